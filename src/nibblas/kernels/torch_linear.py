"""c = a @ b.T by decoding both operands with torch: right on every device, and what is left where nothing else runs.

A quarter of codes times block scales is exact in fp32 (the whole of 6 * 2^127 is not); the product runs in fp32, is
multiplied by the fours and the global scales, and takes the bias before it is narrowed. Bound by decoding b and by the
fp32 rate; memory for b in fp32 is needed at every call.
"""

import torch
from torch import Tensor

from nibblas.formats import FORMATS, e2m1_decode, unpack
from nibblas.kernel import Kernel
from nibblas.problem import DTYPES, Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor


def decode(t: Tensor | ScaledTensor, share: float = 1.0) -> Tensor:
    """The operand in fp32 without its global scale, of a ScaledTensor `share` times that: (..., rows, K)."""
    if isinstance(t, Tensor):
        return t.float()
    codes = e2m1_decode(unpack(t.linear_data)).unflatten(-1, (-1, t.format.block_size))
    scale = t.format.scale_code.decode(t.linear_scale) * share
    return (codes * scale.unsqueeze(-1)).flatten(-2)


def launch(a: Tensor | ScaledTensor, b: ScaledTensor, bias: Tensor | None, out: Tensor) -> None:
    """Write a @ b.T + bias to out: a (..., M, K), b (..., N, K), bias (N,), out (..., M, N)."""
    exact = torch.matmul(decode(a, 0.25), decode(b, 0.25).mT)
    for operand in (a, b):
        if isinstance(operand, ScaledTensor):
            exact *= 4.0
            if operand.global_scale is not None:
                exact *= operand.global_scale[..., None, None]
    if bias is not None:
        exact += bias.float()
    out.copy_(exact)


def cost(problem: Problem, line: Roofline) -> float:
    """Some 20 operations of torch; decoding writes and reads b in fp32 several times over; then an fp32 product."""
    decoded = 4 * problem.L * problem.N * problem.K
    return 100e-6 + 6 * decoded / line.read_bandwidth + problem.operations / line.rates["fp32"]


KERNELS = (
    Kernel(
        name="torch_linear",
        op="linear",
        archs=(),
        operands=tuple((a, b) for b in FORMATS for a in (*DTYPES, *FORMATS)),
        outs=tuple(DTYPES),
        a_layouts=None,
        b_layouts=None,
        launch=launch,
        cost=cost,
        sources=("kernels/torch_linear.py",),
        batched=True,
        decodes_weights=True,
    ),
)
