#!POPCORN leaderboard amd-moe-mxfp4
"""A mixture of experts in MXFP4, activations too: tokens and what the experts' gates make of them are quantized.

Codes and scales are read as they were before AITER's shuffles, and without their padding, as views.
"""

import nibblas as nb


def custom_kernel(data):
    """Tokens (T, H) bf16, experts (E, 2 I, H) and (E, H, I) with scales, raw and shuffled, routing, sizes: (T, H)."""
    tokens, gate_up, down, gate_up_scale, down_scale, _, _, _, _, shares, ids, config = data
    H, I, padded_I = config["d_hidden"], config["d_expert"], config["d_expert_pad"]
    gate_up, down = (
        nb.ScaledTensor.from_parts(codes, scale.view(*codes.shape[:2], -1), nb.MXFP4)
        for codes, scale in ((gate_up, gate_up_scale), (down, down_scale))
    )
    gate_up, down = gate_up.slice(2, 0, H), down.slice(1, 0, H).slice(2, 0, I)
    gate, up = gate_up.slice(1, 0, I), gate_up.slice(1, padded_I, padded_I + I)
    x = nb.quantize(tokens, nb.MXFP4, scale_rule="even")
    return nb.moe(x, ids, shares, gate, up, down)
