"""The FP4 products that known problems ask for: their operands, their exact answers, and what evidence calls them.

A problem is known by its name and by the shape of its input tuple. Contest tensors have L last: operands here have it
first, and answers are turned back into the shape that the problem wants.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nibblas import reference
from nibblas.formats import MXFP4, NVFP4
from nibblas.layouts import LINEAR, CDNA_32x8
from nibblas.problem import Problem
from nibblas.quantize import quantize
from nibblas.tensor import ScaledTensor

# How AITER's dynamic quantizer rounds the exponent of a block's scale.
AITER_SCALE_RULE = "even"


@dataclass(frozen=True)
class Exact:
    """One output in float64, and how large its elements would be if signs were random (reference.magnitude)."""

    answer: Tensor
    size: Tensor


def exact_products(task: str, data: Any) -> list[Exact] | None:
    """The exact outputs that a known problem wants of these inputs, in order; None for another problem.

    task : the name of the problem's directory. data : what its generate_input returned; it is only read.
    """
    known = _EXACT.get(task)
    if known is None:
        return None
    try:
        return known(data)
    except (TypeError, ValueError, AttributeError, IndexError):
        return None  # a problem of the same name with another input tuple


def problem_of(task: str, values: Mapping[str, Any], arch: str) -> Problem | None:
    """A case of a known problem as evidence names it; None for another problem, or groups that differ in N or K."""
    known = _PROBLEMS.get(task)
    if known is None:
        return None
    try:
        return known(values, arch)
    except (KeyError, TypeError, ValueError):
        return None


def _nvfp4(data: Tensor, scale: Tensor, rows: int | None = None) -> ScaledTensor:
    """(rows, K/2, L) codes and (rows, K/16, L) scales -> a ScaledTensor (L, rows, K); padding rows are left out."""
    packed, scales = (t.view(torch.uint8).permute(2, 0, 1)[:, :rows] for t in (data, scale.to(data.device)))
    return ScaledTensor.from_parts(packed.contiguous(), scales.contiguous(), NVFP4)


def _matmul(a: ScaledTensor, b: ScaledTensor) -> Exact:
    return Exact(reference.matmul(a, b).permute(1, 2, 0), reference.magnitude(a, b).permute(1, 2, 0))


def _gemm(data: Any) -> list[Exact]:
    a, b, sfa, sfb, _, _, c = data
    return [_matmul(_nvfp4(a, sfa), _nvfp4(b, sfb, c.shape[1]))]


def _dual_gemm(data: Any) -> list[Exact]:
    """silu(a @ b1.T) * (a @ b2.T); its size is that of the errors which the two products bring into it."""
    a, b1, b2, sfa, sfb1, sfb2, _, _, _, _ = data
    x = _nvfp4(a, sfa)
    gate, up = _matmul(x, _nvfp4(b1, sfb1)), _matmul(x, _nvfp4(b2, sfb2))
    silu = torch.nn.functional.silu(gate.answer)
    slope = 1.1  # silu rises no faster
    return [Exact(silu * up.answer, silu.abs() * up.size + slope * gate.size * up.answer.abs())]


def _group_gemm(data: Any) -> list[Exact]:
    tensors, scales, _, _ = data
    return [_matmul(_nvfp4(a, sfa), _nvfp4(b, sfb)) for (a, b, _), (sfa, sfb) in zip(tensors, scales, strict=True)]


def _mxfp4_mm(data: Any) -> list[Exact]:
    """A is quantized to MXFP4 on the way, as the problem says. The scales of B come shuffled, with padding rows."""
    a, _, b, _, scale = data
    N, K = b.shape[0], b.shape[1] * 2
    rows, cols = CDNA_32x8.shape(N, K // MXFP4.block_size)
    shuffled = scale.view(torch.uint8).reshape(-1, cols)[:rows]
    w = ScaledTensor.from_parts(b.contiguous().view(torch.uint8), shuffled, MXFP4, layout=CDNA_32x8)
    x = quantize(a, MXFP4, scale_rule=AITER_SCALE_RULE)
    return [Exact(reference.matmul(x, w), reference.magnitude(x, w))]


_EXACT: dict[str, Callable[[Any], list[Exact]]] = {
    "nvfp4_gemv": _gemm,
    "nvfp4_gemm": _gemm,
    "nvfp4_dual_gemm": _dual_gemm,
    "modal_nvfp4_dual_gemm": _dual_gemm,
    "nvfp4_group_gemm": _group_gemm,
    "mxfp4-mm": _mxfp4_mm,
}


def _gemv_problem(values: Mapping[str, Any], arch: str) -> Problem:
    """The matrix is the weight: its M is the N of a product with one row."""
    return Problem("linear", 1, values["m"], values["k"], L=values["l"], a="nvfp4", b="nvfp4", out="fp16", arch=arch)


def _nvfp4_problem(op: str) -> Callable[[Mapping[str, Any], str], Problem]:
    def problem(values: Mapping[str, Any], arch: str) -> Problem:
        M, N, K, L = (values[name] for name in "mnkl")
        return Problem(op, M, N, K, L=L, a="nvfp4", b="nvfp4", out="fp16", arch=arch)

    return problem


def _group_problem(values: Mapping[str, Any], arch: str) -> Problem | None:
    Ms, Ns, Ks = (values[name] for name in "mnk")
    if len({*Ns}) != 1 or len({*Ks}) != 1:
        return None
    return Problem("grouped_linear", sum(Ms), Ns[0], Ks[0], G=len(Ms), a="nvfp4", b="nvfp4", out="fp16", arch=arch)


def _mxfp4_problem(values: Mapping[str, Any], arch: str) -> Problem:
    """What is given: bf16 rows, which the submission quantizes, and weights whose scales are shuffled."""
    M, N, K = (values[name] for name in "mnk")
    layouts = (CDNA_32x8.name, LINEAR.name)
    return Problem("linear", M, N, K, a="bf16", b="mxfp4", out="bf16", b_layouts=layouts, arch=arch)


_PROBLEMS: dict[str, Callable[[Mapping[str, Any], str], Problem | None]] = {
    "nvfp4_gemv": _gemv_problem,
    "nvfp4_gemm": _nvfp4_problem("linear"),
    "nvfp4_dual_gemm": _nvfp4_problem("gated_linear"),
    "modal_nvfp4_dual_gemm": _nvfp4_problem("gated_linear"),
    "nvfp4_group_gemm": _group_problem,
    "mxfp4-mm": _mxfp4_problem,
}
