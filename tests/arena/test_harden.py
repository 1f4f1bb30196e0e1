"""Hardened inputs hold every code, keep what holds what, and keep answers small; output arguments are found."""

import math

import pytest
import torch

from nibblas import reference
from nibblas.arena.coverage import bytes_of, coverage
from nibblas.arena.harden import SMALL, Hardener
from nibblas.arena.poison import output_arguments, poison_
from nibblas.formats import E4M3, E8M0, FORMATS, MXFP4, NVFP4, e2m1_decode, unpack
from nibblas.layouts import BLOCKED_128x4, CDNA_32x8, SHUFFLED_16x16, contest_view, from_contest_view
from nibblas.quantize import quantize
from nibblas.tensor import ScaledTensor

FP4 = torch.float4_e2m1fn_x2
NAN = E4M3.nan


def nvfp4_data(M=200, N=24, K=64, L=2, seed=0):
    """a (M, K/2, L), b (N, K/2, L), their scales, the scales blocked, c; of few values, as some problems draw them."""
    generator = torch.Generator().manual_seed(seed)

    def operand(rows):
        codes = torch.randint(4, (L, rows, K // 2), dtype=torch.uint8, generator=generator)
        scale = torch.randint(3, (L, rows, K // 16), generator=generator).to(torch.float8_e4m3fn)
        blocked = contest_view(BLOCKED_128x4.to(scale.view(torch.uint8))).view(torch.float8_e4m3fn)
        return codes.permute(1, 2, 0).view(FP4), scale.permute(1, 2, 0), blocked

    a, sfa, sfa_blocked = operand(M)
    b, sfb, sfb_blocked = operand(N)
    c = torch.randn(L, M, N, generator=generator).half().permute(1, 2, 0)
    return a, b, sfa, sfb, sfa_blocked, sfb_blocked, c


def scaled(codes, scale):
    codes, scale = (t.view(torch.uint8).permute(2, 0, 1).contiguous() for t in (codes, scale))
    return ScaledTensor.from_parts(codes, scale, NVFP4)


def gemm(data):
    a, b, sfa, sfb, _, _, c = data
    c.copy_(reference.matmul(scaled(a, sfa), scaled(b, sfb)).permute(1, 2, 0))
    return c


@pytest.fixture(scope="module")
def hardened():
    data, hardener = nvfp4_data(), Hardener(gemm)
    return data, [hardener(data, seed) for seed in (10, 11)]


def test_all_codes_in_both_nibbles_and_all_scales_of_one_operand_a_time(hardened):
    _, calls = hardened
    for call in calls:
        for found in coverage(call)[:2]:
            assert found.low_codes == found.high_codes == "0123456789abcdef"
    for call, wide in zip(calls, (2, 3), strict=True):
        found = bytes_of(coverage(call)[wide].byte_codes)
        assert min(found) < 8
        assert max(found) > 0x60
        assert not any(E4M3.is_nan(torch.tensor(sorted(found), dtype=torch.uint8)))


def test_answers_stay_finite_and_small(hardened):
    for call in hardened[1]:
        assert SMALL / 8 < gemm(call).abs().max() <= SMALL


# --- blocks of zeros -----------------------------------------------------------------------------------------------


def two_operands(format, M=96, N=80, K=512):
    """a (M, K/2), b (N, K/2) and their scales."""
    generator = torch.Generator().manual_seed(0)
    a, b = (quantize(torch.randn(rows, K, generator=generator), format) for rows in (M, N))
    return *(t.data.view(FP4) for t in (a, b)), *(t.scale.view(format.scale_code.dtype) for t in (a, b))


def product(data, format=MXFP4):
    a, b, a_scale, b_scale = (t.view(torch.uint8) for t in data)
    a, b = ScaledTensor.from_parts(a, a_scale, format), ScaledTensor.from_parts(b, b_scale, format)
    return reference.matmul(a, b).bfloat16()


def in_half(data):
    """The product, its operands decoded to fp16: most e8m0 scales are infinite or zero there."""
    a, b, a_scale, b_scale = data
    a, b = (
        e2m1_decode(unpack(codes.view(torch.uint8))).half() * scale.half().repeat_interleave(32, 1)
        for codes, scale in ((a, a_scale), (b, b_scale))
    )
    return (a.float() @ b.float().T).bfloat16()


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("seed", [10, 11])
def test_both_operands_have_every_legal_scale_and_only_zeros_have_those_out_of_use(format, seed):
    data = Hardener(lambda data: product(data, format))(two_operands(format), seed)
    for codes, scale in (data[::2], data[1::2]):
        scales = scale.view(torch.uint8)
        assert set(scales.flatten().tolist()) == set(range(format.scale_code.largest + 1))
        blocks = unpack(codes.view(torch.uint8)).unflatten(-1, (-1, format.block_size))
        is_zero = (blocks & 7 == 0).all(-1)
        assert 0 < is_zero.float().mean() <= 0.25
        assert {0, 8} == set(blocks[is_zero].flatten().tolist())
        if format == MXFP4:
            others = scales[~is_zero]
            assert 107 <= others.min() <= others.max() <= 129
    assert product(data, format).isfinite().all()


def test_operands_of_one_shape_have_their_own_scales():
    data = Hardener(product)(two_operands(MXFP4, M=64, N=64), 0)
    assert product(data).isfinite().all()
    a, b, a_scale, b_scale = data
    assert not product((a, b, b_scale, a_scale)).isfinite().all()


def test_scales_that_are_infinite_in_fp16_show():
    data = two_operands(MXFP4)
    assert torch.equal(in_half(data), product(data))
    assert in_half(Hardener(product)(data, 0)).isnan().any()


def test_a_reference_to_which_zeros_are_none_gets_none():
    hardener = Hardener(in_half)
    data = hardener(two_operands(MXFP4), 0)
    assert not hardener.has_zeros
    for found in coverage(data)[2:]:
        assert bytes_of(found.byte_codes) <= set(range(107, 130))
    hardener = Hardener(product)
    hardener(two_operands(MXFP4), 0)
    assert hardener.has_zeros


def test_a_reference_that_fails_on_some_scales_only_is_given_others():
    """Its product of both scales is infinite for some: small operands have other scales for each seed."""

    def scales_first(data):
        a, b, a_scale, b_scale = (decode_mx(t) for t in data)
        return (a @ b.T) * (a_scale * b_scale.T)

    def decode_mx(t):
        scales = t.dtype == torch.float8_e8m0fnu
        return E8M0.decode(t.view(torch.uint8)).float() if scales else e2m1_decode(unpack(t.view(torch.uint8))).float()

    for seed in range(0, 60, 2):
        harden = Hardener(scales_first)
        for turn in (seed, seed + 1):
            assert scales_first(harden(two_operands(MXFP4, 16, 16, 32), turn)).isfinite().all()


def test_codes_whose_scales_are_not_told_have_no_zeros():
    a, b, a_scale, _ = two_operands(MXFP4)
    scale = torch.ones(80, 16, dtype=torch.float8_e8m0fnu)
    found = Hardener(lambda data: product((*data, scale)))((a, b, a_scale), 0)
    zero = [(unpack(t.view(torch.uint8)).unflatten(-1, (-1, 32)) & 7 == 0).all(-1).any() for t in found[:2]]
    assert zero == [True, False]


# --- what stays ----------------------------------------------------------------------------------------------------


def test_structure_and_relations_stay_and_padding_is_nan(hardened):
    data, calls = hardened
    for call in calls:
        for before, after in zip(data, call, strict=True):
            assert (before.shape, before.stride(), before.dtype) == (after.shape, after.stride(), after.dtype)
        for linear, blocked in ((call[2], call[4]), (call[3], call[5])):
            scale = linear.permute(2, 0, 1).view(torch.uint8)
            stored = from_contest_view(blocked.view(torch.uint8))
            assert torch.equal(BLOCKED_128x4.from_(stored, *scale.shape[-2:]), scale)
            padding = BLOCKED_128x4.to(torch.ones_like(scale)) == 0
            assert padding.any()
            assert (stored[padding] == 0xFF).all()


def test_a_seed_gives_the_same_inputs_again_and_the_data_is_left_alone(hardened):
    data, (first, _) = hardened
    hardener = Hardener(gemm)
    again, other = hardener(data, 10), hardener(data, 12)
    assert set(hardener.redrawn) == {f"data[{i}]" for i in range(6)}
    assert all(torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in zip(first[:6], again[:6], strict=True))
    assert not any(torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in zip(first, other[:6], strict=False))
    assert coverage(data) == coverage(nvfp4_data())


@pytest.mark.parametrize("K", [256, 512])
def test_weights_stay_the_quantized_form_of_dense_ones(K):
    """Codes and shuffled codes, scales that are there only shuffled and padded to 256 rows, and a dense bf16 copy.

    With K = 512 the shuffled codes of the shuffled ones are the codes again.
    """
    generator = torch.Generator().manual_seed(0)
    x, dense = (torch.randn(rows, K, generator=generator).bfloat16() for rows in (8, 96))
    w = quantize(dense, MXFP4, scale_rule="even")
    shuffled = CDNA_32x8.to(torch.nn.functional.pad(w.scale, (0, 0, 0, 160))).view(torch.float8_e8m0fnu)
    data = (x, dense, w.data.view(FP4), SHUFFLED_16x16.to(w.data).view(FP4), shuffled)

    def product(data):
        scale = CDNA_32x8.from_(data[4].view(torch.uint8), 256, K // 32)[:96]
        return reference.matmul(data[0], ScaledTensor.from_parts(data[2], scale, MXFP4)).bfloat16()

    found = Hardener(product)(data, 0)
    assert torch.equal(found[0], x)
    again = quantize(found[1], MXFP4, scale_rule="even")
    assert torch.equal(again.data, found[2].view(torch.uint8))
    assert not torch.equal(again.data, w.data)
    assert torch.equal(SHUFFLED_16x16.to(again.data), found[3].view(torch.uint8))
    scale = CDNA_32x8.from_(found[4].view(torch.uint8), 256, K // 32)
    assert (scale[96:] == 0xFF).all()
    is_zero = (unpack(again.data).unflatten(-1, (-1, 32)) & 7 == 0).all(-1)
    assert torch.equal(scale[:96][~is_zero], again.scale[~is_zero])
    assert len(scale[:96][is_zero].unique()) > 100, "zeros may have any scale, of which a quantizer gives the least"
    assert not E8M0.is_nan(scale[:96]).any()
    assert torch.equal(reference.to_float64(ScaledTensor.from_parts(found[2], scale[:96], MXFP4)), found[1].double())


def test_data_without_fp4_is_returned_as_it_is():
    data = (torch.ones(3), torch.ones(3).to(torch.float8_e4m3fn))
    hardener = Hardener(lambda data: data[0])
    assert hardener(data, 0) is data
    assert hardener.redrawn == ()


def test_answers_that_no_scales_make_small_are_an_error():
    with pytest.raises(ValueError, match="answers stay above"):
        Hardener(lambda data: gemm(data) * math.inf)(nvfp4_data(), 0)


# --- output arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_poison_is_nan_and_keeps_to_its_view(dtype):
    whole = torch.zeros(4, 4).to(dtype)
    poison_(whole[:, 1::2])
    assert whole[:, 1::2].isnan().all()
    assert (whole[:, 0::2] == 0).all()


def test_poison_of_integers_and_bools():
    for dtype in (torch.int8, torch.int64, torch.uint8, torch.bool, FP4):
        t = torch.zeros(3, dtype=torch.uint8).view(dtype) if dtype == FP4 else torch.zeros(3, dtype=dtype)
        poison_(t)
        assert (t.view(torch.uint8) == (1 if dtype == torch.bool else 0xFF)).all()


def test_an_argument_that_is_filled_and_returned():
    assert output_arguments(nvfp4_data(), gemm) == ("data[6]",)


def test_an_argument_of_which_only_part_of_the_storage_is_the_result():
    def ref(data):
        data[1][0].copy_(data[0] * 2)
        return data[1][0]

    assert output_arguments((torch.ones(3), torch.zeros(2, 3)), ref) == ("data[1]",)


def test_a_last_argument_that_the_reference_leaves_alone():
    data = ([(torch.ones(3), torch.zeros(3)), (torch.ones(2), torch.zeros(2))], 7)
    assert output_arguments(data, lambda data: [a * 2 for a, _ in data[0]]) == ("data[0][0][1]", "data[0][1][1]")


def test_an_argument_of_another_float_dtype_than_a_reference_in_float64():
    assert output_arguments((torch.ones(3), torch.zeros(3)), lambda data: data[0].double() * 2) == ("data[1]",)


@pytest.mark.parametrize(
    "ref",
    [
        lambda data: data[1].mul_(data[0]),  # in place: an input and a result
        lambda data: data[0] + data[1],  # like the result, and read
        lambda data: data[0].index_select(0, torch.tensor([0, 1])),  # not like the result
    ],
)
def test_inputs_are_no_output_arguments(ref):
    data = (torch.ones(3), torch.ones(3))
    assert output_arguments(data, ref) == ()
    assert all((t == 1).all() for t in data)


def test_an_index_that_poison_would_break_is_an_input():
    data = (torch.arange(3.0), torch.tensor([0, 1, 2]))
    assert output_arguments(data, lambda data: data[1].copy_(data[0][data[1]].long())) == ()
    both = (torch.arange(3.0), torch.zeros(3), torch.tensor([2, 1, 0]))
    assert output_arguments(both, lambda d: (d[1].copy_(d[0]), d[2].add_(d[0][d[2]].long()))) == ("data[1]",)
