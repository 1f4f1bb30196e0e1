"""Inputs that reach what a problem's own inputs leave out: every e2m1 code in both nibbles, every legal scale byte.

The tuple keeps its structure, shapes, strides and the relations between its tensors: where one held another in a scale
layout or a shuffled one, or the quantized form of a dense one, it still does. Places of a layout that are padding get
NaN. Scales are drawn so that the reference's answers stay as small as the problem's tolerance takes for granted; the
scales that would not do so stand at blocks of zeros, which are exactly zero by any of them.
"""

import copy
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nibblas.arena.correctness import named_tensors
from nibblas.arena.products import AITER_SCALE_RULE
from nibblas.formats import E4M3, E8M0, FORMATS, MXFP4, ScaleCode, e2m1_decode, pack, unpack
from nibblas.layouts import BLOCKED_128x4, CDNA_32x8, SHUFFLED_16x16, TiledLayout, contest_view
from nibblas.quantize import quantize

FP4 = torch.float4_e2m1fn_x2
SCALES = {code.dtype: code for code in (E4M3, E8M0)}
# Answers stay below this, or the largest that the problem's own inputs give: the error of an fp32 sum (about 1e-7 of
# its terms) then stays below tolerances of 1e-3.
SMALL = 2048.0
OCTAVES = 40  # by which scales can be lowered at all
# Scales of one row lie within so many codes (two octaves of e4m3, four of e8m0), so that no block of a sum is lost in
# the rounding of another; e8m0 codes in use are those of weights near 1, 2^-20 to 2^2.
SPREAD = {"e4m3": 16, "e8m0": 4}
IN_USE = {"e4m3": (0, E4M3.largest), "e8m0": (107, 129)}
OCTAVE = {"e4m3": 8, "e8m0": 1}  # codes that double a scale
BLOCK = {format.scale_code: format.block_size for format in FORMATS.values()}
FEW_ZEROS, MANY_ZEROS = 16, 4  # one block in so many is of zeros; the more, the fewer blocks there are for all scales
NO_ZEROS = "blocks of zeros with any legal scale were left out: by the reference's own answers they are not zero"
NAN = 0xFF  # as a scale of either code
PADDED_ROWS = 256  # aiter pads the rows of shuffled scales to a multiple of this


Writer = Callable[[Tensor], None]


@dataclass(eq=False)
class _Part:
    """A matrix of bytes, K-major (..., rows, columns), and how to put another into each tensor that holds it."""

    linear: Tensor
    scale: ScaleCode | None  # None for packed e2m1 codes
    holders: dict[str, Writer]  # by the tensor's name
    dense: Tensor | None = None  # of codes: the tensor (..., rows, 2 columns) that holds their values
    scales: "_Part | None" = None  # of codes: those of their blocks, where they are known


class Hardener:
    """Redraws the inputs of one case; `redrawn` names the tensors that the last call drew anew.

    `has_zeros` tells whether some blocks are of zeros with any legal scale: not where the reference fails on such.

    ref_kernel : the problem's own, which says how large answers become. It runs once for each call, and some eight
        times more for the first one or two.
    """

    def __init__(self, ref_kernel: Callable[[Any], Any]):
        self.ref_kernel = ref_kernel
        self.redrawn: tuple[str, ...] = ()
        self.has_zeros = True
        self._limit: float | None = None
        self._octaves: dict[int, int] = {}  # by which scales are lowered, for even and for odd seeds

    def __call__(self, data: Any, seed: int) -> Any:
        """A copy of the inputs, redrawn. The data itself is left as it is, and returned where it holds no FP4.

        ValueError where no scales keep the answers small.
        """
        hardened = copy.deepcopy(data)
        parts = _parts(hardened)
        self.redrawn = tuple(name for part in parts for name in part.holders)
        if not parts:
            return data
        if self._limit is None:
            own = self._largest_answer(data)
            self._limit = max(own, SMALL) if math.isfinite(own) else SMALL
        limit = self._limit
        turn = seed % 2

        def fits(octaves: int) -> bool:
            _redraw(parts, seed, octaves, has_zeros=self.has_zeros)
            return self._largest_answer(hardened) <= limit

        if not self._octaves:
            self.has_zeros = fits(OCTAVES - 1)
        if turn not in self._octaves:
            self._octaves[turn] = bisect_left(range(OCTAVES), True, key=fits)
        while not fits(self._octaves[turn]):
            self._octaves[turn] += 1
            if self._octaves[turn] >= OCTAVES:
                if not self.has_zeros:
                    raise ValueError(f"harden: answers stay above {limit:g}, whatever the scales")
                # Few blocks have other scales each time, and the reference failed on these.
                self.has_zeros = False
                self._octaves[turn] = bisect_left(range(OCTAVES - 1), True, key=fits)
        return hardened

    def _largest_answer(self, data: Any) -> float:
        with torch.no_grad():
            result = self.ref_kernel(copy.deepcopy(data))
        answers = [t for t in named_tensors(result, "result").values() if t.is_floating_point() and t.numel()]
        largest = max((t.abs().max().item() for t in answers), default=0.0)
        return largest if math.isfinite(largest) else math.inf


