"""The public operations: each checks its operands and calls the operator of the same name (operators.py)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from nibblas import operators
from nibblas.dispatch import Candidate, Explanation, age, explain_problem, forget
from nibblas.formats import Format, as_format
from nibblas.kernels import cuda_module
from nibblas.kernels.composite import ACTIVATIONS
from nibblas.layouts import LINEAR, BLOCKED_128x4, TiledLayout
from nibblas.operators import Operand, as_arguments, has_tangent, linear_problem, product_problem, refuse_tangent
from nibblas.problem import DTYPE_NAMES, Problem, arch_of, check_layout, operand_name
from nibblas.quantize import check_arguments, rotate
from nibblas.quantize import dequantize as plain_dequantize
from nibblas.tensor import ScaledTensor
from nibblas.words import counted

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
EXPLAINED = {  # by `explain`: operations, and what they take
    "linear": "x (..., K) and w (N, K)",
    "matmul": "x (..., M, K) and w (..., N, K)",
    "bmm": "x (L, M, K) and w (L, N, K)",
    "grouped_linear": "x (M, K) and w (G, N, K)",
    "gated_linear": "x (..., K) and w (N, K)",
}


def format_for(op: str, format: Format | str) -> Format:
    """`as_format`, with the operation named where it is unknown."""
    try:
        return as_format(format)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None


def check_tensor(op: str, name: str, t: Tensor | None) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} is a {type(t).__name__}, need a Tensor")
    check_layout(op, name, t)


def _check_weights(op: str, name: str, w: ScaledTensor, ndim: int | None) -> None:
    if not isinstance(w, ScaledTensor):
        raise TypeError(f"{op}: {name} is a {type(w).__name__}, need a ScaledTensor (nibblas.quantize makes one)")
    if ndim is not None and w.ndim != ndim:
        need = "(N, K)" if ndim == 2 else "(G, N, K)"
        raise ValueError(f"{op}: {name} has shape {tuple(w.shape)}, need {need}")


def _check_operands(
    op: str,
    x: Operand,
    *weights: ScaledTensor,
    biases: Mapping[str, Tensor | None] | None = None,
    others: Sequence[Tensor | ScaledTensor | None] = (),
) -> None:
    """Equal K, usable dtypes, biases each None or of its weights' (.., N), and one device for all and `others`.

    biases : by name, in the order of the weights.
    """
    biases = biases or {}
    if not isinstance(x, Tensor | ScaledTensor):
        raise TypeError(f"{op}: x is a {type(x).__name__}, need a Tensor or a ScaledTensor")
    operand_name(x, op, "x")
    if x.ndim == 0:
        raise ValueError(f"{op}: x has no dimension, need (..., K)")
    for w in weights:
        if x.shape[-1] != w.shape[-1]:
            raise ValueError(f"{op}: K differs: x has shape {tuple(x.shape)}, the weights {tuple(w.shape)}")
    for w, (name, bias) in zip(weights, biases.items(), strict=False):
        _check_bias(op, name, w, bias)
    devices = {str(t.device) for t in (x, *weights, *biases.values(), *others) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"{op}: operands are on different devices: {', '.join(sorted(devices))}")


def _check_bias(op: str, name: str, w: ScaledTensor, bias: Tensor | None) -> None:
    if bias is None:
        return
    check_tensor(op, name, bias)
    if bias.shape != w.shape[:-1]:
        raise ValueError(f"{op}: {name} has shape {tuple(bias.shape)}, need {tuple(w.shape[:-1])}")
    if bias.dtype not in DTYPE_NAMES:
        raise TypeError(f"{op}: {name} has dtype {bias.dtype}, need one of {', '.join(map(str, DTYPE_NAMES))}")


def _check_kernel(op: str, kernel: str | None) -> None:
    if not isinstance(kernel, str | None):
        raise TypeError(f"{op}: kernel is {kernel!r}, need the name of one")


def _out_dtype(op: str, x: Operand, out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    """out_dtype, else out's, else x's, else bf16 for FP4 activations."""
    if out is not None:
        check_tensor(op, "out", out)
    own = x.dtype if isinstance(x, Tensor) else torch.bfloat16
    dtype = out_dtype or (own if out is None else out.dtype)
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"{op}: out_dtype is {dtype}, need one of {', '.join(map(str, DTYPE_NAMES))}")
    return dtype


def _check_out(
    op: str, out: Tensor, shape: Sequence[int], dtype: torch.dtype, inputs: Sequence[Operand | None]
) -> None:
    given = [t for t in inputs if t is not None]
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype or out.device != given[0].device:
        raise ValueError(
            f"{op}: out is {out.dtype} {tuple(out.shape)} on {out.device}, "
            f"need {dtype} {tuple(shape)} on {given[0].device}"
        )
    if _overlaps_itself(out):
        raise ValueError(f"{op}: out has strides {out.stride()}, need memory of its own for each element")
    requires_grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (*given, out))
    if requires_grad or has_tangent(*given, out):
        raise RuntimeError(f"{op}: out= keeps no gradient; drop it, or call under torch.no_grad()")
    if torch.compiler.is_compiling():
        return  # Addresses are not known while tracing; functionalization keeps the buffers apart.
    parts = [p for t in given for p in ((t,) if isinstance(t, Tensor) else (t.data, t.scale, t.global_scale))]
    if any(part is not None and _overlap(out, part) for part in parts):
        raise ValueError(f"{op}: out shares memory with an operand, need a buffer of its own")


def _overlaps_itself(t: Tensor) -> bool:
    """Whether elements of t may lie in one place: a dimension is stepped through within the span of smaller ones."""
    if t.is_contiguous():
        return False
    span = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1):
        if stride < span:
            return True
        span += (size - 1) * stride
    return False


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    (a_start, a_end), (b_start, b_end) = _extent(a), _extent(b)
    return a_start < b_end and b_start < a_end and not _apart(a, b)


def _apart(a: Tensor, b: Tensor) -> bool:
    """Whether a and b are columns of one matrix, and none of them the same."""
    pitch = _pitch(a)
    if not pitch or pitch != _pitch(b):
        return False
    distance = (b.data_ptr() - a.data_ptr()) % pitch
    return a.shape[-1] * a.element_size() <= distance <= pitch - b.shape[-1] * b.element_size()


def _pitch(t: Tensor) -> int:
    """Bytes from row to row, where all rows of t are runs of one matrix; else 0."""
    if t.ndim < 2 or t.stride(-1) != 1 or not t.stride(-2) or any(s % t.stride(-2) for s in t.stride()[:-2]):
        return 0
    return t.stride(-2) * t.element_size()


def _extent(t: Tensor) -> tuple[int, int]:
    span = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
    return t.data_ptr(), t.data_ptr() + span * t.element_size()


def _enter(op: str, x: Operand, w: ScaledTensor) -> tuple[Operand, ScaledTensor]:
    """Operands in the same basis: x takes w's rotation, after which neither is rotated."""
    if x.ndim and x.shape[-1] == w.shape[-1]:
        if isinstance(x, Tensor):
            x = rotate(x, w.rotation) if w.rotation else x
        elif x.rotation != w.rotation:
            raise ValueError(f"{op}: x was rotated by {x.rotation}, the weights by {w.rotation}; need the same")
    return _unrotated(x), _unrotated(w)  # type: ignore[return-value]


