#!/usr/bin/env python3
"""Makes the case files in this folder: answers of PyTorch and ONNX, computed in float64.

README.md describes the files and how to run this. Each case is also computed here by the rule that
README.md gives, in float64 and in float32, so that no case says something else than its source.
"""

import json
import math
import zlib
from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test.case.node.rotaryembedding as rotary_nodes
import torch
import transformers
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, LlamaConfig, Qwen2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

HERE = Path(__file__).resolve().parent
TORCH = f"torch {torch.__version__.split('+')[0]}"
ONNX = f"onnx {onnx.__version__}"
TRANSFORMERS = f"transformers {transformers.__version__}"
TOLERANCE = 5e-5
cases = []


# ---------------------------------------------------------------- tools


def rng_of(name):
    """Every case has a seed of its own, so that a new case changes no other."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def normal(rng, *shape, scale=1.0):
    """Numbers that float32 holds exactly: the file says just what was computed with."""
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def keep(rng, *shape, share=0.7):
    """A boolean mask, true = attend, with at least one true in each last axis longer than 1."""
    mask = rng.random(shape) < share
    if shape[-1] > 1:
        mask[..., 0] |= ~mask.any(axis=-1)
    return mask


def float_mask(rng, *shape):
    """A bias with some keys hidden by -inf."""
    return np.where(keep(rng, *shape), normal(rng, *shape), -np.inf).astype(np.float32)


def lengths_mask(lengths, keys):
    return np.arange(keys) < np.asarray(lengths)[:, None]


def double(array):
    return torch.from_numpy(np.asarray(array)).double()


def add(name, op, source, options, inputs, expected, tolerance=None):
    limits = {answer: TOLERANCE for answer in expected if not answer.startswith("present")}
    limits.update(tolerance or {})
    case = {"name": name, "op": op, "source": source, "options": options, "tolerance": limits}
    cases.append((case, inputs, {key: np.asarray(value) for key, value in expected.items()}))


# ---------------------------------------------------------------- torch.nn.MultiheadAttention


def mha(
    name,
    *,
    heads,
    embed,
    batch=2,
    queries=6,
    keys=None,
    kdim=None,
    vdim=None,
    bias=True,
    bias_kv=False,
    zero_attn=False,
    average=True,
    mask=None,
    key_mask=None,
    causal="none",
    nan_tail=False,
):
    """`keys` asks for cross attention. `mask(rng)` makes an `attn_mask`; `causal` is given to PyTorch
    as a mask and to the file as the option."""
    rng = rng_of(name)
    layer = torch.nn.MultiheadAttention(
        embed, heads, bias=bias, add_bias_kv=bias_kv, add_zero_attn=zero_attn, kdim=kdim, vdim=vdim,
        batch_first=True, dtype=torch.float64,
    )  # fmt: skip
    inputs = {}
    for key, parameter in layer.state_dict().items():
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.5
        inputs[key] = normal(rng, *parameter.shape, scale=spread)
    layer.load_state_dict({key: double(value) for key, value in inputs.items()})

    inputs["query"] = normal(rng, batch, queries, embed)
    if keys is not None:
        inputs["key"] = normal(rng, batch, keys, kdim or embed)
        inputs["value"] = normal(rng, batch, keys, vdim or embed)
    query = double(inputs["query"])
    key, value = (double(inputs[part]) if keys is not None else query for part in ("key", "value"))
    length = key.shape[1]

    hide = None
    if mask is not None:
        inputs["attn_mask"] = mask(rng)
        hide = double_or_hidden(inputs["attn_mask"])
        if hide.dim() == 4:  # PyTorch wants [B*H, Lq, Lk]
            hide = hide.reshape(batch * heads, queries, length)
    if causal != "none":
        offset = length - queries if causal == "bottom_right" else 0
        hide = torch.from_numpy(np.arange(length) > np.arange(queries)[:, None] + offset)
    padding = None
    if key_mask is not None:
        inputs["key_mask"] = np.asarray(key_mask)
        padding = torch.from_numpy(~inputs["key_mask"])
        if hide is not None and hide.is_floating_point():
            padding = torch.zeros(padding.shape).double().masked_fill(padding, -torch.inf)
        if nan_tail:  # the answer is that of a value of 0; the file has NaN there
            hidden = torch.from_numpy(~inputs["key_mask"])
            key, value = (part.masked_fill(hidden[..., None], 0) for part in (key, value))
            inputs["key"][~inputs["key_mask"]] = np.nan
            inputs["value"][~inputs["key_mask"]] = np.nan

    with torch.no_grad():
        output, weights = layer(
            query, key, value, attn_mask=hide, key_padding_mask=padding, average_attn_weights=average
        )
    options = {"num_heads": heads, "causal": causal, "average_weights": average}
    if zero_attn:
        options["add_zero_attn"] = True
    source = f"{TORCH} nn.MultiheadAttention, float64"
    add(name, "mha", source, options, inputs, {"output": output, "weights": weights})


def double_or_hidden(mask):
    """PyTorch's layer takes true = ignore, the opposite of the files."""
    return torch.from_numpy(~mask) if mask.dtype == np.bool_ else double(mask)


