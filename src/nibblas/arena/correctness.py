"""How far an output is from the right answer, beyond what a problem's own check tells.

Errors are taken against up to two answers. "reference" is what the problem's ref_kernel returns, rounded as it rounds.
"exact" is float64 all the way: for FP4 products that nibblas knows, its own oracle; for other problems their ref_kernel
run on inputs cast to float64, and only if no operation in it computed in a narrower type.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nibblas.arena.products import exact_products
from nibblas.arena.record import Errors
from nibblas.arena.wire import same_bytes
from nibblas.memory import free_memory, is_out_of_memory

# Dtypes without arithmetic: their bytes are compared.
_CODES = (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
_WIDE = (torch.float64, torch.complex128)
# Operations that move numbers and compute none; a wider result holds them as they are.
_MOVES = {
    *("_to_copy", "cat", "clone", "constant_pad_nd", "copy_", "embedding", "empty_like", "fill_", "flip", "full_like"),
    *(
        "gather",
        "index",
        "index_copy",
        "index_put_",
        "index_select",
        "masked_fill",
        "new_empty",
        "new_full",
        "new_ones",
    ),
    *("new_zeros", "ones_like", "repeat", "roll", "select_scatter", "slice_scatter", "stack", "where", "zero_"),
    *("_reshape_alias", "_unsafe_view", "index_copy_", "masked_fill_", "new_empty_strided", "resize_", "zeros_like"),
}
CHUNK = 2**24  # elements that are compared at a time
WORKING_COPIES = 6  # of the inputs in float64, that a reference may hold at once
OF_SIZE = 0.01  # of an element's expected size, beside rounding


@dataclass(frozen=True)
class Answer:
    """What the outputs should be, in order; `sizes` are the expected sizes of their elements, where known."""

    against: Literal["exact", "reference"]
    values: tuple[Tensor, ...]
    sizes: tuple[Tensor | None, ...]


def passes(check: Callable[[Any, Any], Any], data: Any, output: Any) -> tuple[bool, str]:
    """Whether a problem's check_implementation takes an output, and what it says.

    Checks return (good, message), or good, or, as older ones do, a message that is empty where all is well. One that
    raises takes nothing.
    """
    try:
        result = check(data, output)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False, f"the problem's check failed: {type(error).__name__}: {error}"
    if isinstance(result, str):
        return not result, result
    good, message = result if isinstance(result, tuple | list) else (result, "")
    return bool(good), str(message)


def named_tensors(value: Any, name: str) -> dict[str, Tensor]:
    """The tensors in tuples, lists and dicts, by where they stand.

    >>> list(named_tensors((torch.zeros(2), {"bias": torch.zeros(1)}, 3), "data"))
    ['data[0]', "data[1]['bias']"]
    """
    leaves, _ = pytree.tree_flatten_with_path(value)
    return {name + pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def is_same(a: Any, b: Any, apart: Sequence[str] = ()) -> bool:
    """Whether all tensors of two values are the same, bit for bit, but for some by name ("data[6]")."""
    ours, theirs = (named_tensors(value, "data") for value in (a, b))
    return ours.keys() == theirs.keys() and all(name in apart or same_bytes(ours[name], theirs[name]) for name in ours)


def reference_answer(expected: Any) -> Answer:
    """The Answer of what ref_kernel returned."""
    values = tuple(named_tensors(expected, "result").values())
    return Answer("reference", values, (None,) * len(values))


def exact_answer(task: str, data: Any, ref_kernel: Callable[[Any], Any] | None) -> Answer | None:
    """The exact Answer for these inputs; None where it can't be had.

    task : the name of the problem's directory. data : what generate_input returned; it is left as it is.
    ref_kernel : the problem's own, None if it has none.
    """
    products = exact_products(task, data)
    if products is not None:
        return Answer("exact", tuple(p.answer for p in products), tuple(p.size for p in products))
    return None if ref_kernel is None else _in_float64(data, ref_kernel)


def errors(output: Any, answer: Answer) -> tuple[Errors, ...]:
    """The errors of each output tensor. ValueError where number or shapes of the outputs are not the answer's."""
    named = named_tensors(output, "result")
    if len(named) != len(answer.values):
        raise ValueError(f"errors: {len(named)} output tensors, the answer has {len(answer.values)}")
    return tuple(
        _errors(name, answer.against, got, value, size)
        for (name, got), value, size in zip(named.items(), answer.values, answer.sizes, strict=True)
    )


