"""The contest entries: tuples as the problems state them, answers against the oracle, nothing copied that needn't be.

The tuples are made here from the problems' descriptions, harder than the problems make them: all 16 codes, all scales
that are not negative, NaN wherever nothing may be read.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import assert_close, poisoned_empty, random_codes
from torch import Tensor

import nibblas as nb
from nibblas import dispatch, operators, reference
from nibblas.formats import E4M3
from nibblas.kernels import cpu_library, kernels
from nibblas.layouts import LINEAR, BLOCKED_128x4
from nibblas.problem import Problem
from nibblas.quantize import quantize
from nibblas.roofline import ASSUMED_GPU
from nibblas.tensor import ScaledTensor

CONTEST = Path(__file__).parents[1] / "contest"
FP4, FP8 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def entry(problem: str, name: str = "submission"):
    spec = importlib.util.spec_from_file_location(name, CONTEST / problem / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.custom_kernel


def operand(L: int, rows: int, K: int, seed: int, mirrored: bool) -> ScaledTensor:
    """(L, rows, K) NVFP4 of all codes and all scales that are not negative.

    The size of the scales goes up along K, and down where `mirrored`, so that products of the two kinds fit in fp16.
    """
    codes = torch.randint(256, (L, rows, K // 2), dtype=torch.uint8, generator=rng(seed))
    slope = torch.linspace(-4, E4M3.largest + 4, K // 16).round().int()
    middle = E4M3.largest - slope if mirrored else slope
    spread = torch.randint(-6, 7, (L, rows, K // 16), generator=rng(seed + 1))
    return ScaledTensor(codes, (middle + spread).clamp(0, E4M3.largest).byte(), nb.NVFP4)


def batch_last(t: Tensor, dtype: torch.dtype) -> Tensor:
    """(L, rows, cols) as (rows, cols, L) of the same memory."""
    return t.view(dtype).permute(1, 2, 0)


def blocked(scale: Tensor) -> Tensor:
    """(L, rows, cols) scales as the six-dimensional (32, 4, rest_m, 4, rest_k, L), with NaN for padding."""
    L, rows, cols = scale.shape
    stored = torch.full((L, -(-rows // 128), -(-cols // 4), 32, 4, 4), E4M3.nan, dtype=torch.uint8)
    view = stored.permute(3, 4, 1, 5, 2, 0)
    r, k = torch.arange(rows)[:, None], torch.arange(cols)
    view[r % 32, r // 32 % 4, r // 128, k % 4, k // 4] = scale.permute(1, 2, 0)
    return view.view(FP8)


def nvfp4(t: ScaledTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, linear scales and blocked scales, each with L last."""
    return batch_last(t.data, FP4), batch_last(t.scale, FP8), blocked(t.scale)


def to_fill(L: int, M: int, N: int) -> Tensor:
    return batch_last(poisoned_empty((L, M, N), torch.float16), torch.float16)


def gemv(M: int, K: int, L: int):
    a, b = operand(L, M, K, 1, False), operand(L, 128, K, 3, True)
    b.scale[:, 1:] = E4M3.nan  # only the first row is the vector
    (codes_a, sfa, sfa_blocked), (codes_b, sfb, sfb_blocked) = nvfp4(a), nvfp4(b)
    data = (codes_a, codes_b, sfa, sfb, sfa_blocked, sfb_blocked, to_fill(L, M, 1))
    vector = b.slice(1, 0, 1)
    return data, reference.matmul(a, vector), reference.magnitude(a, vector)


def gemm(M: int, N: int, K: int, L: int):
    a, b = operand(L, M, K, 1, False), operand(L, N, K, 3, True)
    (codes_a, sfa, sfa_blocked), (codes_b, sfb, sfb_blocked) = nvfp4(a), nvfp4(b)
    data = (codes_a, codes_b, sfa, sfb, sfa_blocked, sfb_blocked, to_fill(L, M, N))
    return data, reference.matmul(a, b), reference.magnitude(a, b)


