//! Opens a safetensors file that nobody vouches for.

use safetensors::SafeTensors;

use crate::{Error, Result};

/// Opens the file and checks what the safetensors crate leaves unchecked.
///
/// The crate bounds the header, and it wants tensors that lie end to end, match their type and shape, and
/// fill the file. Two holes are left. It adds data, header and first eight bytes without looking for
/// overflow, so that offsets near the top of the address space panic in a build with overflow checks. And
/// it lets the last of two entries of one name win without a word.
pub(super) fn open(bytes: &[u8]) -> Result<SafeTensors<'_>> {
    let refuse = |text: &str| {
        Err(Error::Checkpoint(format!(
            "{} bytes that are no valid safetensors file: {}",
            bytes.len(),
            clip(text)
        )))
    };
    let names = match header(bytes) {
        Some(header) => match scan(header) {
            Some(names) => names,
            None => return refuse("a number in the header is larger than any file"),
        },
        // The crate words what is wrong with the first eight bytes.
        None => 0,
    };
    let file = match SafeTensors::deserialize(bytes) {
        Ok(file) => file,
        Err(error) => return refuse(&error.to_string()),
    };
    if names != file.len() {
        return refuse("the header lists a name more than once");
    }
    Ok(file)
}

/// The JSON header, if the file is as long as its first eight bytes say.
fn header(bytes: &[u8]) -> Option<&[u8]> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)
}

/// Number of tensor names in a JSON header, or `None` if a number in it could overflow the file's length.
///
/// Text that is no JSON gives a meaningless count: the parser that runs next refuses it.
fn scan(header: &[u8]) -> Option<usize> {
    let largest = (usize::MAX - 8 - header.len()) as u64;
    let (mut names, mut depth, mut number) = (0usize, 0usize, 0u64);
    // Where the text of the string being read, or read last, lies.
    let (mut start, mut end, mut inside, mut escaped) = (0, 0, false, false);
    for (at, &byte) in header.iter().enumerate() {
        if inside {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => (end, inside) = (at, false),
                _ => {}
            }
            continue;
        }
        number = match byte {
            b'0'..=b'9' => number.saturating_mul(10).saturating_add(u64::from(byte - b'0')),
            _ => 0,
        };
        if number > largest {
            return None;
        }
        match byte {
            b'"' => (start, inside) = (at + 1, true),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b':' if depth == 1 && header.get(start..end) != Some(b"__metadata__".as_slice()) => names += 1,
            _ => {}
        }
    }
    Some(names)
}

/// Text from a file, short enough for a message and without control characters.
pub(super) fn clip(text: &str) -> String {
    const LONGEST: usize = 200;
    let mut clipped: String = text
        .chars()
        .take(LONGEST)
        .map(|c| {
            if c.is_control() {
                char::REPLACEMENT_CHARACTER
            } else {
                c
            }
        })
        .collect();
    if text.chars().nth(LONGEST).is_some() {
        clipped.push_str("...");
    }
    clipped
}

/// A shape from a file, short enough for a message.
pub(super) fn axes(shape: &[usize]) -> String {
    clip(&format!("{shape:?}"))
}
