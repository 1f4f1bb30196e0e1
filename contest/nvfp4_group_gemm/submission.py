#!POPCORN leaderboard nvfp4_group_gemm
"""c = a @ b.T for groups of NVFP4 matrices, each group of sizes of its own.

The linear scales may lie in host memory, where the matrices do not; then the blocked ones are taken.
"""

import nibblas as nb


def custom_kernel(data):
    """Of each group a (M, K, L), b (N, K, L) and c (M, N, L) to fill; scales of a and b, linear and blocked; sizes."""
    matrices, linear, blocked, _ = data

    def operand(codes, scale, blocked_scale):
        wants_blocked = nb.scale_layout(nb.NVFP4, codes.device) == nb.BLOCKED_128x4
        if wants_blocked or scale.device != codes.device:
            scale = blocked_scale
        return nb.ScaledTensor.from_batch_last(codes, scale, nb.NVFP4)

    groups = list(zip(matrices, linear, blocked, strict=True))
    x = [operand(a, sfa, sfa_blocked) for (a, _, _), (sfa, _), (sfa_blocked, _) in groups]
    w = [operand(b, sfb, sfb_blocked) for (_, b, _), (_, sfb), (_, sfb_blocked) in groups]
    nb.grouped_matmul(x, w, out=[c.permute(2, 0, 1) for _, _, c in matrices])  # [L, M, N] each
    return [c for _, _, c in matrices]
