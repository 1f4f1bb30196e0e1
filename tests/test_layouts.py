"""Layouts: the offset formula is what `to` does, inverses are exact, padding is zero and never read."""

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nibblas.layouts
from nibblas.formats import NVFP4
from nibblas.layouts import (
    LAYOUTS,
    LINEAR,
    BLOCKED_128x4,
    CDNA_32x8,
    ROWS_16x1,
    ROWS_16x4,
    SHUFFLED_16x16,
    TiledLayout,
    as_layout,
    contest_view,
    from_contest_view,
)
from nibblas.quantize import quantize

TILED = [layout for layout in LAYOUTS.values() if isinstance(layout, TiledLayout)]
layouts = st.sampled_from(TILED)


def numbered(*shape: int) -> torch.Tensor:
    """Elements 1, 2, ...: each is unique, and none is padding's zero."""
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.int32).view(shape)


@given(layouts, st.integers(0, 300), st.integers(0, 70))
@settings(deadline=None, max_examples=60)
def test_offset_is_where_to_puts_an_element(layout, rows, cols):
    matrix = numbered(rows, cols)
    stored = layout.to(matrix)
    assert stored.shape == layout.shape(rows, cols)
    for row in range(0, rows, max(1, rows // 13)):
        for col in range(0, cols, max(1, cols // 13)):
            assert stored.flatten()[layout.offset(row, col, cols=cols)] == matrix[row, col]


@given(layouts, st.lists(st.integers(0, 3), max_size=2), st.integers(0, 300), st.integers(0, 70))
@settings(deadline=None, max_examples=60)
def test_from_is_the_inverse_of_to(layout, batch, rows, cols):
    matrix = numbered(*batch, rows, cols)
    stored = layout.to(matrix)
    assert torch.equal(layout.from_(stored, rows, cols), matrix)
    # Nothing lost, nothing doubled; the rest is zero.
    assert torch.equal(stored.flatten().sort().values[stored.numel() - matrix.numel() :], matrix.flatten())
    assert (stored != 0).sum() == matrix.numel()


@given(layouts, st.integers(1, 200), st.integers(1, 70))
@settings(deadline=None, max_examples=30)
def test_padding_is_never_read(layout, rows, cols):
    matrix = numbered(rows, cols)
    stored = layout.to(matrix)
    stored[stored == 0] = -1
    assert torch.equal(layout.from_(stored, rows, cols), matrix)


@pytest.mark.parametrize("layout", TILED, ids=str)
def test_a_batch_is_its_matrices_one_after_the_other(layout):
    batch = numbered(3, 33, 9)
    assert torch.equal(layout.to(batch), torch.stack([layout.to(matrix) for matrix in batch]))


@pytest.mark.parametrize("layout", TILED, ids=str)
def test_transposed_input(layout):
    matrix = numbered(9, 33).T
    assert torch.equal(layout.to(matrix), layout.to(matrix.contiguous()))


def test_blocked_offsets():
    at = BLOCKED_128x4.offset
    assert [at(1, 0, cols=4), at(1, 1, cols=4), at(32, 0, cols=4), at(127, 3, cols=4), at(128, 0, cols=4)] == [
        16,
        17,
        4,
        511,
        512,
    ]
    assert at(129, 4, cols=5) == 1552
    for row in range(300):
        for col in range(9):
            formula = ((row // 128) * 3 + col // 4) * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + col % 4
            assert at(row, col, cols=9) == formula


def test_blocked_scales_of_a_small_quantized_tensor_are_zero_padded():
    """M = 5, K = 80: 25 scales in 128 x 8 bytes."""
    w = quantize(torch.ones(5, 80), NVFP4).with_layout(BLOCKED_128x4)
    assert w.scale.shape == (128, 8)
    assert (w.scale != 0).sum() == 25


def test_cdna_offsets():
    at = CDNA_32x8.offset
    positions = ((0, 0), (16, 0), (0, 4), (16, 4), (1, 0), (0, 1))
    assert [at(row, col, cols=8) for row, col in positions] == [0, 1, 2, 3, 4, 64]


@pytest.mark.parametrize("K", [1664, 1824, 1856])
def test_cdna_columns_are_padded_on_both_sides(K):
    """K / 32 is no multiple of 8: the stride of a row of tiles comes from the padded columns."""
    rows, cols = 96, K // 32
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    scale = ((row * 7 + col * 3) % 251).to(torch.uint8)
    stored = CDNA_32x8.to(scale)
    assert stored.shape == (96, -(-cols // 8) * 8)
    assert torch.equal(CDNA_32x8.from_(stored, rows, cols), scale)
    assert stored.flatten()[CDNA_32x8.offset(33, 5, cols=cols)] == scale[33, 5]


@pytest.mark.parametrize("M", [1, 2, 4, 8, 16, 31, 32, 33])
def test_cdna_pads_few_rows(M):
    scale = torch.randint(1, 255, (M, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(M))
    stored = CDNA_32x8.to(scale)
    assert stored.shape == (-(-M // 32) * 32, 8)
    assert torch.equal(CDNA_32x8.from_(stored, M, 5), scale)


def test_shuffled_16x16_formula():
    """Tiles of 16 rows and 32 bytes, the 16-byte halves apart: [row tile, column tile, half, row, byte]."""
    codes = numbered(48, 96)
    stored = SHUFFLED_16x16.to(codes).flatten()
    for row in range(48):
        for col in range(96):
            tile = (row // 16) * 3 + col // 32
            formula = tile * 512 + (col % 32 // 16) * 256 + (row % 16) * 16 + col % 16
            assert stored[formula] == codes[row, col]


def test_rows_16_put_a_row_in_each_lane():
    codes, scale = numbered(32, 8), numbered(32, 3)
    assert torch.equal(ROWS_16x4.to(codes).flatten()[:64].view(16, 4), codes[:16, :4])
    assert torch.equal(ROWS_16x1.to(scale).flatten()[:16], scale[:16, 0])


def test_linear_is_the_matrix_itself():
    matrix = numbered(5, 7)
    assert LINEAR.to(matrix) is matrix
    assert LINEAR.from_(matrix, 5, 7) is matrix
    assert LINEAR.offset(2, 3, cols=7) == 17


def test_a_stored_shape_that_does_not_fit_is_refused():
    """A layout's result taken for a plain matrix has another shape, wherever padding shows."""
    stored = BLOCKED_128x4.to(numbered(5, 3))
    with pytest.raises(ValueError, match=r"BLOCKED_128x4: a \(5, 3\) matrix is stored as \(128, 4\), got \(5, 3\)"):
        BLOCKED_128x4.from_(numbered(5, 3), 5, 3)
    with pytest.raises(ValueError, match="CDNA_32x8"):
        CDNA_32x8.from_(stored, 5, 3)


def test_scales_are_not_blocked_twice():
    """The layout is part of the tensor: asking again changes nothing, and blocked scales don't pass for plain ones."""
    w = quantize(torch.randn(5, 80), NVFP4)
    blocked = w.with_layout(BLOCKED_128x4)
    assert blocked.with_layout(BLOCKED_128x4) is blocked
    assert torch.equal(blocked.with_layout(LINEAR).scale, w.scale)
    with pytest.raises(ValueError, match=r"scale has shape \(128, 8\)"):
        type(w)(w.data, blocked.scale, NVFP4, w.global_scale)
    with pytest.raises(ValueError, match="needs"):
        type(w)(w.data, BLOCKED_128x4.to(blocked.scale[:, :5]), NVFP4, w.global_scale)


def test_as_layout():
    assert as_layout("CDNA_32x8") is CDNA_32x8
    assert as_layout(LINEAR) is LINEAR
    for unknown in ("128x4", None, True):
        with pytest.raises(ValueError, match="layouts are LINEAR, BLOCKED_128x4"):
            as_layout(unknown)


def test_contest_view_is_the_stated_element_without_a_copy():
    plain = numbered(2, 256, 8)
    stored = BLOCKED_128x4.to(plain)
    view = contest_view(stored)
    assert view.shape == (32, 4, 2, 4, 2, 2)
    assert view.data_ptr() == stored.data_ptr()
    for i, j, m, c, k, l in ((0, 0, 0, 0, 0, 0), (5, 3, 1, 2, 1, 1), (31, 1, 0, 3, 1, 0), (16, 2, 1, 0, 0, 1)):
        assert view[i, j, m, c, k, l] == plain[l, 128 * m + 32 * j + i, 4 * k + c]
    back = from_contest_view(view)
    assert back.data_ptr() == stored.data_ptr()
    assert torch.equal(back, stored)


def test_contest_view_of_a_copy_in_another_order():
    stored = BLOCKED_128x4.to(numbered(3, 128, 4))
    assert torch.equal(from_contest_view(contest_view(stored).contiguous()), stored)


def test_contest_view_refuses():
    with pytest.raises(ValueError, match=r"contest_view: shape \(1, 100, 4\)"):
        contest_view(torch.zeros(1, 100, 4))
    with pytest.raises(ValueError, match="contest_view"):
        contest_view(torch.zeros(128, 4))
    with pytest.raises(ValueError, match=r"need \(32, 4, rest_m, 4, rest_k, L\)"):
        from_contest_view(torch.zeros(4, 32, 1, 4, 1, 1))


def test_docstrings():
    result = doctest.testmod(nibblas.layouts)
    assert result.failed == 0
    assert result.attempted > 0