def mha_cases():
    mha("mha_self", heads=4, embed=24, queries=7)
    mha("mha_self_per_head", heads=4, embed=16, queries=7, average=False)
    mha("mha_one_head", heads=1, embed=17, queries=5)
    mha("mha_one_channel_per_head", heads=16, embed=16, queries=5)
    mha("mha_odd_sizes", heads=5, embed=25, batch=3, queries=11, average=False)
    mha("mha_one_token", heads=3, embed=12, batch=1, queries=1)
    mha("mha_cross", heads=3, embed=24, queries=5, keys=9)
    mha("mha_kdim_vdim", heads=3, embed=24, queries=5, keys=9, kdim=10, vdim=14, average=False)
    mha("mha_vdim_only", heads=2, embed=12, queries=4, keys=11, vdim=7)
    mha("mha_no_bias", heads=4, embed=20, bias=False)
    mha("mha_kdim_vdim_no_bias", heads=2, embed=14, queries=3, keys=8, kdim=9, vdim=5, bias=False)
    mha("mha_bias_kv", heads=4, embed=20, bias_kv=True)
    mha("mha_zero_attn", heads=4, embed=20, zero_attn=True)
    mha(
        "mha_bias_kv_zero_attn_bool_mask", heads=4, embed=20, queries=5, keys=7, bias_kv=True,
        zero_attn=True, average=False, mask=lambda rng: keep(rng, 5, 7, share=0.4),
    )  # fmt: skip
    mha(
        "mha_bias_kv_zero_attn_causal_padding", heads=2, embed=16, queries=8, bias_kv=True,
        zero_attn=True, causal="top_left", key_mask=lengths_mask([8, 3], 8),
    )  # fmt: skip
    mha(
        "mha_only_added_keys_visible", heads=2, embed=12, queries=4, bias_kv=True, zero_attn=True,
        average=False, key_mask=lengths_mask([4, 0], 4),
    )  # fmt: skip
    mha("mha_bool_mask_2d", heads=4, embed=20, queries=9, mask=lambda rng: keep(rng, 9, 9))
    mha(
        "mha_bool_mask_per_head", heads=3, embed=18, queries=5, keys=8, average=False,
        mask=lambda rng: keep(rng, 2, 3, 5, 8),
    )  # fmt: skip
    mha("mha_float_mask_2d", heads=4, embed=20, queries=9, mask=lambda rng: float_mask(rng, 9, 9))
    mha(
        "mha_float_mask_per_head_padding", heads=3, embed=18, queries=5, keys=8,
        mask=lambda rng: np.maximum(float_mask(rng, 2, 3, 5, 8), np.float32(-3)),
        key_mask=lengths_mask([8, 5], 8),
    )  # fmt: skip
    mha("mha_padding", heads=4, embed=20, batch=3, queries=11, key_mask=lengths_mask([11, 4, 1], 11))
    mha(
        "mha_padding_nan_tail", heads=2, embed=14, queries=4, keys=9, key_mask=lengths_mask([9, 6], 9),
        nan_tail=True,
    )  # fmt: skip
    mha("mha_causal", heads=4, embed=20, queries=10, causal="top_left", average=False)
    mha(
        "mha_causal_padding", heads=2, embed=16, queries=9, causal="top_left",
        key_mask=lengths_mask([9, 5], 9),
    )  # fmt: skip
    mha("mha_cross_causal_top_left", heads=2, embed=16, queries=4, keys=9, causal="top_left")
    mha("mha_cross_causal_bottom_right", heads=2, embed=16, queries=4, keys=9, causal="bottom_right")


# ---------------------------------------------------------------- layers of the transformers library


