"""act(x @ w_gate.T) * (x @ w_up.T) with many rows of x: all that is FP4 is decoded once, then cuBLAS multiplies.

Decoding, exactness, bounds and scratch as in triton_linear_decoded.py, of two weights: both products are one batch of
cuBLAS's, in fp32, and one kernel adds, gates and narrows them.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nibblas.kernel import Kernel
from nibblas.kernels.triton_launch import DEVICE_CODE, NVIDIA, also, target_of
from nibblas.kernels.triton_linear_decoded import (
    DENSE,
    FP4,
    LAYOUTS,
    also_fp4,
    decode_launch,
    decoded,
    dtype_of,
    in_terms,
    sums_in_fp32,
)
from nibblas.kernels.triton_linear_decoded import cost as linear_cost
from nibblas.kernels.triton_sums import gated_sums_launch
from nibblas.problem import DTYPES, Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

finish_launch = partial(gated_sums_launch, block=512, num_warps=4)


def multiply(x: Tensor, w: Tensor, sums: Tensor) -> None:
    """Write x @ w.mT in fp32: x (terms, M, K), w (2, N, K), sums (terms, 2, M, N)."""
    with sums_in_fp32():
        for term, into in zip(x, sums, strict=True):
            torch.bmm(term.expand(2, *term.shape), w.mT, torch.float32, out=into)


def launch(
    x: Tensor | ScaledTensor,
    w_gate: ScaledTensor,
    w_up: ScaledTensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
    out: Tensor,
    *,
    linear: object = None,
) -> None:
    """Write act(x @ w_gate.T + bias_gate) * (x @ w_up.T + bias_up) to out, in fp32 until the end.

    Shapes as in triton_gated_linear.launch; `linear` is not needed.
    """
    target = target_of(out.device)
    (M, N), K = out.shape, w_up.shape[-1]
    dtype, terms = dtype_of(x, w_up, out.dtype, target)
    w = torch.empty(2, N, K, dtype=dtype, device=out.device)
    for each, into in zip((w_gate, w_up), w, strict=True):
        decode_launch(each, into.unsqueeze(0), target).run()
    rows = in_terms(x, dtype, terms) if isinstance(x, Tensor) else decoded(x, dtype, target)
    sums = torch.empty(terms, 2, M, N, dtype=torch.float32, device=out.device)
    multiply(rows, w, sums)
    finish_launch(sums, x, w_gate, w_up, bias_gate, bias_up, activation, out).run()


def cost(problem: Problem, line: Roofline) -> float:
    """That of a product with as many rows of weights as both have."""
    return linear_cost(replace(problem, op="linear", N=2 * problem.N), line)


_kernel = partial(
    Kernel,
    op="gated_linear",
    outs=tuple(DTYPES),
    launch=launch,
    cost=cost,
    also=also,
    a_layouts=LAYOUTS,
    b_layouts=LAYOUTS,
    sources=(
        *DEVICE_CODE,
        "kernels/triton_linear_device.py",
        "kernels/triton_linear_decoded.py",
        "kernels/triton_linear_decoded_device.py",
        "kernels/triton_gated_linear_device.py",
        "kernels/triton_gated_linear_decoded.py",
        "kernels/triton_sums.py",
    ),
    decodes_weights=True,
)
KERNELS = (
    _kernel(name="triton_gated_linear_decoded", archs=NVIDIA, operands=DENSE),
    _kernel(name="triton_gated_linear_fp4_decoded", archs=NVIDIA, operands=FP4, also=also_fp4),
)
