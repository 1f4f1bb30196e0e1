"""How a matrix of bytes (block scales, or packed codes) lies in memory.

A `TiledLayout` cuts the matrix into tiles and, inside a tile, writes the digits of the row and column index in another
order. All else (padded shape, offset, conversion, its inverse) follows from those digits, so that no two consumers can
disagree about a formula. Padding is written as zero and never read as data.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
        if stored.shape[-2:] != self.shape(rows, cols):
            raise ValueError(
                f"{self.name}: a ({rows}, {cols}) matrix is stored as {self.shape(rows, cols)}, "
                f"got {tuple(stored.shape[-2:])}"
            )
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

LAYOUTS = {layout.name: layout for layout in (LINEAR, BLOCKED_128x4, CDNA_32x8, SHUFFLED_16x16, ROWS_16x4, ROWS_16x1)}


def as_layout(layout: TiledLayout | str) -> TiledLayout:
    """The layout itself, or the one of that name."""
    if isinstance(layout, TiledLayout):
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
