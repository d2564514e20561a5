//! From tensors and options to the call that a case asks for.

use super::*;

/// The rule lets the batch and both lengths be empty, and no other axis.
pub(super) fn checked(shape: AttentionShape) -> Result<AttentionShape> {
    if shape.heads == 0 || shape.kv_heads == 0 || shape.head_dim == 0 || shape.value_dim == 0 {
        return bad(format!("no heads, or heads of size 0: {shape:?}"));
    }
    match shape.validate() {
        Ok(()) => Ok(shape),
        Err(error) => bad(error.to_string()),
    }
}

pub(super) fn read_sdpa(inputs: &mut Inputs<'_>, options: &mut Options) -> Result<Sdpa> {
    let heads = options.count("num_heads")?;
    let kv_heads = options.count("kv_num_heads")?;
    let average_weights = options.flag("average_weights")?;
    let attention = options.attention()?;
    let [query, key, value] = [
        inputs.needed("query")?,
        inputs.needed("key")?,
        inputs.needed("value")?,
    ];

    let flat = query.shape.len() == 3;
    // [B, H, L, D] of each input.
    let axes = |what: &str, x: &Floats, heads: Option<usize>, option: &str| -> Result<[usize; 4]> {
        match (flat, x.shape.as_slice(), heads) {
            (true, &[batch, length, wide], Some(heads)) => match wide % heads {
                0 => Ok([batch, heads, length, wide / heads]),
                _ => bad(format!(
                    "{what:?} has rows of {wide} numbers for {heads} heads ({option})"
                )),
            },
            (true, [_, _, _], None) => bad(format!("{what:?} has 3 axes, which needs option {option:?}")),
            (false, &[batch, given, length, size], heads) if heads.is_none_or(|heads| heads == given) => {
                Ok([batch, given, length, size])
            }
            _ => bad(format!(
                "{what:?} has shape {:?}, the query {:?}, {option:?} is {heads:?}",
                x.shape, query.shape
            )),
        }
    };
    let q = axes("query", &query, heads, "num_heads")?;
    let kv = kv_heads.or(if flat { heads } else { None });
    let k = axes("key", &key, kv, "kv_num_heads")?;
    let v = axes("value", &value, kv, "kv_num_heads")?;
    if k[0] != q[0] || k[3] != q[3] || v[..3] != k[..3] {
        return bad(format!(
            "query {q:?}, key {k:?} and value {v:?} do not fit as [B, H, L, D]"
        ));
    }
    let past = match (inputs.floats("past_key")?, inputs.floats("past_value")?) {
        (None, None) => None,
        (Some(key), Some(value)) => {
            let keys = key.shape.get(2).copied().unwrap_or(0);
            if key.shape != [k[0], k[1], keys, k[3]] || value.shape != [v[0], v[1], keys, v[3]] {
                return bad(format!(
                    "\"past_key\" {:?} and \"past_value\" {:?} do not go in front of {k:?} and {v:?}",
                    key.shape, value.shape
                ));
            }
            Some((key, value))
        }
        _ => return bad("one of \"past_key\" and \"past_value\" is missing"),
    };
    let shape = checked(AttentionShape {
        batch: q[0],
        heads: q[1],
        kv_heads: k[1],
        queries: q[2],
        keys: k[2].saturating_add(past.as_ref().map_or(0, |(key, _)| key.shape[2])),
        head_dim: q[3],
        value_dim: v[3],
    })?;
    let hiding = inputs.hiding(shape.batch, shape.keys)?;
    if past.is_some() && hiding.kv_lengths.is_some() {
        return bad("\"kv_lengths\" and \"past_key\" cannot be given together");
    }
    let sinks = inputs.parameter("sinks", &[shape.heads])?;
    Ok(Sdpa {
        shape,
        options: attention,
        flat,
        query,
        key,
        value,
        past,
        hiding,
        sinks,
        average_weights,
    })
}

