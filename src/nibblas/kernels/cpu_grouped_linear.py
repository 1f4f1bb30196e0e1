"""Groups of rows, each against its own FP4 weights, on the CPU: cpu_linear's C, once for each group that has rows.

What a call costs besides the products is paid once: arguments are laid out for the first group, and only addresses and
counts change from one to the next. Exactness, bounds and weaknesses are those of cpu_linear. Known weakness: threads
share one group at a time and meet after each, which shows where groups are many and small.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from nibblas.kernel import Kernel
from nibblas.kernels import cpu_linear
from nibblas.problem import Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor


def launch(
    x: Tensor | ScaledTensor,
    w: ScaledTensor,
    offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    linear: Callable | None = None,
) -> None:
    """Rows offsets[g]:offsets[g+1] of x (M, K) meet w[g] (N, K) and bias[g] (N,); rows of no group become zero.

    Layouts, dtypes and errors as in cpu_linear.linear; offsets (G+1,) ascending within 0..M, for at least one group.
    `linear` is not needed.
    """
    bounds = offsets.tolist()
    out[: bounds[0]].zero_()
    out[bounds[-1] :].zero_()
    if not (w.data[0].is_contiguous() and w.scale[0].is_contiguous()):
        w = w.contiguous()
    bias = None if bias is None else bias.contiguous()
    task, (x, *_) = cpu_linear._task(x, w[0], None if bias is None else bias[0], out, None)
    factors = None if w.global_scale is None else w.global_scale.expand(w.data.shape[0]).tolist()
    # Where the first group's things are, and bytes from a row, or a group, to the next.
    x_at, x_scale_at, out_at, bias_at = task.a.data, task.a.scale, task.out, task.bias
    codes_at, scales_at = task.b.data, task.b.scale
    x_row = task.a.data_stride * (x.itemsize if isinstance(x, Tensor) else 1)
    out_row = task.out_stride * out.itemsize
    codes_step, scales_step = w.data.stride(0), w.scale.stride(0)
    for g, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        task.M = end - start
        task.a.data = x_at + start * x_row
        if x_scale_at is not None:
            task.a.scale = x_scale_at + start * task.a.scale_stride
        task.b.data, task.b.scale = codes_at + g * codes_step, scales_at + g * scales_step
        if factors is not None:
            task.b.global_scale = factors[g]
        if bias is not None:
            task.bias = bias_at + g * bias.stride(0) * bias.itemsize
        task.out = out_at + start * out_row
        cpu_linear._run(task)


def cost(problem: Problem, line: Roofline) -> float:
    """One product for each group that can have rows, which share them evenly."""
    groups = max(1, min(problem.G, problem.M))
    one = replace(problem, op="linear", G=1, M=-(-problem.M // groups))
    return 10e-6 + groups * cpu_linear.cost(one, line)


def also(problem: Problem) -> str | None:
    return cpu_linear.also(problem) or (None if problem.K else "K is 0")


(_linear,) = cpu_linear.KERNELS
KERNELS = (
    Kernel(
        name="cpu_grouped_linear",
        op="grouped_linear",
        archs=_linear.archs,
        operands=_linear.operands,
        outs=_linear.outs,
        b_layouts=_linear.b_layouts,
        launch=launch,
        cost=cost,
        also=also,
        sources=("kernels/cpu_grouped_linear.py", *_linear.sources),
    ),
)
