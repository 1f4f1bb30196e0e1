"""cpu_linear against the float64 oracle: every tier, layout, dtype and awkward size."""

import math

import pytest
import torch
from checks import assert_close, poisoned_empty, random_codes, random_dense

from nibblas import reference
from nibblas.formats import FORMATS, MXFP4, NVFP4, pack
from nibblas.kernels import cpu_library
from nibblas.kernels.cpu_linear import B_LAYOUTS, bind, linear
from nibblas.layouts import LINEAR, BLOCKED_128x4, ROWS_16x1, ROWS_16x4
from nibblas.tensor import ScaledTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [(M, 33, 96) for M in (1, 2, 3, 5, 16, 17, 33, 64, 100)]
SIZES += [(5, N, 160) for N in (1, 7, 16, 17, 33, 200)]
SIZES += [(17, 17, K) for K in (32, 64, 512, 1056, 2080)]
SIZES_OF_16 = [(3, 17, 16), (18, 33, 48), (3, 33, 80), (40, 17, 112), (2, 17, 1040)]

pytestmark = pytest.mark.skipif(cpu_library.library() is None, reason=str(cpu_library.status()))


@pytest.fixture(params=cpu_library.TIERS)
def tier(request, monkeypatch):
    monkeypatch.setenv("NIBBLAS_CPU_TIER", request.param)
    if cpu_library.TIERS[cpu_library.tier()] != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    return request.param


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def activations(shape, kind, format, generator):
    if kind == "fp4":
        return random_codes(shape, format, generator)
    return random_dense(shape, kind, generator)