pub(super) fn read_layer(bytes: &[u8], inputs: &mut Inputs<'_>, options: &mut Options) -> Result<Layer> {
    let Some(heads) = options.count("num_heads")? else {
        return bad("option \"num_heads\" is missing");
    };
    let kv_heads = options.count("kv_num_heads")?.unwrap_or(heads);
    let checkpoint = options.take("checkpoint", "a string", |value| {
        value.as_str().map(str::to_owned)
    })?;
    let average_weights = options.flag("average_weights")?;
    let add_zero_attn = options.flag("add_zero_attn")?;
    let attention = options.attention()?;
    let rope = options.rope()?;

    let query = inputs.needed("query")?;
    let [key, value] = [inputs.floats("key")?, inputs.floats("value")?];
    let axes = |what: &str, x: &Floats| match *x.shape.as_slice() {
        [batch, length, size] => Ok([batch, length, size]),
        _ => bad(format!("{what:?} has shape {:?}, needed are 3 axes", x.shape)),
    };
    let q = axes("query", &query)?;
    let k = key.as_ref().map_or(Ok(q), |key| axes("key", key))?;
    let v = value.as_ref().map_or(Ok(k), |value| axes("value", value))?;
    if k[0] != q[0] || v[..2] != k[..2] {
        return bad(format!(
            "query {q:?}, key {k:?} and value {v:?} do not fit as [B, L, size]"
        ));
    }
    let ([batch, queries, embed], keys) = (q, k[1]);
    let (mut config, parameters) = match checkpoint {
        Some(prefix) => read_checkpoint(bytes, inputs, &prefix, heads)?,
        None => {
            let config = MultiHeadAttentionConfig::new(embed, heads).kdim(k[2]).vdim(v[2]);
            read_parameters(inputs, config)?
        }
    };
    config.attention = attention;
    config.add_zero_attn = add_zero_attn;
    if [config.embed_dim, config.kdim, config.vdim] != [embed, k[2], v[2]] {
        return bad(format!(
            "query {q:?}, key {k:?} and value {v:?} do not fit a layer of embed_dim = {}, kdim = {}, vdim = {}",
            config.embed_dim, config.kdim, config.vdim
        ));
    }
    if config.num_kv_heads != kv_heads {
        return bad(format!(
            "the parameters are of {} key heads, option \"kv_num_heads\" says {kv_heads}",
            config.num_kv_heads
        ));
    }
    if let Err(error) = config.validate() {
        return bad(error.to_string());
    }
    let size = config.head_dim();
    checked(AttentionShape {
        batch,
        heads,
        kv_heads,
        queries,
        keys: keys.saturating_add(config.extra_keys()),
        head_dim: size,
        value_dim: size,
    })?;
    let rotary = rope.map(|(base, scaling)| RotaryOptions::new(size).base(base).scaling(scaling));
    if let Some(Err(error)) = rotary.map(|rotary| rotary.validate()) {
        return bad(error.to_string());
    }
    if rotary.is_some() && key.is_some() {
        return unsupported("rotary embedding of a key of its own");
    }
    let hiding = inputs.hiding(batch, keys)?;
    Ok(Layer {
        config,
        parameters,
        batch,
        queries,
        keys,
        query,
        key,
        value,
        hiding,
        average_weights,
        rotary,
    })
}

