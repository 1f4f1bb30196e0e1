#!POPCORN leaderboard amd-mxfp4-mm
"""c = a @ b.T in MXFP4: a is quantized at every call, by the rule that AITER calls "even"; b comes quantized.

b's codes are read as they were before the (16,16) shuffle; its scales are given shuffled only, and are put back.
"""

import nibblas as nb


def custom_kernel(data):
    """a (M, K) bf16; b (N, K) as bf16, as codes, as shuffled codes; its scales, shuffled and padded: (M, N) bf16."""
    a, _, codes, _, scale = data
    layout = nb.scale_layout(nb.MXFP4, a.device)
    rows, _ = nb.CDNA_32x8.shape(codes.shape[0], scale.shape[1])  # the rest is padding
    w = nb.ScaledTensor.from_parts(codes, scale[:rows], nb.MXFP4, layout=nb.CDNA_32x8)
    x = nb.quantize(a, nb.MXFP4, scale_rule="even")
    return nb.linear(x.with_layout(layout), w.with_layout(layout))
