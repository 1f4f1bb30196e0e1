"""Which values occur in a problem's inputs: a check can only find the faults that its inputs reach."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import fsum
from typing import Any

import torch
from torch import Tensor

from nibblas.arena.correctness import CHUNK, named_tensors
from nibblas.arena.record import Coverage
from nibblas.formats import E4M3, E8M0, e2m1_decode

_BYTES = torch.arange(256, dtype=torch.uint8)
_SCALES = {code.dtype: code for code in (E4M3, E8M0)}


def coverage(data: Any) -> tuple[Coverage, ...]:
    """The values of each tensor in what generate_input returned.

    Tensors are read by their dtype. A uint8 tensor may hold packed e2m1 codes or not, which its dtype does not say: it
    is read as such, and its kind is "perhaps e2m1 pairs".
    """
    return tuple(_coverage(name, tensor.detach()) for name, tensor in named_tensors(data, "data").items())


def combined(found: Sequence[Coverage]) -> tuple[Coverage, ...]:
    """One Coverage for each tensor over several calls: the codes of all, the shares averaged over the calls."""
    calls: dict[str, list[Coverage]] = {}
    for c in found:
        calls.setdefault(c.tensor, []).append(c)
    return tuple(_combined(alike) for alike in calls.values())


def digits_of(codes: Iterable[int]) -> str:
    """e2m1 codes as hexadecimal digits.

    >>> digits_of({15, 0, 1})
    '01f'
    """
    return "".join(f"{code:x}" for code in sorted(codes))


def ranges_of(codes: Iterable[int]) -> str:
    """Byte codes as hexadecimal ranges; bytes_of is the inverse.

    >>> ranges_of({0, 1, 2, 127})
    '00-02 7f'
    """
    runs: list[list[int]] = []
    for code in sorted(codes):
        if runs and runs[-1][-1] == code - 1:
            runs[-1][1:] = [code]
        else:
            runs.append([code])
    return " ".join("-".join(f"{code:02x}" for code in run) for run in runs)


def bytes_of(ranges: str) -> set[int]:
    """The byte codes in hexadecimal ranges."""
    ends = [[int(code, 16) for code in run.split("-")] for run in ranges.split()]
    return {code for run in ends for code in range(run[0], run[-1] + 1)}


def gaps(found: Sequence[Coverage]) -> tuple[str, ...]:
    """What the inputs leave out, in words: e2m1 codes that a nibble never holds, scales that are always the same few.

    Scales are told of beside FP4 codes only: elsewhere an 8-bit float may be anything.
    """
    pairs = [c for c in found if c.kind == "e2m1 pairs"]
    told: dict[str, list[str]] = {}
    for c in pairs:
        nibbles = {"low": c.low_codes or "", "high": c.high_codes or ""}
        few = [
            f"{len(codes)} of 16 codes in {name} nibbles ({codes})" for name, codes in nibbles.items() if codes != ALL
        ]
        if few:
            told.setdefault(", ".join(few), []).append(c.tensor)
    for c in found:
        codes = bytes_of(c.byte_codes or "")
        if pairs and len(codes) < _FEW_SCALES.get(c.kind, 0):
            told.setdefault(f"{len(codes)} scale codes ({c.byte_codes})", []).append(c.tensor)
    return tuple(f"{', '.join(names)}: only {what}" for what, names in told.items())


ALL = "0123456789abcdef"
_FEW_SCALES = {"e4m3": 16, "e8m0": 2}


def _combined(calls: list[Coverage]) -> Coverage:
    def known(name: str) -> list:
        return [value for c in calls if (value := getattr(c, name)) is not None]

    def union(name: str, read: Callable[[str], Iterable[int]], write: Callable[[Iterable[int]], str]) -> str | None:
        texts = known(name)
        return write({code for text in texts for code in read(text)}) if texts else None

    shares: dict[str, Any] = {name: fsum(known(name)) / len(calls) for name in ("zero", "negative", "nan", "infinite")}
    return replace(
        calls[0],
        **shares,
        smallest=min(known("smallest"), default=None),
        largest=max(known("largest"), default=None),
        low_codes=union("low_codes", lambda text: [int(digit, 16) for digit in text], digits_of),
        high_codes=union("high_codes", lambda text: [int(digit, 16) for digit in text], digits_of),
        byte_codes=union("byte_codes", bytes_of, ranges_of),
    )


def _coverage(name: str, tensor: Tensor) -> Coverage:
    empty = Coverage(name, str(tensor.dtype), tuple(tensor.shape), "other")
    dtype = tensor.dtype
    if not tensor.numel():
        return empty
    if dtype in (torch.float4_e2m1fn_x2, torch.uint8):
        return _of_pairs(empty, tensor)
    if dtype in _SCALES:
        code, counts = _SCALES[dtype], _byte_counts(tensor)
        kind = replace(empty, kind="e4m3" if code == E4M3 else "e8m0", byte_codes=_seen(counts, ranges_of))
        return _of_values(kind, code.decode(_BYTES), counts)
    if dtype == torch.bool:
        return replace(empty, kind="bool", zero=1 - tensor.double().mean().item())
    codes = _seen(_byte_counts(tensor), ranges_of) if dtype.itemsize == 1 else None
    if tensor.is_floating_point() or tensor.is_complex():
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return _of_values(replace(empty, kind="float", byte_codes=codes), values)
    return _of_values(replace(empty, kind="integer", byte_codes=codes), tensor)


def _of_pairs(empty: Coverage, tensor: Tensor) -> Coverage:
    """Two e2m1 codes a byte, the even one in the low nibble."""
    counts = _byte_counts(tensor)
    low, high = counts.view(16, 16).sum(0), counts.view(16, 16).sum(1)
    kind = replace(
        empty,
        kind="e2m1 pairs" if tensor.dtype == torch.float4_e2m1fn_x2 else "perhaps e2m1 pairs",
        low_codes=_seen(low, digits_of),
        high_codes=_seen(high, digits_of),
    )
    return _of_values(kind, e2m1_decode(torch.arange(16)), low + high)


def _of_values(kind: Coverage, values: Tensor, counts: Tensor | None = None) -> Coverage:
    """Shares and range of values, each of which occurs `counts` times (once where that is None)."""
    zero, negative, nan, infinite, total = 0, 0, 0, 0, 0
    smallest, largest = math.inf, 0.0
    for part in values.reshape(-1).split(CHUNK) if counts is None else (values,):
        if part.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            part = part.double()  # torch lacks half of its functions for the others

        def times(mask: Tensor) -> int:
            return int(mask.count_nonzero()) if counts is None else int((mask * counts).sum())

        magnitude = part.abs() if counts is None else torch.where(counts > 0, part.abs(), torch.nan)
        is_size = (magnitude > 0) & magnitude.isfinite()
        zero += times(part == 0)
        negative += times(torch.signbit(part) & ~part.isnan())
        nan += times(part.isnan())
        infinite += times(part.isinf())
        total += times(torch.ones_like(part, dtype=torch.bool))
        if is_size.any():
            smallest = min(smallest, torch.where(is_size, magnitude, torch.inf).min().item())
            largest = max(largest, torch.where(is_size, magnitude, 0.0).max().item())
    return replace(
        kind,
        zero=zero / total,
        negative=negative / total,
        nan=nan / total,
        infinite=infinite / total,
        smallest=smallest if largest else None,
        largest=largest or None,
    )


def _byte_counts(tensor: Tensor) -> Tensor:
    """How often each byte occurs in a tensor of an 8-bit dtype: (256,), on the CPU."""
    parts = tensor.view(torch.uint8).reshape(-1).split(CHUNK)
    return torch.stack([torch.bincount(part, minlength=256).cpu() for part in parts]).sum(0)


def _seen(counts: Tensor, write: Callable[[Iterable[int]], str]) -> str:
    return write(counts.nonzero().flatten().tolist())
