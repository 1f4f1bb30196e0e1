"""Wrong answers that a problem's check must refuse, each the work of a kernel with one fault.

Some are made from the right answer, others by running the reference on inputs from which the fault takes something. A
mutant that comes out equal to the right answer shows that the inputs never reach the fault.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nibblas.arena.correctness import named_tensors
from nibblas.arena.harden import FP4, SCALES

Kernel = Callable[[Any], Any]


@dataclass(frozen=True)
class Situation:
    """A case's inputs, the right answer to them, and to those of another seed (None where a case has no seed)."""

    data: Any
    right: Any
    other: Any
    ref_kernel: Kernel
    outputs: tuple[str, ...]  # names of output arguments among the inputs


@dataclass(frozen=True)
class Mutant:
    """A faulty kernel; `make` gives its output, None where the fault makes no sense for such a problem.

    `must_fail` is False for what a problem may well allow, and which is only told.
    """

    name: str
    make: Callable[[Situation], Any]
    must_fail: bool = True


def _of_output(change: Callable[[Tensor], Tensor | None]) -> Callable[[Situation], Any]:
    """Changes each tensor of the right answer; no mutant where none of them can be changed."""

    def make(s: Situation) -> Any:
        changed = [change(t.clone()) for t in named_tensors(s.right, "result").values() if t.numel()]
        if not changed or all(t is None for t in changed):
            return None
        return pytree.tree_map_only(Tensor, lambda t: _or(change(t.clone()), t) if t.numel() else t, s.right)

    return make


def _or(changed: Tensor | None, kept: Tensor) -> Tensor:
    return kept if changed is None else changed


def _of_inputs(change: Callable[[Tensor], bool]) -> Callable[[Situation], Any]:
    """The reference on changed inputs; no mutant where none can be changed, or where it fails on them."""

    def make(s: Situation) -> Any:
        data = copy.deepcopy(s.data)
        tensors = [t for name, t in named_tensors(data, "data").items() if t.numel() and name not in s.outputs]
        if not any([change(t) for t in tensors]):
            return None
        try:
            with torch.no_grad():
                return s.ref_kernel(data)
        except Exception:  # inputs that mean nothing to the reference
            return None

    return make


# --- faults in the output ------------------------------------------------------------------------------------------


def _is_number(t: Tensor) -> bool:
    return t.dtype not in (FP4, torch.float8_e8m0fnu)


def _zeros(t: Tensor) -> Tensor:
    t.view(torch.uint8).zero_() if not _is_number(t) else t.zero_()
    return t


def _nan(t: Tensor) -> Tensor | None:
    return t.fill_(torch.nan) if (t.is_floating_point() or t.is_complex()) and _is_number(t) else None


def _every_second(t: Tensor) -> Tensor | None:
    if t.numel() < 2 or not _is_number(t):
        return None
    flat = t.reshape(-1)
    flat[1::2] = 0
    return flat.reshape(t.shape)


def _one_off(t: Tensor) -> Tensor | None:
    """The last element off by the RMS of all; by one where they are integers."""
    if not _is_number(t):
        return None
    flat = t.reshape(-1)
    if t.dtype == torch.bool:
        flat[-1] = ~flat[-1]
    elif t.is_floating_point() or t.is_complex():
        flat[-1] = (flat[-1].double() + max(rms(t), 1e-3)).to(t.dtype)
    else:
        flat[-1] += 1
    return flat.reshape(t.shape)


def rms(t: Tensor) -> float:
    """The root of the mean square of the finite elements; 0.0 without any."""
    values = t.abs().double()
    values = values[values.isfinite()]
    return values.square().mean().sqrt().item() if values.numel() else 0.0


def _rounded(bits: int) -> Callable[[Tensor], Tensor | None]:
    """Floats with so many significant bits, nearest even; None for what has no more than that."""

    def change(t: Tensor) -> Tensor | None:
        if not t.is_floating_point() or not _is_number(t) or torch.finfo(t.dtype).eps * 2**bits >= 2:
            return None
        mantissa, exponent = torch.frexp(t.double())
        return torch.ldexp((mantissa * 2**bits).round(), exponent - bits).to(t.dtype)

    return change


def _bf16(t: Tensor) -> Tensor | None:
    return t.bfloat16().to(t.dtype) if t.dtype in (torch.float32, torch.float16, torch.float64) else None


