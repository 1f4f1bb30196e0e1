#!POPCORN leaderboard amd-moe-mxfp4
"""The baseline: the experts that are used are decoded to bf16 and go to cuBLAS one by one.

Tokens, and what the gates make of them, are quantized first, as the problem wants, by nibblas.
"""

import torch

import nibblas as nb
from nibblas.arena.baseline import decode, product


def quantized(x):
    """The values that x has as MXFP4, bf16."""
    x = nb.quantize(x, nb.MXFP4, scale_rule="even")
    return decode(x.data, x.scale)


def custom_kernel(data):
    """Tokens (T, H) bf16, experts (E, 2 I, H) and (E, H, I) with scales, raw and shuffled, routing, sizes: (T, H)."""
    tokens, gate_up, down, gate_up_scale, down_scale, _, _, _, _, shares, ids, config = data
    H, I, padded_I = config["d_hidden"], config["d_expert"], config["d_expert_pad"]
    gate_up_scale, down_scale = (
        scale.view(*codes.shape[:2], -1) for codes, scale in ((gate_up, gate_up_scale), (down, down_scale))
    )
    x, out = quantized(tokens), torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        weights = decode(gate_up[expert], gate_up_scale[expert])[:, :H]  # [2 padded_I, H]
        gate, up = (product(x[token], weights[start : start + I]) for start in (0, padded_I))
        hidden = quantized((torch.nn.functional.silu(gate) * up).bfloat16())
        y = product(hidden, decode(down[expert], down_scale[expert])[:H, :I])
        out.index_add_(0, token, y * shares[token, place, None])
    return out.to(tokens.dtype)
