"""quantize and dequantize against values worked out by hand, an exhaustive search, and the original tensor."""

import doctest
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nibblas.formats import E4M3, E8M0, FORMATS, MXFP4, NVFP4, e2m1_decode, e2m1_encode, unpack
from nibblas.layouts import LAYOUTS, SHUFFLED_16x16, TiledLayout
from nibblas.quantize import (
    DTYPES,
    RULES,
    SMALLEST_GLOBAL_SCALE,
    amax,
    dequantize,
    global_scale_from_amax,
    quantize,
    rotate,
)

module = sys.modules["nibblas.quantize"]
EVERY_RULE = [(format, rule) for format in FORMATS.values() for rule in format.scale_rules]
every_rule = pytest.mark.parametrize(("format", "rule"), EVERY_RULE, ids=lambda value: str(value))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes(w) -> torch.Tensor:
    return unpack(w.data)


def same_bytes(a, b) -> bool:
    return torch.equal(a.data, b.data) and torch.equal(a.scale, b.scale)


def block_of(*values: float, block_size: int = 32) -> torch.Tensor:
    """One row of one block that starts with the values."""
    x = torch.zeros(1, block_size)
    x[0, : len(values)] = torch.tensor(values)
    return x


def mx_byte(amax: float, rule: str, dtype: torch.dtype = torch.float32) -> int:
    return quantize(block_of(amax).to(dtype), MXFP4, scale_rule=rule).scale.item()


# Reported faults of other software, restated.


def test_zero_block_beside_a_live_one():
    x = torch.zeros(1, 64)
    x[0, 32:] = randn(32)
    x[0, 40] = -3.0
    for format, rule in EVERY_RULE:
        w = quantize(x, format, scale_rule=rule)
        assert not format.scale_code.is_nan(w.scale).any()
        assert not codes(w)[0, :32].any()
        got = dequantize(w)
        assert not got[0, :32].any()
        assert torch.equal(got[0, 32:], dequantize(quantize(x[:, 32:], format, scale_rule=rule))[0])
    assert dequantize(quantize(x, NVFP4))[0, 40].item() == pytest.approx(-3.0, rel=1e-6)


@every_rule
@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-149, 2.0**-126, 1e-38])
def test_tiny_and_zero_tensors_have_a_finite_global_scale(format, rule, value):
    w = quantize(torch.full((4, 64), value), format, scale_rule=rule)
    if format is NVFP4:
        assert w.global_scale >= SMALLEST_GLOBAL_SCALE
        assert (1 / w.global_scale).isfinite()
    got = dequantize(w)
    assert got.isfinite().all()
    if value == 0:
        assert not got.any()
        assert not w.scale.any()
    if value == 1e-38:
        torch.testing.assert_close(got, torch.full((4, 64), 1e-38), rtol=1 / 7, atol=0)


@pytest.mark.parametrize("rule", NVFP4.scale_rules)
def test_blocks_above_a_static_scale_saturate(rule):
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 16] = 4.0, -4.0, 1e30
    w = quantize(x, NVFP4, scale_rule=rule, global_scale=1 / 2688)
    assert w.scale.tolist() == [[0x7E, 0x7E]]
    assert dequantize(w)[0, [0, 1, 16]].tolist() == pytest.approx([1.0, -1.0, 1.0], rel=1e-6)


def test_small_blocks_with_and_without_a_global_scale():
    w = quantize(torch.full((2, 32), 0.005), NVFP4)
    assert (w.scale == 0x7E).all()
    torch.testing.assert_close(dequantize(w), torch.full((2, 32), 0.005), rtol=1e-6, atol=0)
    for largest, byte in ((0.005, 0x00), (0.005859375, 0x00), (0.006, 0x01)):  # 6 * 2^-10 is a tie, and goes to even
        w = quantize(block_of(largest, block_size=16), NVFP4, global_scale=1.0)
        assert w.scale.item() == byte
        assert bool(codes(w).any()) == (byte > 0)
    assert dequantize(quantize(torch.full((1, 16), 5376.0), NVFP4, global_scale=1.0)).unique() == 2688


