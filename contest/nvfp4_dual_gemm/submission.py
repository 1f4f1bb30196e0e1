#!POPCORN leaderboard nvfp4_dual_gemm
"""c = silu(a @ b1.T) * (a @ b2.T) for each of L triples of NVFP4 matrices: a gated product, held in fp32 to its end."""

import nibblas as nb


def custom_kernel(data):
    """a (M, K, L), b1 and b2 (N, K, L), their scales, linear and blocked, and c (M, N, L) to fill."""
    *codes, sfa, sfb1, sfb2, sfa_blocked, sfb1_blocked, sfb2_blocked, c = data
    scales = sfa, sfb1, sfb2
    if nb.scale_layout(nb.NVFP4, c.device) == nb.BLOCKED_128x4:
        scales = sfa_blocked, sfb1_blocked, sfb2_blocked
    x, gate, up = (nb.ScaledTensor.from_batch_last(*parts, nb.NVFP4) for parts in zip(codes, scales, strict=True))
    for l in range(c.shape[2]):
        nb.gated_linear(x[l], gate[l], up[l], out=c[:, :, l])
    return c