def weights(rows, format, generator, scale, global_scale=None):
    """(rows, K) weights of random codes under the given scale codes (rows, blocks)."""
    data = torch.randint(256, (rows, scale.shape[1] * format.block_size // 2), dtype=torch.uint8, generator=generator)
    return ScaledTensor(data, scale, format, global_scale)


def tiled(w):
    return w.with_layout(ROWS_16x1, ROWS_16x4)


def product(a, b, bias=None, dtype=torch.float32, **options):
    out = poisoned_empty((a.shape[0], b.shape[0]), dtype)
    linear(a, b, bias, out, **options)
    return out


def check(a, b, bias=None, dtype=torch.float32, what=""):
    exact = reference.matmul(a, b, bias)
    size = reference.magnitude(a, b)
    got = product(a, b, bias, dtype)
    assert_close(got, exact, dtype, K=a.shape[-1], what=what, magnitude=size)
    return got


@pytest.mark.parametrize("kind", [*DTYPES, "fp4"], ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_sizes_and_layouts(tier, format, kind, generator):
    for M, N, K in SIZES + (SIZES_OF_16 if format is NVFP4 else []):
        a = activations((M, K), kind, format, generator)
        b = random_codes((N, K), format, generator)
        padded = random_codes((N, K), format, generator, layout=ROWS_16x1, data_layout=ROWS_16x4)
        linear_result = check(a, b, what=f"{M} {N} {K} LINEAR")
        check(a, padded, what=f"{M} {N} {K} ROWS_16 with padding of NaN")
        assert torch.equal(product(a, tiled(b), threads=2), linear_result), (M, N, K)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(tier, format, generator):
    b = random_codes((200, 1056), format, generator)
    for kind in (*DTYPES, "fp4"):
        a = activations((100, 1056), kind, format, generator)
        together = product(a, b, threads=2)
        assert torch.equal(together, product(a, b, threads=1))
        for rows in ([0, 1], [7, 8], [30, 47], [98, 100], [0, 64]):
            some = a[slice(*rows)] if isinstance(a, torch.Tensor) else a.slice(0, *rows)
            assert torch.equal(product(some, b), together[slice(*rows)]), (kind, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_and_narrowing(tier, dtype, generator):
    b = random_codes((37, 320), NVFP4, generator, scale_bytes=(0x28, 0x38))
    for bias_dtype in DTYPES:
        a = random_dense((19, 320), dtype, generator)
        check(a, b, random_dense((37,), bias_dtype, generator), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_and_unaligned(tier, dtype, generator):
    x = random_dense((2 * 21, 3 * 64 + 7), dtype, generator)
    a = x[::2, 5 : 5 + 128]
    transposed = random_dense((128, 21), dtype, generator).T
    b = random_codes((40, 128), MXFP4, generator)
    at = torch.full((b.data.numel() + b.scale.numel() + 2,), 0xFF, dtype=torch.uint8)
    at[1 : 1 + b.data.numel()] = b.data.flatten()
    at[-1 - b.scale.numel() : -1] = b.scale.flatten()
    data, scale = at[1 : 1 + b.data.numel()].view(b.data.shape), at[-1 - b.scale.numel() : -1].view(b.scale.shape)
    unaligned = ScaledTensor(data, scale, MXFP4)
    wide = poisoned_empty((21 * 2, 64), dtype)
    out = wide[::2, 3:43]
    linear(a, unaligned, None, out)
    exact, size = reference.matmul(a, b), reference.magnitude(a, b)
    assert_close(out.contiguous(), exact, dtype, K=128, what="strided", magnitude=size)
    untouched = torch.ones_like(wide, dtype=torch.bool)
    untouched[::2, 3:43] = False
    assert wide[untouched].isnan().all()
    check(transposed, b.slice(0, 3, 40), dtype=dtype)


def test_empty(tier, generator):
    b = random_codes((5, 32), NVFP4, generator)
    bias = random_dense((5,), torch.float16, generator)
    assert product(torch.empty(0, 32), b).shape == (0, 5)
    assert product(torch.empty(3, 32), b.slice(0, 0, 0)).shape == (3, 0)
    nothing = b.slice(1, 0, 0)
    for w in (nothing, tiled(nothing)):
        assert torch.equal(product(torch.empty(3, 0), w), torch.zeros(3, 5))
        assert torch.equal(product(torch.empty(3, 0), w, bias), bias.float().expand(3, 5))


def test_every_e4m3_scale(tier):
    """Ones times one block of ones a row is 16 times the scale, exactly."""
    codes = torch.full((256, 16), 2, dtype=torch.uint8)
    b = ScaledTensor(pack(codes), torch.arange(256, dtype=torch.uint8)[:, None], NVFP4)
    need = 16 * torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for dtype in DTYPES:
        for w in (b, tiled(b)):
            got = product(torch.ones(20, 16, dtype=dtype), w)
            torch.testing.assert_close(got, need.expand(20, 256), rtol=0, atol=0, equal_nan=True)


def test_every_e8m0_scale(tier):
    """Alone, 2^-127 is kept; a row that mixes 2^-127 with 2^127 keeps both."""
    codes = torch.zeros(256, 32, dtype=torch.uint8)
    codes[:, 3] = 2
    every = torch.arange(256, dtype=torch.uint8)
    b = ScaledTensor(pack(codes), every[:, None], MXFP4)
    need = MXFP4.scale_code.decode(every)
    for M in (1, 20):
        for w in (b, tiled(b)):
            got = product(torch.ones(M, 32, dtype=torch.bfloat16), w)
            torch.testing.assert_close(got, need.expand(M, 256), rtol=0, atol=0, equal_nan=True)
    mixed = ScaledTensor(pack(codes[:2].repeat(1, 2)), torch.tensor([[0, 254], [254, 0]]).byte(), MXFP4)
    x = torch.zeros(1, 64)
    x[0, 3] = 2.0
    assert product(x, mixed).tolist() == [[2.0**-126, math.inf]]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "fp4"], ids=str)
def test_all_legal_e8m0_scales_in_one_row(tier, kind, generator):
    """Scales over the whole range, with zeros under the smallest; what fp32 can hold of the result is right."""
    scale = torch.randint(0, 240, (35, 12), dtype=torch.uint8, generator=generator)
    scale[3, 4] = 0
    b = weights(35, MXFP4, generator, scale)
    b.data[3, 64:80] = 0x80
    a = activations((19, 384), kind, MXFP4, generator)
    check(a, b)
    check(a, tiled(b))
    near = weights(35, MXFP4, generator, torch.randint(120, 130, (35, 12), dtype=torch.uint8, generator=generator))
    near.scale[:, 5], near.data[:, 80:96] = 0, 0x08
    check(a, near)


def test_negative_and_extreme_e4m3_scales(tier, generator):
    scale = torch.randint(0, 0x7F, (35, 24), generator=generator)
    scale += torch.randint(2, (35, 24), generator=generator) * 0x80
    b = weights(35, NVFP4, generator, scale.to(torch.uint8), torch.tensor(3e-5))
    for M in (1, 40):
        a = random_dense((M, 384), torch.bfloat16, generator)
        assert torch.equal(check(a, b), check(a, tiled(b)))


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_nan_scales_take_their_row_alone(tier, format, generator):
    for M in (1, 40):
        for nan in (format.scale_code.nan, 0xFF):
            b = random_codes((50, 1088), format, generator)
            b.scale[17, 3], b.scale[49, -1], b.data[17] = nan, nan, 0
            for w in (b, tiled(b)):
                got = product(random_dense((M, 1088), torch.bfloat16, generator), w)
                assert got[:, [17, 49]].isnan().all()
                assert got[:, [n for n in range(50) if n not in (17, 49)]].isfinite().all()
    a = random_codes((3, 1088), format, generator)
    a.scale[1, 2] = format.scale_code.nan
    got = product(a, random_codes((50, 1088), format, generator))
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_activations(tier, dtype, generator):
    """Inf times zero is NaN, Inf times the rest is Inf of that sign; NaN is NaN; no other row sees it."""
    b = random_codes((40, 64), NVFP4, generator, scale_bytes=(0x20, 0x38))
    for M in (4, 20):
        a = random_dense((M, 64), dtype, generator)
        a[1, 5], a[2, 6], a[3, 7] = math.inf, -math.inf, math.nan
        exact = reference.matmul(a, b)
        assert exact[1].isinf().any()
        assert exact[1].isnan().any()
        check(a, b)
    signalling = torch.full((1, 64), 0x7F800001, dtype=torch.int32).view(torch.float32)
    assert product(signalling, b).isnan().all()


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_near_the_ends_of_fp32(tier, dtype, format, generator):
    """Rows of subnormal, tiny and huge elements beside ordinary ones, and all in one row."""
    b = random_codes((35, 128), format, generator, scale_bytes=(0x28, 0x38) if format is NVFP4 else (120, 130))
    if format is NVFP4:
        b = ScaledTensor(b.data, b.scale, NVFP4, torch.tensor(1.0))
    a = random_dense((24, 128), torch.float32, generator)
    powers = [0, -20, -60, -95, -101, -110, -115, -118, -121, 20, 38, 41, 60, 100]
    for row, power in enumerate(powers):
        a[row] *= 2.0**power
    a[20] = a[20] * torch.exp2(torch.arange(128) - 126.0)
    a[21] = -0.0
    a[21, 3] = 2.0**-133
    a = a.to(dtype)
    tiny = torch.tensor([2.0**-149] * 4 + [0.0] * 124).to(dtype)  # bf16 makes it 0
    a[22] = tiny
    exact, size = reference.matmul(a, b), reference.magnitude(a, b)
    for w in (b, tiled(b)):
        got = product(a, w).double()
        # Results down here have an absolute error of fp32's subnormal step.
        assert ((got - exact).abs() <= 2e-6 * torch.maximum(size, exact.abs()) + 2.0**-149).all()


def test_global_scales_meet_in_fp32(tier, generator):
    a = random_codes((3, 64), NVFP4, generator, scale_bytes=(0x30, 0x40))
    b = random_codes((5, 64), NVFP4, generator, scale_bytes=(0x30, 0x40))
    once = product(a, b)
    doubled = ScaledTensor(b.data, b.scale, NVFP4, 2 * b.global_scale)
    assert torch.equal(product(a, doubled), 2 * once)
    none = ScaledTensor(b.data, b.scale, NVFP4)
    one = ScaledTensor(b.data, b.scale, NVFP4, torch.tensor(1.0))
    assert torch.equal(product(a, none), product(a, one))
    tiny, large = torch.tensor(2.0**-120), torch.tensor(2.0**100)
    check(torch.ones(2, 64) * 2.0**30, ScaledTensor(b.data, b.scale, NVFP4, tiny))
    check(torch.ones(2, 64) * 2.0**-30, ScaledTensor(b.data, b.scale, NVFP4, large))


def test_flushing_subnormals_elsewhere_changes_nothing(tier, generator):
    b = random_codes((35, 128), MXFP4, generator)
    a = random_dense((3, 128), torch.float32, generator) * 2.0**-130
    need = product(a, b)
    torch.set_flush_denormal(True)
    try:
        got = product(a, b)
        tiny = torch.tensor([2.0**-130])
        assert (tiny * 2).item() == 0, "the setting was not given back"
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, need)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_over_a_long_sum(tier, dtype, format, generator):
    """Under 1e-6 of the RMS of the exact answer at K = 4096."""
    low, high = (0x20, 0x40) if format is NVFP4 else (120, 128)
    scale = torch.randint(low, high, (48, 4096 // format.block_size), dtype=torch.uint8, generator=generator)
    b = weights(48, format, generator, scale)
    a = random_dense((20, 4096), dtype, generator)
    exact = reference.matmul(a, b)
    error = (product(a, b).double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 1e-6


def test_refusals(generator):
    b = random_codes((16, 64), NVFP4, generator)
    x, out = torch.ones(2, 64), torch.empty(2, 16)
    with pytest.raises(ValueError, match="do not fit"):
        linear(x, b, None, torch.empty(2, 15))
    with pytest.raises(ValueError, match="do not fit"):
        linear(x[:, :32], b, None, out)
    with pytest.raises(ValueError, match="BLOCKED_128x4"):
        linear(x, b.with_layout(BLOCKED_128x4), None, out)
    with pytest.raises(ValueError, match="ROWS_16x1"):
        linear(x, b.with_layout(ROWS_16x1), None, out)
    with pytest.raises(ValueError, match="need nvfp4 like b"):
        linear(random_codes((2, 64), MXFP4, generator), b, None, out)
    with pytest.raises(ValueError, match="side by side"):
        linear(x, b, None, torch.empty(16, 2).T)
    assert b.data_layout == LINEAR


def test_an_unknown_tier_is_an_error(monkeypatch):
    monkeypatch.setenv("NIBBLAS_CPU_TIER", "sse9")
    with pytest.raises(ValueError, match="portable, avx2, avx512, amx"):
        cpu_library.tier()


@pytest.mark.parametrize("layouts", B_LAYOUTS, ids=str)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_a_bound_product_is_the_product(format, layouts, generator):
    b, bias = random_codes((33, 96), format, generator).with_layout(*layouts), random_dense((33,), DTYPES[0], generator)
    first = random_dense((5, 96), torch.bfloat16, generator)
    run = bind(first, b, bias, poisoned_empty((5, 33), torch.bfloat16))
    for x in (first, random_dense((5, 96), torch.bfloat16, generator).view(1, 5, 96)):
        for change in (lambda: None, lambda: b.global_scale is None or b.global_scale.mul_(3), lambda: bias.neg_()):
            change()
            y = poisoned_empty((1, 5, 33), torch.bfloat16)
            run(x, y)
            assert torch.equal(y[0], product(x.view(5, 96), b, bias, torch.bfloat16))


def test_a_bound_product_sees_what_is_written_to_strided_weights(generator):
    wide = random_codes((33, 192), NVFP4, generator)
    b = wide.slice(1, 0, 96)
    x = random_dense((5, 96), torch.bfloat16, generator)
    y = poisoned_empty((5, 33), torch.bfloat16)
    run = bind(x, b, None, y)
    wide.data.bitwise_xor_(0x88)
    run(x, y)
    assert torch.equal(y, product(x, b, None, torch.bfloat16))