@pytest.mark.parametrize(("format", "options"), [(NVFP4, {"global_scale": 1.0}), (MXFP4, {"scale_rule": "floor"})])
def test_ties_go_to_even(format, options):
    values = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat((values, -values)).repeat(format.block_size // 16).unsqueeze(0)
    w = quantize(x, format, **options)
    assert w.scale.item() == format.scale_code.one
    assert codes(w)[0, :16].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 15, 8, 10, 10, 12, 12, 14, 14]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_codes_at_every_midpoint_and_its_neighbours(format, sign):
    """Scale exactly 1: what is encoded is the input."""
    below = torch.arange(7)
    values = e2m1_decode(torch.arange(8))
    midpoint = (values[:-1] + values[1:]) / 2
    cases = ((torch.nextafter(midpoint, values[:-1]), below), (midpoint, below + below % 2))
    cases += ((torch.nextafter(midpoint, values[1:]), below + 1),)
    for inputs, expected in cases:
        x = block_of(6.0, *inputs, block_size=format.block_size) * sign
        options = {"global_scale": 1.0} if format.has_global_scale else {"scale_rule": "floor"}
        w = quantize(x, format, **options)
        assert w.scale.item() == format.scale_code.one
        assert (codes(w)[0, 1:8] & 7).tolist() == expected.tolist()
        assert (codes(w)[0, 1:8] >> 3).tolist() == [sign < 0] * 7


@pytest.mark.parametrize(
    ("rule", "bytes_"),
    [
        ("floor", {5: 127, 6.5: 127, 7: 127, 3: 126, 6: 127, 12: 128}),
        ("even", {5: 127, 6.5: 127, 7: 128, 3: 126, 6: 127, 12: 128}),
        ("rceil", {5: 127, 6.5: 128, 7: 128, 3: 126, 6: 127, 12: 128}),
    ],
)
def test_mx_rules_by_hand(rule, bytes_):
    assert {value: mx_byte(value, rule) for value in bytes_} == bytes_
    w = quantize(block_of(7.0), MXFP4, scale_rule=rule)
    assert w.scale_rule == rule
    assert dequantize(w)[0, 0] == (6.0 if rule == "floor" else 8.0)


def test_mx_exponents_come_from_bits():
    for k in range(-124, 128):
        power = torch.tensor(2.0**k)
        under = torch.nextafter(power, torch.tensor(0.0)).item()
        assert mx_byte(power.item(), "floor") == k + 125
        assert mx_byte(under, "floor") == k + 124
        assert mx_byte(under, "even") == mx_byte(power.item(), "even") == k + 125
    for k in range(-120, 121):
        six = torch.tensor(6 * 2.0**k)
        assert mx_byte(six.item(), "rceil") == k + 127
        assert mx_byte(torch.nextafter(six, torch.tensor(math.inf)).item(), "rceil") == k + 128
        assert mx_byte(3.5 * 2.0**k, "even") == k + 127
        assert mx_byte(torch.nextafter(torch.tensor(3.5 * 2.0**k), torch.tensor(0.0)).item(), "even") == k + 126
    assert mx_byte(3.9999, "floor") == 126
    largest = torch.finfo(torch.float32).max
    assert [mx_byte(largest, rule) for rule in ("floor", "even", "rceil")] == [252, 253, 253]
    assert [mx_byte(2.0**-149, rule) for rule in MXFP4.scale_rules] == [0] * 4


@every_rule
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_mark_their_block_alone(format, rule, bad, dtype):
    block_size = format.block_size
    x = randn(3, 4 * block_size, seed=1).to(dtype)
    x[0, -1] = 100  # the amax is elsewhere
    clean = quantize(x, format, scale_rule=rule)
    x[1, block_size + 3] = bad
    w = quantize(x, format, scale_rule=rule)
    assert w.scale[1, 1] == format.scale_code.nan
    assert not codes(w)[1, block_size : 2 * block_size].any()
    assert dequantize(w)[1, block_size : 2 * block_size].isnan().all()
    assert dequantize(w).isnan().sum() == block_size
    others = torch.ones_like(w.scale, dtype=torch.bool)
    others[1, 1] = False
    assert torch.equal(w.scale[others], clean.scale[others])
    others = others.repeat_interleave(block_size, dim=1)
    assert torch.equal(codes(w)[others], codes(clean)[others])
    with pytest.raises(ValueError, match=r"quantize: 1 of 12 blocks hold a NaN or Inf \(strict=True\)"):
        quantize(x, format, scale_rule=rule, strict=True)
    assert same_bytes(quantize(x.nan_to_num(0, 0, 0), format, strict=True), quantize(x.nan_to_num(0, 0, 0), format))


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_nothing_finite(format):
    w = quantize(torch.full((2, 32), math.nan), format)
    assert format.scale_code.is_nan(w.scale).all()
    assert format is MXFP4 or w.global_scale == SMALLEST_GLOBAL_SCALE


