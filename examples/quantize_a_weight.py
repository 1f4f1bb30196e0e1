"""Quantize one weight by every scale rule, see what each costs in error, and multiply with the best."""

import torch

import nibblas as nb

torch.manual_seed(0)
weight = torch.randn(1024, 2048) * 0.02
x = torch.randn(4, 2048).bfloat16()

for format in (nb.NVFP4, nb.MXFP4):
    for rule in format.scale_rules:
        w = nb.quantize(weight, format, scale_rule=rule)
        error = (nb.dequantize(w) - weight).square().sum() / weight.square().sum()
        print(f"{format!s:6} {rule:14} {8 * w.nbytes / weight.numel():.2f} bits a weight, relative MSE {error:.5f}")

w = nb.quantize(weight, nb.NVFP4, scale_rule="search")
print(w)
y = nb.linear(x, w)
exact = x.double() @ weight.double().T
print("product against the unquantized weight:", f"{(y - exact).norm() / exact.norm():.3f} relative error")
print(nb.explain("linear", x, w))
