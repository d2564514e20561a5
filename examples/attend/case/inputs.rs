//! The tensors of a case file.

use super::*;

/// Inputs that nobody has taken yet.
pub(super) struct Inputs<'a>(pub(super) BTreeMap<String, TensorView<'a>>);

impl Inputs<'_> {
    pub(super) fn floats(&mut self, name: &str) -> Result<Option<Floats>> {
        self.0.remove(name).map(|view| floats(name, &view)).transpose()
    }

    pub(super) fn needed(&mut self, name: &str) -> Result<Floats> {
        match self.floats(name)? {
            Some(floats) => Ok(floats),
            None => bad(format!("input {name:?} is missing")),
        }
    }

    /// A parameter of a known shape.
    pub(super) fn parameter(&mut self, name: &str, shape: &[usize]) -> Result<Option<Vec<f32>>> {
        match self.floats(name)? {
            Some(floats) if floats.shape == shape => Ok(Some(floats.data)),
            Some(floats) => bad(format!(
                "{name:?} has shape {:?}, needed is {shape:?}",
                floats.shape
            )),
            None => Ok(None),
        }
    }

    /// Counts: whole numbers that are not negative.
    pub(super) fn counts(&mut self, name: &str) -> Result<Option<(Vec<usize>, Vec<usize>)>> {
        let Some(view) = self.0.remove(name) else {
            return Ok(None);
        };
        let counts: Option<Vec<usize>> = match view.dtype() {
            Dtype::I32 => words(view.data())
                .map(|x| usize::try_from(i32::from_le_bytes(x)).ok())
                .collect(),
            Dtype::I64 => words(view.data())
                .map(|x| usize::try_from(i64::from_le_bytes(x)).ok())
                .collect(),
            other => return bad(format!("{name:?} is {other:?}, needed is I32 or I64")),
        };
        match counts {
            Some(counts) => Ok(Some((view.shape().to_vec(), counts))),
            None => bad(format!("{name:?} holds a negative number")),
        }
    }

    /// The mask, key mask and lengths, the last two held against `[batch, keys]`.
    pub(super) fn hiding(&mut self, batch: usize, keys: usize) -> Result<Hiding> {
        let mask = match self.0.remove("attn_mask") {
            None => None,
            Some(view) => {
                let data = match view.dtype() {
                    Dtype::BOOL => MaskData::Keep(flags(&view)),
                    _ => MaskData::Bias(floats("attn_mask", &view)?.data),
                };
                Some(CaseMask {
                    shape: view.shape().to_vec(),
                    data,
                })
            }
        };
        let key_mask = match self.0.remove("key_mask") {
            None => None,
            Some(view) if view.dtype() != Dtype::BOOL => {
                return bad(format!("\"key_mask\" is {:?}, needed is BOOL", view.dtype()));
            }
            Some(view) if view.shape() != [batch, keys] => {
                return bad(format!(
                    "\"key_mask\" has shape {:?}, needed is [{batch}, {keys}]",
                    view.shape()
                ));
            }
            Some(view) => Some(flags(&view)),
        };
        let kv_lengths = match self.counts("kv_lengths")? {
            None => None,
            Some((shape, lengths)) if shape == [batch] => Some(lengths),
            Some((shape, _)) => {
                return bad(format!("\"kv_lengths\" has shape {shape:?}, needed is [{batch}]"));
            }
        };
        Ok(Hiding {
            mask,
            key_mask,
            kv_lengths,
        })
    }
}

/// Little-endian words of `N` bytes. Safetensors has checked that the bytes fit the shape.
pub(super) fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes
        .chunks_exact(N)
        .map(|chunk| std::array::from_fn(|at| chunk[at]))
}

pub(super) fn flags(view: &TensorView<'_>) -> Vec<bool> {
    view.data().iter().map(|&byte| byte != 0).collect()
}

pub(super) fn floats(name: &str, view: &TensorView<'_>) -> Result<Floats> {
    let (dtype, data) = match view.dtype() {
        Dtype::F32 => (DType::F32, words(view.data()).map(f32::from_le_bytes).collect()),
        Dtype::F16 => (
            DType::F16,
            words(view.data())
                .map(|x| half::f16::from_le_bytes(x).to_f32())
                .collect(),
        ),
        other => return bad(format!("{name:?} is {other:?}, needed is F32 or F16")),
    };
    Ok(Floats {
        shape: view.shape().to_vec(),
        data,
        dtype,
    })
}
