"""A mixture of experts in MXFP4, as gpt-oss stores them: eight experts, two for each token."""

import torch

import nibblas as nb

torch.manual_seed(0)
E, H, I, T = 8, 256, 512, 16
gate, up, down = (
    nb.stack([nb.quantize(0.05 * torch.randn(rows, cols), nb.MXFP4) for _ in range(E)])
    for rows, cols in ((I, H), (I, H), (H, I))
)
print("gate:", gate)

x = torch.randn(T, H).bfloat16()
share, expert = torch.randn(T, E).softmax(-1).topk(2)
y = nb.moe(x, expert, share, gate, up, down, activation="swiglu_clamped")

exact = nb.reference.moe(x, expert, share, gate, up, down, activation="swiglu_clamped")
print(f"{y.shape}, relative error to the float64 oracle {(y - exact).norm() / exact.norm():.1e}")
