#!POPCORN leaderboard nvfp4_group_gemm
"""The baseline: all matrices are decoded to fp16 and go to cuBLAS, group by group.

Scales are taken from the blocked ones, since the linear ones may lie in host memory.
"""

import torch

from nibblas.arena.baseline import decode

torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def operand(codes, blocked):
    """Codes (rows, K/2, 1) and scales (32, 4, rest_m, 4, rest_k, 1) -> (rows, K) fp16."""
    _, _, tiles, _, columns, _ = blocked.shape
    scale = blocked[..., 0].permute(2, 1, 0, 4, 3).reshape(128 * tiles, 4 * columns)
    return decode(codes[:, :, 0], scale[: codes.shape[0], : codes.shape[1] // 8])


def custom_kernel(data):
    """Of each group a (M, K, 1), b (N, K, 1) and c (M, N, 1) to fill; scales of a and b, linear and blocked; sizes."""
    matrices, _, scales, _ = data
    for (a, b, c), (sfa, sfb) in zip(matrices, scales, strict=True):
        torch.mm(operand(a, sfa), operand(b, sfb).T, out=c[:, :, 0])
    return [c for _, _, c in matrices]
