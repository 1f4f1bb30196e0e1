"""cpu_quantize against quantize.py, byte for byte, on every tier."""

import pytest
import torch

from nibblas.formats import E2M1_MIDPOINTS, FORMATS, MXFP4, NVFP4
from nibblas.kernels import cpu_library, cpu_quantize
from nibblas.quantize import amax, dequantize, quantize
from nibblas.tensor import ScaledTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RULES = [(format, rule) for format in FORMATS.values() for rule in format.scale_rules]

pytestmark = pytest.mark.skipif(cpu_library.library() is None, reason=str(cpu_library.status()))


@pytest.fixture(params=cpu_library.TIERS)
def tier(request, monkeypatch):
    monkeypatch.setenv("NIBBLAS_CPU_TIER", request.param)
    if cpu_library.TIERS[cpu_library.tier()] != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    return request.param


def inputs():
    """Matrices (rows, 1088) that bring out rounding, ties, zeros, specials and both ends of fp32."""
    generator = torch.Generator().manual_seed(0)
    shape = (24, 1088)
    normal = torch.randn(shape, generator=generator)
    yield "normal", normal
    yield "powers", normal * torch.exp2(torch.randint(-30, 10, shape, generator=generator).float())
    yield "any bits", torch.randint(1 << 31, shape, generator=generator, dtype=torch.int64).int().view(torch.float32)
    yield "ties", torch.randint(-28, 29, shape, generator=generator) / 4.0
    yield "subnormal", normal * 1e-44
    special = normal.clone()
    special[special < 0.3] = 0
    special[0], special[1] = 0, -0.0
    special[2, 5], special[3, 40], special[4, 1087] = torch.nan, torch.inf, -torch.inf
    special[5], special[6], special[7, ::2] = 1e-42, -3e38, 1e-20
    yield "special", special


def assert_same(got, need, what):
    assert got.scale_rule == need.scale_rule
    assert torch.equal(got.scale, need.scale), f"{what}: {(got.scale != need.scale).sum()} scale codes differ"
    assert torch.equal(got.data, need.data), f"{what}: {(got.data != need.data).sum()} bytes of codes differ"
    assert (got.global_scale is None) == (need.global_scale is None)
    assert got.global_scale is None or torch.equal(got.global_scale, need.global_scale)


@pytest.mark.parametrize(("format", "rule"), RULES, ids=str)
def test_bytes_equal_the_reference(tier, format, rule):
    for name, x in inputs():
        for dtype in DTYPES:
            given = x.to(dtype)
            scales = [None]
            if format is NVFP4:
                scales += [torch.tensor(value) for value in (0.01, 1e-41, 3e38)]
            for global_scale in scales:
                need = quantize(given, format, scale_rule=rule, global_scale=global_scale)
                got = cpu_quantize.quantize(given, format, rule, global_scale)
                assert_same(got, need, f"{name} {dtype} {global_scale}")


@pytest.mark.parametrize("power", [-126, -80, 0, 60], ids=str)
def test_quotients_next_to_a_midpoint(tier, power):
    """Elements within two units in the last place of each midpoint of e2m1, under steps of many mantissas.

    A product with the step's inverse is on the wrong side of the midpoint for one of them in a few dozen.
    """
    generator = torch.Generator().manual_seed(3)
    scale = torch.arange(0x38, 0x40, dtype=torch.uint8)
    for factor in torch.ldexp(torch.rand(100, generator=generator) + 1, torch.tensor(power)):
        step = NVFP4.scale_code.decode(scale) * factor
        near = step[:, None] * torch.tensor(E2M1_MIDPOINTS)
        near = (
            (near.view(torch.int32)[..., None] + torch.arange(-2, 3, dtype=torch.int32)).flatten(1).view(torch.float32)
        )
        blocks = torch.cat([near, near[:, :10]], dim=1).view(8, 3, 15)
        x = torch.cat([(6 * step)[:, None, None].expand(8, 3, 1), blocks], dim=-1).view(8, 48)
        need = quantize(x, NVFP4, scale_rule="absmax", global_scale=factor)
        assert torch.equal(need.scale, scale[:, None].expand(8, 3))
        assert_same(cpu_quantize.quantize(x, NVFP4, "absmax", factor), need, f"global_scale {factor}")


def test_strided_few_and_many_columns(tier):
    wide = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    tall = torch.randn(3, 5 << 13, generator=torch.Generator().manual_seed(4))
    for x in (wide[::2, 3:35], wide.T[:96, :32], wide[:0, :32], wide[:, :0], tall, tall[:, : 9 << 12], tall[1:2]):
        assert torch.equal(cpu_quantize.amax(x), amax(x))
        for format in FORMATS.values():
            rule = format.scale_rules[0]
            assert_same(
                cpu_quantize.quantize(x, format, rule, None),
                quantize(x, format, scale_rule=rule),
                str(x.shape),
            )


def test_threads_change_nothing(tier):
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(cpu_quantize.quantize(x, NVFP4, "four_over_six", None))
    finally:
        torch.set_num_threads(before)
    assert_same(*results, "threads")


def test_amax(tier):
    for name, x in inputs():
        for dtype in DTYPES:
            assert torch.equal(cpu_quantize.amax(x.to(dtype)), amax(x.to(dtype))), (name, dtype)
    assert cpu_quantize.amax(torch.full((2, 16), torch.nan)) == 0
    assert cpu_quantize.amax(torch.empty(0, 16)) == 0


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_every_code_and_scale(tier, dtype, format):
    """16 codes under 256 scale codes, with global scales that make results subnormal and infinite."""
    block = format.block_size
    data = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]).byte().repeat(256, block // 16)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    factors = [None] if format is MXFP4 else [None, *map(torch.tensor, (1.0, 0.3, 1e-40, 1e37))]
    for factor in factors:
        w = ScaledTensor(data, scale, format, factor)
        need, got = dequantize(w, dtype), cpu_quantize.dequantize(w, dtype)
        nan = need.isnan()
        assert torch.equal(got.isnan(), nan)
        assert torch.equal(got[~nan], need[~nan])
        assert torch.equal(got[~nan].signbit(), need[~nan].signbit())
