"""Writes an nn.MultiheadAttention, an input and its output for the Rust side to compare with.

    pip install torch safetensors
    python examples/compare_torch/export.py layer.safetensors
    cargo run --release --example compare_torch -- layer.safetensors
"""

import sys

import torch
from safetensors.torch import save_file

EMBED_DIM, NUM_HEADS = 64, 4

torch.manual_seed(0)
layer = torch.nn.MultiheadAttention(EMBED_DIM, NUM_HEADS, batch_first=True).eval()
with torch.no_grad():
    for bias in (layer.in_proj_bias, layer.out_proj.bias):  # PyTorch starts them at 0
        bias.normal_()
    x = torch.randn(2, 9, EMBED_DIM)
    y, weights = layer(x, x, x, average_attn_weights=False)

tensors = {f"attention.{name}": tensor for name, tensor in layer.state_dict().items()}
tensors |= {"input": x, "output": y, "weights": weights}
save_file(
    {name: tensor.contiguous() for name, tensor in tensors.items()},
    sys.argv[1] if len(sys.argv) > 1 else "layer.safetensors",
    metadata={"num_heads": str(NUM_HEADS), "torch": torch.__version__},
)