def test_signs():
    w = quantize(-torch.ones(1, 16), NVFP4)
    assert codes(w).unique() == 0xF
    assert w.scale.item() == 0x7E
    assert dequantize(w).unique() == -1.0
    w = quantize(block_of(6.0, -0.25, -0.0, 0.0, 0.25, block_size=16), NVFP4, global_scale=1.0)
    assert w.scale.item() == E4M3.one
    assert codes(w)[0, :5].tolist() == [7, 8, 8, 0, 0]
    assert torch.signbit(dequantize(w))[0, :5].tolist() == [False, True, True, False, False]


def test_the_reference_is_the_input_not_the_codes():
    torch.testing.assert_close(dequantize(quantize(torch.full((2, 32), 0.01), NVFP4)), torch.full((2, 32), 0.01))
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 64))).float()
    assert x.norm() > 0
    for format, rule, expected in ((NVFP4, "absmax", 0.0945), (MXFP4, "floor", 0.116), (MXFP4, "rceil", 0.114)):
        error = (dequantize(quantize(x, format, scale_rule=rule)) - x).norm() / x.norm()
        assert error.item() == pytest.approx(expected, rel=0.04)


@every_rule
def test_fp32_goes_through_no_narrower_type(format, rule):
    assert [mx_byte(3.9999, "floor", dtype) for dtype in (torch.float32, torch.bfloat16)] == [126, 127]
    x = randn(64, 64, seed=2)
    from_fp32, from_bf16 = quantize(x, format, scale_rule=rule), quantize(x.bfloat16(), format, scale_rule=rule)
    assert not same_bytes(from_fp32, from_bf16)
    assert same_bytes(quantize(x.bfloat16().float(), format, scale_rule=rule), from_bf16)
    assert same_bytes(quantize(x.half().float(), format, scale_rule=rule), quantize(x.half(), format, scale_rule=rule))


# Rules.


@pytest.mark.parametrize(
    ("format", "rule", "expected"),
    [
        (NVFP4, "absmax", 0.00909),
        (NVFP4, "four_over_six", 0.00760),
        (NVFP4, "search", 0.00661),
        (MXFP4, "even", 0.01254),
        (MXFP4, "floor", 0.01323),
        (MXFP4, "rceil", 0.01326),
        (MXFP4, "search", 0.01251),
    ],
)
def test_relative_squared_error_of_normal_weights(format, rule, expected):
    x = randn(1024, 1024)
    error = (dequantize(quantize(x, format, scale_rule=rule)) - x).square().sum() / x.square().sum()
    assert error.item() == pytest.approx(expected, rel=0.01)