def checkpoint(
    name, layer, prefix, *, heads, batch=2, queries=7, key_mask=None, causal=True, leftovers=None, rope=False
):  # fmt: skip
    """The tensors keep the names that they have in a model's checkpoint. `leftovers` are those that old
    checkpoints hold beside the parameters. `rope` turns queries and keys as the layer's configuration says."""
    rng = rng_of(name)
    layer = layer.double().eval()
    inputs = {}
    for key, parameter in layer.state_dict().items():
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.5
        inputs[key] = normal(rng, *parameter.shape, scale=spread)
    layer.load_state_dict({key: double(value) for key, value in inputs.items()})
    inputs = {f"{prefix}.{key}": value for key, value in (inputs | (leftovers or {})).items()}
    rotary = hasattr(layer, "q_proj")
    embed = (layer.q_proj.in_features if rotary else layer.embed_dim)

    inputs["query"] = normal(rng, batch, queries, embed)
    query = double(inputs["query"])
    mask = torch.ones(batch, 1, queries, queries, dtype=torch.bool)
    if causal:
        mask = mask.tril()
    if key_mask is not None:
        inputs["key_mask"] = np.asarray(key_mask)
        mask = mask & torch.from_numpy(inputs["key_mask"])[:, None, None, :]
    options = {"num_heads": heads, "causal": "top_left" if causal else "none", "checkpoint": prefix}
    # Cosine 1 and sine 0: queries and keys stay as they are, for no position turns them.
    turn = torch.ones(1, 1, 1).double(), torch.zeros(1, 1, 1).double()
    if rope:
        options |= rope_options(layer.config)
        angles = np.arange(queries)[:, None] * np.tile(rope_frequencies(options, layer.head_dim), 2)
        turn = torch.from_numpy(np.cos(angles))[None], torch.from_numpy(np.sin(angles))[None]
        for own, given in zip(LlamaRotaryEmbedding(layer.config)(query, torch.arange(queries)[None]), turn):
            assert distance(own.numpy(), given.numpy()) < 1e-5, f"{name}: the angles are not the library's"
    with torch.no_grad():
        output, _ = layer(query, attention_mask=mask, **({"position_embeddings": turn} if rotary else {}))
        if rotary:
            q, k = layer.q_proj(query), layer.k_proj(query)
        else:
            q, k, _ = layer.c_attn(query).split(embed, dim=2)
        q, k = (x.unflatten(2, (-1, layer.head_dim)).transpose(1, 2) for x in (q, k))
        if rotary:
            q, k = apply_rotary_pos_emb(q, k, *turn)
        unit = torch.eye(queries).double().expand(*k.shape[:2], -1, -1)
        weights = scaled_dot_product_attention(q, k, unit, attn_mask=mask, enable_gqa=True)
    options["kv_num_heads"] = k.shape[1]
    source = f"{TRANSFORMERS} {type(layer).__name__}, float64"
    add(name, "mha", source, options, inputs, {"output": output, "weights": weights})


def rope_options(config):
    rope = config.rope_parameters
    options = {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] == "llama3":
        parts = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        options["rope_scaling"] = {part: rope[part] for part in parts}
    return options


