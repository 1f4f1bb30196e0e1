"""How a matrix of bytes (block scales, or packed codes) lies in memory.

A `TiledLayout` cuts the matrix into tiles and, inside a tile, writes the digits of the row and column index in another
order. All else (padded shape, offset, conversion, its inverse) follows from those digits, so that no two consumers can
disagree about a formula. Padding is written as zero and never read as data.

`FragmentCodes` and `FragmentScales` have the same face, and store what a tensor core's operand registers want: there
the bits of a word move, and scales take another code.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nibblas.formats import E4M3, E8M0, MXFP4, NVFP4, Format, e4m3_encode, unpack


@dataclass(frozen=True)
class TiledLayout:
    """A matrix as tiles, row of tiles by row of tiles, each a permutation of its bytes.

    `row_digits` and `col_digits` are the radices, slowest first, into which an index inside the tile is split;
    `order` lists those digits (rows first, then columns) from the slowest to the fastest in memory.

    >>> BLOCKED_128x4.offset(129, 4, cols=5)
    1552
    """

    name: str
    row_digits: tuple[int, ...]
    col_digits: tuple[int, ...]
    order: tuple[int, ...]

    def __repr__(self) -> str:
        return self.name

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of one tile."""
        return math.prod(self.row_digits), math.prod(self.col_digits)

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """The stored shape of a (rows, cols) matrix: both rounded up to whole tiles."""
        tile_rows, tile_cols = self.tile
        return -(-rows // tile_rows) * tile_rows, -(-cols // tile_cols) * tile_cols

    def offset(self, row: int, col: int, *, cols: int) -> int:
        """Where element (row, col) of a matrix with `cols` columns lies, in bytes from its start."""
        if row < 0 or not 0 <= col < cols:
            raise IndexError(f"{self}: no element ({row}, {col}) in a matrix of {cols} columns")
        tile_rows, tile_cols = self.tile
        tiles_across = -(-cols // tile_cols)
        tile_index = (row // tile_rows) * tiles_across + col // tile_cols
        digits = _split(row % tile_rows, self.row_digits) + _split(col % tile_cols, self.col_digits)
        radices = self.row_digits + self.col_digits
        inside = 0
        for digit in self.order:
            inside = inside * radices[digit] + digits[digit]
        return tile_index * tile_rows * tile_cols + inside

    def to(self, matrix: Tensor) -> Tensor:
        """Store a plain matrix in this layout: (..., rows, cols) -> (..., padded rows, padded cols)."""
        _check_matrix(self, matrix)
        if self == LINEAR:
            return matrix
        batch, (rows, cols) = matrix.shape[:-2], matrix.shape[-2:]
        padded_rows, padded_cols = self.shape(rows, cols)
        if (padded_rows, padded_cols) != (rows, cols):
            matrix = torch.nn.functional.pad(matrix, (0, padded_cols - cols, 0, padded_rows - rows))
        tile_rows, tile_cols = self.tile
        split = matrix.reshape(
            *batch, padded_rows // tile_rows, *self.row_digits, padded_cols // tile_cols, *self.col_digits
        )
        return split.permute(self._forward(len(batch))).reshape(*batch, padded_rows, padded_cols)

    def from_(self, stored: Tensor, rows: int, cols: int) -> Tensor:
        """The plain (..., rows, cols) matrix of one stored in this layout; the inverse of `to`."""
        _check_stored(self, stored, rows, cols)
        if self == LINEAR:
            return stored
        batch = stored.shape[:-2]
        padded_rows, padded_cols = stored.shape[-2:]
        tile_rows, tile_cols = self.tile
        radices = self.row_digits + self.col_digits
        split = stored.reshape(
            *batch, padded_rows // tile_rows, padded_cols // tile_cols, *(radices[digit] for digit in self.order)
        )
        forward = self._forward(len(batch))
        backward = sorted(range(len(forward)), key=forward.__getitem__)
        return split.permute(backward).reshape(*batch, padded_rows, padded_cols)[..., :rows, :cols].contiguous()

    def canonical(self, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of the same values, both row after row, that this layout of scales can hold: here any."""
        return data, scale

    def _forward(self, batch: int) -> list[int]:
        """The permutation from (batch, tile row, row digits, tile column, column digits) to the stored order."""
        row_positions = [batch + 1 + i for i in range(len(self.row_digits))]
        tile_col = batch + 1 + len(self.row_digits)
        positions = row_positions + [tile_col + 1 + i for i in range(len(self.col_digits))]
        return [*range(batch), batch, tile_col, *(positions[digit] for digit in self.order)]


def _split(index: int, radices: tuple[int, ...]) -> tuple[int, ...]:
    digits = []
    for radix in reversed(radices):
        digits.append(index % radix)
        index //= radix
    return tuple(reversed(digits))


@dataclass(frozen=True)
class FragmentCodes:
    """Packed codes as a warp's registers take them for mma m16n8k16 (and wgmma), weights as operand A.

    A tile is 16 rows by 128 columns: two runs of 16 bytes for each of the 32 lanes. Lane 4g + t holds rows g and g + 8
    of a scale block of its own (the t-th block of each 64 columns for NVFP4, of the 128 for MXFP4), in words of eight
    codes: (g, k), (g, k+1), (g+8, k), (g+8, k+1), (g, k+2), (g, k+3), (g+8, k+2), (g+8, k+3) for k a multiple of 4.
    Of a word x, with m = 0x81C081C0, the pairs in that order are x & m, (x << 4) & m, rotate_right(x, 6) & m and
    ((x << 6) ^ (x >> 2)) & m: each two bf16 numbers, 2^-126 times the code's value.
    """

    name: str
    format: Format

    def __repr__(self) -> str:
        return self.name

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """The stored shape of (rows, cols) packed codes: rows rounded up to 16, columns to 64."""
        return _round_up(rows, 16), _round_up(cols, 64)

    def to(self, matrix: Tensor) -> Tensor:
        """Store packed codes: (..., rows, cols) uint8 -> (..., padded rows, padded cols) uint8."""
        _check_matrix(self, matrix)
        padded = _pad(matrix, self.shape(*matrix.shape[-2:]))
        *batch, rows, cols = padded.shape
        codes = unpack(padded).reshape(*batch, rows // 16, 2, 8, cols // 64, *self._digits)
        # [..., tile, chunk, half, g, t, word, k / 2 % 2, row half, k % 2]
        codes = codes.permute(self._forward(len(batch))).flatten(-3).long()
        fields = (codes & 8) << 12 | (codes & 7) << 6
        pair = [fields[..., 2 * i] | fields[..., 2 * i + 1] << 16 for i in range(4)]
        word = pair[0] | pair[1] >> 4 | _rotate_left(pair[2], 6)
        for bit, of_pair, known in _FOURTH_PAIR:
            word |= ((pair[3] >> of_pair ^ (word >> known if known is not None else 0)) & 1) << bit
        return word.int().view(torch.uint8).reshape(*batch, rows, cols)

    def from_(self, stored: Tensor, rows: int, cols: int) -> Tensor:
        """The packed codes row after row; the inverse of `to`."""
        _check_stored(self, stored, rows, cols)
        *batch, padded_rows, padded_cols = stored.shape
        word = stored.contiguous().view(torch.int32).long() & 0xFFFFFFFF
        pairs = (word, word << 4, _rotate_left(word, 26), word << 6 ^ word >> 2)
        fields = torch.stack([half for pair in pairs for half in (pair, pair >> 16)], dim=-1)
        codes = ((fields >> 12 & 8) | (fields >> 6 & 7)).to(torch.uint8)
        radices = (2, 8, 4, 4, 2, 2, 2)
        codes = codes.reshape(*batch, padded_rows // 16, padded_cols // 64, *radices)
        forward = self._forward(len(batch))
        codes = codes.permute(sorted(range(len(forward)), key=forward.__getitem__)).reshape(*batch, padded_rows, -1, 2)
        return (codes[..., 0] | codes[..., 1] << 4)[..., :rows, :cols].contiguous()

    def canonical(self, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """As TiledLayout's: a layout of codes asks nothing of scales."""
        return data, scale

    @property
    def _digits(self) -> tuple[int, ...]:
        """Radices of a column in its chunk: half, t, word for NVFP4; t, half, word for MXFP4; then k / 2 % 2, k % 2."""
        return (2, 4, 4, 2, 2) if self.format == NVFP4 else (4, 2, 4, 2, 2)

    def _forward(self, batch: int) -> list[int]:
        """The permutation from (batch, tile, row half, g, chunk, column digits) to the stored order."""
        half, t = (4, 5) if self.format == NVFP4 else (5, 4)
        return [*range(batch), *(batch + i for i in (0, 3, half, 2, t, 6, 7, 1, 8))]


@dataclass(frozen=True)
class FragmentScales:
    """Block scales beside `FragmentCodes`: of each tile of 16 rows by 128 columns, the scales of lane after lane.

    NVFP4: a lane's four scales (row g, both halves; row g + 8, both halves) in a word, rotated left by 4. The code is
    e5m3 without sign, value (1 + m/8) * 2^(e-22), NaN 0xFF, so that (x & 0x0FF00FF0) | 0x70007000 is a pair of bf16.
    It has no zero and no sign: see `canonical`.
    MXFP4: a lane's two scales (rows g and g + 8), each the e8m0 byte less its row's largest plus 254, NaN 0xFF; after
    the chunks of 16 rows, their largest bytes.
    """

    name: str
    format: Format

    def __repr__(self) -> str:
        return self.name

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Rows rounded up to 16, columns to whole chunks of 128 elements, and for MXFP4 one more."""
        return _round_up(rows, 16), _round_up(cols, 128 // self.format.block_size) + (self.format == MXFP4)

    def to(self, matrix: Tensor) -> Tensor:
        """Store scale codes: (..., rows, cols) uint8 -> (..., *shape) uint8; ValueError for a negative e4m3 scale."""
        _check_matrix(self, matrix)
        rows, cols = matrix.shape[-2:]
        padded_rows, padded_cols = self.shape(rows, cols)
        *batch, _, _ = matrix.shape
        if self.format == NVFP4:
            if ((matrix >= 0x80) & (matrix != 0xFF)).any():
                raise ValueError(f"{self}: scales are negative, need them folded into the codes (see canonical)")
            stored = _pad(_e5m3_of_e4m3(matrix), (padded_rows, padded_cols))
            tiles = stored.reshape(*batch, padded_rows // 16, 2, 8, padded_cols // 8, 2, 4)
            # [..., tile, chunk, g, t, row half, half]
            lanes = tiles.permute(*range(len(batch)), *(len(batch) + i for i in (0, 3, 2, 5, 1, 4)))
            lanes = lanes.flatten(-2).contiguous()
            words = _rotate_left(lanes.view(torch.int32).long() & 0xFFFFFFFF, 4)
            return words.int().view(torch.uint8).reshape(*batch, padded_rows, padded_cols)
        largest = _largest(matrix)
        relative = torch.where(matrix == E8M0.nan, E8M0.nan, matrix.int() - largest + 254).to(torch.uint8)
        stored = _pad(relative, (padded_rows, padded_cols - 1))
        tiles = stored.reshape(*batch, padded_rows // 16, 2, 8, (padded_cols - 1) // 4, 4)
        # [..., tile, chunk, g, t, row half]
        lanes = tiles.permute(*range(len(batch)), *(len(batch) + i for i in (0, 3, 2, 4, 1)))
        lanes = lanes.reshape(*batch, padded_rows // 16, 16 * (padded_cols - 1))
        reference = _pad(largest.to(torch.uint8), (padded_rows, 1)).reshape(*batch, padded_rows // 16, 16)
        return torch.cat((lanes, reference), dim=-1).reshape(*batch, padded_rows, padded_cols)

    def from_(self, stored: Tensor, rows: int, cols: int) -> Tensor:
        """The scale codes row after row; the inverse of `to`."""
        _check_stored(self, stored, rows, cols)
        *batch, padded_rows, padded_cols = stored.shape
        kept = list(range(len(batch)))
        if self.format == NVFP4:
            words = stored.contiguous().view(torch.int32).long() & 0xFFFFFFFF
            lanes = _rotate_left(words, 28).int().view(torch.uint8)
            lanes = lanes.reshape(*batch, padded_rows // 16, padded_cols // 8, 8, 4, 2, 2)
            codes = lanes.permute(*kept, *(len(batch) + i for i in (0, 4, 2, 1, 5, 3)))
            codes = codes.reshape(*batch, padded_rows, padded_cols)[..., :rows, :cols]
            return _e4m3_of_e5m3(codes)
        tiles = stored.reshape(*batch, padded_rows // 16, 16 * padded_cols)
        largest = tiles[..., -16:].reshape(*batch, padded_rows, 1).int()
        lanes = tiles[..., :-16].reshape(*batch, padded_rows // 16, (padded_cols - 1) // 4, 8, 4, 2)
        relative = lanes.permute(*kept, *(len(batch) + i for i in (0, 4, 2, 1, 3)))
        relative = relative.reshape(*batch, padded_rows, padded_cols - 1)
        codes = torch.where(relative == E8M0.nan, E8M0.nan, relative.int() + largest - 254)
        return codes.to(torch.uint8)[..., :rows, :cols].contiguous()

    def canonical(self, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of the same values, row after row, that this layout can hold.

        NVFP4: a negative scale gives its sign to the codes; under a zero scale the codes become zero.
        MXFP4: under a NaN scale the codes become zero (Inf times them is NaN); a scale over zero codes only is at most
        the largest of its row's others.
        """
        block_bytes = self.format.block_size // 2
        blocks = data.unflatten(-1, (scale.shape[-1], block_bytes))
        if self.format == NVFP4:
            negative, nan = (scale & 0x80) != 0, E4M3.is_nan(scale)
            blocks = torch.where((negative & ~nan).unsqueeze(-1), blocks ^ 0x88, blocks)
            blocks = torch.where(((scale & 0x7F) == 0).unsqueeze(-1), blocks & 0x88, blocks)
            return blocks.flatten(-2), torch.where(nan, E4M3.nan, scale & 0x7F)
        nan = scale == E8M0.nan
        zero = ((blocks & 0x77) == 0).all(-1) & ~nan
        largest = _largest(torch.where(zero, E8M0.nan, scale))
        blocks = torch.where(nan.unsqueeze(-1), 0, blocks)
        return blocks.flatten(-2), torch.where(zero, torch.minimum(scale, largest.to(torch.uint8)), scale)


# Where the bits of a word that only the fourth pair uses come from: (bit, bit of the pair, bit of the word in xor).
_FOURTH_PAIR = ((25, 31, None), (26, 24, 18), (17, 23, 25), (16, 22, 24), (9, 15, 17), (10, 8, 2), (1, 7, 9), (0, 6, 8))


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _pad(matrix: Tensor, shape: tuple[int, int]) -> Tensor:
    rows, cols = matrix.shape[-2:]
    return torch.nn.functional.pad(matrix, (0, shape[1] - cols, 0, shape[0] - rows))


def _rotate_left(words: Tensor, n: int) -> Tensor:
    """32-bit words held in int64."""
    return (words << n | words >> 32 - n) & 0xFFFFFFFF


def _check_matrix(layout: "Layout", matrix: Tensor) -> None:
    if matrix.ndim < 2:
        raise ValueError(f"{layout}: the matrix has shape {tuple(matrix.shape)}, need (..., rows, cols)")


def _check_stored(layout: "Layout", stored: Tensor, rows: int, cols: int) -> None:
    if stored.shape[-2:] != layout.shape(rows, cols):
        raise ValueError(
            f"{layout.name}: a ({rows}, {cols}) matrix is stored as {layout.shape(rows, cols)}, "
            f"got {tuple(stored.shape[-2:])}"
        )


def _largest(scale: Tensor) -> Tensor:
    """Each row's largest e8m0 byte that is not NaN, 127 where there is none: (..., rows, cols) -> (..., rows, 1)."""
    finite = torch.where(scale == E8M0.nan, -1, scale.int())
    none = torch.full_like(finite[..., :1], -1)
    largest = torch.cat((finite, none), dim=-1).amax(-1, keepdim=True)
    return torch.where(largest < 0, E8M0.one, largest)


def _e5m3_of_e4m3(codes: Tensor) -> Tensor:
    """e5m3 codes (exponent bias 22) of e4m3 codes without sign: uint8 -> uint8. Zero, which e5m3 lacks, becomes 0."""
    mantissa, exponent = torch.frexp(E4M3.decode(codes & 0x7F))  # 0.5 <= mantissa < 1
    encoded = (exponent + 21) << 3 | (mantissa * 16 - 8).nan_to_num().int()
    encoded = torch.where((codes & 0x7F) == 0, 0, encoded)
    return torch.where(E4M3.is_nan(codes), 0xFF, encoded).to(torch.uint8)


def _e4m3_of_e5m3(codes: Tensor) -> Tensor:
    """The inverse of _e5m3_of_e4m3; 2^-22, what code 0 would be in e5m3, rounds to 0 in e4m3."""
    values = ((codes.int() << 20) + (105 << 23)).view(torch.float32)
    return torch.where(codes == 0xFF, E4M3.nan, e4m3_encode(values))


Layout = TiledLayout | FragmentCodes | FragmentScales

# Row after row: what checkpoints hold (packed codes too).
LINEAR = TiledLayout("LINEAR", (1,), (1,), (0, 1))

# Block scales as cuBLAS and CUTLASS take them for tcgen05 and mma block scaling: tiles of 128 rows by 4 scales.
BLOCKED_128x4 = TiledLayout("BLOCKED_128x4", (4, 32), (4,), (1, 0, 2))

# Block scales as AITER's CDNA4 kernels take them ("e8m0 shuffle"): tiles of 32 rows by 8 scales.
CDNA_32x8 = TiledLayout("CDNA_32x8", (2, 16), (2, 4), (3, 1, 2, 0))

# Packed codes as AITER's CDNA4 kernels take them ("(16,16) weight shuffle"): tiles of 16 rows by 32 bytes.
SHUFFLED_16x16 = TiledLayout("SHUFFLED_16x16", (16,), (2, 16), (1, 0, 2))

# Packed codes and block scales for CPU vectors of 16 lanes, a row a lane: 4 bytes (8 codes) or one scale of each row.
ROWS_16x4 = TiledLayout("ROWS_16x4", (16,), (4,), (0, 1))
ROWS_16x1 = TiledLayout("ROWS_16x1", (16,), (1,), (0, 1))

# Packed codes and block scales for tensor cores that take bf16: as the registers of mma's operand A.
FRAGMENTS_NVFP4, FRAGMENTS_MXFP4 = (FragmentCodes(f"FRAGMENTS_{f.name.upper()}", f) for f in (NVFP4, MXFP4))
FRAGMENT_SCALES_NVFP4, FRAGMENT_SCALES_MXFP4 = (
    FragmentScales(f"FRAGMENT_SCALES_{f.name.upper()}", f) for f in (NVFP4, MXFP4)
)

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        LINEAR,
        BLOCKED_128x4,
        CDNA_32x8,
        SHUFFLED_16x16,
        ROWS_16x4,
        ROWS_16x1,
        FRAGMENTS_NVFP4,
        FRAGMENTS_MXFP4,
        FRAGMENT_SCALES_NVFP4,
        FRAGMENT_SCALES_MXFP4,
    )
}


def as_layout(layout: Layout | str) -> Layout:
    """The layout itself, or the one of that name."""
    if isinstance(layout, Layout):
        return layout
    try:
        return LAYOUTS[layout]
    except (KeyError, TypeError):
        raise ValueError(f"layout {layout!r} is unknown; layouts are {', '.join(LAYOUTS)}") from None


def contest_view(stored: Tensor) -> Tensor:
    """BLOCKED_128x4 scales as the contest's six-dimensional view, without a copy.

    (L, 128*rest_m, 4*rest_k) contiguous -> (32, 4, rest_m, 4, rest_k, L), whose element [i, j, m, c, k, l] is the scale
    of row 128*m + 32*j + i and scale column 4*k + c of batch l.
    """
    if stored.ndim != 3 or stored.shape[1] % 128 or stored.shape[2] % 4:
        raise ValueError(f"contest_view: shape {tuple(stored.shape)}, need (L, a multiple of 128, a multiple of 4)")
    L, rows, cols = stored.shape
    # [l, m, k, i, j, c]
    return stored.view(L, rows // 128, cols // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def from_contest_view(view: Tensor) -> Tensor:
    """The (L, 128*rest_m, 4*rest_k) BLOCKED_128x4 scales under the contest's view; copies only if it must."""
    if view.ndim != 6 or (view.shape[0], view.shape[1], view.shape[3]) != (32, 4, 4):
        raise ValueError(f"from_contest_view: shape {tuple(view.shape)}, need (32, 4, rest_m, 4, rest_k, L)")
    _, _, rest_m, _, rest_k, L = view.shape
    return view.permute(5, 2, 4, 0, 1, 3).reshape(L, rest_m * 128, rest_k * 4)