def _unrotated(t: Operand) -> Operand:
    if isinstance(t, Tensor) or not t.rotation:
        return t
    return ScaledTensor(t.data, t.scale, t.format, t.global_scale, t.layout, t.data_layout, matrix=t.matrix)


def _has_one_scale(x: Operand) -> bool:
    return isinstance(x, Tensor) or x.global_scale is None or not x.global_scale.ndim


def as_rows(x: Tensor) -> Tensor:
    """(..., K) -> (rows, K), with no size made a constant of a graph."""
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)


def _as_matrix(op: str, x: Operand) -> Operand:
    if isinstance(x, ScaledTensor):
        if not _has_one_scale(x):
            raise ValueError(f"{op}: x {x} has one global_scale a matrix, need one for all (matmul takes either)")
        return x if x.ndim == 2 else x.flatten_rows()
    return as_rows(x)


def linear(
    x: Operand,
    w: ScaledTensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """x @ w.T + bias: summed in fp32 or better, narrowed once (docs/formats.md, "The product").

    Parameters
    ----------
    x : (..., K) bf16, fp16, fp32, or a ScaledTensor of either format.
    w : (N, K) ScaledTensor.
    bias : (N,), any of the float dtypes.
    out : (..., N) to write to; must not share memory with an operand.
    out_dtype : of the result; x's own by default, bf16 for FP4 activations.
    kernel : name of the kernel to use; the dispatcher's choice by default (see `explain`).
    batch_invariant : a row's result must not depend on how many rows there are.

    Returns (..., N). Differentiable with respect to a dense x and to bias; in forward mode (torch.func.jvp), w is
    decoded to fp32 and torch multiplies.
    Raises TypeError, ValueError for operands that don't fit, NoKernelError where no kernel can run.

    >>> w = nb.quantize(torch.eye(16), nb.NVFP4)
    >>> nb.linear(torch.ones(2, 16), w).shape
    torch.Size([2, 16])
    """
    return _linear("linear", x, w, bias, out, out_dtype, kernel, batch_invariant)


def _linear(
    op: str,
    x: Operand,
    w: ScaledTensor,
    bias: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    kernel: str | None,
    batch_invariant: bool,
) -> Tensor:
    _check_weights(op, "w", w, 2)
    _check_operands(op, x, w, biases={"bias": bias})
    _check_kernel(op, kernel)
    dtype = _out_dtype(op, x, out, out_dtype)
    shape = (*x.shape[:-1], w.shape[0])
    a, b = _enter(op, x, w)
    arguments = (*as_arguments(_as_matrix(op, a)), *as_arguments(b), bias, kernel, batch_invariant)
    if out is None:
        return operators.linear(*arguments, dtype).reshape(shape)
    _check_out(op, out, shape, dtype, (x, w, bias))
    _write(lambda rows: torch.ops.nibblas.linear_out(*arguments, rows), out)
    return out


def _write(run, out: Tensor) -> None:
    """Run into out as a matrix (rows, N), through a copy if out can't be viewed as one whose rows are runs."""
    if out.ndim == 2 and out.stride(-1) == 1:
        run(out)
    elif out.is_contiguous():
        run(as_rows(out))
    else:
        rows = out.new_empty((math.prod(out.shape[:-1]), out.shape[-1]))
        run(rows)
        out.copy_(rows.view(out.shape))


def matmul(
    a: Operand,
    b: Operand,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """a @ b.T over the last dimension of both: a (..., M, K), b (..., N, K) -> (..., M, N).

    At least one of a and b is a ScaledTensor. Batch dimensions are equal, or one operand has none.
    Arguments as in `linear`; out_dtype defaults to the dense operand's dtype, bf16 if there is none.
    """
    return _matmul("matmul", a, b, out, out_dtype, kernel, batch_invariant)


def _matmul(
    op: str,
    a: Operand,
    b: Operand,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    kernel: str | None,
    batch_invariant: bool,
) -> Tensor:
    if not isinstance(a, ScaledTensor) and not isinstance(b, ScaledTensor):
        raise TypeError(f"{op}: neither operand is a ScaledTensor; torch.matmul multiplies dense tensors")
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, Tensor | ScaledTensor) or t.ndim < 2:
            got = tuple(t.shape) if isinstance(t, Tensor | ScaledTensor) else type(t).__name__
            raise ValueError(f"{op}: {name} is {got}, need (..., rows, K)")
        operand_name(t, op, name)
    _check_batches(op, a, b)
    if not isinstance(b, ScaledTensor):
        # Only the second operand of a kernel is always FP4: c.T = b @ a.T.
        dtype = _out_dtype(op, b, out, out_dtype)
        transposed = _matmul(op, b, a, None, dtype, kernel, batch_invariant).mT
        if out is None:
            return transposed
        _check_out(op, out, transposed.shape, dtype, (a, b))
        return out.copy_(transposed)
    _check_operands(op, a, b)
    if b.ndim == 2 and _has_one_scale(a):
        return _linear(op, a, b, None, out, out_dtype, kernel, batch_invariant)
    _check_kernel(op, kernel)
    dtype = _out_dtype(op, a, out, out_dtype)
    batch = (a if b.ndim == 2 else b).shape[:-2]
    x, w = _enter(op, a, b)
    flat = (*as_arguments(_as_batch(x, batch)), *as_arguments(_as_batch(w, batch)), None, kernel, batch_invariant)
    shape = (*batch, a.shape[-2], b.shape[-2])
    if out is not None:
        _check_out(op, out, shape, dtype, (a, b))
        if out.ndim == 3 and out.stride(-1) == 1:
            torch.ops.nibblas.linear_out(*flat, out)
            return out
    c = operators.linear(*flat, dtype).reshape(shape)
    return c if out is None else out.copy_(c)


def _check_batches(op: str, a: Operand, b: Operand) -> None:
    """Of a (..., M, K) and b (..., N, K): equal K, equal batch dimensions or none."""
    shapes = f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}"
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"{op}: K differs: {shapes}")
    if a.ndim > 2 and b.ndim > 2 and a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"{op}: batch dimensions differ: {shapes}")


