"""quantize and dequantize in plain torch: the reference that every fast quantizer is compared with, byte for byte.

A scale rule maps the magnitudes of a block to its scale code; the codes of the elements follow from the scale alone:
`code = e2m1(x / (scale * global_scale))`, all in fp32. docs/formats.md states each rule with its order of operations.
"""

from collections.abc import Callable, Iterator
from functools import partial
from numbers import Real

import torch
from torch import Tensor

from nibblas.formats import (
    E2M1_MAX,
    E4M3,
    E8M0,
    MXFP4,
    NVFP4,
    ROTATIONS,
    Format,
    as_format,
    e2m1_decode,
    e2m1_encode,
    e4m3_encode,
    pack,
    unpack,
)
from nibblas.tensor import ScaledTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The NVFP4 block scale that the block with the largest magnitude of the tensor gets. Rules that may raise a block's
# scale above block_amax / 6 leave room for it: 256 * 1.5 = 384 is a code, and 448 / 256 is more than 1.5.
TOP_SCALE = {"absmax": 448.0, "four_over_six": 256.0, "search": 256.0}
# The smallest automatic global_scale. It and its inverse are finite, and normal, for every input.
SMALLEST_GLOBAL_SCALE = 2.0**-126
# Elements in fp32 at a time: bounds the temporaries of a call, and keeps them near the caches.
CHUNK = 1 << 18

# Magnitudes (B, block_size), their amax (B), global_scale (B), all fp32 -> scale codes (B) uint8.
ScaleRule = Callable[[Tensor, Tensor, Tensor], Tensor]


def _nearest_e2m1(values: Tensor) -> Tensor:
    """e2m1_decode(e2m1_encode(values)) of non-negative values."""
    values = values.clamp(max=E2M1_MAX)
    power = (values.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=1.0)
    # The grid between power and 2 * power has steps of power / 2. Added to 1.5 * 2^23 steps, a value is rounded to one.
    magic = power.mul_(1.5 * 2**22)
    return values.add_(magic).sub_(magic)


def _block_error(magnitude: Tensor, step: Tensor) -> Tensor:
    """Squared error of blocks (B, block_size) under the steps scale * global_scale (B): sum((x - e2m1 * step)^2), (B).

    The sum is a halving tree, so that its rounding does not depend on who computes it. Two steps under which a block
    dequantizes to the same values have the same error exactly.
    """
    step = step.unsqueeze(-1)
    error = (magnitude - _nearest_e2m1(magnitude / step).mul_(step)).square_()
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error.squeeze(-1)


def _inverse_power(exponent: Tensor) -> Tensor:
    """2^(127 - e) of biased fp32 exponents e in 0..254: what errors are scaled by, lest their squares leave fp32."""
    return E8M0.decode(E8M0.largest - exponent)