def error_under(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Squared error in float64 of blocks (B, block_size) under steps (B)."""
    step = step.double().unsqueeze(-1)
    return (x.double() - e2m1_decode(e2m1_encode(x.double() / step)).double() * step).square().sum(-1)


def adversarial_blocks(count: int, block_size: int, seed: int) -> torch.Tensor:
    """Blocks on which scales compete: normal, heavy-tailed, all equal but one, and a large element among .5 and 1.5."""
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    equal = 6 * rand(count, 1) * torch.ones(block_size)
    equal[:, 0] = 16 * rand(count)
    halves = torch.tensor([0.5, 1.5])[(rand(count, block_size) * 2).long()]
    halves[:, 0] = 5 + 6 * rand(count)
    kinds = torch.stack((randn(count, block_size, seed=seed).abs(), rand(count, block_size) ** 4, equal, halves))
    return kinds[torch.arange(count) % 4, torch.arange(count)]


@pytest.mark.parametrize("global_scale", [1.0, 1.75, 0.7391])
@pytest.mark.parametrize("octaves", [(-12, 12), (-11, -4), (5, 14)], ids=["all", "subnormal", "saturating"])
def test_nvfp4_search_is_exhaustive(global_scale, octaves):
    """Against all 126 positive scales in float64."""
    x = adversarial_blocks(2000, 16, seed=3)
    low, high = octaves
    x *= 2.0 ** (low + (high - low) * torch.rand(2000, 1, generator=torch.Generator().manual_seed(4)))
    w = quantize(x, NVFP4, scale_rule="search", global_scale=global_scale)
    scales = E4M3.decode(torch.arange(1, 127, dtype=torch.uint8))
    least = torch.stack([error_under(x, (scale * global_scale).expand(2000)) for scale in scales]).amin(0)
    ours = error_under(x, E4M3.decode(w.scale.squeeze(1)) * global_scale)
    assert (ours <= least + 1e-6 * x.double().square().sum(-1) * 2.0**-16 + 1e-5 * least).all()


@pytest.mark.parametrize("octaves", [(-20, 20), (-126, -118), (120, 124)])
def test_mxfp4_search_is_exhaustive(octaves):
    x = adversarial_blocks(2000, 32, seed=5)
    low, high = octaves
    x *= 2.0 ** (low + (high - low) * torch.rand(2000, 1, generator=torch.Generator().manual_seed(6)))
    w = quantize(x, MXFP4, scale_rule="search")
    scales = E8M0.decode(torch.arange(255, dtype=torch.uint8))
    errors = torch.stack([error_under(x, scale.expand(2000)) for scale in scales])
    assert torch.equal(error_under(x, E8M0.decode(w.scale.squeeze(1))), errors.amin(0))
    # Exact steps, so ties are exact: the smallest scale wins.
    assert torch.equal(w.scale.squeeze(1), errors.argmin(0).to(torch.uint8))


def test_four_over_six_by_hand():
    """amax 6 keeps 6 for values on that grid, and takes 4 for values that are multiples of 1.5; a tie keeps 6."""
    on_six, on_four = block_of(6, 4, 3, block_size=16), block_of(6, 4.5, 3, block_size=16)
    both = block_of(6, 3, 1.5, block_size=16)
    scales = [
        quantize(x, NVFP4, scale_rule="four_over_six", global_scale=1.0).scale.item() for x in (on_six, on_four, both)
    ]
    assert E4M3.decode(torch.tensor(scales, dtype=torch.uint8)).tolist() == [1.0, 1.5, 1.0]


def test_four_over_six_below_the_smallest_scale():
    """amax / 6 rounds to a scale of 0 while 1.5 times it does not."""
    x = block_of(6 * 0.9 * 2.0**-10, block_size=16)
    assert quantize(x, NVFP4, scale_rule="absmax", global_scale=1.0).scale.item() == 0
    assert quantize(x, NVFP4, scale_rule="four_over_six", global_scale=1.0).scale.item() == 1


@pytest.mark.parametrize("rule", ["four_over_six", "search"])
def test_better_rules_are_better_in_every_block(rule):
    x = randn(256, 256, seed=7)
    global_scale = global_scale_from_amax(amax(x), rule)
    errors = {}
    for name in ("absmax", rule):
        got = dequantize(quantize(x, NVFP4, scale_rule=name, global_scale=global_scale))
        errors[name] = (got.double() - x.double()).square().unflatten(1, (-1, 16)).sum(-1)
    assert (errors[rule] <= errors["absmax"] * (1 + 1e-5)).all()
    assert errors[rule].sum() < 0.9 * errors["absmax"].sum()


@every_rule
@pytest.mark.parametrize("k", [-90, -7, 1, 60])
def test_powers_of_two_scale_through(format, rule, k):
    """Errors are compared in units in which their squares neither overflow nor vanish."""
    x = randn(16, 128, seed=8)
    w, scaled = quantize(x, format, scale_rule=rule), quantize(x * 2.0**k, format, scale_rule=rule)
    assert torch.equal(w.data, scaled.data)
    if format is NVFP4:
        assert torch.equal(w.scale, scaled.scale)
        assert scaled.global_scale == w.global_scale * 2.0**k
    else:
        assert torch.equal(w.scale.int() + k, scaled.scale.int())


@every_rule
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_error_is_within_half_a_grid_step(format, rule, data):
    exponent = data.draw(st.integers(-40, 40))
    values = data.draw(st.lists(st.floats(-1, 1, width=32), min_size=64, max_size=64))
    x = torch.tensor(values).unsqueeze(0) * 2.0**exponent
    w = quantize(x, format, scale_rule=rule)
    global_scale = 1.0 if w.global_scale is None else w.global_scale.double()
    step = (format.scale_code.decode(w.scale).double() * global_scale).repeat_interleave(format.block_size, dim=1)
    error, size = (dequantize(w).double() - x.double()).abs(), x.double().abs()
    half = torch.where(size < 2 * step, 0.25, torch.where(size < 4 * step, 0.5, 1.0)) * step
    bound = torch.maximum(half, size - 6 * step) + 1e-6 * size
    assert (error <= torch.where(step == 0, size, bound)).all()
    if rule in ("absmax", "even", "rceil"):
        # How far above 6 each rule lets the largest element go: half a step of e4m3 (or of its subnormals), 7, and 6.
        beyond = {"absmax": 6 * 17 / 16, "even": 7.0, "rceil": 6.0}[rule]
        slack = 3 * 2.0**-9 * global_scale if rule == "absmax" else 0.0
        assert (size <= beyond * step * (1 + 1e-6) + slack + 2.0**-140).all()


# Another implementation, in numpy, from docs/formats.md alone.

F = np.float32
MIDPOINTS = F([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])


def numpy_e2m1(v: np.ndarray) -> np.ndarray:
    """Codes of magnitudes."""
    v = np.abs(v)[..., None]
    return np.where(np.arange(7) % 2, v >= MIDPOINTS, v > MIDPOINTS).sum(-1)


def numpy_e4m3(v: np.ndarray) -> np.ndarray:
    v = np.minimum(v, F(448))
    values = E4M3.decode(torch.arange(127, dtype=torch.uint8)).numpy()
    middle = (values[:-1] + values[1:]) / 2
    return np.where(np.arange(126) % 2, v[..., None] >= middle, v[..., None] > middle).sum(-1)


def numpy_error(m: np.ndarray, t: np.ndarray) -> np.ndarray:
    t = t[:, None]
    e = m - F([0, 0.5, 1, 1.5, 2, 3, 4, 6])[numpy_e2m1(m / t)] * t
    e = e * e
    while e.shape[1] > 1:
        h = e.shape[1] // 2
        e = e[:, :h] + e[:, h:]
    return e[:, 0]


def numpy_choose(m: np.ndarray, candidates: list[tuple[np.ndarray, np.ndarray]], best: np.ndarray) -> np.ndarray:
    """The code of least error among (codes, steps), the first on a tie; `best` where no error is finite."""
    least = np.full(len(m), np.inf, dtype=F)
    for code, t in candidates:
        error = numpy_error(m, t)
        best, least = np.where(error < least, code, best), np.where(error < least, error, least)
    return best


def numpy_scale_codes(blocks: np.ndarray, rule: str, global_scale: np.float32 | None) -> np.ndarray:
    magnitude = np.abs(blocks)
    a = magnitude.max(1)
    if global_scale is None:
        rounding = {"floor": 0, "even": 0x200000, "rceil": 0x3FFFFF, "search": 0}[rule]
        code = np.clip(((a.view(np.int32) + rounding) >> 23) - 2, 0, 254)
        if rule == "search":
            first = np.maximum(code - 1, 0)
            m = magnitude * np.ldexp(F(1), 127 - first)[:, None]
            code = numpy_choose(m, [(first + i, np.full(len(a), F(2**i))) for i in range(3)], first)
        return code
    s = a / (F(6) * global_scale)
    code = numpy_e4m3(s)
    if rule == "absmax":
        return code
    decode = lambda codes: E4M3.decode(torch.from_numpy(codes.astype(np.uint8))).numpy()  # noqa: E731
    p = np.ldexp(F(1), 127 - (int(global_scale.view(np.int32)) >> 23))
    m, g = magnitude * p, global_scale * p
    if rule == "four_over_six":
        four = numpy_e4m3(F(1.5) * s)
        return np.where(numpy_error(m, decode(four) * g) >= numpy_error(m, decode(code) * g), code, four)
    first = np.clip(code - 5, 1, 111)
    return np.where(a == 0, 0, numpy_choose(m, [(first + i, decode(first + i) * g) for i in range(16)], code))


@every_rule
@pytest.mark.parametrize("amplitude", [1e-30, 0.02, 1.0, 3e38])
def test_an_implementation_from_the_document_agrees(format, rule, amplitude):
    x = adversarial_blocks(2048, format.block_size, seed=23) * torch.where(randn(2048, 1, seed=24) > 0, 1.0, 2.0**-9)
    x = (x * randn(2048, format.block_size, seed=25).sign() * (amplitude / 16)).view(64, -1)
    x[3, : 2 * format.block_size] = 0
    w = quantize(x, format, scale_rule=rule)
    blocks = x.numpy().reshape(-1, format.block_size)
    global_scale = None
    if format is NVFP4:
        divisor = F(2688 if rule == "absmax" else 1536)
        global_scale = np.maximum(np.abs(blocks).max() / divisor, F(2.0**-126))
        assert w.global_scale.numpy() == global_scale
    with np.errstate(divide="ignore", invalid="ignore"):
        code = numpy_scale_codes(blocks, rule, global_scale)
        assert np.array_equal(code, w.scale.numpy().ravel())
        step = format.scale_code.decode(w.scale).numpy().ravel() * (F(1) if global_scale is None else global_scale)
        expected = numpy_e2m1(blocks / step[:, None]) + 8 * np.signbit(blocks)
    expected[step == 0] = 0
    assert np.array_equal(expected.ravel(), codes(w).numpy().ravel())


def test_the_block_scale_is_one_division():
    """amax / (6 * global_scale), where amax / 6 / global_scale would cross a tie of e4m3."""
    values = E4M3.decode(torch.arange(8, 120, dtype=torch.uint8))
    ties = (values[:-1] + values[1:]) / 2
    differ = 0
    for global_scale in torch.rand(20, generator=torch.Generator().manual_seed(2)) + 0.5:
        x = (ties * 6 * global_scale).unsqueeze(1).expand(-1, 16)
        w = quantize(x, NVFP4, global_scale=global_scale)
        amaxs = x[:, 0].numpy()
        assert np.array_equal(numpy_e4m3(amaxs / (F(6) * global_scale.numpy())), w.scale.numpy().ravel())
        differ += (numpy_e4m3(amaxs / F(6) / global_scale.numpy()) != w.scale.numpy().ravel()).sum()
    assert differ > 0


def test_errors_are_summed_as_a_halving_tree():
    """In fp32 the order shows, and two steps that give a block the same values give it the same error exactly."""
    x, step = randn(256, 32, seed=26).abs(), torch.rand(256, generator=torch.Generator().manual_seed(1)) + 0.2
    got = module._block_error(x, step)
    assert np.array_equal(got.numpy(), numpy_error(x.numpy(), step.numpy()))
    y = randn(256, 16, seed=27).abs() * 0.01
    y[:, 0] = 6.0
    assert torch.equal(module._block_error(y, torch.full((256,), 1.0)), module._block_error(y, torch.full((256,), 1.5)))


# Global scales.


@pytest.mark.parametrize(("rule", "divisor"), [("absmax", 2688.0), ("four_over_six", 1536.0), ("search", 1536.0)])
def test_global_scale_is_one_division(rule, divisor):
    x = randn(33, 64, seed=9)
    w = quantize(x, NVFP4, scale_rule=rule)
    assert w.global_scale.shape == ()
    assert w.global_scale == x.abs().amax() / divisor
    assert w.global_scale == global_scale_from_amax(amax(x), rule)


def test_global_scale_for_each_matrix():
    x = randn(2, 3, 8, 32, seed=10)
    global_scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)) / 1000 + 1e-3
    w = quantize(x, NVFP4, global_scale=global_scale)
    assert torch.equal(w.global_scale, global_scale)
    got = dequantize(w)
    for i in range(2):
        for j in range(3):
            one = quantize(x[i, j], NVFP4, global_scale=global_scale[i, j])
            assert torch.equal(one.data, w.data[i, j])
            assert torch.equal(one.scale, w.scale[i, j])
            assert torch.equal(dequantize(one), got[i, j])


def test_a_global_scale_of_one_element_has_any_shape():
    x = randn(4, 32)
    want = quantize(x, NVFP4, global_scale=0.001)
    for given_scale in (torch.tensor(0.001), torch.tensor([0.001]), torch.tensor([[0.001]], dtype=torch.float64)):
        w = quantize(x, NVFP4, global_scale=given_scale)
        assert w.global_scale.shape == ()
        assert w.global_scale.dtype == torch.float32
        assert same_bytes(w, want)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, torch.tensor([1.0, 0.0])])
def test_global_scale_must_be_positive_and_finite(bad):
    shape = (2, 4, 32) if isinstance(bad, torch.Tensor) else (4, 32)
    with pytest.raises(ValueError, match="need positive and finite"):
        quantize(torch.ones(shape), NVFP4, global_scale=bad)


# Shapes, dtypes, arguments.


@every_rule
def test_chunks_do_not_show(format, rule, monkeypatch):
    x = randn(5, 7, 96, seed=11)
    whole = quantize(x, format, scale_rule=rule)
    values = dequantize(whole)
    monkeypatch.setattr(module, "CHUNK", 64)
    assert same_bytes(quantize(x, format, scale_rule=rule), whole)
    assert torch.equal(dequantize(whole), values)


def test_temporaries_are_bounded(monkeypatch):
    """No tensor larger than a chunk is widened: blocks come to the rule a chunk at a time."""
    seen = []
    rules = {
        name: lambda m, a, g, rule=rule: (seen.append(m.numel()), rule(m, a, g))[1]
        for name, rule in RULES[NVFP4].items()
    }
    monkeypatch.setitem(RULES, NVFP4, rules)
    x = randn(512, 2048).bfloat16()
    quantize(x, NVFP4)
    assert sum(seen) == x.numel()
    assert max(seen) <= module.CHUNK
    assert len(seen) > 1


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize(
    "shape", [(64,), (1, 32), (3, 64), (2, 3, 5, 96), (0, 64), (4, 0), (2, 0, 32), (0, 3, 32), (0,)]
)
def test_shapes(format, shape):
    x = randn(*shape, seed=12)
    w = quantize(x, format)
    K = shape[-1]
    assert w.shape == shape
    assert w.data.shape == (*shape[:-1], K // 2)
    assert w.scale.shape == (*shape[:-1], K // format.block_size)
    got = dequantize(w)
    assert got.shape == shape
    if x.numel():
        assert (got - x).norm() < 0.16 * x.norm()


@every_rule
def test_strides_do_not_matter(format, rule):
    x = randn(96, 64, seed=13)
    for strided in (x.T, x[::3], x[:, ::2], randn(4, 6, 64).permute(1, 0, 2), x[:1].expand(5, 64)):
        assert same_bytes(
            quantize(strided, format, scale_rule=rule), quantize(strided.contiguous(), format, scale_rule=rule)
        )


@pytest.mark.parametrize("block_dim", [0, 1, 2, -1, -2, -3])
def test_block_dim_is_moved_last(block_dim):
    x = randn(32, 64, 96, seed=14)
    w = quantize(x, MXFP4, block_dim=block_dim)
    moved = x.movedim(block_dim, -1)
    assert w.shape == moved.shape
    assert same_bytes(w, quantize(moved.contiguous(), MXFP4))


def test_the_input_is_left_alone():
    x = randn(4, 64, seed=15)
    x[0, 0] = math.nan
    before = x.clone()
    for format, rule in EVERY_RULE:
        quantize(x, format, scale_rule=rule)
        quantize(x, format, scale_rule=rule, rotation=32)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))
    assert not dequantize(quantize(randn(2, 32).requires_grad_(), NVFP4)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=rf"quantize: x is {dtype}, need"):
        quantize(torch.zeros(1, 32).to(dtype), NVFP4)


@pytest.mark.parametrize(
    ("x", "format", "options", "message"),
    [
        (torch.zeros(2, 24), NVFP4, {}, "K = 24 is not a multiple of nvfp4's block_size 16"),
        (torch.zeros(2, 48), MXFP4, {}, "K = 48 is not a multiple of mxfp4's block_size 32"),
        (torch.zeros(2, 33), NVFP4, {}, "K = 33"),
        (torch.zeros(32, 24), NVFP4, {"block_dim": 1}, "K = 24"),
        (torch.zeros(()), NVFP4, {}, "block_dim -1 of a tensor of shape"),
        (torch.zeros(2, 32), NVFP4, {"block_dim": 2}, "block_dim 2"),
        (torch.zeros(2, 32), "fp4", {}, "format 'fp4' is unknown"),
        (torch.zeros(2, 32), NVFP4, {"scale_rule": "floor"}, "nvfp4 has absmax, four_over_six, search"),
        (torch.zeros(2, 32), MXFP4, {"scale_rule": "absmax"}, "mxfp4 has even, floor, rceil, search"),
        (torch.zeros(2, 32), MXFP4, {"global_scale": 1.0}, "mxfp4 has no global_scale"),
        (torch.zeros(2, 3, 32), NVFP4, {"global_scale": torch.ones(3)}, r"shape \(3,\), need \(\) or \(2,\)"),
        (torch.zeros(2, 32), NVFP4, {"rotation": 8}, "rotation 8 of K = 32"),
        (torch.zeros(2, 96), NVFP4, {"rotation": 64}, "rotation 64 of K = 96"),
    ],
)
def test_arguments_are_checked(x, format, options, message):
    with pytest.raises(ValueError, match=message):
        quantize(x, format, **options)


def test_a_tensor_is_needed():
    with pytest.raises(TypeError, match="quantize: x is list"):
        quantize([1.0] * 16, NVFP4)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_the_first_rule_is_the_default_and_is_recorded(format):
    x = randn(4, 64)
    for rule in format.scale_rules:
        assert quantize(x, format.name, scale_rule=rule).scale_rule == rule
    assert same_bytes(quantize(x, format), quantize(x, format, scale_rule=format.scale_rules[0]))


# amax.


def test_amax_is_of_finite_elements():
    x = torch.tensor([1.0, -5.0, math.nan, math.inf, -math.inf])
    assert amax(x) == 5.0
    assert amax(x[2:]) == 0
    assert amax(torch.zeros(0, 4)) == 0
    assert amax(torch.zeros(())) == 0
    assert amax(randn(3, 5).bfloat16()).dtype == torch.float32
    y = randn(4, 64)
    assert amax(y, rotation=64) == rotate(y, 64).abs().amax()


# dequantize.


def test_the_bracket_comes_first():
    """code * (scale * global_scale) is 0.75 here; (code * scale) * global_scale is 0.75000006."""
    w = quantize(torch.full((1, 16), 0.75), NVFP4)
    assert (codes(w).unique().item(), w.scale.item()) == (7, 0x7E)
    assert dequantize(w).unique() == 0.75


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dequantize_narrows_once(dtype):
    w = quantize(randn(16, 64, seed=16), NVFP4, scale_rule="search", rotation=16)
    assert torch.equal(dequantize(w, dtype), dequantize(w).to(dtype))


def test_dequantize_refuses_other_dtypes():
    with pytest.raises(TypeError, match=r"dequantize: dtype torch\.int32"):
        dequantize(quantize(torch.ones(1, 16), NVFP4), torch.int32)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS.values() if isinstance(x, TiledLayout)], ids=str)
def test_dequantize_reads_every_layout(layout):
    w = quantize(randn(2, 33, 160, seed=17), NVFP4)
    want = dequantize(w)
    assert torch.equal(dequantize(w.with_layout(layout)), want)
    assert torch.equal(dequantize(w.with_layout(layout, SHUFFLED_16x16)), want)


def test_dequantize_of_slices():
    w = quantize(randn(2, 32, 128, seed=18), NVFP4)
    want = dequantize(w)
    assert torch.equal(dequantize(w.slice(-1, 32, 96)), want[..., 32:96])
    assert torch.equal(dequantize(w.slice(-2, 5, 20)), want[:, 5:20])
    assert torch.equal(dequantize(w.slice(0, 1, 2)), want[1:])


@every_rule
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bytes(format, rule):
    x = adversarial_blocks(4096, format.block_size, seed=28).view(64, -1)
    for rotation in (0, 64):
        w = quantize(x, format, scale_rule=rule, rotation=rotation)
        on_gpu = quantize(x.cuda(), format, scale_rule=rule, rotation=rotation)
        assert same_bytes(on_gpu.to("cpu"), w)
        assert format is MXFP4 or on_gpu.global_scale.item() == w.global_scale.item()
        assert torch.equal(dequantize(on_gpu).cpu(), dequantize(w))


# Rotation.


@pytest.mark.parametrize("size", module.ROTATIONS)
def test_rotation_is_sylvesters_matrix(size):
    i = torch.arange(size)
    bits = (i[:, None] & i[None, :]).unsqueeze(-1) >> torch.arange(8) & 1
    matrix = (1 - 2 * (bits.sum(-1) % 2)).double() / math.sqrt(size)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64))
    x = randn(3, 5, 256, seed=19)
    want = (x.double().unflatten(-1, (-1, size)) @ matrix).flatten(-2)
    torch.testing.assert_close(rotate(x, size).double(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotate(rotate(x, size), size), x, rtol=0, atol=2e-6)


def test_rotating_both_operands_leaves_the_product():
    a, b = randn(4, 128, seed=20), randn(6, 128, seed=21)
    torch.testing.assert_close(rotate(a, 64) @ rotate(b, 64).T, a @ b.T, rtol=0, atol=1e-4)


@every_rule
@pytest.mark.parametrize("size", module.ROTATIONS)
def test_dequantize_rotates_back(format, rule, size, monkeypatch):
    x = randn(8, 256, seed=22).bfloat16()
    x[3, 17] = 40
    w = quantize(x, format, scale_rule=rule, rotation=size)
    assert w.rotation == size
    plain = quantize(rotate(x, size), format, scale_rule=rule)
    assert same_bytes(w, plain)
    assert torch.equal(dequantize(w), rotate(dequantize(plain), size))
    assert (dequantize(w) - x.float()).norm() < 0.16 * x.float().norm()
    monkeypatch.setattr(module, "CHUNK", 128)
    assert same_bytes(quantize(x, format, scale_rule=rule, rotation=size), w)


def test_rotate_refuses():
    for x, size in ((torch.ones(2, 24), 16), (torch.ones(2, 32), 8), (torch.ones(2, 32), 0), (torch.ones(()), 16)):
        with pytest.raises(ValueError, match="rotate: "):
            rotate(x, size)


def test_docstrings():
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0