def _as_batch(t: Operand, batch: torch.Size) -> Operand:
    """(..., rows, K) -> (L, rows, K), a plain matrix repeated without copying its values."""
    if t.ndim == 3:
        return t
    L = batch.numel()
    if isinstance(t, Tensor):
        return t.expand(L, *t.shape) if t.ndim == 2 else t.reshape(L, *t.shape[-2:])

    def reshape(part: Tensor) -> Tensor:
        return part.expand(L, *part.shape) if t.ndim == 2 else part.reshape(L, *part.shape[-2:])

    global_scale = t.global_scale
    if global_scale is not None and global_scale.ndim:
        global_scale = global_scale.reshape(L)
    return ScaledTensor(
        reshape(t.data), reshape(t.scale), t.format, global_scale, t.layout, t.data_layout, matrix=t.matrix
    )


def bmm(
    a: Operand,
    b: Operand,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """`matmul` of exactly one batch dimension: a (L, M, K), b (L, N, K) -> (L, M, N). Arguments as in `matmul`."""
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, Tensor | ScaledTensor):
            raise TypeError(f"bmm: {name} is a {type(t).__name__}, need a Tensor or a ScaledTensor")
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: a has shape {tuple(a.shape)}, b {tuple(b.shape)}, need (L, M, K) and (L, N, K)")
    return _matmul("bmm", a, b, out, out_dtype, kernel, batch_invariant)


