"""Quantize with plain torch: the reference itself, on every device. Bound by its many passes over the input."""

from torch import Tensor

from nibblas.formats import FORMATS, Format
from nibblas.kernel import Kernel
from nibblas.problem import DTYPES, Problem
from nibblas.quantize import quantize as reference
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor


def launch(x: Tensor, format: Format, rule: str, global_scale: Tensor | None) -> ScaledTensor:
    """x (rows, K) -> ScaledTensor over it in LINEAR layouts; global_scale () fp32 or None for the rule's own."""
    return reference(x, format, scale_rule=rule, global_scale=global_scale)


def cost(problem: Problem, line: Roofline) -> float:
    """About 60 operations of torch, of which 40 are passes in fp32; some 25 times that for an exhaustive search."""
    searched = 25 if problem.rule == "search" else 1
    return searched * (120e-6 + 40 * 4 * problem.M * problem.K / line.read_bandwidth)


KERNELS = (
    Kernel(
        name="torch_quantize",
        op="quantize",
        archs=(),
        operands=tuple((dtype, format) for dtype in DTYPES for format in FORMATS),
        outs=tuple(FORMATS),
        launch=launch,
        cost=cost,
        sources=("kernels/torch_quantize.py", "quantize.py", "formats.py"),
    ),
)
