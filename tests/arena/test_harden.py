"""Hardened inputs hold every code, keep what holds what, and keep answers small; output arguments are found."""

import math

import pytest
import torch

from nibblas import reference
from nibblas.arena.coverage import bytes_of, coverage
from nibblas.arena.harden import SMALL, Hardener
from nibblas.arena.poison import output_arguments, poison_
from nibblas.formats import E4M3, MXFP4, NVFP4
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
    assert torch.equal(scale[:96], again.scale)
    assert (scale[96:] == 0xFF).all()


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
