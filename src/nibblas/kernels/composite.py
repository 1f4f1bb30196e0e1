"""Ops made of other products: a grouped linear as one product a group, a gated one as two products.

They are right wherever a linear kernel is, and take its time; each reads the group offsets on the host.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from nibblas.formats import FORMATS
from nibblas.kernel import Kernel
from nibblas.kernels.triton_linear import decoding_both
from nibblas.problem import DTYPES, Problem
from nibblas.roofline import Roofline
from nibblas.tensor import ScaledTensor

Linear = Callable[[Tensor | ScaledTensor, ScaledTensor, Tensor | None, Tensor], None]


def launch_grouped(
    x: Tensor | ScaledTensor, w: ScaledTensor, offsets: Tensor, bias: Tensor | None, out: Tensor, *, linear: Linear
) -> None:
    """Rows offsets[g]:offsets[g+1] of x (M, K) meet w[g] (N, K) and bias[g] (N,); rows of no group become zero."""
    bounds = offsets.tolist()
    out[: bounds[0]].zero_()
    out[bounds[-1] :].zero_()
    for g, (start, end) in enumerate(pairwise(bounds)):
        if start < end:
            rows = x[start:end] if isinstance(x, Tensor) else x.slice(-2, start, end)
            linear(rows, w[g], None if bias is None else bias[g], out[start:end])


def swiglu_clamped(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gpt-oss's gate: gate at most `limit`, up within +-`limit`, gate * sigmoid(alpha * gate) * (up + 1)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: torch.nn.functional.silu(gate) * up,
    "swiglu_clamped": swiglu_clamped,
}


def launch_gated(
    x: Tensor | ScaledTensor,
    w_gate: ScaledTensor,
    w_up: ScaledTensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
    out: Tensor,
    *,
    linear: Linear,
) -> None:
    """out (M, N) = act(x @ w_gate.T + bias_gate, x @ w_up.T + bias_up), both products kept in fp32."""
    gate, up = (torch.empty(out.shape, dtype=torch.float32, device=out.device) for _ in range(2))
    linear(x, w_gate, bias_gate, gate)
    linear(x, w_up, bias_up, up)
    out.copy_(ACTIVATIONS[activation](gate, up))


def cost(problem: Problem, line: Roofline) -> float:
    """Four floors, and the launch of a product for each group: what is made for the purpose should be better. On a GPU
    with FP4 activations at least what products take that decode both operands (see triton_linear).
    """
    seconds = 4 * line.floor(problem)
    if problem.b_layouts == ("LINEAR", "LINEAR"):
        products = 2 if problem.op == "gated_linear" else 1
        seconds = max(seconds, products * decoding_both(replace(problem, op="linear"), line))
    return seconds + 20e-6 * problem.G


_anywhere = partial(
    Kernel,
    archs=(),
    operands=tuple((a, b) for b in FORMATS for a in (*DTYPES, *FORMATS)),
    outs=tuple(DTYPES),
    a_layouts=None,
    b_layouts=None,
    cost=cost,
    sources=("kernels/composite.py",),
)
KERNELS = (
    _anywhere(name="composite_grouped_linear", op="grouped_linear", launch=launch_grouped),
    _anywhere(name="composite_gated_linear", op="gated_linear", launch=launch_gated),
)