def _unit_global(magnitude: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """magnitude and global_scale times the power of two that takes global_scale to [1, 2)."""
    power = _inverse_power(global_scale.view(torch.int32) >> 23)
    return magnitude * power.unsqueeze(-1), global_scale * power


def _absmax(magnitude: Tensor, amax: Tensor, global_scale: Tensor) -> Tensor:
    return e4m3_encode(amax / (E2M1_MAX * global_scale))


def _four_over_six(magnitude: Tensor, amax: Tensor, global_scale: Tensor) -> Tensor:
    """amax to 6, or to 4 where the squared error is strictly smaller (arXiv 2512.02010)."""
    scale = amax / (E2M1_MAX * global_scale)
    to_six, to_four = e4m3_encode(scale), e4m3_encode(1.5 * scale)
    magnitude, unit = _unit_global(magnitude, global_scale)
    error_six, error_four = (_block_error(magnitude, E4M3.decode(code) * unit) for code in (to_six, to_four))
    # Under a scale of 0 the error can be NaN (0 / 0), and must lose: the comparison is the one that NaN makes false.
    return torch.where(error_four >= error_six, to_six, to_four)


def _search_e4m3(magnitude: Tensor, amax: Tensor, global_scale: Tensor) -> Tensor:
    """The e4m3 scale of least squared error, the smallest one on ties; 0 for a block of zeros.

    16 codes hold the best of all 126. Let r = amax / (scale * global_scale).
    - r <= 3: every value that is used, scale * {0, .5, 1, 1.5, 2, 3}, is also one of scale / 2, which is at least as
      good for each element and comes first. Below code 16 scale / 2 may be no code, so none of those is dropped.
    - r >= 8: going to 2 * scale wins at least 4 scale^2 on the largest element and loses at most .25 scale^2 on each
      of the 15 others (those at .5 and 1.5). 4 > 3.75, so 2 * scale is better.
    What is left lies between 3/4 and 2 times amax / 6: at most 5 codes below and 8 above the code of absmax. Near the
    largest code 2 * scale may be none; there the window is the last 16 codes, down to 120.
    """
    absmax = _absmax(magnitude, amax, global_scale)
    magnitude, unit = _unit_global(magnitude, global_scale)
    first = (absmax.int() - 5).clamp_(1, E4M3.largest - 15)
    best, least = absmax, torch.full_like(amax, torch.inf)
    for i in range(16):
        code = (first + i).to(torch.uint8)
        error = _block_error(magnitude, E4M3.decode(code) * unit)
        better = error < least
        best, least = torch.where(better, code, best), torch.where(better, error, least)
    return best.masked_fill_(amax == 0, 0)


def _exponent(rounding: int, magnitude: Tensor, amax: Tensor, global_scale: Tensor) -> Tensor:
    """e8m0 code of amax's exponent less 2, that of the largest e2m1 value; `rounding` may carry into the exponent."""
    return (((amax.view(torch.int32) + rounding) >> 23) - 2).clamp_(0, E8M0.largest).to(torch.uint8)


_floor = partial(_exponent, 0)  # amax / scale in [4, 8)
_even = partial(_exponent, 1 << 21)  # [3.5, 7): carries from a mantissa of 1.75, where amax rounds to 8
_rceil = partial(_exponent, (1 << 22) - 1)  # (3, 6]: carries above a mantissa of 1.5


def _search_e8m0(magnitude: Tensor, amax: Tensor, global_scale: Tensor) -> Tensor:
    """The e8m0 scale of least squared error, the smallest one on ties: the floor rule's, half or twice it.

    As for e4m3: r <= 3 is no better than scale / 2. At r >= 9 going to 2 * scale wins at least 8 scale^2 on the largest
    element and loses at most 31 * .25 on the others. The floor rule has 4 <= r < 8, so r is in 3..9 on three codes.
    """
    first = (_floor(magnitude, amax, global_scale).int() - 1).clamp_(min=0)
    magnitude = magnitude * _inverse_power(first).unsqueeze(-1)
    best, least = first, torch.full_like(amax, torch.inf)
    for i in range(3):
        error = _block_error(magnitude, torch.full_like(amax, 2.0**i))
        better = error < least
        best, least = torch.where(better, first + i, best), torch.where(better, error, least)
    return best.to(torch.uint8)


RULES: dict[Format, dict[str, ScaleRule]] = {
    NVFP4: {"absmax": _absmax, "four_over_six": _four_over_six, "search": _search_e4m3},
    MXFP4: {"even": _even, "floor": _floor, "rceil": _rceil, "search": _search_e8m0},
}


def rotate(x: Tensor, size: int) -> Tensor:
    """Block Hadamard rotation along the last dimension, orthonormal and its own inverse: (..., K) -> (..., K) fp32.

    Each run of `size` elements (16, 32, 64 or 128) is multiplied by the Sylvester matrix H[i, j] =
    (-1)^popcount(i & j) / sqrt(size), in fp32: log2(size) butterfly stages, neighbours first, then one multiplication.
    Rotating both operands of a product along K leaves the product as it was.
    Raises ValueError for another size, or where K is no multiple of it.
    """
    if size not in ROTATIONS:
        raise ValueError(f"rotate: size {size!r}, need one of {', '.join(map(str, ROTATIONS))}")
    if x.ndim < 1 or x.shape[-1] % size:
        raise ValueError(f"rotate: shape {tuple(x.shape)}, need a last dimension that is a multiple of {size}")
    shape, x, span = x.shape, x.float(), 1
    while span < size:
        low, high = x.reshape(-1, 2, span).unbind(1)
        x = torch.stack((low + high, low - high), dim=1)
        span *= 2
    return (x * size**-0.5).reshape(shape)


def _chunks(x: Tensor, width: int, rotation: int) -> Iterator[tuple[slice, Tensor]]:
    """x as rows of `width` elements, some at a time: (rows of the result, their fp32 values, rotated if asked)."""
    rows = x.reshape(-1, width)
    step = CHUNK // width
    for start in range(0, len(rows), step):
        values = rows[start : start + step].float()
        if rotation:
            values = rotate(values.view(-1, rotation), rotation).view(-1, width)
        yield slice(start, start + step), values


@torch.no_grad()
def amax(x: Tensor, rotation: int = 0) -> Tensor:
    """The largest magnitude among the finite elements of x, after the rotation if one is named: (...) -> () fp32.

    0 where there is none. A tensor that is not contiguous may be copied; other temporaries are bounded.
    """
    largest = torch.zeros((), dtype=torch.float32, device=x.device)
    if x.numel():
        for _, values in _chunks(x, rotation or 1, rotation):
            largest = torch.maximum(largest, _finite_magnitude(values).amax())
    return largest


def global_scale_from_amax(amax: Tensor, scale_rule: str = "absmax") -> Tensor:
    """NVFP4's automatic global_scale: amax / (6 * TOP_SCALE[scale_rule]), at least 2^-126; fp32 of any shape."""
    amax = amax.float()
    # A tensor, not a number: CUDA would multiply by the number's reciprocal, which rounds differently.
    divisor = torch.full_like(amax, E2M1_MAX * TOP_SCALE[scale_rule])
    return (amax / divisor).clamp(min=SMALLEST_GLOBAL_SCALE)


def check_arguments(
    x: Tensor,
    format: Format | str,
    scale_rule: str | None,
    global_scale: Tensor | float | None,
    block_dim: int,
    rotation: int,
) -> tuple[Tensor, Format, str, Tensor | None]:
    """What `quantize` takes, checked: x with its block dimension last, the Format, the rule, global_scale in fp32."""
    op, format = "quantize", as_format(format)
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{op}: x is {got}, need a tensor of {', '.join(map(str, DTYPES))}")
    if not -x.ndim <= block_dim < x.ndim:
        raise ValueError(
            f"{op}: block_dim {block_dim} of a tensor of shape {tuple(x.shape)}, need one of its dimensions"
        )
    scale_rule = format.scale_rules[0] if scale_rule is None else scale_rule
    if scale_rule not in RULES[format]:
        raise ValueError(f"{op}: scale_rule {scale_rule!r} is unknown; {format} has {', '.join(format.scale_rules)}")
    x = x.movedim(block_dim, -1)
    K = x.shape[-1]
    format.check_K(op, K)
    if rotation and (rotation not in ROTATIONS or K % rotation):
        raise ValueError(
            f"{op}: rotation {rotation!r} of K = {K}, need 0 or a divisor of K among {', '.join(map(str, ROTATIONS))}"
        )
    if global_scale is None:
        return x, format, scale_rule, None
    if not format.has_global_scale:
        raise ValueError(f"{op}: {format} has no global_scale, got {global_scale}")
    if not isinstance(global_scale, Tensor | Real):
        raise TypeError(f"{op}: global_scale is a {type(global_scale).__name__}, need a Tensor or a number")
    if isinstance(global_scale, Tensor) and global_scale.is_meta and not x.is_meta:
        raise ValueError(f"{op}: x is on {x.device}, global_scale on {global_scale.device}")
    given = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device).detach()
    if given.shape != x.shape[:-2]:
        if given.numel() != 1:
            raise ValueError(f"{op}: global_scale has shape {tuple(given.shape)}, need () or {tuple(x.shape[:-2])}")
        given = given.reshape(())
    if not (torch.compiler.is_compiling() or given.is_meta) and not ((given > 0) & given.isfinite()).all():
        raise ValueError(f"{op}: global_scale is {global_scale}, need positive and finite numbers")
    return x, format, scale_rule, given


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
) -> ScaledTensor:
    """The block-scaled tensor nearest to x under a scale rule.

    Parameters
    ----------
    x : (..., N, K) or (K,), fp32, bf16 or fp16, of any strides. Computed from its exact values in fp32.
    format : NVFP4 or MXFP4, or the name.
    scale_rule : one of format.scale_rules; None takes the first.
    global_scale : NVFP4 only. A positive number, one for the tensor () or one a matrix (x.shape[:-2]): a static scale,
        under which larger blocks saturate. None derives () from amax(x).
    block_dim : the dimension that is cut into blocks. The result has it last, the others in their order.
    strict : raise where x has a NaN or Inf. Otherwise its block gets a NaN scale and codes 0; no other block changes.
    rotation : 16, 32, 64 or 128 rotates x along K first (`rotate`); recorded, and undone by `dequantize`.

    Returns
    -------
    ScaledTensor of logical shape (..., N, K) in LINEAR layouts, on x's device.

    Raises
    ------
    TypeError for other dtypes; ValueError for an unknown rule or size, a K that is not whole blocks, a global_scale
    that is not positive and finite or does not fit, and, if strict, for blocks with a NaN or Inf.

    >>> quantize(torch.full((2, 32), 0.01), "nvfp4")
    ScaledTensor(nvfp4, shape=(2, 32), layout=LINEAR, global_scale=3.72024e-06, scale_rule='absmax')
    """
    op = "quantize"
    x, format, scale_rule, given = check_arguments(x, format, scale_rule, global_scale, block_dim, rotation)
    global_scale = _global_scale(x, format, scale_rule, given, rotation)
    K, block_size = x.shape[-1], format.block_size

    data = torch.empty(*x.shape[:-1], K // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(*x.shape[:-1], K // block_size, dtype=torch.uint8, device=x.device)
    packed_blocks, scales = data.view(-1, block_size // 2), scale.view(-1)
    multipliers = _expand(global_scale, scale).reshape(-1)
    not_finite = torch.zeros((), dtype=torch.int64, device=x.device)
    for part, values in _chunks(x, block_size, rotation):
        multiplier = multipliers[part]
        magnitude = _finite_magnitude(values)
        code = RULES[format][scale_rule](magnitude, magnitude.amax(-1), multiplier)
        bad = ~values.isfinite().all(-1)
        not_finite += bad.sum()
        code.masked_fill_(bad, format.scale_code.nan)
        divisor = (format.scale_code.decode(code) * multiplier).unsqueeze(-1)
        # A scale of 0 or NaN holds no value.
        packed_blocks[part] = pack(e2m1_encode(values / divisor).masked_fill_(~(divisor > 0), 0))
        scales[part] = code
    if strict and not_finite:
        raise ValueError(f"{op}: {int(not_finite)} of {scales.numel()} blocks hold a NaN or Inf (strict=True)")
    return ScaledTensor(
        data,
        scale,
        format,
        global_scale if format.has_global_scale else None,
        scale_rule=scale_rule,
        rotation=rotation,
    )


@torch.no_grad()
def dequantize(w: ScaledTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values code * (scale * global_scale) of a tensor in any layout, rotated back: (..., N, K) of dtype.

    Computed in fp32 and narrowed once; dtype is fp32, bf16, fp16 or fp64. Temporaries are bounded.

    >>> dequantize(quantize(torch.full((1, 16), -3.0), "nvfp4"))[0, :2]
    tensor([-3., -3.])
    """
    if not isinstance(w, ScaledTensor):
        raise TypeError(f"dequantize: w is a {type(w).__name__}, need a ScaledTensor")
    if dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"dequantize: dtype {dtype}, need one of {', '.join(map(str, DTYPES))} or torch.float64")
    block_size = w.format.block_size
    scale = w.linear_scale
    multipliers = w.format.scale_code.decode(scale).mul_(
        1.0 if w.global_scale is None else _expand(w.global_scale, scale)
    )
    multipliers, packed_blocks = multipliers.reshape(-1, 1), w.linear_data.reshape(-1, block_size // 2)
    out = torch.empty(w.shape, dtype=dtype, device=w.device)
    blocks = out.view(-1, block_size)
    step = CHUNK // block_size
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        values = e2m1_decode(unpack(packed_blocks[part])).mul_(multipliers[part])
        if w.rotation:
            values = rotate(values.view(-1, w.rotation), w.rotation).view(-1, block_size)
        blocks[part] = values
    return out


def _finite_magnitude(values: Tensor) -> Tensor:
    """|x|, with 0 for what is not finite."""
    magnitude = values.abs()
    return magnitude.masked_fill_(magnitude.isfinite().logical_not_(), 0.0)


def _expand(global_scale: Tensor, scale: Tensor) -> Tensor:
    """global_scale, () or one a matrix, as a view of the shape of scale."""
    return global_scale.reshape(*global_scale.shape, *(1,) * (scale.ndim - global_scale.ndim)).expand(scale.shape)


def _global_scale(x: Tensor, format: Format, scale_rule: str, given: Tensor | None, rotation: int) -> Tensor:
    """The fp32 multiplier of the tensor, () or x.shape[:-2]; 1 where the format has none."""
    if not format.has_global_scale:
        return torch.ones((), dtype=torch.float32, device=x.device)
    return global_scale_from_amax(amax(x, rotation), scale_rule) if given is None else given