def rope_frequencies(options, dim):
    """README.md's radians per position of each pair, in float64: the library's own are float32."""
    plain = options["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    if "rope_scaling" not in options:
        return plain
    scaling = options["rope_scaling"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * plain / scaling["factor"]


def checkpoint_cases():
    def gpt2(embed, heads):
        return GPT2Attention(GPT2Config(n_embd=embed, n_head=heads, attn_implementation="sdpa"))

    def llama(embed, heads, kv_heads, config=LlamaConfig, layer=LlamaAttention, **more):
        sizes = {"hidden_size": embed, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        return layer(config(**sizes, **more, attn_implementation="sdpa"), layer_idx=0)

    causal_mask = np.tril(np.ones((1, 1, 7, 7), np.float32))
    checkpoint(
        "mha_gpt2", gpt2(24, 4), "h.0.attn", heads=4,
        leftovers={"bias": causal_mask, "masked_bias": np.float32(-1e4)},
    )  # fmt: skip
    checkpoint(
        "mha_gpt2_padding", gpt2(15, 3), "transformer.h.11.attn", heads=3, batch=3, queries=9,
        key_mask=lengths_mask([9, 5, 1], 9),
    )  # fmt: skip
    checkpoint(
        "mha_llama_grouped", llama(24, 6, 2), "model.layers.0.self_attn", heads=6,
        leftovers={"rotary_emb.inv_freq": np.float32([1, 0.01])},
    )  # fmt: skip
    checkpoint("mha_llama_not_grouped", llama(24, 4, 4), "model.layers.12.self_attn", heads=4)
    checkpoint(
        "mha_llama_head_dim", llama(20, 4, 2, head_dim=6), "model.layers.1.self_attn", heads=4, causal=False
    )
    checkpoint(
        "mha_llama_one_kv_head_bias", llama(20, 5, 1, attention_bias=True), "layers.0.self_attn", heads=5
    )
    checkpoint(
        "mha_qwen2_padding", llama(24, 6, 3, Qwen2Config, Qwen2Attention), "model.layers.3.self_attn", heads=6,
        batch=3, queries=8, key_mask=lengths_mask([8, 5, 2], 8),
    )  # fmt: skip
    checkpoint(
        "mha_llama_rotary", llama(16, 4, 2, head_dim=8), "model.layers.0.self_attn", heads=4, queries=9, rope=True
    )
    llama_3 = {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    }  # fmt: skip
    checkpoint(
        "mha_llama_3_rotary_padding", llama(16, 2, 1, head_dim=12, rope_parameters=llama_3),
        "model.layers.5.self_attn", heads=2, queries=9, key_mask=lengths_mask([9, 4], 9), rope=True,
    )  # fmt: skip


# ---------------------------------------------------------------- scaled_dot_product_attention


def sdpa(
    name, *, batch=2, heads=3, kv_heads=None, queries=5, keys=7, dim=5, vdim=None, mask=None,
    causal=False, scale=None, spread=1.0, with_lse=True, tolerance=None,
):  # fmt: skip
    rng = rng_of(name)
    kv_heads, vdim = kv_heads or heads, vdim or dim
    inputs = {
        "query": normal(rng, batch, heads, queries, dim, scale=spread),
        "key": normal(rng, batch, kv_heads, keys, dim, scale=spread),
        "value": normal(rng, batch, kv_heads, keys, vdim),
    }
    given = None
    if mask is not None:
        inputs["attn_mask"] = mask(rng)
        given = torch.from_numpy(inputs["attn_mask"])
        given = given if given.dtype == torch.bool else given.double()
        given = given.expand(torch.broadcast_shapes(given.shape, (queries, keys)))
    query, key, value = (double(inputs[part]) for part in ("query", "key", "value"))
    unit = torch.eye(keys).double().expand(batch, kv_heads, keys, keys)

    def attend(value):
        return scaled_dot_product_attention(
            query, key, value, attn_mask=given, is_causal=causal, scale=scale, enable_gqa=kv_heads != heads
        )

    # The weights are what attention makes of the unit vectors.
    expected = {"output": attend(value), "weights": attend(unit)}
    if with_lse:
        scores = query @ key.repeat_interleave(heads // kv_heads, 1).mT
        scores = scores * (dim**-0.5 if scale is None else scale)
        if causal:
            scores = scores + torch.full((queries, keys), -torch.inf).double().triu(1)
        if given is not None and given.dtype == torch.bool:
            scores = scores.masked_fill(~given, -torch.inf)
        elif given is not None:
            scores = scores + given
        expected["lse"] = torch.logsumexp(scores, -1)
    options = {"causal": "top_left" if causal else "none"}
    if scale is not None:
        options["scale"] = scale
    source = f"{TORCH} scaled_dot_product_attention, float64"
    add(name, "sdpa", source, options, inputs, expected, tolerance)


def lowest_mask(rng):
    """The lowest float32 is a bias: it outweighs any score, but hides nothing."""
    mask = np.where(keep(rng, 5, 7), 0, np.finfo(np.float32).min).astype(np.float32)
    mask[2] = np.finfo(np.float32).min
    return mask


def row_masked(rng):
    mask = keep(rng, 5, 7)
    mask[1] = False
    return mask


def sdpa_cases():
    sdpa("sdpa_prime_sizes", heads=3, queries=13, keys=17, dim=11, vdim=7)
    sdpa("sdpa_one_of_each", batch=1, heads=1, queries=1, keys=1, dim=1)
    sdpa("sdpa_one_key", heads=2, queries=4, keys=1, dim=3, vdim=5)
    sdpa("sdpa_long_row", batch=1, heads=1, queries=3, keys=131, dim=33, vdim=5)
    sdpa("sdpa_wide_value", batch=1, heads=2, queries=3, keys=5, dim=4, vdim=129)
    sdpa("sdpa_gqa_6_2", heads=6, kv_heads=2, queries=5, keys=9)
    sdpa("sdpa_mqa_5_1_causal", heads=5, kv_heads=1, queries=9, keys=9, dim=6, causal=True)
    sdpa("sdpa_causal_more_keys", queries=5, keys=11, causal=True)
    sdpa("sdpa_causal_more_queries", queries=11, keys=5, causal=True)
    sdpa("sdpa_scale", scale=0.75)
    sdpa("sdpa_scale_tiny_gqa_causal", heads=4, kv_heads=2, scale=0.01, causal=True)
    # float32 rounds the scores, some hundreds here, and so the exponents.
    wide = {"output": 2e-4, "weights": 2e-4, "lse": 1e-3}
    sdpa("sdpa_large_scores", queries=7, keys=13, spread=10.0, tolerance=wide)
    for shape in [(7,), (5, 7), (3, 1, 7), (2, 1, 1, 7), (1, 3, 5, 7), (2, 1, 5, 1), (2, 3, 5, 7)]:
        name = "sdpa_bool_mask_" + "x".join(map(str, shape))
        sdpa(name, mask=lambda rng, shape=shape: keep(rng, *shape))
    for shape in [(5, 7), (3, 5, 7), (2, 1, 1, 7), (2, 3, 5, 1)]:
        name = "sdpa_float_mask_" + "x".join(map(str, shape))
        sdpa(name, mask=lambda rng, shape=shape: float_mask(rng, *shape))
    sdpa("sdpa_row_fully_masked", mask=row_masked)
    sdpa("sdpa_float_mask_lowest_f32", mask=lowest_mask, with_lse=False)


# ---------------------------------------------------------------- ONNX Attention

INPUTS = ["query", "key", "value", "attn_mask", "past_key", "past_value", "kv_lengths"]
OUTPUTS = ["output", "present_key", "present_value", "weights"]


def onnx_case(
    name, *, opset, batch=2, heads=3, kv_heads=None, queries=4, keys=6, dim=6, vdim=None, past=0,
    lengths=None, mask=None, causal=False, flat=False, scale=None, softcap=None, window=None,
    nan_tail=False,
):  # fmt: skip
    """`flat` asks for 3-D inputs. The positions of the operator are ours like this: behind a past,
    `query_offset` is its length; with lengths, the last query stands at the last key."""
    rng = rng_of(name)
    kv_heads, vdim = kv_heads or heads, vdim or dim

    def part(count, length, size):
        shape = (batch, length, count * size) if flat else (batch, count, length, size)
        return normal(rng, *shape)

    inputs = {
        "query": part(heads, queries, dim),
        "key": part(kv_heads, keys, dim),
        "value": part(kv_heads, keys, vdim),
    }
    if past:
        inputs["past_key"] = normal(rng, batch, kv_heads, past, dim)
        inputs["past_value"] = normal(rng, batch, kv_heads, past, vdim)
    if mask is not None:
        inputs["attn_mask"] = mask(rng)
    if lengths is not None:
        inputs["kv_lengths"] = np.asarray(lengths, np.int32)

    attributes = {"is_causal": int(causal), "qk_matmul_output_mode": 3, "scale": scale, "softcap": softcap}
    if flat:
        attributes |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
    if window is not None:
        attributes |= {"left_window_size": window[0], "right_window_size": window[1]}
    feed = {
        key: value.astype(np.float64) if value.dtype == np.float32 else value for key, value in inputs.items()
    }
    if lengths is not None:
        feed["kv_lengths"] = feed["kv_lengths"].astype(np.int64)
    types = {
        np.float64: onnx.TensorProto.DOUBLE,
        np.bool_: onnx.TensorProto.BOOL,
        np.int64: onnx.TensorProto.INT64,
    }
    outputs = [item for item in OUTPUTS if past or not item.startswith("present")]
    ranks = {item: [None] * (3 if flat and item == "output" else 4) for item in outputs}
    names = [item if item in feed else "" for item in INPUTS]
    node = onnx.helper.make_node(
        "Attention",
        names[: len(names) - next(back for back, item in enumerate(reversed(names)) if item)],
        [item if item in outputs else "" for item in OUTPUTS],
        **{key: value for key, value in attributes.items() if value is not None},
    )
    graph = onnx.helper.make_graph(
        [node],
        name,
        [
            onnx.helper.make_tensor_value_info(key, types[value.dtype.type], value.shape)
            for key, value in feed.items()
        ],
        [onnx.helper.make_tensor_value_info(item, onnx.TensorProto.DOUBLE, ranks[item]) for item in outputs],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    onnx.checker.check_model(model)
    expected = dict(zip(outputs, ReferenceEvaluator(model).run(None, feed), strict=True))

    if nan_tail:  # no key is there: what lies there must not count
        for which in ("key", "value"):
            inputs[which] = inputs[which].copy()
            for row, length in enumerate(lengths):
                inputs[which][row, :, length:] = np.nan
    options = {"causal": "none"}
    if causal:
        options["causal"] = "top_left" if lengths is None else "bottom_right"
    elif window is not None and lengths is not None:
        options["align"] = "bottom_right"
    if past:
        options["query_offset"] = past
    if flat:
        options |= {"num_heads": heads, "kv_num_heads": kv_heads}
    # The node holds both, and the root of `scale`, as float32: only numbers that this leaves exact.
    if scale is not None:
        options["scale"] = scale
    if softcap is not None:
        options["softcap"] = softcap
    if window is not None:
        options["window"] = list(window)
    source = f"{ONNX} reference evaluator, Attention of opset {opset}, float64"
    add(name, "sdpa", source, options, inputs, expected)


def onnx_cases():
    onnx_case("onnx_23_softcap", opset=23, softcap=1.5, vdim=5)
    onnx_case("onnx_23_softcap_float_mask", opset=23, softcap=0.5, mask=lambda rng: float_mask(rng, 4, 6))
    onnx_case("onnx_23_3d", opset=23, flat=True, vdim=10)
    onnx_case(
        "onnx_23_3d_gqa_bool_mask_scale", opset=23, flat=True, heads=6, kv_heads=2, scale=0.25,
        mask=lambda rng: keep(rng, 2, 1, 4, 6),
    )  # fmt: skip
    onnx_case("onnx_23_mask_rank_3", opset=23, mask=lambda rng: float_mask(rng, 3, 4, 6))
    onnx_case("onnx_23_causal_bool_mask", opset=23, queries=6, causal=True, mask=lambda rng: keep(rng, 6, 6))
    onnx_case("onnx_23_past", opset=23, keys=4, past=5, vdim=6)
    onnx_case("onnx_23_past_causal", opset=23, keys=4, past=7, causal=True)
    onnx_case(
        "onnx_24_3d_gqa_past_causal_mask", opset=24, flat=True, heads=4, kv_heads=2, queries=3, keys=3,
        past=6, causal=True, mask=lambda rng: float_mask(rng, 2, 1, 3, 9),
    )  # fmt: skip
    onnx_case("onnx_24_decode_past", opset=24, heads=4, kv_heads=1, queries=1, keys=1, past=17, causal=True)
    onnx_case("onnx_24_short_mask", opset=24, keys=7, mask=lambda rng: keep(rng, 2, 1, 4, 5))
    onnx_case("onnx_24_lengths", opset=24, keys=9, lengths=[9, 4])
    onnx_case("onnx_24_lengths_nan_tail", opset=24, keys=9, lengths=[6, 1], nan_tail=True)
    onnx_case(
        "onnx_24_lengths_causal_gqa", opset=24, heads=4, kv_heads=2, keys=9, lengths=[9, 5], causal=True
    )
    onnx_case("onnx_24_lengths_causal_empty_rows", opset=24, queries=5, keys=7, lengths=[3, 0], causal=True)
    onnx_case(
        "onnx_24_lengths_causal_bool_mask", opset=24, keys=8, lengths=[8, 6], causal=True,
        mask=lambda rng: keep(rng, 2, 1, 4, 8),
    )  # fmt: skip
    onnx_case("onnx_25_window", opset=25, queries=9, keys=9, window=(2, 1))
    onnx_case(
        "onnx_25_window_causal_softcap", opset=25, queries=9, keys=9, window=(3, -1), causal=True, softcap=2.0
    )
    onnx_case("onnx_25_window_past", opset=25, keys=4, past=8, window=(2, 0), causal=True)
    onnx_case("onnx_25_window_lengths", opset=25, keys=9, lengths=[9, 5], window=(2, 1))


# ---------------------------------------------------------------- ONNX RotaryEmbedding


def rotary_cases():
    """The operator's backend node tests, with numbers that do not change from run to run."""

    def collect(node, inputs, outputs, name):
        name = name.replace("test_", "onnx_23_")
        given = dict(zip(node.input, inputs, strict=True))
        feed = {
            key: value.astype(np.float64) if value.dtype == np.float32 else value
            for key, value in given.items()
        }
        expected = ReferenceEvaluator(node).run(None, feed)[0]
        assert distance(expected, outputs[0]) < 1e-6, f"{name}: float64 moves the node test's answer"
        inputs = {
            key: value.astype(np.int32) if value.dtype == np.int64 else value
            for key, value in given.items()
        }
        options = {item.name: item.i for item in node.attribute}
        if "interleaved" in options:
            options["interleaved"] = bool(options["interleaved"])
        source = f"{ONNX} reference evaluator, RotaryEmbedding of opset 23, float64"
        add(name, "rotary", source, options, inputs, {"output": expected})

    rotary_nodes.expect = collect
    for export in sorted(item for item in vars(rotary_nodes.RotaryEmbedding) if item.startswith("export_")):
        np.random.seed(zlib.crc32(export.encode()))
        getattr(rotary_nodes.RotaryEmbedding, export)()


def rotated(inputs, options, dtype):
    """[B, L, H, D] all along; every pair is turned by its own angle."""
    x = inputs["input"].astype(dtype)
    flat = x.ndim == 3
    split = x.reshape(*x.shape[:2], options["num_heads"], -1) if flat else x.swapaxes(1, 2)
    dim = options.get("rotary_embedding_dim", split.shape[-1])
    cos, sin = (inputs[part].astype(dtype) for part in ("cos_cache", "sin_cache"))
    if "position_ids" in inputs:
        cos, sin = cos[inputs["position_ids"]], sin[inputs["position_ids"]]
    answer = split.copy()
    for pair in range(dim // 2):
        a, b = (2 * pair, 2 * pair + 1) if options.get("interleaved") else (pair, pair + dim // 2)
        c, s = cos[:, :, None, pair], sin[:, :, None, pair]
        answer[..., a] = c * split[..., a] - s * split[..., b]
        answer[..., b] = s * split[..., a] + c * split[..., b]
    return {"output": answer.reshape(x.shape) if flat else answer.swapaxes(1, 2)}


def turned(x, cos, sin):
    """[B, H, L, D] by angles [L, D / 2]."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([cos * a - sin * b, sin * a + cos * b], axis=-1)


# ---------------------------------------------------------------- the rule of README.md


def by_the_rule(case, inputs, dtype):
    """What README.md says, step by step; only the options that occur here."""
    options = case["options"]
    if case["op"] == "rotary":
        return rotated(inputs, options, dtype)
    real = {key: value.astype(dtype) if value.dtype == np.float32 else value for key, value in inputs.items()}
    query, mask = real["query"], real.get("attn_mask")
    key, value = real.get("key", query), real.get("value", query)
    heads, flat = options.get("num_heads"), query.ndim == 3
    kv_heads = options.get("kv_num_heads", heads)

    def split(x, count):
        return x.reshape(x.shape[0], x.shape[1], count, -1).swapaxes(1, 2)

    layer = case["op"] == "mha"
    if "checkpoint" in options:
        # Names and layouts as README.md has them; below, all is as in PyTorch's layer.
        own = {
            key.removeprefix(options["checkpoint"] + "."): value
            for key, value in real.items()
            if key.startswith(options["checkpoint"] + ".")
        }
        if "c_attn.weight" in own:
            real["in_proj_weight"] = own["c_attn.weight"].T
            real["in_proj_bias"] = own["c_attn.bias"]
            real["out_proj.weight"], real["out_proj.bias"] = own["c_proj.weight"].T, own["c_proj.bias"]
        else:
            for part in "qkv":
                real[f"{part}_proj_weight"] = own[f"{part}_proj.weight"]
                real[f"{part}_proj_bias"] = own.get(f"{part}_proj.bias", np.zeros((), dtype))
            real["out_proj.weight"] = own["o_proj.weight"]
            real["out_proj.bias"] = own.get("o_proj.bias", 0)
    if layer:
        weights = [real.get(f"{part}_proj_weight") for part in "qkv"]
        if weights[0] is None:
            weights = np.split(real["in_proj_weight"], 3)
        biases = [real.get(f"{part}_proj_bias") for part in "qkv"]
        if biases[0] is None:
            biases = np.split(real.get("in_proj_bias", np.zeros(3 * query.shape[-1], dtype)), 3)
        query, key, value = (
            x @ weight.T + bias for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
    if flat:
        query, key, value = split(query, heads), split(key, kv_heads), split(value, kv_heads)
    if "rope_theta" in options:
        angles = np.arange(query.shape[2])[:, None] * rope_frequencies(options, query.shape[3])
        query, key = (turned(x, np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)) for x in (query, key))
    answer = {}
    if "past_key" in real:
        key = answer["present_key"] = np.concatenate([real["past_key"], key], axis=2)
        value = answer["present_value"] = np.concatenate([real["past_value"], value], axis=2)
    batch, _, length, dim = key.shape
    queries = query.shape[2]

    i, j = np.arange(queries)[:, None], np.arange(length)
    ends = real.get("kv_lengths", np.full(batch, length)).reshape(-1, 1, 1, 1)
    offset = np.full_like(ends, options.get("query_offset", 0))
    if "bottom_right" in (options["causal"], options.get("align")):
        offset = offset + ends - queries
    position = i + offset
    visible = (j < ends) & np.ones((batch, query.shape[1], queries, length), np.bool_)
    if options["causal"] != "none":
        visible &= j <= position
    left, right = options.get("window", (-1, -1))
    visible &= (left < 0) | (j >= position - left)
    visible &= (right < 0) | (j <= position + right)
    if "key_mask" in real:
        visible &= real["key_mask"][:, None, None, :]
    bias = np.zeros((), dtype)
    if mask is not None:
        short = length - mask.shape[-1] if mask.shape[-1] != 1 else 0
        hidden = False if mask.dtype == np.bool_ else -np.inf
        mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=hidden)
        if mask.dtype == np.bool_:
            visible &= mask
        else:
            visible &= mask > -np.inf
            bias = mask

    if layer:  # the added keys, which nothing hides
        extra_k, extra_v = [], []
        if "bias_k" in real:
            extra_k.append(split(np.broadcast_to(real["bias_k"], (batch, 1, heads * dim)), heads))
            extra_v.append(split(np.broadcast_to(real["bias_v"], (batch, 1, heads * dim)), heads))
        if options.get("add_zero_attn"):
            extra_k.append(np.zeros((batch, heads, 1, dim), dtype))
            extra_v.append(np.zeros((batch, heads, 1, dim), dtype))
        more = [(0, 0)] * 3 + [(0, len(extra_k))]
        key, value = np.concatenate([key, *extra_k], axis=2), np.concatenate([value, *extra_v], axis=2)
        visible = np.pad(visible, more, constant_values=True)
        bias = np.pad(np.broadcast_to(bias, (*visible.shape[:3], length)), more)

    group = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    score = query @ key.swapaxes(2, 3) * dtype(options.get("scale", 1 / math.sqrt(dim)))
    if "softcap" in options:
        softcap = dtype(options["softcap"])
        score = softcap * np.tanh(score / softcap)
    score = np.where(visible, score + np.where(bias > -np.inf, bias, 0), -np.inf).astype(dtype)
    top = score.max(axis=-1, keepdims=True)
    top = np.where(np.isneginf(top), 0, top)
    power = np.exp(score - top)
    total = power.sum(axis=-1, keepdims=True)
    weights = power / np.where(total == 0, 1, total)
    seen = np.where(visible[..., None], value[:, :, None], 0)  # an invisible value never counts
    output = (weights[..., None, :] @ seen)[..., 0, :]
    with np.errstate(divide="ignore"):
        answer["lse"] = (top + np.log(total))[..., 0]
    if flat:
        output = output.swapaxes(1, 2).reshape(batch, queries, -1)
    if layer:
        output = output @ real["out_proj.weight"].T + real.get("out_proj.bias", 0)
    answer["output"] = output.astype(dtype)
    answer["weights"] = weights.mean(axis=1) if options.get("average_weights") else weights
    return answer


def distance(a, b):
    with np.errstate(invalid="ignore"):
        return float(np.max(np.where(a == b, 0, np.abs(a - b)), initial=0))


def main():
    mha_cases()
    checkpoint_cases()
    sdpa_cases()
    onnx_cases()
    rotary_cases()
    for old in HERE.glob("*.safetensors"):
        old.unlink()
    for case, inputs, expected in cases:
        name = case["name"]
        exact, rounded = (by_the_rule(case, inputs, dtype) for dtype in (np.float64, np.float32))
        errors = {}
        for answer, value in expected.items():
            limit = case["tolerance"].get(answer, TOLERANCE)
            assert exact[answer].shape == value.shape, (name, answer, exact[answer].shape, value.shape)
            gap, error = distance(exact[answer], value), distance(rounded[answer], value)
            assert gap < 1e-10, f"{name}: {answer} is {gap} off the rule"
            assert error < limit / 4, f"{name}: float32 misses {answer} by {error}, too near to {limit}"
            errors[answer] = f"{error:.0e}"
        tensors = inputs | {f"expected.{key}": value.astype(np.float32) for key, value in expected.items()}
        tensors = {key: np.ascontiguousarray(value) for key, value in sorted(tensors.items())}
        file = HERE / f"{name}.safetensors"
        save_file(tensors, file, metadata={"case": json.dumps(case, sort_keys=True)})
        print(f"{file.name:48} {file.stat().st_size:7}  float32 errors {errors}")
    print(f"{len(cases)} cases, {sum(file.stat().st_size for file in HERE.glob('*.safetensors'))} bytes")


if __name__ == "__main__":
    main()
