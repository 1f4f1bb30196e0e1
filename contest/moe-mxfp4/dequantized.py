#!POPCORN leaderboard amd-moe-mxfp4
"""The baseline: the experts that are used are decoded to bf16, by one look-up a byte, and go to cuBLAS one by one.

Tokens, and what the gates make of them, are quantized first, as the problem wants, by nibblas.
"""

from functools import cache

import torch

import nibblas as nb


@cache
def pairs(device):
    """The two bf16 values that each byte holds, low nibble first, as one 32-bit word a byte: (256,)."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.bfloat16)
    high, low = torch.cartesian_prod(torch.arange(16), torch.arange(16)).T
    return torch.cat((values, -values))[torch.stack((low, high), -1)].view(torch.int32).flatten().to(device)


def decode(codes, scale):
    """Packed codes (..., K/2) and e8m0 scales (..., K/32) -> (..., K) bf16, exact."""
    codes = codes.view(torch.uint8)
    words = pairs(codes.device).index_select(0, codes.flatten().int())
    blocks = words.view(torch.bfloat16).view(*scale.shape, 32)
    return blocks.mul_(scale.view(torch.float8_e8m0fnu).to(torch.bfloat16)[..., None]).flatten(-2)


def product(a, b):
    """a @ b.T in fp32: of cuBLAS, which sums so anyway; torch has no such sum of bf16 on a CPU."""
    return torch.mm(a, b.T, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().T


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
