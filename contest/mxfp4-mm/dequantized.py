#!POPCORN leaderboard amd-mxfp4-mm
"""The baseline: both matrices are decoded to bf16, by one look-up a byte, and go to cuBLAS.

a is quantized first, as the problem wants, by nibblas.
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


def custom_kernel(data):
    """a (M, K) bf16; b (N, K) as bf16, as codes, as shuffled codes; its scales, shuffled and padded: (M, N) bf16."""
    a, _, codes, _, shuffled = data
    x = nb.quantize(a, nb.MXFP4, scale_rule="even")
    N, columns = codes.shape[0], codes.shape[1] // 16
    rows, _ = nb.CDNA_32x8.shape(N, columns)  # the rest is padding
    scale = nb.CDNA_32x8.from_(shuffled[:rows].view(torch.uint8), N, columns)
    return decode(x.data, x.scale) @ decode(codes, scale).T