# --- what holds what -----------------------------------------------------------------------------------------------


def _parts(data: Any) -> list[_Part]:
    """The FP4 operands and scales of a tuple, each once, with every tensor that holds it; none without FP4 codes."""
    tensors = {name: t for name, t in named_tensors(data, "data").items() if t.numel()}
    codes = {name: t for name, t in tensors.items() if t.dtype == FP4}
    scales = {name: t for name, t in tensors.items() if t.dtype in SCALES}
    dense = [t for t in tensors.values() if t.dtype in (torch.bfloat16, torch.float16, torch.float32)]
    if not codes:
        return []
    parts = _distinct(codes)
    scale_parts = _distinct(scales)
    for part in list(parts):
        quantized = next((found for t in dense if (found := _quantized(t, part.linear))), None)
        if quantized is None:
            continue
        part.dense, scale = quantized
        part.scales = _scale_part(scale, scales, scale_parts)
        if part.scales is None:
            parts.remove(part)  # whose scales are not among the inputs: nothing can be said of its values
    _pair(parts, scale_parts)
    return parts + scale_parts


def _distinct(tensors: dict[str, Tensor]) -> list[_Part]:
    """One part for each tensor that does not hold another in some layout; of two that hold each other, for the first.

    SHUFFLED_16x16 of 256 columns is such a layout, whose inverse it is itself.
    """
    parts: list[_Part] = []
    for name, tensor in tensors.items():
        if any(name in part.holders for part in parts):
            continue
        matrix = _k_major(tensor).clone()
        part = _Part(matrix, SCALES.get(tensor.dtype), {name: _into(tensor)})
        for other_name, other in tensors.items():
            if other is not tensor and other.dtype == tensor.dtype and (write := _stored(matrix, other)):
                part.holders[other_name] = write
        parts.append(part)
    copies = {name for part in parts for name in list(part.holders)[1:]}
    return [part for part in parts if next(iter(part.holders)) not in copies]


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A view with the dimensions from slowest to fastest: a contest tensor (rows, K, L) becomes (L, rows, K)."""
    stride, size = tensor.stride(), tensor.shape
    return tensor.permute(sorted(range(tensor.ndim), key=lambda dim: (-stride[dim], -size[dim])))


def _k_major(tensor: Tensor) -> Tensor:
    """Its bytes, a view (..., rows, columns)."""
    return _in_memory_order(tensor).view(torch.uint8)


def _into(tensor: Tensor) -> Writer:
    def write(matrix: Tensor) -> None:
        _k_major(tensor).copy_(matrix)

    return write


def _ways(layout: TiledLayout) -> list[Callable[[Tensor], Tensor]]:
    """How a matrix (..., rows, columns) may have been put into a layout: a batch each or as one, rows padded or not."""

    def padded(matrix: Tensor) -> Tensor:
        return layout.to(torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[-2] % PADDED_ROWS)))

    def as_one(way: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda matrix: way(matrix.flatten(0, -2))

    return [layout.to, padded, as_one(layout.to), as_one(padded)]


def _blocked_view(matrix: Tensor) -> Tensor:
    return contest_view(BLOCKED_128x4.to(matrix)) if matrix.ndim == 3 else matrix.new_empty(0)


_WAYS = [_blocked_view, *_ways(BLOCKED_128x4), *_ways(CDNA_32x8), *_ways(SHUFFLED_16x16)]


def _stored(matrix: Tensor, other: Tensor) -> Writer | None:
    """How to write a matrix like this into another tensor, if that holds it in some layout now; padding becomes NaN."""
    if matrix.ndim < 2 or bool((matrix == matrix.flatten()[0]).all()):
        return None  # one value looks the same in every layout
    held = other.view(torch.uint8)
    for way in _WAYS:
        stored = way(matrix)
        if stored.numel() != held.numel() or (way is _blocked_view and stored.shape != held.shape):
            continue
        real = (way(torch.ones_like(matrix)) != 0).reshape(held.shape)
        if not ((stored.reshape(held.shape) == held) | ~real).all():
            continue

        def write(matrix: Tensor, way=way, real=real) -> None:
            held.copy_(way(matrix).reshape(held.shape).masked_fill(~real, NAN))

        return write
    return None


def _quantized(dense: Tensor, codes: Tensor) -> tuple[Tensor, Tensor] | None:
    """The dense tensor and its MXFP4 scales, if these codes are its quantized form; None otherwise."""
    rows = _in_memory_order(dense)
    if rows.shape != (*codes.shape[:-1], 2 * codes.shape[-1]) or rows.shape[-1] % MXFP4.block_size:
        return None
    quantized = quantize(rows, MXFP4, scale_rule=AITER_SCALE_RULE)
    return (rows, quantized.scale) if torch.equal(quantized.data, codes) else None


def _scale_part(scale: Tensor, tensors: dict[str, Tensor], parts: list[_Part]) -> _Part | None:
    """The part of these scales, which may be there in a layout alone; that of the stored bytes gives way to it."""
    for part in parts:
        if part.scale == E8M0 and torch.equal(part.linear, scale):
            return part
    for part in parts:
        (name, *_) = part.holders
        if part.scale == E8M0 and (write := _stored(scale, tensors[name])):
            parts[parts.index(part)] = found = _Part(scale, E8M0, {name: write})
            return found
    return None


def _pair(codes: list[_Part], scales: list[_Part]) -> None:
    """Find the scales of the codes that have none yet: those of their shape, of several alike in the tuple's order."""
    free = [part for part in scales if all(part is not other.scales for other in codes)]
    for part in codes:
        if part.scales is None:
            part.scales = next((scale for scale in free if _has_blocks_of(part, scale)), None)
            free = [scale for scale in free if scale is not part.scales]


