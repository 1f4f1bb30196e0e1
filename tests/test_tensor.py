"""ScaledTensor: what it refuses, what it shares, and that slicing and stacking commute with dequantizing."""

from dataclasses import MISSING, fields, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from nibblas import storage
from nibblas.formats import MXFP4, NVFP4, pack
from nibblas.layouts import LAYOUTS, LINEAR, BLOCKED_128x4, SHUFFLED_16x16, TiledLayout, contest_view
from nibblas.quantize import dequantize, quantize
from nibblas.tensor import ScaledTensor, stack

FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=str)
TILED = [layout for layout in LAYOUTS.values() if isinstance(layout, TiledLayout)]
EVERY_LAYOUT = pytest.mark.parametrize("layout", TILED, ids=str)
EVERY_DATA_LAYOUT = pytest.mark.parametrize("data_layout", TILED, ids=str)


def u8(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


def drawn(format, *shape, seed=0, global_scale=None, **more):
    """All codes and all finite scales that are not negative, equal to no permutation of themselves."""
    generator = torch.Generator().manual_seed(seed)
    data = pack(torch.randint(16, shape, dtype=torch.uint8, generator=generator))
    low, high = (0, 0x7E) if format == NVFP4 else (100, 150)
    scale = torch.randint(low, high, (*shape[:-1], shape[-1] // format.block_size), generator=generator).byte()
    if global_scale is None and format.has_global_scale:
        global_scale = torch.rand(shape[:-2], generator=generator) + 0.5
    return ScaledTensor(data, scale, format, global_scale, **more)


def assert_same_values(a: Tensor, b: Tensor):
    assert a.shape == b.shape
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((u8(4, 8).int(), u8(4, 1), NVFP4), TypeError, r"data is torch\.int32 and .*from_parts takes"),
        ((u8(4, 8).view(torch.int8), u8(4, 1), NVFP4), TypeError, r"data is torch\.int8"),
        ((u8(4, 8), u8(4, 1).view(torch.float8_e4m3fn), NVFP4), TypeError, r"scale is torch\.float8_e4m3fn"),
        ((torch.tensor(1, dtype=torch.uint8), u8(1), NVFP4), ValueError, "data has no dimension"),
        ((u8(4, 9), u8(4, 1), NVFP4), ValueError, "K = 18 is not a multiple of nvfp4's block_size 16"),
        ((u8(4, 8), u8(4, 1), MXFP4), ValueError, "K = 16 is not a multiple of mxfp4's block_size 32"),
        ((u8(4, 8), u8(4, 2), NVFP4), ValueError, r"scale has shape \(4, 2\).*needs \(4, 1\)"),
        ((u8(4, 8), u8(1, 4), NVFP4), ValueError, r"scale has shape \(1, 4\)"),
        ((u8(2, 4, 8), u8(4, 1), NVFP4), ValueError, r"needs \(2, 4, 1\)"),
        ((u8(4, 8), u8(4, 1), NVFP4, None, BLOCKED_128x4), ValueError, r"BLOCKED_128x4 needs \(128, 4\)"),
        ((u8(4, 8), u8(128, 4), NVFP4), ValueError, r"LINEAR needs \(4, 1\)"),
        ((u8(16), u8(3), NVFP4), ValueError, r"scale has shape \(3,\)"),
        (([1], u8(4, 1), NVFP4), TypeError, "data is a list"),
        ((u8(4, 8), None, NVFP4), TypeError, "scale is a NoneType"),
        ((u8(4, 8), u8(4, 1), NVFP4, 0.5), TypeError, "global_scale is a float"),
        ((u8(4, 8), u8(4, 1), "nvfp4"), TypeError, r"format is 'nvfp4', need a Format \(from_parts takes names\)"),
        ((u8(4, 8), u8(4, 1), NVFP4, None, "LINEAR"), TypeError, r"layouts are 'LINEAR', LINEAR, need Layouts"),
        (
            (u8(4, 8), u8(4, 1), NVFP4, None, LINEAR, LINEAR, "floor"),
            ValueError,
            "scale_rule 'floor' is unknown; nvfp4",
        ),
        (
            (u8(4, 48), u8(4, 6), NVFP4, None, LINEAR, LINEAR, None, 48),
            ValueError,
            "rotation 48 of K = 96, need 0 or a",
        ),
        ((u8(4, 48), u8(4, 6), NVFP4, None, LINEAR, LINEAR, None, 64), ValueError, "rotation 64 of K = 96"),
        ((u8(16), u8(2), NVFP4, None, BLOCKED_128x4), ValueError, "one dimension has LINEAR layouts only"),
        ((u8(16), u8(2), NVFP4, None, LINEAR, SHUFFLED_16x16), ValueError, "one dimension has LINEAR layouts only"),
        ((u8(16), u8(2), NVFP4, None, LINEAR, LINEAR, None, 0, (5, 32)), ValueError, "and no matrix"),
        ((u8(4, 32), u8(4, 4), NVFP4, None, LINEAR, SHUFFLED_16x16), ValueError, r"can't hold.*need \(16, 32\)"),
        ((u8(16, 32), u8(16, 2), NVFP4, None, LINEAR, LINEAR, None, 0, (4, 32)), ValueError, r"need \(4, 16\)"),
        ((u8(4, 16), u8(4, 1), MXFP4, torch.tensor(1.0)), ValueError, "mxfp4 has no global_scale"),
        ((u8(4, 8), u8(4, 1), NVFP4, torch.tensor(1.0).double()), TypeError, r"global_scale is torch\.float64"),
        ((u8(4, 8), u8(4, 1), NVFP4, torch.ones(1)), ValueError, r"global_scale has shape \(1,\), need \(\) or \(\)"),
        ((u8(3, 4, 8), u8(3, 4, 1), NVFP4, torch.ones(4)), ValueError, r"shape \(4,\), need \(\) or \(3,\)"),
        ((u8(4, 8), torch.empty(4, 1, dtype=torch.uint8, device="meta"), NVFP4), ValueError, "devices: cpu, meta"),
        ((u8(4, 8), u8(4, 1), NVFP4, torch.empty((), device="meta")), ValueError, "devices: cpu, meta"),
    ],
)
def test_construction_errors(arguments, error, message):
    with pytest.raises(error, match=message) as raised:
        ScaledTensor(*arguments)
    assert str(raised.value).startswith("ScaledTensor: ")


def test_shapes():
    t = drawn(NVFP4, 2, 3, 33, 96)
    assert (t.shape, t.K, t.ndim) == ((2, 3, 33, 96), 96, 4)
    assert t.nbytes == 2 * 3 * 33 * (48 + 6) + 2 * 3 * 4
    stored = t.with_layout(BLOCKED_128x4, SHUFFLED_16x16)
    assert (stored.shape, stored.K, stored.ndim) == ((2, 3, 33, 96), 96, 4)
    assert (stored.data.shape, stored.scale.shape) == ((2, 3, 48, 64), (2, 3, 128, 8))
    assert ScaledTensor(u8(16), u8(1), MXFP4).shape == (32,)
    assert ScaledTensor(u8(0, 16), u8(0, 1), MXFP4).shape == (0, 32)
    with pytest.raises(AttributeError):
        t.data = t.data


@FORMATS
def test_from_parts_copies_nothing(format):
    data, scale = u8(4, 16), u8(4, 32 // format.block_size)
    for data_dtype in (torch.uint8, torch.int8, torch.float4_e2m1fn_x2):
        for scale_dtype in (torch.uint8, format.scale_code.dtype):
            t = ScaledTensor.from_parts(data.view(data_dtype), scale.view(scale_dtype), format.name)
            assert (t.data.dtype, t.scale.dtype, t.format) == (torch.uint8, torch.uint8, format)
            assert t.data.data_ptr() == data.data_ptr()
            assert t.scale.data_ptr() == scale.data_ptr()
    assert t.data_as_float4.dtype == torch.float4_e2m1fn_x2
    assert t.data_as_float4.data_ptr() == data.data_ptr()
    assert t.scale_as_float8.dtype == format.scale_code.dtype
    assert t.scale_as_float8.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize("given", [0.25, torch.tensor(0.25), torch.tensor([0.25]), torch.tensor([[0.25]]).bfloat16()])
def test_from_parts_takes_a_global_scale_of_any_shape(given):
    t = ScaledTensor.from_parts(u8(4, 8), u8(4, 1), "nvfp4", given)
    assert (t.global_scale.dtype, t.global_scale.shape, t.global_scale.item()) == (torch.float32, (), 0.25)
    one_a_matrix = ScaledTensor.from_parts(u8(2, 4, 8), u8(2, 4, 1), "nvfp4", torch.tensor([1.0, 2.0]))
    assert one_a_matrix.global_scale.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("data", "scale", "format", "more", "error", "message"),
    [
        (u8(4, 8).int(), u8(4, 1), "nvfp4", {}, TypeError, r"data is torch\.int32, need uint8, int8 or float4"),
        ([1], u8(4, 1), "nvfp4", {}, TypeError, "data is list"),
        (u8(4, 8), u8(4, 1).int(), "nvfp4", {}, TypeError, r"scale is torch\.int32, nvfp4 needs uint8 or .*e4m3fn"),
        (u8(4, 8), u8(4, 1).view(torch.float8_e8m0fnu), "nvfp4", {}, TypeError, "nvfp4 needs uint8 or .*e4m3fn"),
        (u8(4, 16), u8(4, 1).view(torch.float8_e4m3fn), "mxfp4", {}, TypeError, "mxfp4 needs uint8 or .*e8m0fnu"),
        (u8(4, 8), None, "nvfp4", {}, TypeError, "scale is NoneType"),
        (u8(4, 8), u8(4, 1), "int4", {}, ValueError, "format 'int4' is unknown"),
        (u8(4, 8), u8(4, 1), "nvfp4", {"layout": "SPIRAL"}, ValueError, "layout 'SPIRAL' is unknown"),
        (u8(4, 8), u8(4, 1), "nvfp4", {"data_layout": "SPIRAL"}, ValueError, "layout 'SPIRAL' is unknown"),
    ],
)
def test_from_parts_errors(data, scale, format, more, error, message):
    with pytest.raises(error, match=message):
        ScaledTensor.from_parts(data, scale, format, **more)


@FORMATS
@pytest.mark.parametrize("rows", [128, 200, 1])
def test_from_batch_last_copies_nothing(format, rows):
    t = drawn(format, 3, rows, 320, global_scale=torch.tensor(1.0) if format.has_global_scale else None)
    data, linear = t.data_as_float4.permute(1, 2, 0), t.scale_as_float8.permute(1, 2, 0)
    stored = BLOCKED_128x4.to(t.scale)
    for scale, parts, layout in ((linear, t.scale, LINEAR), (contest_view(stored), stored, BLOCKED_128x4)):
        got = ScaledTensor.from_batch_last(data, scale, format.name)
        assert (got.shape, got.layout, got.format) == (t.shape, layout, format)
        assert (got.data.data_ptr(), got.scale.data_ptr()) == (t.data.data_ptr(), parts.data_ptr())
        assert torch.equal(got.data, t.data)
        assert torch.equal(got.scale, parts)
    first = ScaledTensor.from_batch_last(data[:1], linear[:1], format)
    assert_same_values(dequantize(first), dequantize(t)[:, :1])


@pytest.mark.parametrize(
    ("data", "scale", "error", "message"),
    [
        (u8(4, 8), u8(4, 1, 1), ValueError, r"from_batch_last: data has shape \(4, 8\) and scale \(4, 1, 1\), need"),
        (u8(4, 8, 1), u8(4, 1), ValueError, r"scale \(4, 1\), need \(rows, K/2, L\) and \(rows, K/block_size, L\) or"),
        (u8(4, 8, 1), u8(32, 4, 1, 4, 1), ValueError, "from_batch_last: data has shape"),
        (u8(4, 8, 1), u8(4, 32, 1, 4, 1, 1), ValueError, r"from_contest_view: shape .*need \(32, 4"),
        (u8(4, 8, 2), u8(4, 1, 1), ValueError, r"needs \(2, 4, 1\)"),
        (u8(4, 8, 1), None, TypeError, "from_batch_last: scale is a NoneType"),
        ([1], u8(4, 1, 1), TypeError, "from_batch_last: data is a list"),
    ],
)
def test_from_batch_last_errors(data, scale, error, message):
    with pytest.raises(error, match=message):
        ScaledTensor.from_batch_last(data, scale, NVFP4)


def test_a_layout_is_never_applied_twice():
    """Scales that are blocked already carry the tag: to the same layout is no change, and a wrong tag is refused."""
    t = drawn(NVFP4, 200, 96).with_layout(BLOCKED_128x4)
    assert t.with_layout(BLOCKED_128x4) is t
    assert t.with_layout() is t
    with pytest.raises(ValueError, match=r"BLOCKED_128x4 needs \(256, 8\)"):
        ScaledTensor(t.data, BLOCKED_128x4.to(t.scale)[:255], NVFP4, layout=BLOCKED_128x4)
    with pytest.raises(ValueError, match=r"scale has shape \(2048,\)"):
        ScaledTensor(t.data, t.scale.flatten(), NVFP4)
    with pytest.raises(ValueError, match=r"stored as \(256, 8\), got \(200, 6\)"):
        BLOCKED_128x4.from_(t.linear_scale, 200, 6)


@FORMATS
@EVERY_LAYOUT
@EVERY_DATA_LAYOUT
def test_layouts_hold_the_same_values(format, layout, data_layout):
    plain = drawn(format, 2, 33, 96, rotation=32, scale_rule="search")
    t = plain.with_layout(layout, data_layout.name)
    assert (t.layout, t.data_layout, t.rotation, t.scale_rule) == (layout, data_layout, 32, "search")
    assert torch.equal(t.linear_data, plain.data)
    assert torch.equal(t.linear_scale, plain.scale)
    assert_same_values(dequantize(t), dequantize(plain))
    back = t.with_layout(LINEAR, LINEAR)
    assert back.matrix is None
    assert torch.equal(back.data, plain.data)
    assert torch.equal(back.scale, plain.scale)


@FORMATS
@EVERY_LAYOUT
@EVERY_DATA_LAYOUT
def test_slices_are_slices_of_the_values(format, layout, data_layout):
    t = drawn(format, 3, 200, 192, scale_rule="search").with_layout(layout, data_layout)
    values = dequantize(t)
    # Whole tiles, parts of tiles, one row, none, past the end, from the end.
    rows = [(0, 128), (128, 200), (64, 192), (7, 8), (5, 5), (100, 999), (-3, 200), (150, 20)]
    for start, end in rows:
        cut = t.slice(1, start, end)
        assert (cut.layout, cut.data_layout, cut.format, cut.scale_rule) == (layout, data_layout, format, "search")
        assert_same_values(dequantize(cut), values[:, start:end])
    for start, end in [(0, 64), (64, 192), (32, 96), (160, 192), (96, 96), (-64, 192), (0, 999)]:
        assert_same_values(dequantize(t.slice(-1, start, end)), values[..., start:end])
    for start, end in [(0, 1), (1, 3), (2, 2), (-1, 3)]:
        assert_same_values(dequantize(t.slice(0, start, end)), values[start:end])
    assert_same_values(dequantize(t.slice(1, 3, 77).slice(2, 32, 96).slice(0, 1, 2)), values[1:2, 3:77, 32:96])


def test_k_shards_of_464_columns():
    """Four-way shards whose 29 scales are no whole tiles: padded with zeros, and together the whole."""
    t = drawn(NVFP4, 40, 4 * 464).with_layout(BLOCKED_128x4)
    shards = [t.slice(1, 464 * i, 464 * (i + 1)) for i in range(4)]
    assert {tuple(shard.scale.shape) for shard in shards} == {(128, 32)}
    assert_same_values(torch.cat([dequantize(shard) for shard in shards], dim=1), dequantize(t))
    inside = BLOCKED_128x4.to(torch.ones(40, 29, dtype=torch.uint8)).bool()
    assert not shards[1].scale[~inside].any()


def test_slice_errors():
    t = drawn(NVFP4, 40, 192)
    for start, end in [(8, 32), (0, 24), (1, 17)]:
        with pytest.raises(ValueError, match=f"slice: K range {start}:{end} must lie on multiples of 16"):
            t.slice(1, start, end)
    with pytest.raises(ValueError, match="multiples of 32"):
        drawn(MXFP4, 4, 64).slice(1, 16, 64)
    with pytest.raises(ValueError, match=r"multiples of 64 \(nvfp4, rotation 64\)"):
        drawn(NVFP4, 4, 192, rotation=64).slice(1, 0, 32)
    for dim in (2, -3):
        with pytest.raises(IndexError, match=f"slice: dim {dim} is out of range"):
            t.slice(dim, 0, 1)


def test_slices_of_a_rotated_tensor_and_of_a_vector():
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    t = quantize(x, "nvfp4", rotation=64)
    assert_same_values(dequantize(t.slice(1, 64, 192)), dequantize(t)[:, 64:192])
    vector = drawn(MXFP4, 128)
    assert_same_values(dequantize(vector.slice(0, 32, 96)), dequantize(vector)[32:96])


def test_a_linear_slice_is_a_view():
    t = drawn(NVFP4, 40, 192)
    assert t.slice(0, 4, 8).data.data_ptr() == t.data[4:].data_ptr()
    assert t.slice(1, 32, 64).scale.data_ptr() == t.scale[:, 2:].data_ptr()
    cut = t.slice(1, 32, 64)
    assert not cut.data.is_contiguous()
    assert cut.contiguous().data.is_contiguous()
    assert cut.contiguous().scale.is_contiguous()
    assert_same_values(dequantize(cut.contiguous()), dequantize(cut))


@EVERY_LAYOUT
@EVERY_DATA_LAYOUT
def test_take_rows(layout, data_layout):
    t = drawn(NVFP4, 2, 33, 96).with_layout(layout, data_layout)
    index = torch.tensor([32, 0, 5, 5])
    assert_same_values(dequantize(t.take_rows(index)), dequantize(t)[:, index])
    assert t.take_rows(index[:0]).shape == (2, 0, 96)
    with pytest.raises(IndexError):
        t.take_rows(torch.tensor([33]))
    for wrong in (index[None], index > 4, index.float()):
        with pytest.raises(ValueError, match=r"take_rows: index is torch\.\w+ .*need int32 or int64 \(R,\)"):
            t.take_rows(wrong)


@EVERY_LAYOUT
@EVERY_DATA_LAYOUT
def test_index(layout, data_layout):
    t = drawn(NVFP4, 2, 3, 33, 96).with_layout(layout, data_layout)
    values = dequantize(t)
    assert_same_values(dequantize(t[1]), values[1])
    assert_same_values(dequantize(t[1][-1]), values[1, -1])
    assert t[1][0].global_scale.shape == ()
    with pytest.raises(TypeError, match="no batch dimension to index; use slice"):
        t[0][0][0]
    one = drawn(NVFP4, 3, 4, 32, global_scale=torch.tensor(0.5))
    assert_same_values(dequantize(one[2]), dequantize(one)[2])
    with pytest.raises(IndexError):
        one[3]
    for index in (slice(0, 1), (0, 1), ..., None, torch.tensor([True, False]), "0", 1.0):
        with pytest.raises(TypeError, match=r"ScaledTensor: index is .* need an int; use slice for ranges"):
            t[index]


def test_iteration():
    t = drawn(NVFP4, 2, 4, 32).with_layout(BLOCKED_128x4)
    for got, want in zip(list(t), dequantize(t), strict=True):
        assert_same_values(dequantize(got), want)
    assert list(drawn(MXFP4, 0, 4, 32)) == []
    with pytest.raises(TypeError, match="no batch dimension"):
        list(t[0])


def test_layouts_of_another_kind_are_refused():
    t = drawn(NVFP4, 16, 128)
    for layouts, message in [
        ((None, "FRAGMENTS_MXFP4"), "FRAGMENTS_MXFP4 is of mxfp4, the tensor is nvfp4"),
        (("FRAGMENT_SCALES_MXFP4", None), "FRAGMENT_SCALES_MXFP4 is of mxfp4, the tensor is nvfp4"),
        (("FRAGMENTS_NVFP4", None), "FRAGMENTS_NVFP4 can't hold scales"),
        ((None, "FRAGMENT_SCALES_NVFP4"), "or FRAGMENT_SCALES_NVFP4 codes"),
    ]:
        with pytest.raises(ValueError, match=f"with_layout: .*{message}"):
            t.with_layout(*layouts)
    stored = t.with_layout("FRAGMENT_SCALES_NVFP4", "FRAGMENTS_NVFP4")
    with pytest.raises(ValueError, match="ScaledTensor: FRAGMENT_SCALES_NVFP4 is of nvfp4, the tensor is mxfp4"):
        replace(stored, format=MXFP4, global_scale=None, scale_rule=None)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_a_layout_stores_matrices(layout):
    with pytest.raises(ValueError, match=f"{layout}: the matrix has shape \\(128,\\), need"):
        layout.to(u8(128))


def test_offsets_are_those_of_elements():
    for row, col in [(0, 9), (0, 4), (0, -1), (-1, 0)]:
        with pytest.raises(IndexError, match=f"BLOCKED_128x4: no element \\({row}, {col}\\) in a matrix of 4 columns"):
            BLOCKED_128x4.offset(row, col, cols=4)


def test_flatten_rows():
    t = drawn(MXFP4, 2, 3, 33, 96).with_layout(BLOCKED_128x4, SHUFFLED_16x16)
    flat = t.flatten_rows()
    assert (flat.layout, flat.data_layout, flat.matrix) == (LINEAR, LINEAR, None)
    assert_same_values(dequantize(flat), dequantize(t).reshape(-1, 96))
    assert drawn(MXFP4, 2, 3, 0).flatten_rows().shape == (6, 0)
    with pytest.raises(ValueError, match="one global_scale a matrix"):
        drawn(NVFP4, 2, 3, 32).flatten_rows()


@FORMATS
@EVERY_LAYOUT
def test_stack(format, layout):
    members = [drawn(format, 33, 96, seed=i, scale_rule="search").with_layout(layout) for i in range(3)]
    t = stack(members)
    assert (t.shape, t.layout, t.scale_rule) == ((3, 33, 96), layout, "search")
    assert_same_values(dequantize(t), torch.stack([dequantize(member) for member in members]))
    for i, member in enumerate(members):
        assert torch.equal(t[i].data, member.data)
    twice = stack([t, t])
    assert_same_values(dequantize(twice), torch.stack([dequantize(t)] * 2))


def test_stack_keeps_what_all_agree_on():
    a, b = (drawn(NVFP4, 4, 32, seed=i, scale_rule=rule) for i, rule in enumerate(("absmax", "search")))
    assert stack([a, b]).scale_rule is None
    one_for_all = drawn(NVFP4, 2, 4, 32, global_scale=torch.tensor(0.5))
    assert stack([one_for_all] * 3).global_scale.tolist() == [[0.5, 0.5]] * 3


@pytest.mark.parametrize(
    "other",
    [
        drawn(MXFP4, 4, 32),
        drawn(NVFP4, 4, 48),
        drawn(NVFP4, 5, 32),
        drawn(NVFP4, 4, 32).with_layout(BLOCKED_128x4),
        drawn(NVFP4, 4, 32).with_layout(data_layout=SHUFFLED_16x16),
        drawn(NVFP4, 4, 32, rotation=32),
        ScaledTensor(u8(4, 16), u8(4, 2), NVFP4),
    ],
    ids=["format", "K", "N", "layout", "data layout", "rotation", "global scale"],
)
def test_stack_errors(other):
    with pytest.raises(ValueError, match=r"stack: .* does not fit"):
        stack([drawn(NVFP4, 4, 32), other])


@FORMATS
def test_stack_takes_no_vectors(format):
    with pytest.raises(ValueError, match=r"stack: the list has tensors of shape \(32,\), need \(\.\.\., N, K\)"):
        stack([drawn(format, 32)] * 2)


def test_stack_of_nothing():
    with pytest.raises(ValueError, match="stack: the list is empty"):
        stack([])
    with pytest.raises(TypeError, match="stack: the list has a int"):
        stack([1])
    t = drawn(MXFP4, 4, 32)
    with pytest.raises(ValueError, match="rotation and device must agree"):
        stack([t, t.to("meta")])
    assert stack(m for m in (t, t)).shape == (2, 4, 32)


def test_to():
    t = drawn(NVFP4, 4, 32, rotation=32).with_layout(BLOCKED_128x4)
    assert t.to("cpu") is t
    moved = t.to("meta")
    assert moved.device.type == "meta"
    assert {part.device.type for part in (moved.data, moved.scale, moved.global_scale)} == {"meta"}
    assert (moved.layout, moved.rotation, moved.shape) == (t.layout, t.rotation, t.shape)


def test_contiguous_with_an_expanded_global_scale():
    t = drawn(NVFP4, 3, 4, 32, global_scale=torch.tensor(0.5).expand(3))
    assert not t.global_scale.is_contiguous()
    assert t.contiguous().global_scale.is_contiguous()


def test_repr():
    assert repr(ScaledTensor(u8(4, 16), u8(4, 1), MXFP4)) == "ScaledTensor(mxfp4, shape=(4, 32), layout=LINEAR)"
    t = ScaledTensor(u8(4, 16), u8(4, 2), NVFP4, torch.tensor(0.5), scale_rule="absmax", rotation=32)
    assert repr(t.with_layout(BLOCKED_128x4, SHUFFLED_16x16)) == (
        "ScaledTensor(nvfp4, shape=(4, 32), layout=BLOCKED_128x4, data_layout=SHUFFLED_16x16, global_scale=0.5, "
        "scale_rule='absmax', rotation=32)"
    )
    assert "global_scale=(one a matrix)" in repr(drawn(NVFP4, 3, 4, 32))
    assert repr(ScaledTensor(u8(4, 16), u8(4, 1), MXFP4).to("meta")).endswith("device=meta)")
    assert repr(t.to("meta")).endswith("global_scale=(no value), scale_rule='absmax', rotation=32, device=meta)")
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert "global_scale=(no value)" in repr(replace(t, global_scale=torch.ones(())))


@FORMATS
def test_shell_dtypes_go_through_slice_cat_save_and_load(tmp_path, format):
    """torch's float4 and float8 have no cat, no copy of a column slice and no fill: all of it is on bytes here."""
    plain = drawn(format, 64, 128, global_scale=torch.tensor(0.5) if format == NVFP4 else None)
    t = ScaledTensor.from_parts(plain.data_as_float4, plain.scale_as_float8, format, plain.global_scale)
    left, right = t.slice(1, 0, 64), t.slice(1, 64, 128)
    swapped = ScaledTensor.from_parts(
        torch.cat([right.data, left.data], dim=1),
        torch.cat([right.scale, left.scale], dim=1),
        format,
        t.global_scale,
    )
    assert_same_values(dequantize(swapped), dequantize(plain).roll(64, dims=1))
    storage.save(tmp_path / "a", {"swapped": swapped, "right": right, "codes": right.data_as_float4})
    loaded = storage.load(tmp_path / "a")
    assert_same_values(dequantize(loaded["swapped"]), dequantize(swapped))
    assert_same_values(dequantize(loaded["right"]), dequantize(plain)[:, 64:])
    assert loaded["codes"].dtype == torch.float4_e2m1fn_x2
    assert torch.equal(loaded["codes"].view(torch.uint8), plain.data[:, 32:])


def test_its_defaults_are_such_as_every_torch_can_trace():
    """torch.compile of torch 2.11 knows no constant of a class of ours, which a plain default would be."""
    plain = [field.default for field in fields(ScaledTensor) if field.default is not MISSING]
    assert {type(default) for default in plain} <= {type(None), int, str}