def grouped_linear(
    x: Operand,
    w: ScaledTensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Runs of rows against their own weights: rows offsets[g]:offsets[g+1] of x meet w[g].

    x (M, K); w (G, N, K) ScaledTensor; offsets (G+1,) int32 or int64, ascending within 0..M; bias (G, N).
    Returns (M, N); rows of no group are zero, empty groups are fine. Other arguments as in `linear`.
    """
    op = "grouped_linear"
    _check_weights(op, "w", w, 3)
    check_tensor(op, "offsets", offsets)
    _check_operands(op, x, w, biases={"bias": bias}, others=(offsets,))
    _check_kernel(op, kernel)
    if x.ndim != 2:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, need (M, K)")
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.shape != (w.shape[0] + 1,):
        raise ValueError(
            f"{op}: offsets are {offsets.dtype} {tuple(offsets.shape)}, need int32 or int64 ({w.shape[0] + 1},)"
        )
    dtype = _out_dtype(op, x, out, out_dtype)
    refuse_tangent(op, x, bias)
    a, b = _enter(op, x, w)
    arguments = (*as_arguments(a), *as_arguments(b), offsets, bias, kernel)
    if out is None:
        return torch.ops.nibblas.grouped_linear(*arguments, dtype)
    _check_out(op, out, (x.shape[0], w.shape[-2]), dtype, (x, w, bias))
    _write(lambda rows: torch.ops.nibblas.grouped_linear_out(*arguments, rows), out)
    return out


def grouped_matmul(
    a: Iterable[Operand],
    b: Iterable[Operand],
    *,
    out: Iterable[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> list[Tensor]:
    """Independent products of any sizes: [a[g] (M_g, K_g) @ b[g] (N_g, K_g).T for each g]. Arguments as in `matmul`."""
    op = "grouped_matmul"
    for name, given in (("a", a), ("b", b), ("out", out)):
        is_one = isinstance(given, Tensor | ScaledTensor) or not isinstance(given, Iterable | None)
        if is_one or (given is None and name != "out"):
            raise TypeError(f"{op}: {name} is a {type(given).__name__}, need a list of matrices")
    a, b, out = list(a), list(b), None if out is None else list(out)
    if len(a) != len(b) or (out is not None and len(out) != len(a)):
        lengths = f"a has {counted(len(a), 'matrix', 'matrices')}, b {len(b)}"
        lengths += "" if out is None else f", out {len(out)}"
        raise ValueError(f"{op}: {lengths}; need as many in each")
    outs = [None] * len(a) if out is None else out
    return [_matmul(op, x, w, c, out_dtype, kernel, False) for x, w, c in zip(a, b, outs, strict=True)]


def gated_linear(
    x: Operand,
    w_gate: ScaledTensor,
    w_up: ScaledTensor,
    bias_gate: Tensor | None = None,
    bias_up: Tensor | None = None,
    *,
    activation: str = "silu",
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> Tensor:
    """act(x @ w_gate.T + bias_gate) * (x @ w_up.T + bias_up), both products held in fp32.

    x (..., K); w_gate and w_up (N, K) ScaledTensors of one format; biases (N,). Returns (..., N).
    activation: "silu", or "swiglu_clamped" (gpt-oss: gate at most 7, up within +-7,
    gate * sigmoid(1.702 gate) * (up + 1)).
    Other arguments as in `linear`.
    """
    op = "gated_linear"
    _check_weights(op, "w_gate", w_gate, 2)
    _check_weights(op, "w_up", w_up, 2)
    if w_gate.shape != w_up.shape or w_gate.format != w_up.format or w_gate.rotation != w_up.rotation:
        one, other = (f"{w.format} {tuple(w.shape)} rotated by {w.rotation}" for w in (w_gate, w_up))
        raise ValueError(f"{op}: w_gate is {one}, w_up {other}; need the same")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation {activation!r} is unknown; there are {', '.join(ACTIVATIONS)}")
    _check_operands(op, x, w_gate, w_up, biases={"bias_gate": bias_gate, "bias_up": bias_up})
    _check_kernel(op, kernel)
    dtype = _out_dtype(op, x, out, out_dtype)
    refuse_tangent(op, x, bias_gate, bias_up)
    shape = (*x.shape[:-1], w_up.shape[0])
    a, up = _enter(op, x, w_up)
    flat = (
        *as_arguments(_as_matrix(op, a)),
        *as_arguments(_unrotated(w_gate)),
        *as_arguments(up),
        bias_gate,
        bias_up,
        activation,
        kernel,
    )
    if out is None:
        return torch.ops.nibblas.gated_linear(*flat, dtype).reshape(shape)
    _check_out(op, out, shape, dtype, (x, w_gate, w_up, bias_gate, bias_up))
    _write(lambda rows: torch.ops.nibblas.gated_linear_out(*flat, rows), out)
    return out


def moe(
    x: Operand,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w_gate: ScaledTensor,
    w_up: ScaledTensor,
    w_down: ScaledTensor,
    bias_gate: Tensor | None = None,
    bias_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    *,
    activation: str = "silu",
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> Tensor:
    """A mixture of experts: for each token the weighted sum over its experts of down(act(gate) * up).

    x (T, H); expert_ids (T, top_k) integers, -1 for none; expert_weights (T, top_k); w_gate, w_up (E, I, H);
    w_down (E, H, I); biases (E, I), (E, I), (E, H), each inside its product, so that the routing weight counts for it.
    Intermediate results are held in x's dtype (fp32 for the gated activation itself). Where x is a ScaledTensor, all
    three products are W4A4: the gated activation is narrowed to bf16 and quantized to x's format by x's scale_rule, all
    rows together. `kernel` names the grouped_linear kernel of all three products. Returns (T, H).
    """
    op = "moe"
    for name, w in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        _check_weights(op, name, w, 3)
    E, H, I = w_down.shape
    if w_gate.shape != (E, I, H) or w_up.shape != (E, I, H):
        raise ValueError(
            f"{op}: w_gate {tuple(w_gate.shape)} and w_up {tuple(w_up.shape)} must be ({E}, {I}, {H}), "
            f"the transpose of w_down {tuple(w_down.shape)}"
        )
    for name, t in (("expert_ids", expert_ids), ("expert_weights", expert_weights)):
        check_tensor(op, name, t)
    _check_bias(op, "bias_down", w_down, bias_down)
    others = (w_down, bias_down, expert_ids, expert_weights)
    _check_operands(op, x, w_gate, w_up, biases={"bias_gate": bias_gate, "bias_up": bias_up}, others=others)
    if x.ndim != 2:
        raise ValueError(f"{op}: x is {tuple(x.shape)}, need (T, {H})")
    _check_kernel(op, kernel)
    if expert_ids.shape != expert_weights.shape or expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"{op}: expert_ids {tuple(expert_ids.shape)} and expert_weights {tuple(expert_weights.shape)} must both be "
            f"({x.shape[0]}, top_k)"
        )
    if expert_ids.dtype not in INTEGERS or not expert_weights.is_floating_point():
        raise TypeError(
            f"{op}: expert_ids are {expert_ids.dtype}, need integers; "
            f"expert_weights are {expert_weights.dtype}, need floats"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation {activation!r} is unknown; there are {', '.join(ACTIVATIONS)}")
    expert_ids = expert_ids.long()  # E itself may be more than a small dtype holds.
    if expert_ids.device.type == "cpu" and expert_ids.numel() and not torch.compiler.is_compiling():
        low, high = int(expert_ids.min()), int(expert_ids.max())
        if low < -1 or high >= E:
            raise ValueError(f"{op}: expert_ids span {low}..{high}, need -1..{E - 1}")
    dtype = _out_dtype(op, x, out, out_dtype)
    tokens, top_k = expert_ids.shape
    if out is not None:
        operands = (x, expert_weights, w_gate, w_up, w_down, bias_gate, bias_up, bias_down)
        _check_out(op, out, (tokens, H), dtype, operands)

    # Rows sorted by expert, tokens without one first; no shape depends on where the tokens go.
    order = torch.argsort(expert_ids.flatten(), stable=True)
    experts = torch.arange(E + 1, device=x.device)
    offsets = torch.searchsorted(expert_ids.flatten()[order].contiguous(), experts)
    token = order // max(top_k, 1)
    rows = x[token] if isinstance(x, Tensor) else x.take_rows(token)
    options = {"out_dtype": torch.float32, "kernel": kernel}
    gate = grouped_linear(rows, w_gate, offsets, bias_gate, **options)  # type: ignore[arg-type]
    up = grouped_linear(rows, w_up, offsets, bias_up, **options)  # type: ignore[arg-type]
    hidden: Operand = ACTIVATIONS[activation](gate, up).to(x.dtype if isinstance(x, Tensor) else torch.bfloat16)
    if isinstance(x, ScaledTensor):
        hidden = quantize(hidden, x.format, scale_rule=x.scale_rule, rotation=w_down.rotation)  # type: ignore[arg-type]
    down = grouped_linear(hidden, w_down, offsets, bias_down, **options)  # type: ignore[arg-type]
    # Back to token order, then a sum in the order of the token's experts: no atomics.
    by_token = torch.empty_like(down)
    by_token[order] = down
    shares = expert_weights.float().masked_fill(expert_ids < 0, 0.0)
    weighted = by_token.view(tokens, top_k, H) * shares.unsqueeze(-1)
    result = weighted.sum(dim=1).to(dtype)
    return result if out is None else out.copy_(result)


@torch.no_grad()
def quantize(
    x: Tensor,
    format: Format | str,
    *,
    scale_rule: str | None = None,
    global_scale: Tensor | float | None = None,
    block_dim: int = -1,
    strict: bool = False,
    rotation: int = 0,
    out: ScaledTensor | None = None,
    kernel: str | None = None,
) -> ScaledTensor:
    """A ScaledTensor nearest to x by a named scale rule; what `nibblas.quantize.quantize` defines, by a fast kernel.

    The result is a constant: no gradient flows through it.

    Parameters
    ----------
    x : (..., N, K) fp32, bf16 or fp16.
    format : NVFP4 or MXFP4.
    scale_rule : one of format.scale_rules, the first by default (docs/formats.md gives the formulas).
    global_scale : fp32 multiplier, () or one a matrix (x.shape[:-2]); NVFP4 computes its own from max |x| by default.
    block_dim : the dimension along which blocks lie; it becomes the last of the result.
    strict : raise where a block holds NaN or Inf instead of marking that block NaN; not while torch.compile traces.
    rotation : size of a block Hadamard rotation along K (16, 32, 64, 128), 0 for none.
    out : a ScaledTensor as the call would return, whose parts are overwritten; it is returned.
    kernel : name of the kernel to use.

    >>> nb.quantize(torch.ones(2, 32), nb.MXFP4)
    ScaledTensor(mxfp4, shape=(2, 32), layout=LINEAR, scale_rule='even')
    """
    if out is not None and not isinstance(out, ScaledTensor):
        raise TypeError(f"quantize: out is a {type(out).__name__}, need a ScaledTensor")
    _check_kernel("quantize", kernel)
    if strict and torch.compiler.is_compiling():
        raise NotImplementedError("quantize: strict=True reads values, which torch.compile can't trace")
    format = format_for("quantize", format)
    check_tensor("quantize", "x", x)
    x, target, rule, given = check_arguments(x, format, scale_rule, global_scale, block_dim, rotation)
    if rotation:
        x = rotate(x, rotation)
    rows = as_rows(x)
    if given is None or not given.ndim:
        data, scale, own = torch.ops.nibblas.quantize(rows, given, target.name, rule, kernel)
        given = own if target.has_global_scale else None
    else:
        matrices = rows.split(x.shape[-2]) if x.numel() else [rows]
        factors = given.flatten() if x.numel() else [None]
        parts = [
            torch.ops.nibblas.quantize(m, g, target.name, rule, kernel) for m, g in zip(matrices, factors, strict=True)
        ]
        data, scale = (torch.cat([part[i] for part in parts]) for i in range(2))
    data, scale = (part.reshape(*x.shape[:-1], part.shape[-1]) for part in (data, scale))
    if strict:
        bad = int(target.scale_code.is_nan(scale).sum())
        if bad:
            raise ValueError(f"quantize: {bad} of {scale.numel()} blocks hold NaN or Inf (strict=True)")
    found = ScaledTensor(data, scale, target, given, LINEAR, LINEAR, rule, rotation)
    return found if out is None else _overwrite(out, found)


def _overwrite(out: ScaledTensor, found: ScaledTensor) -> ScaledTensor:
    """Copy the parts of `found` into those of `out`, which must be its like."""

    def facts(t: ScaledTensor) -> tuple:
        shape = None if t.global_scale is None else tuple(t.global_scale.shape)
        return t.format, tuple(t.shape), t.layout, t.data_layout, t.scale_rule, t.rotation, shape, t.device

    if facts(out) != facts(found):
        raise ValueError(f"quantize: out is {out}, need the like of {found}")
    out.data.copy_(found.data)
    out.scale.copy_(found.scale)
    if out.global_scale is not None and found.global_scale is not None:
        out.global_scale.copy_(found.global_scale)
    return out


@torch.no_grad()
def dequantize(w: ScaledTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values code * (scale * global_scale) of a tensor in any layout, rotated back: (..., N, K) of dtype.

    Computed in fp32 and narrowed once; dtype is fp32, bf16, fp16 or fp64. What `nibblas.quantize.dequantize` defines,
    by a fast kernel where w is not rotated and its device has one.

    >>> nb.dequantize(nb.quantize(torch.full((1, 16), -3.0), nb.NVFP4))[0, :2]
    tensor([-3., -3.])
    """
    if isinstance(w, ScaledTensor) and not w.rotation and dtype in DTYPE_NAMES:
        return torch.ops.nibblas.dequantize(*as_arguments(w), dtype)
    return plain_dequantize(w, dtype)


def scale_layout(format: Format | str, device: torch.device | str) -> TiledLayout:
    """The layout that block scales of both operands should have on a device, where a product is W4A4.

    BLOCKED_128x4 where the dispatcher expects most of a kernel that takes no other (the native ones), else LINEAR.

    >>> nb.scale_layout(nb.NVFP4, "cpu")
    LINEAR
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"scale_layout: device {device!r} is unknown; need cpu, cuda, or cuda:1 ...") from None
    return _scale_layout(format_for("scale_layout", format), place, age())


@cache
def _scale_layout(format: Format, device: torch.device, age: int) -> TiledLayout:
    """Kept until the dispatcher drops its choices, which changes its age."""
    square = Problem("linear", M=4096, N=4096, K=4096, a=format.name, b=format.name, arch=arch_of(device))

    def best(layout: TiledLayout) -> Candidate:
        stored = layout.name, LINEAR.name
        return explain_problem(replace(square, a_layouts=stored, b_layouts=stored), device).candidates[0]

    blocked = best(BLOCKED_128x4)
    takes_linear = blocked.kernel.b_layouts is None or (LINEAR, LINEAR) in blocked.kernel.b_layouts
    return LINEAR if takes_linear or best(LINEAR).seconds <= blocked.seconds else BLOCKED_128x4


def dependent_launch(enabled: bool = True) -> None:
    """Let kernels that can (cuda_linear_sm90) start before the kernel before them on their stream has ended.

    For this process; off at first. Such a kernel reads its weights early, and all else once the kernel before it is
    done (CUDA's programmatic dependent launch), which hides most of its start. Weights must not be written by a kernel
    that lets the next one start early; none of nibblas's does. Graphs keep the setting they were captured with.
    """
    cuda_module.dependent = enabled
    forget()


def explain(
    op: str,
    x: Operand,
    w: ScaledTensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Explanation:
    """How the dispatcher decides: every kernel of the op, why it can't run or what it should take, and the floor.

    `op` is linear, matmul, bmm, grouped_linear or gated_linear; x and w (of a gated product either one) are as that
    takes them, bias is of all but matmul and bmm, batch_invariant of linear, matmul and bmm. Print the result.
    """
    if op not in EXPLAINED:
        raise ValueError(f"explain: op is {op!r}, need one of {', '.join(EXPLAINED)}")
    is_batch, has_invariant = op in ("matmul", "bmm"), op in ("linear", "matmul", "bmm")
    if (is_batch and bias is not None) or (batch_invariant and not has_invariant):
        raise ValueError(f"explain: {op} has no {'bias' if is_batch else 'batch_invariant'}")
    _check_weights("explain", "w", w, None)
    _check_operands("explain", x, w)
    fits = {
        "matmul": x.ndim >= 2 and w.ndim >= 2,
        "bmm": x.ndim == 3 and w.ndim == 3,
        "grouped_linear": x.ndim == 2 and w.ndim == 3,
    }
    if not fits.get(op, w.ndim == 2):
        raise ValueError(f"explain: x has shape {tuple(x.shape)}, w {tuple(w.shape)}; {op} takes {EXPLAINED[op]}")
    _check_bias("explain", "bias", w, bias)
    if is_batch:
        _check_batches("explain", x, w)
    dtype = _out_dtype("explain", x, None, out_dtype)
    x, w = _enter("explain", x, w)
    if op in ("grouped_linear", "gated_linear"):
        G = w.shape[0] if op == "grouped_linear" else 1
        return explain_problem(product_problem(op, _as_matrix("explain", x), w, bias, dtype, G=G), w.device)
    if w.ndim == 2 and (op == "linear" or _has_one_scale(x)):
        x = _as_matrix("explain", x)
    else:
        batch = (x if w.ndim == 2 else w).shape[:-2]
        x, w = _as_batch(x, batch), _as_batch(w, batch)  # type: ignore[assignment]
    return explain_problem(linear_problem(x, w, bias, dtype, batch_invariant), w.device)