def _has_blocks_of(codes: _Part, scales: _Part) -> bool:
    (*rows, columns), (*scale_rows, scale_columns) = codes.linear.shape, scales.linear.shape
    assert scales.scale is not None
    return math.prod(rows) == math.prod(scale_rows) and 2 * columns == BLOCK[scales.scale] * scale_columns


# --- drawing -------------------------------------------------------------------------------------------------------


def _redraw(parts: list[_Part], seed: int, octaves: int, *, has_zeros: bool) -> None:
    """New codes and scales into every tensor. Scales other than the widest are lowered first, by so many octaves.

    By the seed it is the first operand's scales that take all codes in use (the first scale tensor of each tuple), or
    the others'. With `has_zeros` some blocks are of zeros, and have any legal scale.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = [part for part in parts if part.scale]
    firsts = {_tuple_of(part): part for part in reversed(scales)}
    wide = [part for part in scales if (part is firsts[_tuple_of(part)]) == (seed % 2 == 0)] or scales
    for part in scales:
        _write(part, _drawn_scales(part, part in wide, octaves, len(wide) < len(scales), generator))
    for part in parts:
        if part.scale is None:
            codes = _drawn_codes(part, generator)
            if part.scales is not None and has_zeros:
                _write(part.scales, _with_zeros(codes, part.scales, generator))
            _write(part, pack(codes))


def _tuple_of(part: _Part) -> str:
    return next(iter(part.holders)).rpartition("[")[0]


def _write(part: _Part, matrix: Tensor) -> None:
    part.linear = matrix.to(part.linear.device)
    for write in part.holders.values():
        write(part.linear)
    if part.dense is not None and part.scales is not None:
        values = e2m1_decode(unpack(part.linear)).unflatten(-1, (-1, MXFP4.block_size))
        part.dense.copy_((values * E8M0.decode(part.scales.linear)[..., None]).flatten(-2))


def _drawn_codes(part: _Part, generator: torch.Generator) -> Tensor:
    """All 16 codes alike, one a byte. Where a dense tensor has to quantize to them, a block's largest is 4 or 6."""
    *batch, columns = part.linear.shape
    codes = torch.randint(16, (*batch, 2 * columns), dtype=torch.uint8, generator=generator)
    if part.dense is not None:
        blocks = codes.unflatten(-1, (-1, MXFP4.block_size))
        place = torch.randint(MXFP4.block_size, (*blocks.shape[:-1], 1), generator=generator)
        blocks.scatter_(-1, place, blocks.gather(-1, place) | 0b110)
    return codes


def _with_zeros(codes: Tensor, scales: _Part, generator: torch.Generator) -> Tensor:
    """These scales with all that are legal alike at some blocks, whose codes become zeros of either sign."""
    assert scales.scale is not None
    blocks, legal = scales.linear.numel(), scales.scale.largest + 1
    step = max(min(blocks // legal, FEW_ZEROS), MANY_ZEROS)
    count = blocks // step
    places = torch.arange(count) * step + torch.randint(step, (count,), generator=generator)
    any_scale = torch.randperm(legal, generator=generator)[torch.arange(count) % legal].to(torch.uint8)
    codes.view(blocks, -1)[places] &= 0b1000
    return scales.linear.cpu().flatten().scatter(0, places, any_scale).view(scales.linear.shape)


def _drawn_scales(part: _Part, is_wide: bool, octaves: int, has_others: bool, generator: torch.Generator) -> Tensor:
    """Each row its own short range of codes; those of a wide part together span all in use."""
    assert part.scale is not None
    name = part.scale.name
    (low, high), spread, step = IN_USE[name], SPREAD[name], OCTAVE[name]
    others_top = part.scale.one
    room = (others_top - spread + 1 - low) // step  # octaves by which the others can be lowered
    if is_wide:
        high -= step * max(octaves - room, 0) if has_others else step * octaves
    else:
        high = others_top - step * min(octaves, room)
        low = high - spread + 1
    high = max(high, low + spread - 1)
    *batch, columns = part.linear.shape
    rows = math.prod(batch)
    place = torch.randperm(rows, generator=generator) / max(rows - 1, 1)
    first = low + (place * (high - low - spread + 1)).round().int()
    steps = torch.randint(spread, (rows, columns), generator=generator)
    return (first[:, None] + steps).to(torch.uint8).reshape(*batch, columns)