def fault_beside_rounding(output: Any, answer: Answer) -> str | None:
    """What is wrong with the outputs of hardened inputs although the problem's check takes them; None if nothing.

    Rows of hardened inputs differ in size by many octaves, and a tolerance with an absolute part is blind to the
    small ones. So each element is held to its own expected size, where that is known: one unit in the last place, and
    OF_SIZE of that size for the order of the sum, or a code that another quantizer rounds the other way.
    """
    for (name, got), value, size in zip(
        named_tensors(output, "result").items(), answer.values, answer.sizes, strict=True
    ):
        if size is None:
            continue
        right, size = value.to(got.device), size.to(got.device)
        beyond = (got.double() - right).abs() - _ulp(right, got.dtype)
        share = torch.where(right.to(got.dtype).isfinite(), beyond / torch.maximum(size, right.abs()), 0.0)
        share = share.nan_to_num(torch.inf)
        bad = share > OF_SIZE
        if bad.any():
            worst = tuple(int(i) for i in torch.unravel_index(share.argmax(), share.shape))
            return (
                f"{int(bad.sum())} of {bad.numel()} elements of {name} are off by more than {OF_SIZE:.0%} of their "
                f"expected size; worst at {worst}: got {got[worst].item():.6g}, exact {right[worst].item():.6g}"
            )
    return None


def largest(found: Sequence[Errors]) -> tuple[Errors, ...]:
    """One Errors for each output and answer: the largest of each kind over several calls of a case."""
    merged: dict[tuple[str, str], Errors] = {}
    for e in found:
        key = e.output, e.against
        merged[key] = _larger(merged[key], e) if key in merged else e
    return tuple(merged.values())


def _larger(a: Errors, b: Errors) -> Errors:
    worst = max(a, b, key=lambda e: (e.max_relative_rms or 0.0, e.max_absolute))
    return replace(
        worst,
        elements=a.elements + b.elements,
        max_ulp=_max(a.max_ulp, b.max_ulp),
        max_absolute=max(a.max_absolute, b.max_absolute),
        max_relative_rms=_max(a.max_relative_rms, b.max_relative_rms),
        max_relative_size=_max(a.max_relative_size, b.max_relative_size),
        special_mismatches=a.special_mismatches + b.special_mismatches,
    )


def _max(a: float | None, b: float | None) -> float | None:
    return max((n for n in (a, b) if n is not None), default=None)


def _errors(
    name: str, against: Literal["exact", "reference"], got: Tensor, answer: Tensor, size: Tensor | None
) -> Errors:
    if got.shape != answer.shape:
        raise ValueError(f"errors: {name} has shape {tuple(got.shape)}, the answer {tuple(answer.shape)}")
    found = _Largest(got.dtype)
    flat_got, flat_answer = (t.detach().to(got.device).reshape(-1) for t in (got, answer))
    flat_size = None if size is None else size.to(got.device).reshape(-1)
    for start in range(0, got.numel(), CHUNK):
        run = slice(start, start + CHUNK)
        found.add(start, flat_got[run], flat_answer[run], None if flat_size is None else flat_size[run])
    rms = math.sqrt(found.squares / found.finite) if found.finite else 0.0
    index = np.unravel_index(found.worst, got.shape) if got.numel() else ()
    return Errors(
        name,
        against,
        str(got.dtype),
        got.numel(),
        None if found.counted else found.ulp,
        max(found.error, 0.0),
        found.error / rms if rms else None,
        rms,
        tuple(map(int, index)),
        found.got,
        found.answer,
        None if size is None else found.relative,
        found.mismatches,
    )


