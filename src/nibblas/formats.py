"""What the 4-bit block-scaled formats are: every fact about codes and values is stated here and nowhere else.

A block-scaled tensor stores one e2m1 code per element and one scale code per block of `block_size` elements along K:
`value = e2m1 * (scale * global_scale)`, the bracket in fp32. docs/formats.md gives the same bit by bit.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# e2m1: a sign, two exponent bits, one mantissa bit.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E2M1_VALUES = E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES)  # index is the code; code 8 is -0.0
# Halfway points between neighbours, and whether the code below a midpoint is even (then the tie goes down).
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Sizes of the block Hadamard rotation that values may go through before they are quantized.
ROTATIONS = (16, 32, 64, 128)


def _e2m1_table(device: torch.device) -> Tensor:
    return torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)


_kept_e2m1_table = cache(_e2m1_table)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Values of e2m1 codes: (...) integers 0..15 -> (...) fp32."""
    # What a trace makes must not outlive it, and a trace takes no tensor from before it.
    traced = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    table = _e2m1_table(codes.device) if traced else _kept_e2m1_table(codes.device)
    return table[codes.int()]


def e2m1_encode(values: Tensor) -> Tensor:
    """Codes nearest to the values, ties to even, saturating at 6: (...) float -> (...) uint8 in 0..15.

    The sign bit is kept, so -0.0 and everything that rounds to it from below becomes code 8. A NaN has no code:
    the caller marks its block (docs/formats.md, "NaN and Inf").
    """
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for below, midpoint in enumerate(E2M1_MIDPOINTS):
        rounds_up = magnitude > midpoint if below % 2 == 0 else magnitude >= midpoint
        code += rounds_up
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, even k in the low nibble: (..., K) uint8 -> (..., K/2) uint8."""
    if codes.dtype != torch.uint8:
        raise TypeError(f"pack: codes have dtype {codes.dtype}, need torch.uint8")
    if codes.shape[-1] % 2:
        raise ValueError(f"pack: the last dimension is {codes.shape[-1]}, need an even number of codes")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(data: Tensor) -> Tensor:
    """The codes of packed bytes: (..., K/2) uint8 -> (..., K) uint8."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True)
class ScaleCode:
    """An 8-bit code for block scales, stored as raw bytes (uint8)."""

    name: str
    dtype: torch.dtype  # the torch dtype with the same bits
    one: int  # the code of 1.0
    nan: int  # the code written for NaN
    largest: int  # the code of the largest finite value
    max: float  # the largest finite value

    def __repr__(self) -> str:
        return self.name

    def decode(self, codes: Tensor) -> Tensor:
        """Values of the codes, exact: (...) uint8 -> (...) fp32."""
        if self == E8M0:
            # Read as the exponent field of fp32, except for 2^-127, which is an fp32 subnormal, and NaN.
            bits = codes.to(torch.int32) << 23
            bits = torch.where(codes == 0, 0x00400000, bits)
            return torch.where(codes == self.nan, 0x7FC00000, bits).view(torch.float32)
        return codes.view(self.dtype).float()

    def is_nan(self, codes: Tensor) -> Tensor:
        """Where a code is NaN: (...) uint8 -> (...) bool."""
        return codes == 0xFF if self == E8M0 else (codes & 0x7F) == 0x7F


E4M3 = ScaleCode("e4m3", torch.float8_e4m3fn, one=0x38, nan=0x7F, largest=0x7E, max=448.0)
E8M0 = ScaleCode("e8m0", torch.float8_e8m0fnu, one=127, nan=0xFF, largest=254, max=2.0**127)


def e4m3_encode(values: Tensor) -> Tensor:
    """e4m3 codes nearest to the values, ties to even, clamped to +-448 first; NaN gives 0x7F: (...) fp32 -> uint8."""
    clamped = values.clamp(-E4M3.max, E4M3.max)
    return torch.where(values.isnan(), E4M3.nan, clamped.to(torch.float8_e4m3fn).view(torch.uint8))


@dataclass(frozen=True)
class Format:
    """A block-scaled format: e2m1 elements, `block_size` of which along K share one scale.

    >>> NVFP4
    nvfp4
    >>> NVFP4.block_size, NVFP4.scale_code, NVFP4.has_global_scale
    (16, e4m3, True)
    """

    name: str
    block_size: int
    scale_code: ScaleCode
    has_global_scale: bool
    scale_rules: tuple[str, ...]  # the first one is the default

    def __repr__(self) -> str:
        return self.name

    @property
    def bits_per_element(self) -> float:
        """Bits an element costs with its share of the scale."""
        return 4 + 8 / self.block_size

    def check_K(self, op: str, K: int) -> None:
        """Raise unless K is a whole number of blocks; `op` names the operation in the message."""
        if K % self.block_size:
            raise ValueError(
                f"{op}: K = {K} is not a multiple of {self.name}'s block_size {self.block_size}; "
                f"pad K with zeros to {-(-K // self.block_size) * self.block_size}"
            )


NVFP4 = Format("nvfp4", 16, E4M3, has_global_scale=True, scale_rules=("absmax", "four_over_six", "search"))
MXFP4 = Format("mxfp4", 32, E8M0, has_global_scale=False, scale_rules=("even", "floor", "rceil", "search"))
FORMATS = {format.name: format for format in (NVFP4, MXFP4)}


def as_format(format: Format | str) -> Format:
    """The Format itself, or the one of that name."""
    if isinstance(format, Format):
        return format
    try:
        return FORMATS[format.lower()]
    except (KeyError, AttributeError):
        raise ValueError(f"format {format!r} is unknown; formats are {', '.join(FORMATS)}") from None
