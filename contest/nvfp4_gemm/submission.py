#!POPCORN leaderboard nvfp4_gemm
"""c = a @ b.T for each of L pairs of NVFP4 matrices, as one batched product."""

import nibblas as nb


def custom_kernel(data):
    """a (M, K, L), b (N, K, L), their scales, linear and blocked, and c (M, N, L) to fill."""
    a, b, sfa, sfb, sfa_blocked, sfb_blocked, c = data
    if nb.scale_layout(nb.NVFP4, a.device) == nb.BLOCKED_128x4:
        sfa, sfb = sfa_blocked, sfb_blocked
    x, w = (nb.ScaledTensor.from_batch_last(*parts, nb.NVFP4) for parts in ((a, sfa), (b, sfb)))
    nb.bmm(x, w, out=c.permute(2, 0, 1))  # [L, M, N]
    return c