/// The parameters under the names of a layer in PyTorch, and what they tell about the layer.
pub(super) fn read_parameters(
    inputs: &mut Inputs<'_>,
    mut config: MultiHeadAttentionConfig,
) -> Result<(MultiHeadAttentionConfig, Parameters)> {
    let (embed, kdim, vdim) = (config.embed_dim, config.kdim, config.vdim);
    // How the file stores the weights is how the layer will hold them.
    let half = |view: &TensorView<'_>| view.dtype() == Dtype::F16;
    if inputs.0.get("out_proj.weight").is_some_and(half) {
        config.dtype = DType::F16;
    }
    let joined = match embed.checked_mul(3) {
        Some(three) => inputs.parameter("in_proj_weight", &[three, embed])?,
        None => return bad(format!("{embed} is too large a size")),
    };
    let [q_weight, k_weight, v_weight] = match joined {
        Some(joined) if kdim == embed && vdim == embed => thirds(&joined),
        Some(_) => return bad("\"in_proj_weight\" needs keys and values of the query's size"),
        None => {
            let mut one = |name: &str, size| match inputs.parameter(name, &[embed, size])? {
                Some(weight) => Ok(weight),
                None => bad(format!("\"in_proj_weight\" and {name:?} are missing")),
            };
            [
                one("q_proj_weight", embed)?,
                one("k_proj_weight", kdim)?,
                one("v_proj_weight", vdim)?,
            ]
        }
    };
    let in_biases = inputs
        .parameter("in_proj_bias", &[3 * embed])?
        .map(|joined| thirds(&joined));
    let Some(out_weight) = inputs.parameter("out_proj.weight", &[embed, embed])? else {
        return bad("\"out_proj.weight\" is missing");
    };
    let out_bias = inputs.parameter("out_proj.bias", &[embed])?;
    let bias_k = inputs.parameter("bias_k", &[1, 1, embed])?;
    let bias_v = inputs.parameter("bias_v", &[1, 1, embed])?;
    let bias_kv = match (bias_k, bias_v) {
        (None, None) => None,
        (Some(k), Some(v)) => Some([k, v]),
        _ => return bad("one of \"bias_k\" and \"bias_v\" is missing"),
    };
    config.bias = in_biases.is_some();
    config.out_bias = out_bias.is_some();
    config.add_bias_kv = bias_kv.is_some();
    let parameters = Parameters {
        q_weight,
        k_weight,
        v_weight,
        in_biases,
        out_weight,
        out_bias,
        bias_kv,
    };
    Ok((config, parameters))
}

/// The parameters under `prefix` as the crate's own loader finds them.
pub(super) fn read_checkpoint(
    bytes: &[u8],
    inputs: &mut Inputs<'_>,
    prefix: &str,
    heads: usize,
) -> Result<(MultiHeadAttentionConfig, Parameters)> {
    let told = |error: multihead::Error| CaseError::Bad(error.to_string());
    let config = multihead::Parameters::describe(bytes, prefix)
        .map_err(told)?
        .config(heads);
    let found = multihead::Parameters::from_safetensors(&config, bytes, prefix).map_err(told)?;
    let below = format!("{prefix}.");
    inputs.0.retain(|name, _| !name.starts_with(&below));
    let parameters = Parameters {
        q_weight: found.q_proj_weight,
        k_weight: found.k_proj_weight,
        v_weight: found.v_proj_weight,
        in_biases: match (found.q_proj_bias, found.k_proj_bias, found.v_proj_bias) {
            (Some(q), Some(k), Some(v)) => Some([q, k, v]),
            _ => None,
        },
        out_weight: found.out_proj_weight,
        out_bias: found.out_proj_bias,
        bias_kv: match (found.bias_k, found.bias_v) {
            (Some(k), Some(v)) => Some([k, v]),
            _ => None,
        },
    };
    Ok((config, parameters))
}

/// Query's, key's and value's part of a joined parameter.
pub(super) fn thirds(joined: &[f32]) -> [Vec<f32>; 3] {
    let third = joined.len() / 3;
    std::array::from_fn(|at| joined[at * third..(at + 1) * third].to_vec())
}

