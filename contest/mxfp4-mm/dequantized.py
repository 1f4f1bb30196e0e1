#!POPCORN leaderboard amd-mxfp4-mm
"""The baseline: both matrices are decoded to bf16 and go to cuBLAS.

a is quantized first, as the problem wants, by nibblas.
"""

import torch

import nibblas as nb
from nibblas.arena.baseline import decode


def custom_kernel(data):
    """a (M, K) bf16; b (N, K) as bf16, as codes, as shuffled codes; its scales, shuffled and padded: (M, N) bf16."""
    a, _, codes, _, shuffled = data
    x = nb.quantize(a, nb.MXFP4, scale_rule="even")
    N, columns = codes.shape[0], codes.shape[1] // 16
    rows, _ = nb.CDNA_32x8.shape(N, columns)  # the rest is padding
    scale = nb.CDNA_32x8.from_(shuffled[:rows].view(torch.uint8), N, columns)
    return decode(x.data, x.scale) @ decode(codes, scale).T