def _stale(s: Situation) -> Any:
    return s.other


def _passed_through(s: Situation) -> Any:
    """An input that has the shape of the only output, in its dtype; the first that is no output argument."""
    outputs = list(named_tensors(s.right, "result").values())
    if len(outputs) != 1 or not isinstance(s.right, Tensor):
        return None
    for name, t in named_tensors(s.data, "data").items():
        if t.shape == s.right.shape and name not in s.outputs and _is_number(t) and not t.is_complex():
            return t.to(s.right.dtype, copy=True)
    return None


def _not_written(s: Situation) -> Any:
    """Output arguments as they came."""
    tensors = named_tensors(s.data, "data")
    if len(s.outputs) == 1 and isinstance(s.right, Tensor) and tensors[s.outputs[0]].shape == s.right.shape:
        return tensors[s.outputs[0]].clone()
    return None


# --- faults in reading the inputs ----------------------------------------------------------------------------------


def _masked_codes(mask: int) -> Callable[[Tensor], bool]:
    def change(t: Tensor) -> bool:
        if t.dtype == FP4:
            t.view(torch.uint8).bitwise_and_(mask)
        return t.dtype == FP4

    return change


def _scales(change_codes: Callable[[Tensor, torch.dtype], Tensor | None]) -> Callable[[Situation], Any]:
    """Changes the scale codes of inputs that hold FP4 codes too; an 8-bit float elsewhere may be anything.

    None from change_codes: scales of this dtype have nothing to change.
    """

    def change(t: Tensor) -> bool:
        codes = t.view(torch.uint8) if t.dtype in SCALES else None
        changed = None if codes is None else change_codes(codes, t.dtype)
        if codes is None or changed is None:
            return False
        codes.copy_(changed)
        return True

    def make(s: Situation) -> Any:
        has_codes = any(t.dtype == FP4 for t in named_tensors(s.data, "data").values())
        return _of_inputs(change)(s) if has_codes else None

    return make


def _one(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full_like(codes, SCALES[dtype].one)


def _power_of_two(codes: Tensor, dtype: torch.dtype) -> Tensor | None:
    return codes & 0x78 if dtype == torch.float8_e4m3fn else None


def _second_half_zero(t: Tensor) -> bool:
    """Along the longest dimension; of FP4 the codes, not the scales."""
    longest = max(range(t.ndim), key=t.shape.__getitem__, default=None)
    if longest is None or t.shape[longest] < 2 or t.dtype in SCALES:
        return False
    half = t.shape[longest] // 2
    values = t.view(torch.uint8) if t.dtype == FP4 else t
    values.narrow(longest, half, t.shape[longest] - half).zero_()
    return True


def _coarse(t: Tensor) -> bool:
    changed = _rounded(4)(t) if t.dtype not in SCALES else None
    if changed is not None:
        t.copy_(changed)
    return changed is not None


# Of the right answer alone, so that each run can try them on its cases.
OF_OUTPUT = (
    Mutant("all zeros", _of_output(_zeros)),
    Mutant("all NaN", _of_output(_nan)),
    Mutant("every second element zero", _of_output(_every_second)),
    Mutant("one element off", _of_output(_one_off)),
)
MUTANTS = (
    *OF_OUTPUT,
    Mutant("answer to another seed", _stale),
    Mutant("output argument not written", _not_written),
    Mutant("input passed through", _passed_through),
    Mutant("high nibbles ignored", _of_inputs(_masked_codes(0x0F))),
    Mutant("low nibbles ignored", _of_inputs(_masked_codes(0xF0))),
    Mutant("signs of FP4 ignored", _of_inputs(_masked_codes(0x77))),
    Mutant("FP4 above 1.5 taken for less", _of_inputs(_masked_codes(0xBB))),
    Mutant("scales ignored", _scales(_one)),
    Mutant("mantissas of scales ignored", _scales(_power_of_two)),
    Mutant("second half of the inputs ignored", _of_inputs(_second_half_zero)),
    Mutant("inputs rounded to 4 bits", _of_inputs(_coarse)),
    Mutant("output rounded to 4 bits", _of_output(_rounded(4))),
    Mutant("output rounded to bf16", _of_output(_bf16), must_fail=False),
)