pub(super) fn read_packed(inputs: &mut Inputs<'_>, options: &mut Options) -> Result<Packed> {
    let [heads, kv_heads] = [options.count("num_heads")?, options.count("kv_num_heads")?];
    let attention = options.attention()?;
    let [query, key, value] = [
        inputs.needed("query")?,
        inputs.needed("key")?,
        inputs.needed("value")?,
    ];
    let ([_, h, d], [tk, hkv, dk], [tv, hv, dv]) = (
        three("query", &query)?,
        three("key", &key)?,
        three("value", &value)?,
    );
    let given = |option: Option<usize>, found| option.is_none_or(|option| option == found);
    if dk != d || hv != hkv || tv != tk || !given(heads, h) || !given(kv_heads, hkv) {
        return bad(format!(
            "query {:?}, key {:?} and value {:?} do not fit as [T, H, D]",
            query.shape, key.shape, value.shape
        ));
    }
    checked(AttentionShape {
        batch: 1,
        heads: h,
        kv_heads: hkv,
        queries: query.shape[0],
        keys: tk,
        head_dim: d,
        value_dim: dv,
    })?;
    let mut seams = |name: &str| match inputs.counts(name)? {
        Some((shape, seams)) if shape.len() == 1 => Ok(seams),
        Some((shape, _)) => bad(format!("{name:?} has shape {shape:?}, needed is one axis")),
        None => bad(format!("input {name:?} is missing")),
    };
    let [cu_seqlens_q, cu_seqlens_k] = [seams("cu_seqlens_q")?, seams("cu_seqlens_k")?];
    let sinks = inputs.parameter("sinks", &[h])?;
    Ok(Packed {
        options: attention,
        heads: h,
        kv_heads: hkv,
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        sinks,
    })
}

pub(super) fn read_rotary(inputs: &mut Inputs<'_>, options: &mut Options) -> Result<Rotary> {
    let heads = options.count("num_heads")?;
    let rotary_dim = options.count("rotary_embedding_dim")?;
    let pairing = if options.flag("interleaved")? {
        RotaryPairing::Interleaved
    } else {
        RotaryPairing::HalfSplit
    };
    let [input, cos, sin] = [
        inputs.needed("input")?,
        inputs.needed("cos_cache")?,
        inputs.needed("sin_cache")?,
    ];
    let positions = inputs.counts("position_ids")?;
    let (shape, flat) = match (input.shape.as_slice(), heads) {
        (&[b, h, l, d], heads) if heads.is_none_or(|heads| heads == h) => ([b, h, l, d], false),
        (&[b, l, wide], Some(heads)) if wide % heads == 0 => ([b, heads, l, wide / heads], true),
        (shape, heads) => {
            return bad(format!(
                "\"input\" has shape {shape:?}, option \"num_heads\" is {heads:?}"
            ));
        }
    };
    let [batch, _, rows, size] = shape;
    let pairs = cos.shape.last().copied().unwrap_or(0);
    let dim = rotary_dim.unwrap_or(size);
    let tables = match &positions {
        Some(_) => vec![cos.shape.first().copied().unwrap_or(0), pairs],
        None => vec![batch, rows, pairs],
    };
    if cos.shape != tables || sin.shape != tables || cos.dtype != sin.dtype {
        return bad(format!(
            "\"cos_cache\" has shape {:?} and \"sin_cache\" {:?}, needed is {tables:?} of one type",
            cos.shape, sin.shape
        ));
    }
    if Some(dim) != pairs.checked_mul(2) || dim > size || cos.data.is_empty() {
        return bad(format!("{pairs} pairs for {dim} of {size} elements"));
    }
    let positions = match positions {
        None => None,
        Some((shape, positions)) => {
            if shape != [batch, rows] || positions.iter().any(|&position| position >= tables[0]) {
                return bad(format!(
                    "\"position_ids\" has shape {shape:?}, needed is [{batch}, {rows}] below {}",
                    tables[0]
                ));
            }
            Some(positions)
        }
    };
    Ok(Rotary {
        shape,
        flat,
        input,
        cos,
        sin,
        positions,
        pairing,
    })
}

pub(super) fn three(what: &str, x: &Floats) -> Result<[usize; 3]> {
    match *x.shape.as_slice() {
        [a, b, c] => Ok([a, b, c]),
        _ => bad(format!("{what:?} has shape {:?}, needed are 3 axes", x.shape)),
    }
}