def dual_gemm(M: int, N: int, K: int, L: int):
    """The gate stays near where SiLU bends; the rows of `up` have scales of every size that lets them fit in fp16."""
    a, gate = (random_codes((L, r, K), nb.NVFP4, rng(r), scale_bytes=(20, 50), global_scale=False) for r in (M, N))
    up = random_codes((L, N, K), nb.NVFP4, rng(3), scale_bytes=(0, 80), global_scale=False)
    codes, linear, others = zip(*map(nvfp4, (a, gate, up)), strict=True)
    exact = reference.gated_linear(a, gate, up)
    g, u = reference.matmul(a, gate), reference.matmul(a, up)
    of_g, of_u = (reference.magnitude(a, w) for w in (gate, up))
    magnitude = 1.1 * of_g * u.abs() + torch.nn.functional.silu(g).abs() * of_u  # SiLU's slope is at most 1.1
    return (*codes, *linear, *others, to_fill(L, M, N)), exact, magnitude


def group_gemm(*sizes: tuple[int, int, int]):
    pairs = [(operand(1, M, K, 7 * g, False), operand(1, N, K, 7 * g + 3, True)) for g, (M, N, K) in enumerate(sizes)]
    parts = [(nvfp4(a), nvfp4(b)) for a, b in pairs]
    matrices = [(a[0], b[0], to_fill(1, M, N)) for (a, b), (M, N, _) in zip(parts, sizes, strict=True)]
    linear, others = ([(a[i], b[i]) for a, b in parts] for i in (1, 2))
    data = (matrices, linear, others, [(*size, 1) for size in sizes])
    return data, [reference.matmul(a, b) for a, b in pairs], [reference.magnitude(a, b) for a, b in pairs]


def tensors(data) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    return [t for part in data for t in tensors(part)] if isinstance(data, list | tuple) else []


def bytes_of(t: Tensor) -> Tensor:
    return t.view(torch.uint8 if t.element_size() == 1 else torch.int16 if t.element_size() == 2 else torch.int32)


def run(problem: str, data, filled: list[Tensor] = (), name: str = "submission"):
    """The entry's answer; fails if it changed an input other than `filled`, or found more than the tuple's own."""
    inputs = [t for t in tensors(data) if all(t is not c for c in filled)]
    before = [bytes_of(t).clone() for t in inputs]
    answer = entry(problem, name)(data)
    for t, old in zip(inputs, before, strict=True):
        assert torch.equal(bytes_of(t), old), f"{problem} changed an input of shape {tuple(t.shape)}"
    return answer


def assert_answer(got: Tensor, exact: Tensor, magnitude: Tensor | None, K: int, what: str, tolerance: float = 1e-3):
    """Right to the last place that fp32 sums give, and within what the contest allows of the rounded answer."""
    assert_close(got, exact, got.dtype, K=K, what=what, magnitude=magnitude)
    torch.testing.assert_close(got.double(), exact.to(got.dtype).double(), rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["own layout", "BLOCKED_128x4"])
def layout(request, monkeypatch):
    """The layout of scales that the entry asks for on this device, and the one that it asks for on Blackwell."""
    if request.param == "BLOCKED_128x4":
        monkeypatch.setattr(nb, "scale_layout", lambda format, device: BLOCKED_128x4)


def test_operands_have_every_code_and_every_scale():
    a, b = operand(3, 200, 2048, 1, False), operand(3, 40, 2048, 3, True)
    assert len(torch.cat((a.data & 15, a.data >> 4)).unique()) == 16
    assert a.scale.unique().tolist() == b.scale.unique().tolist() == list(range(E4M3.largest + 1))
    assert reference.matmul(a, b).abs().max() < torch.finfo(torch.float16).max


GEMV = [(128, 256, 1), (200, 2048, 3), (1, 64, 2)]
GEMM = [(128, 256, 256, 1), (72, 40, 2048, 3), (1, 300, 64, 2)]
GROUPS = [((96, 128, 256), (128, 256, 512)), ((40, 56, 768), (200, 1, 64), (1, 300, 2048))]


@pytest.mark.parametrize("sizes", GEMV, ids=str)
def test_nvfp4_gemv(sizes, layout):
    data, exact, magnitude = gemv(*sizes)
    got = run("nvfp4_gemv", data, [data[-1]])
    assert got is data[-1]
    assert_answer(got.permute(2, 0, 1), exact, magnitude, sizes[1], "nvfp4_gemv")


@pytest.mark.parametrize("sizes", GEMM, ids=str)
def test_nvfp4_gemm(sizes, layout):
    data, exact, magnitude = gemm(*sizes)
    got = run("nvfp4_gemm", data, [data[-1]])
    assert got is data[-1]
    assert_answer(got.permute(2, 0, 1), exact, magnitude, sizes[2], "nvfp4_gemm")


