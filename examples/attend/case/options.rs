//! The options of a case file.

use super::*;

/// Options that nobody has taken yet.
pub(super) struct Options(pub(super) Map<String, Value>);

impl Options {
    /// `null` is as good as absent.
    pub(super) fn take<T>(
        &mut self,
        key: &str,
        what: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.0.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(&value) {
                Some(value) => Ok(Some(value)),
                None => bad(format!("option {key:?} must be {what}")),
            },
        }
    }

    pub(super) fn count(&mut self, key: &str) -> Result<Option<usize>> {
        self.take(key, "a whole number above 0", |value| {
            value
                .as_u64()
                .and_then(|n| usize::try_from(n).ok())
                .filter(|n| *n > 0)
        })
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<bool> {
        Ok(self.take(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub(super) fn tokens(&mut self) -> Result<Option<Vec<Vec<String>>>> {
        self.take("tokens", "lists of strings", |value| {
            let row = |row: &Value| -> Option<Vec<String>> {
                row.as_array()?
                    .iter()
                    .map(|token| token.as_str().map(str::to_owned))
                    .collect()
            };
            value.as_array()?.iter().map(row).collect()
        })
    }

    /// Base and scaling of a layer's rotary embedding.
    pub(super) fn rope(&mut self) -> Result<Option<(f64, RotaryScaling)>> {
        let base = self.take("rope_theta", "a number", Value::as_f64)?;
        let scaling = self.take("rope_scaling", "an object of Llama 3's four numbers", |value| {
            let number = |key: &str| value.get(key)?.as_f64();
            Some(RotaryScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_positions: number("original_max_position_embeddings")? as usize,
            })
        })?;
        match (base, scaling) {
            (Some(base), scaling) => Ok(Some((base, scaling.unwrap_or_default()))),
            (None, None) => Ok(None),
            (None, Some(_)) => bad("option \"rope_scaling\" without \"rope_theta\""),
        }
    }

    /// The options of the rule.
    pub(super) fn attention(&mut self) -> Result<AttentionOptions> {
        let number = |value: &Value| value.as_f64().map(|x| x as f32);
        let mut options = AttentionOptions::new();
        options.scale = self.take("scale", "a number", number)?;
        // ONNX writes "no cap" as 0.
        options.softcap = self
            .take("softcap", "a number", number)?
            .filter(|cap| *cap != 0.0);
        options.alibi_slopes = self.take("alibi_slopes", "a list of numbers", |value| {
            value.as_array()?.iter().map(number).collect()
        })?;
        options.query_offset = self
            .take("query_offset", "a whole number", Value::as_i64)?
            .unwrap_or(0);
        options.causal = self
            .take("causal", "none, top_left or bottom_right", |value| {
                match value.as_str()? {
                    "none" => Some(Causal::None),
                    "top_left" => Some(Causal::TopLeft),
                    "bottom_right" => Some(Causal::BottomRight),
                    _ => None,
                }
            })?
            .unwrap_or_default();
        options.align = self
            .take("align", "top_left or bottom_right", |value| {
                match value.as_str()? {
                    "top_left" => Some(Align::TopLeft),
                    "bottom_right" => Some(Align::BottomRight),
                    _ => None,
                }
            })?
            .unwrap_or_default();
        let window = self.take("window", "[left, right], each at least -1", |value| {
            let side = |value: &Value| match value.as_i64()? {
                -1 => Some(None),
                keys => u32::try_from(keys).ok().map(Some),
            };
            match value.as_array()?.as_slice() {
                [left, right] => Some((side(left)?, side(right)?)),
                _ => None,
            }
        })?;
        (options.window_left, options.window_right) = window.unwrap_or_default();
        Ok(options)
    }
}