class _Largest:
    """The largest errors of one output so far, of which it is given one run of elements after the other."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.counted = dtype in _CODES or not (dtype.is_floating_point or dtype.is_complex)
        self.error, self.ulp, self.relative, self.squares = -1.0, 0.0, 0.0, 0.0
        self.finite, self.mismatches, self.worst = 0, 0, 0
        self.got: float | None = None
        self.answer: float | None = None

    def add(self, start: int, got: Tensor, answer: Tensor, size: Tensor | None) -> None:
        """Elements from place `start` of an output, flat, with the answer and the sizes that are expected."""
        if self.counted:
            # In integers, so that large ones that differ by one are not taken for equal.
            found, right = (_bytes(t).long() for t in (got, answer))
            error, fine = (found - right).abs().double(), torch.ones_like(found, dtype=torch.bool)
            found, right = found.double(), right.double()
        else:
            found, right = _real(got), _real(answer)
            rounded = right if self.dtype.is_complex else right.to(self.dtype).double()
            fine = found.isfinite() & rounded.isfinite()
            self.mismatches += int((~fine & (found != rounded) & ~(found.isnan() & rounded.isnan())).sum())
            error = torch.where(fine, (found - right).abs(), 0.0)
            self.ulp = max(self.ulp, (error / _ulp(right, self.dtype)).max().item())
        self.squares += right[fine].square().sum().item()
        self.finite += int(fine.sum())
        if size is not None:
            relative = error / torch.maximum(size, right.abs())
            self.relative = max(self.relative, torch.where(error > 0, relative, 0.0).nan_to_num(0.0).max().item())
        if (largest := error.max().item()) > self.error:
            worst = int(error.argmax())
            self.error, self.got, self.answer = largest, found[worst].item(), right[worst].item()
            self.worst = start + (worst // 2 if self.dtype.is_complex else worst)


def _bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype in _CODES else t


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.to(torch.complex128)).flatten() if t.is_complex() else t.double()


def _ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` at these values, subnormals included."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.abs().clamp(info.smallest_normal, info.max))
    return torch.exp2((exponent - 1).double()) * info.eps


def _in_float64(data: Any, ref_kernel: Callable[[Any], Any]) -> Answer | None:
    """ref_kernel's result on inputs cast to float64.

    None if it fails, computed anything in a narrower type, or may not find the memory.
    """
    tensors = [t for t in named_tensors(data, "data").values() if t.is_floating_point()]
    if WORKING_COPIES * sum(8 * t.numel() for t in tensors) > _free_memory(tensors):
        return None
    wide = pytree.tree_map(lambda leaf: _widened(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf), data)
    watch = _Watch()
    try:
        with watch, torch.no_grad():
            result = ref_kernel(wide)
    except Exception:  # whatever a reference that is not made for float64 raises
        return None
    values = tuple(named_tensors(result, "result").values())
    narrow = [t for t in values if t.dtype not in _WIDE and (t.is_floating_point() or t.is_complex())]
    if not watch.exact or narrow or not any(t.dtype in _WIDE for t in values):
        return None
    return Answer("exact", values, (None,) * len(values))


def _free_memory(tensors: Sequence[Tensor]) -> int:
    devices = {t.device for t in tensors if t.is_cuda}
    return min((torch.cuda.mem_get_info(device)[0] for device in devices), default=free_memory())


def _widened(t: Tensor) -> Tensor:
    """A copy in float64 or complex128, of codes and integers in their own dtype."""
    if t.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return t.to(torch.float64, copy=True)
    return t.to(torch.complex128, copy=True) if t.is_complex() else t.clone()


class _Watch(TorchDispatchMode):
    """Notices every operation that gives a narrower floating type than float64 and is not a mere move of numbers."""

    exact = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its whole compiler at the first operation, which takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = _floating(result)
        if made and not func.is_view and not all(t.dtype in _WIDE for t in made):
            given = _floating((args, kwargs))
            moved = func.overloadpacket.__name__ in _MOVES
            if given and not (moved and all(_holds(out.dtype, t.dtype) for out in made for t in given)):
                self.exact = False
        return result


def _floating(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of one floating type is one of the other."""
    if wide == narrow:
        return True
    if wide in _CODES or narrow in _CODES or wide.is_complex != narrow.is_complex:
        return False
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.eps <= b.eps and a.max >= b.max and a.smallest_normal * a.eps <= b.smallest_normal * b.eps