@pytest.mark.parametrize("sizes", GEMM, ids=str)
def test_nvfp4_dual_gemm(sizes, layout):
    data, exact, magnitude = dual_gemm(*sizes)
    got = run("nvfp4_dual_gemm", data, [data[-1]])
    assert got is data[-1]
    assert_answer(got.permute(2, 0, 1), exact, magnitude, sizes[2], "nvfp4_dual_gemm")


@pytest.mark.parametrize("host_scales", [False, True], ids=["", "linear scales elsewhere"])
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_nvfp4_group_gemm(sizes, host_scales, layout):
    data, exact, magnitude = group_gemm(*sizes)
    matrices, linear, others, problem_sizes = data
    if host_scales:
        data = (matrices, [tuple(s.to("meta") for s in pair) for pair in linear], others, problem_sizes)
        got = entry("nvfp4_group_gemm")(data)
    else:
        got = run("nvfp4_group_gemm", data, [c for _, _, c in matrices])
    assert isinstance(got, list)
    for g, (_, _, c) in enumerate(matrices):
        assert got[g] is c
        assert_answer(c.permute(2, 0, 1), exact[g], magnitude[g], sizes[g][2], f"group {g}")


@pytest.mark.parametrize("problem", ["nvfp4_gemm", "nvfp4_gemv"])
def test_any_strides(problem):
    """L in memory where the shape has it, last, is as right as where the problems put it, first."""
    data, exact, magnitude = gemv(200, 64, 3) if problem == "nvfp4_gemv" else gemm(72, 40, 64, 3)
    assert not any(t.is_contiguous() for t in data)
    data = tuple(bytes_of(t).contiguous().view(t.dtype) for t in data)
    got = run(problem, data, [data[-1]])
    assert_answer(got.permute(2, 0, 1), exact, magnitude, 64, problem)


