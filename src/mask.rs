//! Which keys a query may see: one rule, lowered to positions and a window.
//!
//! Causal order is a window whose right side is 0, alignment and offset only move the query's
//! position, and lengths cut the keys. What is left, the boolean and float masks, is data.

use crate::{Align, AttentionOptions, Causal};

/// The positional part of the rule, lowered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Visibility {
    /// Keys to the left of the position that are visible; [`UNBOUNDED`] for all.
    pub(crate) left: i32,
    /// Keys to the right of the position that are visible; [`UNBOUNDED`] for all.
    pub(crate) right: i32,
    /// Added to the query's index; [`Visibility::position`] adds the alignment.
    pub(crate) offset: i32,
    /// Whether the sequence's `len - queries` is added too.
    pub(crate) bottom_right: bool,
}

/// A side of the window that hides nothing. Positions stay within ±2^31: an axis and an offset are at most 2^29.
pub(crate) const UNBOUNDED: i32 = 1 << 30;

impl Visibility {
    /// Lowers checked options.
    pub(crate) fn new(options: &AttentionOptions) -> Self {
        let side = |side: Option<u32>| side.map_or(UNBOUNDED, |keys| keys.min(UNBOUNDED as u32) as i32);
        let right = side(options.window_right);
        Self {
            left: side(options.window_left),
            right: if options.causal == Causal::None {
                right
            } else {
                right.min(0)
            },
            offset: options.query_offset as i32,
            bottom_right: options.causal == Causal::BottomRight || options.align == Align::BottomRight,
        }
    }

    /// Position of query `query` of a sequence with `len` keys, always visible keys not counted.
    pub(crate) fn position(&self, query: usize, queries: usize, len: usize) -> i64 {
        let aligned = if self.bottom_right {
            len as i64 - queries as i64
        } else {
            0
        };
        query as i64 + i64::from(self.offset) + aligned
    }

    /// Whether the window, causal order included, lets a query at `position` see key `key`.
    pub(crate) fn sees(&self, position: i64, key: usize) -> bool {
        let key = key as i64;
        (self.left == UNBOUNDED || key >= position - i64::from(self.left))
            && (self.right == UNBOUNDED || key <= position + i64::from(self.right))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The drawn mask of `options` for a sequence of `len` keys, a row a query.
    fn drawn(options: &AttentionOptions, queries: usize, len: usize) -> Vec<String> {
        let rule = Visibility::new(options);
        (0..queries)
            .map(|query| {
                let position = rule.position(query, queries, len);
                (0..len)
                    .map(|key| if rule.sees(position, key) { 'x' } else { '.' })
                    .collect()
            })
            .collect()
    }

    #[test]
    fn causal_order_is_drawn_as_documented() {
        let causal = |causal| AttentionOptions::new().causal(causal);
        assert_eq!(drawn(&causal(Causal::TopLeft), 2, 5), ["x....", "xx..."]);
        assert_eq!(drawn(&causal(Causal::BottomRight), 2, 5), ["xxxx.", "xxxxx"]);
        assert_eq!(
            drawn(&causal(Causal::TopLeft), 5, 2),
            ["x.", "xx", "xx", "xx", "xx"]
        );
        assert_eq!(
            drawn(&causal(Causal::BottomRight), 5, 2),
            ["..", "..", "..", "x.", "xx"]
        );
    }

    #[test]
    fn windows_count_both_sides_without_the_query_itself() {
        let window = |left, right| AttentionOptions::new().window(left, right);
        assert_eq!(
            drawn(&window(Some(1), Some(0)), 4, 4),
            ["x...", "xx..", ".xx.", "..xx"]
        );
        assert_eq!(
            drawn(&window(Some(0), Some(1)), 4, 4),
            ["xx..", ".xx.", "..xx", "...x"]
        );
        assert_eq!(drawn(&window(None, Some(1)), 3, 4), ["xx..", "xxx.", "xxxx"]);
        let both = window(Some(1), Some(3)).causal(Causal::BottomRight);
        assert_eq!(drawn(&both, 2, 5), ["..xx.", "...xx"]);
    }

    #[test]
    fn alignment_and_offset_move_positions_alone() {
        let window = AttentionOptions::new().window(Some(1), Some(0));
        assert_eq!(drawn(&window.clone().query_offset(2), 2, 5), [".xx..", "..xx."]);
        assert_eq!(
            drawn(&window.clone().align(Align::BottomRight), 2, 5),
            ["..xx.", "...xx"]
        );
        assert_eq!(
            drawn(&window.query_offset(-3), 4, 4),
            ["....", "....", "....", "x..."]
        );
    }
}
