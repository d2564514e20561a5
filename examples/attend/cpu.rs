//! A case on the CPU: the reference, in f64.

use super::case::{Answer, Answers, Case, Layer, Op, Packed, Rotary, Sdpa};
use multihead::reference::{
    self, Attention, MultiHead, join_keys, mean_heads, merge_heads, packed_attention, split_heads,
};
use multihead::{AttentionShape, Result};

/// Computes every answer that the operator has; the weights only if they are wanted.
pub(crate) fn run(case: &Case, weights: bool) -> Result<Answers> {
    match &case.op {
        Op::Sdpa(op) => sdpa(
            op,
            weights,
            op.past.is_some() || case.expected.contains_key("present_key"),
        ),
        Op::Layer(op) => layer(op, weights),
        Op::Packed(op) => packed(op),
        Op::Rotary(op) => rotary(op),
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn sdpa(op: &Sdpa, weights: bool, present: bool) -> Result<Answers> {
    let s = op.shape;
    let past = op.past_keys();
    let new = s.keys - past;
    let mut query = wide(&op.query.data);
    let mut key = wide(&op.key.data);
    let mut value = wide(&op.value.data);
    if op.flat {
        query = split_heads(&query, s.batch, s.queries, s.heads, s.head_dim)?;
        key = split_heads(&key, s.batch, new, s.kv_heads, s.head_dim)?;
        value = split_heads(&value, s.batch, new, s.kv_heads, s.value_dim)?;
    }
    if let Some((past_key, past_value)) = &op.past {
        let groups = s.batch * s.kv_heads;
        key = join_keys(&wide(&past_key.data), &key, groups, past, new, s.head_dim)?;
        value = join_keys(&wide(&past_value.data), &value, groups, past, new, s.value_dim)?;
    }
    let call = Attention {
        mask: op.hiding.mask.as_ref().map(|mask| mask.view()),
        key_mask: op.hiding.key_mask.as_deref(),
        kv_lengths: op.hiding.kv_lengths.as_deref(),
        sinks: op.sinks.as_deref(),
        ..Attention::new(s, &op.options, &query, &key, &value)
    };
    let answer = if weights { call.run()? } else { call.run_output()? };

    let mut answers = Answers::new();
    let output = if op.flat {
        let shape = vec![s.batch, s.queries, s.heads * s.value_dim];
        Answer {
            shape,
            data: merge_heads(&answer.output, s.batch, s.queries, s.heads, s.value_dim)?,
        }
    } else {
        Answer {
            shape: s.output().to_vec(),
            data: answer.output,
        }
    };
    answers.insert("output", output);
    answers.insert(
        "lse",
        Answer {
            shape: s.output()[..3].to_vec(),
            data: answer.lse,
        },
    );
    if weights {
        answers.insert("weights", averaged(answer.weights, s, op.average_weights)?);
    }
    if present {
        answers.insert(
            "present_key",
            Answer {
                shape: s.key().to_vec(),
                data: key,
            },
        );
        answers.insert(
            "present_value",
            Answer {
                shape: s.value().to_vec(),
                data: value,
            },
        );
    }
    Ok(answers)
}

/// `[B, H, Lq, Lk]`, or their mean over the heads.
fn averaged(weights: Vec<f64>, shape: AttentionShape, average: bool) -> Result<Answer> {
    if !average {
        return Ok(Answer {
            shape: shape.weights().to_vec(),
            data: weights,
        });
    }
    let mean = mean_heads(&weights, &shape)?;
    Ok(Answer {
        shape: vec![shape.batch, shape.queries, shape.keys],
        data: mean,
    })
}

fn layer(op: &Layer, weights: bool) -> Result<Answers> {
    let query = wide(&op.query.data);
    let key = wide(&op.key().data);
    let value = wide(&op.value().data);
    let call = MultiHead {
        config: &op.config,
        parameters: op.parameters.view(),
        batch: op.batch,
        queries: op.queries,
        keys: op.keys,
        query: &query,
        key: &key,
        value: &value,
        mask: op.hiding.mask.as_ref().map(|mask| mask.view()),
        key_mask: op.hiding.key_mask.as_deref(),
        kv_lengths: op.hiding.kv_lengths.as_deref(),
        causal: None,
        rotary: op.rotary,
    };
    let answer = if weights { call.run()? } else { call.run_output()? };
    let mut answers = Answers::new();
    let shape = vec![op.batch, op.queries, op.config.embed_dim];
    answers.insert(
        "output",
        Answer {
            shape,
            data: answer.output,
        },
    );
    if weights {
        answers.insert(
            "weights",
            averaged(answer.weights, answer.shape, op.average_weights)?,
        );
    }
    Ok(answers)
}

fn packed(op: &Packed) -> Result<Answers> {
    let [rows, size] = [op.query.shape[0], op.value.shape[2]];
    let answer = packed_attention(&reference::Packed {
        heads: op.heads,
        kv_heads: op.kv_heads,
        head_dim: op.query.shape[2],
        value_dim: size,
        options: &op.options,
        query: &wide(&op.query.data),
        key: &wide(&op.key.data),
        value: &wide(&op.value.data),
        cu_seqlens_q: &op.cu_seqlens_q,
        cu_seqlens_k: &op.cu_seqlens_k,
        sinks: op.sinks.as_deref(),
    })?;
    Ok(Answers::from([
        (
            "output",
            Answer {
                shape: vec![rows, op.heads, size],
                data: answer.output,
            },
        ),
        (
            "lse",
            Answer {
                shape: vec![op.heads, rows],
                data: answer.lse,
            },
        ),
    ]))
}

fn rotary(op: &Rotary) -> Result<Answers> {
    let [batch, heads, rows, size] = op.shape;
    let mut x = wide(&op.input.data);
    if op.flat {
        x = split_heads(&x, batch, rows, heads, size)?;
    }
    let positions = match &op.positions {
        Some(positions) => positions.clone(),
        None => (0..batch * rows).collect(),
    };
    let mut data = reference::rotary(
        &x,
        op.shape,
        &wide(&op.cos.data),
        &wide(&op.sin.data),
        &positions,
        2 * op.cos.shape.last().copied().unwrap_or(0),
        op.pairing,
    )?;
    if op.flat {
        data = merge_heads(&data, batch, rows, heads, size)?;
    }
    let shape = op.input.shape.clone();
    Ok(Answers::from([("output", Answer { shape, data })]))
}