def e8m0_shuffled(scale: Tensor) -> Tensor:
    """AITER's e8m0 shuffle of (rows, cols): tiles of 32 by 8; rows padded to 256, cols to 8, here with NaN."""
    rows, cols = scale.shape
    padded = -(-rows // 256) * 256, -(-cols // 8) * 8
    stored = torch.full(padded, 0xFF, dtype=torch.uint8)
    r, c = torch.arange(rows)[:, None], torch.arange(cols)
    tile = r // 32 * (padded[1] // 8) + c // 8
    stored.view(-1)[tile * 256 + c % 4 * 64 + r % 16 * 4 + c % 8 // 4 * 2 + r % 32 // 16] = scale
    return stored.view(torch.float8_e8m0fnu)


def poisoned_like(t: Tensor) -> Tensor:
    return poisoned_empty(tuple(t.shape), t.dtype)


def mm(M: int, N: int, K: int, scale_bytes: tuple[int, int] = (0, 240)):
    w = random_codes((N, K), nb.MXFP4, rng(1), scale_bytes=scale_bytes)
    a = torch.randn(M, K, generator=rng(2)).bfloat16()
    a[0, :32] = 0  # a block of zeros
    a[-1, 32:64] = torch.tensor([0.25, -0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], dtype=torch.bfloat16).repeat(4)  # ties
    codes = w.data.view(FP4)
    data = (a, poisoned_empty((N, K), torch.bfloat16), codes, poisoned_like(codes), e8m0_shuffled(w.scale))
    x = quantize(a, nb.MXFP4, scale_rule="even")
    return data, reference.matmul(x, w), reference.magnitude(x, w)


@pytest.mark.parametrize("sizes", [(4, 288, 512), (33, 70, 96), (1, 16, 64)], ids=str)
def test_mxfp4_mm(sizes, layout):
    data, exact, magnitude = mm(*sizes)
    got = run("mxfp4-mm", data)
    assert got.dtype == torch.bfloat16
    assert_answer(got, exact, magnitude, sizes[2], "mxfp4-mm", tolerance=1e-2)


def moe(T: int, E: int, top_k: int, H: int, I: int, padded_H: int, padded_I: int, flat_scales: bool):
    """Of the weights only what lies outside the padding is drawn; the scales of the padding are NaN."""
    gate, up = (random_codes((E, I, H), nb.MXFP4, rng(s), scale_bytes=(121, 125)) for s in (1, 2))
    down = random_codes((E, H, I), nb.MXFP4, rng(3), scale_bytes=(121, 125))
    gate_up = poisoned_empty((E, 2 * padded_I, padded_H // 2), torch.uint8)
    gate_up_scale = poisoned_empty((E, 2 * padded_I, padded_H // 32), torch.uint8)
    for start, w in ((0, gate), (padded_I, up)):
        gate_up[:, start : start + I, : H // 2] = w.data
        gate_up_scale[:, start : start + I, : H // 32] = w.scale
    down_codes = poisoned_empty((E, padded_H, padded_I // 2), torch.uint8)
    down_scale = poisoned_empty((E, padded_H, padded_I // 32), torch.uint8)
    down_codes[:, :H, : I // 2], down_scale[:, :H, : I // 32] = down.data, down.scale
    x = 0.1 * torch.randn(T, H, generator=rng(4))
    shared = torch.full((T, 1), E - 1)  # the last expert takes every token, with a share of 1
    ids = torch.cat((torch.rand(T, E - 1, generator=rng(5)).argsort(1)[:, : top_k - 1], shared), dim=1).int()
    shares = torch.cat((torch.rand(T, top_k - 1, generator=rng(6)), torch.ones(T, 1)), dim=1)
    scales = [s.view(torch.float8_e8m0fnu) for s in (gate_up_scale, down_scale)]
    if flat_scales:
        scales = [s.flatten(0, 1) for s in scales]
    codes = gate_up.view(FP4), down_codes.view(FP4)
    config = {"d_hidden": H, "d_expert": I, "d_hidden_pad": padded_H, "d_expert_pad": padded_I}
    shuffled = [poisoned_like(t) for t in (*codes, *scales)]
    data = (x.bfloat16(), *codes, *scales, *shuffled, shares, ids, config)
    return data, (gate, up, down)


@pytest.mark.parametrize("flat_scales", [True, False], ids=["scales of all rows", "scales of each expert"])
@pytest.mark.parametrize("sizes", [(7, 5, 3, 96, 64, 128, 128), (1, 9, 2, 256, 256, 256, 256)], ids=str)
def test_moe_mxfp4(sizes, flat_scales):
    data, weights = moe(*sizes, flat_scales)
    got = run("moe-mxfp4", data)
    tokens, ids, shares = data[0], data[10], data[9]
    x = quantize(tokens, nb.MXFP4, scale_rule="even")
    exact = reference.moe(
        x, ids, shares, *weights, of_hidden=lambda hidden: quantize(hidden.bfloat16(), nb.MXFP4, scale_rule="even")
    )
    assert got.dtype == torch.bfloat16
    assert exact.norm() > 0.1 * exact.numel() ** 0.5
    torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)
    # It does matter that the hidden activations are quantized.
    assert (reference.moe(x, ids, shares, *weights) - exact).norm() > 0.01 * exact.norm()


@pytest.mark.parametrize("sizes", GEMV, ids=str)
def test_dequantized_nvfp4_gemv(sizes):
    data, exact, magnitude = gemv(*sizes)
    got = run("nvfp4_gemv", data, [data[-1]], "dequantized")
    assert_answer(got.permute(2, 0, 1), exact, magnitude, sizes[1], "nvfp4_gemv")


@pytest.mark.parametrize(("problem", "drawn"), [("nvfp4_gemm", gemm), ("nvfp4_dual_gemm", dual_gemm)])
@pytest.mark.parametrize("sizes", GEMM, ids=str)
def test_dequantized_nvfp4_gemm(problem, drawn, sizes):
    data, exact, magnitude = drawn(*sizes)
    got = run(problem, data, [data[-1]], "dequantized")
    assert_answer(got.permute(2, 0, 1), exact, magnitude, sizes[2], problem)


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_dequantized_nvfp4_group_gemm(sizes):
    data, exact, magnitude = group_gemm(*sizes)
    matrices, linear, *others = data
    on_the_host = [tuple(s.to("meta") for s in pair) for pair in linear]
    got = entry("nvfp4_group_gemm", "dequantized")((matrices, on_the_host, *others))
    for g, (_, _, c) in enumerate(matrices):
        assert got[g] is c
        assert_answer(c.permute(2, 0, 1), exact[g], magnitude[g], sizes[g][2], f"group {g}")


@pytest.mark.parametrize("sizes", [(4, 288, 512), (33, 70, 96)], ids=str)
def test_dequantized_mxfp4_mm(sizes):
    data, exact, magnitude = mm(*sizes, scale_bytes=(27, 240))  # a CPU's AMX takes subnormals for zeros
    got = run("mxfp4-mm", data, name="dequantized")
    assert_answer(got, exact, magnitude, sizes[2], "mxfp4-mm", tolerance=1e-2)


@pytest.mark.parametrize("flat_scales", [True, False])
def test_dequantized_moe_mxfp4_agrees_with_the_entry(flat_scales):
    """Which is held to the oracle above."""
    data, _ = moe(7, 5, 3, 96, 64, 128, 128, flat_scales)
    got = run("moe-mxfp4", data, name="dequantized")
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, run("moe-mxfp4", data), rtol=1e-2, atol=1e-2)


TUPLES = {
    "nvfp4_gemv": lambda: gemv(200, 256, 3)[0],
    "nvfp4_gemm": lambda: gemm(72, 40, 256, 3)[0],
    "nvfp4_dual_gemm": lambda: dual_gemm(72, 40, 256, 1)[0],
    "nvfp4_group_gemm": lambda: group_gemm((40, 56, 768), (200, 72, 64))[0],
    "mxfp4-mm": lambda: mm(4, 288, 512)[0],
    "moe-mxfp4": lambda: moe(7, 5, 3, 96, 64, 128, 128, True)[0],
}


def posed(problem: str, monkeypatch) -> list[Problem]:
    """The Problems that an entry puts to the dispatcher, those of composite kernels' products among them."""
    found = []

    def choose(problem, *arguments):
        found.append(problem)
        return dispatch.choose(problem, *arguments)

    monkeypatch.setattr(operators, "choose", choose)
    entry(problem)(TUPLES[problem]())
    return found


def able(problem: Problem, arch: str) -> list[str]:
    """Kernels written for this architecture, not for any, that answer the problem where their libraries are there."""
    found = [kernel for kernel in kernels() if arch in kernel.archs]
    return [k.name for k in found if replace(k, also=None).why_not(replace(problem, arch=arch)) is None]


@pytest.mark.parametrize("problem", TUPLES)
def test_hopper_has_a_kernel_for_every_call(problem, monkeypatch):
    """None is left to torch, which decodes all of the weight, or to one product a group."""
    calls = posed(problem, monkeypatch)
    assert calls
    for call in calls:
        assert able(call, "sm_90"), f"{call} on sm_90"


@pytest.mark.parametrize("problem", ["nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_group_gemm", "mxfp4-mm"])
def test_blackwell_multiplies_natively(problem, monkeypatch):
    monkeypatch.setattr(nb, "scale_layout", lambda format, device: BLOCKED_128x4)
    products = [call for call in posed(problem, monkeypatch) if call.op == "linear"]
    assert products
    costs = {kernel.name: kernel.cost for kernel in kernels()}
    for call in products:
        names = able(call, "sm_100")
        assert (
            min(names, key=lambda name: costs[name](replace(call, arch="sm_100"), ASSUMED_GPU))
            == "triton_linear_native"
        )


def allocations(problem: str, data) -> list[int]:
    """Bytes of each tensor that an entry allocates."""
    kernel = entry(problem)
    kernel(data)  # tables that are kept
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        kernel(data)
    return [event.cpu_memory_usage for event in profile.function_events if event.cpu_memory_usage > 0]


@pytest.mark.skipif(not cpu_library.tier(), reason="torch, which copies, may be faster than the portable kernel in C")
def test_nothing_is_copied():
    """Codes and linear scales go to the kernels as they lie, whichever way their shape names the dimensions."""
    assert nb.scale_layout(nb.NVFP4, "cpu") == LINEAR
    assert allocations("nvfp4_gemv", gemv(200, 2048, 3)[0]) == []
    assert allocations("nvfp4_gemm", gemm(72, 40, 2048, 3)[0]) == []
    assert allocations("nvfp4_group_gemm", group_gemm((40, 56, 768), (200, 1, 64))[0]) == []
    # The two products in fp32, and what becomes of them.
    assert max(allocations("nvfp4_dual_gemm", dual_gemm(72, 40, 2048, 3)[0])) <= 72 * 40 * 4
