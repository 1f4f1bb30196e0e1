"""Errors against exact answers, and where exact answers come from."""

import math

import pytest
import torch
from checks import random_codes

from nibblas import reference
from nibblas.arena.correctness import (
    Answer,
    errors,
    exact_answer,
    fault_beside_rounding,
    largest,
    passes,
    reference_answer,
)
from nibblas.arena.products import problem_of
from nibblas.formats import MXFP4, NVFP4
from nibblas.layouts import BLOCKED_128x4, CDNA_32x8, SHUFFLED_16x16, contest_view
from nibblas.quantize import quantize


def exact(*values):
    return Answer("exact", values, (None,) * len(values))


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_step_to_a_neighbour_is_one_ulp(dtype):
    """At 1, and at the smallest subnormal."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    answer = torch.tensor([1.0, 4.0, tiny, 0.0], dtype=torch.float64)
    step = torch.tensor([info.eps, 0, 0, 0], dtype=torch.float64)
    (found,) = errors((answer + step).to(dtype), exact(answer))
    assert (found.max_ulp, found.max_absolute, found.worst_index) == (1.0, info.eps, (0,))
    (found,) = errors((answer + torch.tensor([0, 0, 0, tiny], dtype=torch.float64)).to(dtype), exact(answer))
    assert (found.max_ulp, found.worst_got, found.worst_answer) == (1.0, tiny, 0.0)


def test_right_rounding_is_half_an_ulp_at_most():
    answer = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dtype in FLOATS[1:]:
        (found,) = errors(answer.to(dtype), exact(answer))
        assert 0.4 < found.max_ulp <= 0.5, dtype


def test_relative_to_the_rms_with_the_worst_element():
    answer = torch.tensor([[3.0, 4.0], [3.0, 4.0]], dtype=torch.float64)
    got = answer.float()
    got[1, 0] += 0.5
    (found,) = errors([got], exact(answer))
    assert found.output == "result[0]"
    assert found.max_relative_rms == pytest.approx(0.5 / math.sqrt(12.5))
    assert (found.worst_index, found.worst_got, found.worst_answer) == ((1, 0), 3.5, 3.0)


def test_nan_and_infinity_must_stand_where_the_answer_has_them():
    answer = torch.tensor([math.nan, math.inf, -math.inf, 1e6, 1.0], dtype=torch.float64)
    assert errors(answer.half(), exact(answer))[0].special_mismatches == 0  # 1e6 is infinite in fp16
    wrong = torch.tensor([0.0, math.nan, math.inf, 65504.0, math.nan], dtype=torch.float16)
    (found,) = errors(wrong, exact(answer))
    assert found.special_mismatches == 5
    assert found.max_absolute == 0


def test_integers_are_not_compared_as_floats():
    answer = torch.tensor([2**60, 0])
    (found,) = errors(answer + torch.tensor([1, 0]), exact(answer))
    assert (found.max_absolute, found.max_ulp, found.worst_index) == (1.0, None, (0,))


def test_complex_codes_and_empty_outputs():
    z = torch.tensor([1 + 1j], dtype=torch.complex64)
    assert errors(z + 0.5j, reference_answer(z))[0].max_absolute == 0.5
    codes = torch.tensor([1, 2], dtype=torch.uint8)
    (found,) = errors((codes + 1).view(torch.float4_e2m1fn_x2), reference_answer(codes.view(torch.float4_e2m1fn_x2)))
    assert (found.max_absolute, found.max_ulp) == (1.0, None)
    (empty,) = errors(torch.empty(0, 3), reference_answer(torch.empty(0, 3)))
    assert (empty.elements, empty.max_absolute, empty.worst_index) == (0, 0.0, ())


def test_large_outputs_are_compared_piece_by_piece(monkeypatch):
    monkeypatch.setattr("nibblas.arena.correctness.CHUNK", 5)
    answer = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    got = answer.float().clone()
    got[3, 2] += 0.5
    got[1, 1] = math.nan
    (found,) = errors(got, exact(answer))
    assert (found.max_absolute, found.worst_index, found.special_mismatches) == (0.5, (3, 2), 1)
    kept = torch.cat([answer.flatten()[:7], answer.flatten()[8:]])
    assert found.rms == pytest.approx(kept.square().mean().sqrt().item())


def test_a_float64_run_that_may_not_fit_in_memory_is_not_tried(monkeypatch):
    monkeypatch.setattr("nibblas.arena.correctness.free_memory", lambda: 6 * 8 * 4 - 1)
    assert exact_answer("any", torch.ones(4), lambda x: x) is None
    assert exact_answer("any", torch.ones(3), lambda x: x) is not None


def test_outputs_must_be_the_answers():
    with pytest.raises(ValueError, match="2 output tensors, the answer has 1"):
        errors((torch.zeros(1), torch.zeros(1)), reference_answer(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"result has shape \(2,\), the answer \(1,\)"):
        errors(torch.zeros(2), reference_answer(torch.zeros(1)))


def test_largest_over_calls():
    answer = torch.tensor([1.0, -1.0], dtype=torch.float64)
    calls = [errors(answer.float() + torch.tensor(step), exact(answer)) for step in ([0.5, 0.0], [0.0, 0.25])]
    (found,) = largest([*calls[0], *calls[1]])
    assert (found.max_absolute, found.worst_index, found.elements) == (0.5, (0,), 4)
    assert found == largest([*calls[1], *calls[0]])[0]


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        ((True, "fine"), (True, "fine")),
        ([False, "bad"], (False, "bad")),
        (True, (True, "")),
        (None, (False, "")),
        ("", (True, "")),  # what older checks return
        ("mismatch", (False, "mismatch")),
        (torch.tensor(True), (True, "")),
    ],
)
def test_what_checks_return(result, verdict):
    assert passes(lambda data, output: result, None, None) == verdict


def test_a_check_that_raises_takes_nothing():
    def check(data, output):
        raise AssertionError("shapes differ")

    assert passes(check, None, None) == (False, "the problem's check failed: AssertionError: shapes differ")


# --- exact answers of a reference run in float64 -------------------------------------------------------------------


def test_a_reference_in_float64():
    x = torch.randn(64, dtype=torch.float16)
    before = x.clone()

    def in_place(data):
        (x, bias) = data
        x.mul_(3)
        return x.cumsum(0) + bias[0]

    found = exact_answer("any", (x, [torch.tensor(1.0)]), in_place)
    assert found.against == "exact"
    assert torch.equal(found.values[0], (before.double() * 3).cumsum(0) + 1)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "ref",
    [
        lambda x: (x.float() * 2).double(),  # computes in float32
        lambda x: x.to(torch.bfloat16).double(),  # rounds on the way
        lambda x: (x * 2).half(),  # rounds at the end
        lambda x: torch.zeros_like(x, dtype=torch.float32).copy_(x).double(),  # a buffer that is too narrow
        lambda x: x + torch.ones(4, dtype=torch.float32).exp(),  # a narrow part
        lambda x: x.argmax(),  # no float at all
        lambda x: x.no_such_method(),
    ],
)
def test_what_is_not_float64_all_the_way_is_not_called_exact(ref):
    assert exact_answer("any", torch.randn(4), ref) is None


def test_exact_moves_of_narrow_numbers_are_allowed():
    weight = torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn)

    def ref(data):
        x, w, ids = data
        table = torch.cat([torch.zeros(1), torch.arange(3.0)])
        return x * w.float().double() + table[ids]

    found = exact_answer("any", (torch.ones(2), weight, torch.tensor([1, 3])), ref)
    assert found.values[0].tolist() == [1.5, 4.0]


# --- exact answers of FP4 products ---------------------------------------------------------------------------------


def contest_scales(t):
    """(rows, K/16, L) e4m3 and its six-dimensional blocked copy."""
    linear = t.scale.permute(1, 2, 0).view(torch.float8_e4m3fn)
    return linear, contest_view(BLOCKED_128x4.to(t.scale)).view(torch.float8_e4m3fn)


def contest_codes(t):
    return t.data.permute(1, 2, 0).view(torch.float4_e2m1fn_x2)


def operand(rows, K, seed, L=2):
    return random_codes((L, rows, K), NVFP4, torch.Generator().manual_seed(seed), global_scale=False)


def contest_tuple(*operands, c):
    scales = [contest_scales(t) for t in operands]
    return (*map(contest_codes, operands), *(s for s, _ in scales), *(s for _, s in scales), c)


def test_nvfp4_products_in_the_shapes_of_the_contest():
    a, b = operand(128, 64, 0), operand(128, 64, 1)
    answer = reference.matmul(a, b).permute(1, 2, 0)
    gemm = contest_tuple(a, b, c=torch.empty(128, 128, 2, dtype=torch.float16))
    assert torch.equal(exact_answer("nvfp4_gemm", gemm, None).values[0], answer)
    gemv = (*gemm[:-1], torch.empty(128, 1, 2, dtype=torch.float16))
    found = exact_answer("nvfp4_gemv", gemv, None)
    assert torch.equal(found.values[0], answer[:, :1])
    (e,) = errors(found.values[0].half() / 2, found)
    assert 0.1 < e.max_relative_size < 0.501
    assert fault_beside_rounding(found.values[0].half(), found) is None
    small = found.values[0].half()
    small[5] = 0  # of its own row, which may be tiny beside the others
    assert "2 of 256 elements of result are off by more than 1%" in fault_beside_rounding(small, found)
    small[5] = math.nan
    assert "worst at (5, 0, 0): got nan" in fault_beside_rounding(small, found)
    b2 = operand(128, 64, 2)
    dual = contest_tuple(a, b, b2, c=torch.empty(128, 128, 2, dtype=torch.float16))
    gated = reference.gated_linear(a, b, b2).permute(1, 2, 0)
    assert torch.allclose(exact_answer("nvfp4_dual_gemm", dual, None).values[0], gated, rtol=1e-12, atol=0)


def test_grouped_products():
    pairs = [(operand(128, 64, 3, L=1), operand(64, 64, 4, L=1)), (operand(72, 128, 5, L=1), operand(64, 128, 6, L=1))]
    data = (
        [(contest_codes(a), contest_codes(b), None) for a, b in pairs],
        [(contest_scales(a)[0], contest_scales(b)[0]) for a, b in pairs],
        None,
        None,
    )
    found = exact_answer("nvfp4_group_gemm", data, None)
    for value, (a, b) in zip(found.values, pairs, strict=True):
        assert torch.equal(value, reference.matmul(a, b).permute(1, 2, 0))


def test_mxfp4_with_shuffled_and_padded_scales():
    w = random_codes((48, 128), MXFP4, torch.Generator().manual_seed(7))
    x = torch.randn(8, 128, dtype=torch.bfloat16)
    shuffled = CDNA_32x8.to(torch.nn.functional.pad(w.scale, (0, 4, 0, 256 - 48), value=255))
    data = (x, None, w.data.view(torch.float4_e2m1fn_x2), SHUFFLED_16x16.to(w.data), shuffled)
    quantized = quantize(x, MXFP4, scale_rule="even")
    assert torch.equal(exact_answer("mxfp4-mm", data, None).values[0], reference.matmul(quantized, w))


def test_a_problem_of_the_same_name_with_other_inputs_is_another_problem():
    x = torch.ones(3)
    assert exact_answer("nvfp4_gemm", (x, x), lambda data: data[0] + data[1]).values[0].tolist() == [2, 2, 2]


# --- names in evidence ---------------------------------------------------------------------------------------------


SIZES = {"m": 8, "n": 16, "k": 32, "l": 1}
GROUPS = {"m": [8, 9], "n": [4, 4], "k": [32, 32], "g": 2}


@pytest.mark.parametrize(
    ("task", "values", "text"),
    [
        ("nvfp4_gemv", {"m": 128, "k": 256, "l": 2}, "linear M=1 N=128 K=256 L=2 nvfp4 x nvfp4 -> fp16"),
        ("nvfp4_gemm", SIZES, "linear M=8 N=16 K=32 nvfp4 x nvfp4 -> fp16"),
        ("nvfp4_dual_gemm", SIZES, "gated_linear M=8 N=16 K=32 nvfp4 x nvfp4 -> fp16"),
        ("nvfp4_group_gemm", GROUPS, "grouped_linear M=17 N=4 K=32 G=2 nvfp4 x nvfp4 -> fp16"),
        ("mxfp4-mm", SIZES, "linear M=8 N=16 K=32 bf16 x mxfp4 -> bf16 b in CDNA_32x8/LINEAR"),
    ],
)
def test_problems_have_their_names(task, values, text):
    assert str(problem_of(task, values, "sm_90")) == f"{text} on sm_90"


@pytest.mark.parametrize(
    ("task", "values"),
    [
        ("vectoradd", {"size": 8}),
        ("nvfp4_gemm", {"size": 8}),
        ("nvfp4_group_gemm", GROUPS | {"n": [4, 8]}),
    ],
)
def test_other_problems_have_none(task, values):
    assert problem_of(task, values, "cpu") is None
