"""Stand-ins: what they compute, against the oracle; that they leave no trace; and that each call is counted."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import random_codes

from nibblas import quantize, reference
from nibblas.arena import aiter
from nibblas.arena.rounding import round_once
from nibblas.arena.standins import AITER, ALL, CUDA, NAMES_ONLY, SCALED_MM, install, provides
from nibblas.formats import MXFP4, NVFP4, pack
from nibblas.layouts import BLOCKED_128x4, CDNA_32x8, SHUFFLED_16x16
from nibblas.tensor import ScaledTensor

CPU = torch.device("cpu")
FLOAT4 = torch.float4_e2m1fn_x2

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens on a CPU")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20)


@pytest.fixture
def stand_ins():
    with install(CPU) as installed:
        yield installed


def drawn(shape, format, seed=0, **how):
    """Codes of all kinds, with scales under which products stay within fp16."""
    how = {"scale_bytes": (0x20, 0x48) if format == NVFP4 else None, "global_scale": False, **how}
    return random_codes(shape, format, torch.Generator().manual_seed(seed), **how)


def operand(t):
    """A ScaledTensor as torch._scaled_mm takes it: float4 codes, flat scales of the format's dtype in BLOCKED_128x4."""
    blocked = t.with_layout(BLOCKED_128x4)
    return blocked.data_as_float4, blocked.scale_as_float8.flatten()


def scaled_mm(a, b, **how):
    (a_codes, a_scale), (b_codes, b_scale) = operand(a), operand(b)
    return torch._scaled_mm(a_codes, b_codes.t(), a_scale, b_scale, **how)


def as_fp16(exact):
    """float64 to fp16 in one rounding: numpy's, not ours."""
    return torch.from_numpy(exact.numpy().astype(np.float16))


@pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(128, 128, 64), (1, 7, 32), (129, 33, 96), (3, 260, 544)])
def test_scaled_mm_is_the_exact_product_rounded_once(stand_ins, format, M, N, K):
    a, b = drawn((M, K), format, seed=1), drawn((N, K), format, seed=2)
    out = scaled_mm(a, b, out_dtype=torch.float16)
    assert torch.equal(out, as_fp16(reference.matmul(a, b)))
    assert out.isfinite().all()
    assert stand_ins.used[SCALED_MM] == 1


def test_scaled_mm_does_not_round_by_way_of_fp32(stand_ins):
    """64 + 2^-5 lies between two fp16 numbers, and 2^-20 above it is lost in fp32."""
    codes = torch.zeros(1, 48, dtype=torch.uint8)
    codes[0, ::16] = torch.tensor([2, 2, 1])  # 1, 1 and 0.5, one a block
    scales = torch.tensor([[[8.0, 2.0**-2, 2.0**-9]], [[8.0, 2.0**-3, 2.0**-9]]]).to(torch.float8_e4m3fn)
    a, b = (ScaledTensor.from_parts(pack(codes), scale, NVFP4) for scale in scales)
    assert scaled_mm(a, b, out_dtype=torch.float16).item() == 64.0625


def test_scaled_mm_marks_blocks_whose_scale_is_nan(stand_ins):
    a, b = drawn((5, 64), NVFP4, nan_scales=2), drawn((9, 64), NVFP4, seed=1)
    out = scaled_mm(a, b, out_dtype=torch.float16)
    rows = (a.scale & 0x7F == 0x7F).any(1)
    assert 0 < rows.sum() < 5
    assert torch.equal(out.isnan(), rows[:, None].expand(5, 9))


def test_scaled_mm_reads_no_padding_of_scales(stand_ins):
    a, b = drawn((5, 48), NVFP4), drawn((9, 48), NVFP4, seed=1)
    poisoned = drawn((5, 48), NVFP4, layout=BLOCKED_128x4)  # its padding is NaN
    assert (poisoned.scale & 0x7F == 0x7F).any()
    b_codes, b_scale = operand(b)
    scale = poisoned.scale_as_float8
    out = torch._scaled_mm(a.data_as_float4, b_codes.t(), scale, b_scale, out_dtype=torch.float16)
    assert torch.equal(out, as_fp16(reference.matmul(a, b)))


def test_scaled_mm_takes_what_the_problems_give(stand_ins):
    """Operands cut out of (rows, K/2, L), scales of six dimensions, a bias, and out=."""
    L, M, N, K = 2, 130, 5, 64
    a, b = drawn((L, M, K), NVFP4), drawn((L, N, K), NVFP4, seed=1)
    a_last, b_last = (t.data.permute(1, 2, 0).contiguous().view(FLOAT4) for t in (a, b))
    bias = torch.randn(N).bfloat16()
    for batch in range(L):
        one_a, one_b = (t.slice(0, batch, batch + 1) for t in (a, b))
        a_scale, b_scale = (t.with_layout(BLOCKED_128x4).scale_as_float8 for t in (one_a, one_b))
        out = torch.empty(M, N, dtype=torch.bfloat16)
        operands = a_last[:, :, batch], b_last[:, :, batch].transpose(0, 1)
        got = torch._scaled_mm(*operands, a_scale, b_scale, bias=bias, out_dtype=torch.bfloat16, out=out)
        assert got is out
        exact = reference.matmul(one_a, one_b, bias)[0]
        assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"out_dtype": None}, "need an out_dtype"),
        ({"scale_result": torch.ones(1)}, "and no scale_result"),
        ({"scale_a": torch.ones(7)}, "scales of FP4 operands are torch.float32"),
        ({"scale_a": torch.ones(7).to(torch.float8_e4m3fn)}, "7 scales for an operand of 4 rows and K = 32"),
        ({"mat2": torch.zeros(16, 4, dtype=torch.uint8)}, "need (M, K/2) and (K/2, N) float4_e2m1fn_x2"),
        ({"mat2": torch.zeros(8, 4, dtype=torch.uint8).view(FLOAT4)}, "need (M, K/2) and (K/2, N)"),
    ],
)
def test_scaled_mm_refuses_what_does_not_fit(stand_ins, change, says):
    codes, scale = operand(drawn((4, 32), NVFP4))
    given = {"mat2": codes.t(), "scale_a": scale, "scale_b": scale, "out_dtype": torch.float16, **change}
    with pytest.raises(ValueError, match="_scaled_mm") as caught:
        torch._scaled_mm(codes, **given)
    assert says in str(caught.value)


def test_scaled_mm_of_fp8_is_torchs_own(stand_ins):
    x = torch.eye(16).to(torch.float8_e4m3fn)
    one = torch.ones(())
    assert torch.equal(torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.float32), torch.eye(16))
    assert not stand_ins.used


def test_aiter_quantizes_by_the_rule_even(stand_ins):
    quant = importlib.import_module("aiter.ops.triton.quant")
    typed = importlib.import_module("aiter.utility.fp4_utils")
    x = torch.randn(3, 5, 96).bfloat16() * 10
    expected = quantize(x.view(15, 96), MXFP4, scale_rule="even")
    data, scale = quant.dynamic_mxfp4_quant(x.view(15, 96))
    assert torch.equal(data, expected.data)
    assert torch.equal(scale, expected.scale)
    data, scale = typed.dynamic_mxfp4_quant(x.view(15, 96), shuffle=True)
    assert (data.dtype, scale.dtype, scale.shape) == (FLOAT4, torch.float8_e8m0fnu, (256, 8))
    assert torch.equal(scale.view(torch.uint8), CDNA_32x8.to(torch.cat((expected.scale, torch.zeros(241, 3).byte()))))
    package = importlib.import_module("aiter")
    data, scale = package.get_torch_quant(package.QuantType.per_1x32)(x, quant_dtype=package.dtypes.fp4x2)
    assert data.shape == (3, 5, 48)
    values = typed.mxfp4_to_f32(data.view(15, 48)) * typed.e8m0_to_f32(scale).repeat_interleave(32, 1)
    assert torch.equal(values.double(), reference.to_float64(expected))


def test_aiter_values_of_all_codes_and_scales():
    codes = torch.arange(256, dtype=torch.uint8)
    assert aiter.mxfp4_to_f32(codes.view(1, -1))[0, 2 * 0xA7 : 2 * 0xA7 + 2].tolist() == [6.0, -1.0]
    values = aiter.e8m0_to_f32(codes.view(torch.float8_e8m0fnu))
    assert values[:255].log2().tolist() == list(range(-127, 128))
    assert values[255].isnan()


def test_aiter_shuffles_are_undone_by_our_layouts():
    scale = torch.randint(256, (70, 11), dtype=torch.uint8)
    shuffled = aiter.e8m0_shuffle(scale)
    assert shuffled.shape == (256, 16)
    # Where AITER's kernels look: tile of 32 rows by 8 columns, column % 4, row % 16, column / 4 % 2, row / 16 % 2.
    row, col = 37, 6
    offset = (row // 32 * 2 + col // 8) * 256 + col % 4 * 64 + row % 16 * 4 + col // 4 % 2 * 2 + row // 16 % 2
    assert shuffled.flatten()[offset] == scale[row, col]
    assert torch.equal(aiter.e8m0_unshuffle(shuffled, 70, 11), scale)
    weight = torch.randint(256, (2, 32, 64), dtype=torch.uint8)
    stored = aiter.shuffle_weight(weight.view(FLOAT4), layout=(16, 16))
    assert stored.dtype == FLOAT4
    assert torch.equal(SHUFFLED_16x16.from_(stored.view(torch.uint8), 32, 64), weight)
    # Tiles of 16 rows by 32 bytes: each half of the columns, then the rows, 16 bytes of each.
    assert stored.view(torch.uint8)[0].flatten()[16 * 32 + 256 + 3 * 16 + 5] == weight[0, 3, 32 + 16 + 5]


@pytest.mark.parametrize(("M", "N", "K"), [(1, 16, 64), (33, 48, 320), (130, 16, 64)])
def test_gemm_a4w4_is_the_exact_product_rounded_once(stand_ins, M, N, K):
    a, b = drawn((M, K), MXFP4), drawn((N, K), MXFP4, seed=1)
    scales = [aiter.e8m0_shuffle(t.scale).view(torch.float8_e8m0fnu) for t in (a, b)]
    weight = aiter.shuffle_weight(b.data_as_float4)
    package = importlib.import_module("aiter")
    out = package.gemm_a4w4(a.data_as_float4, weight, *scales, dtype=torch.float16, bpreshuffle=True)
    assert torch.equal(out, as_fp16(reference.matmul(a, b)))
    plain = package.gemm_a4w4(a.data_as_float4, b.data_as_float4, *scales, dtype=torch.float16, bpreshuffle=False)
    assert torch.equal(plain, out)
    assert package.gemm_a4w4(a.data_as_float4, weight, *scales).dtype == torch.bfloat16
    assert stand_ins.used == {"aiter.gemm_a4w4": 3}


def test_aiters_modules_are_reached_from_the_package(stand_ins):
    package = importlib.import_module("aiter")
    assert package.ops.triton.quant is importlib.import_module("aiter.ops.triton.quant")
    assert package.utility.fp4_utils.e8m0_shuffle(torch.zeros(1, 1, dtype=torch.uint8)).shape == (256, 8)
    assert package.fused_moe.fused_moe.__name__ == "fused_moe"


def test_fused_moe_is_the_mixture_of_gated_experts():
    E, T, H, I, top_k = 5, 7, 256, 128, 3
    w1, w2 = (quantize(torch.randn(shape), MXFP4) for shape in ((E, 2 * I, H), (E, H, I)))
    x = torch.randn(T, H).bfloat16()
    ids = torch.stack([torch.randperm(E)[:top_k] for _ in range(T)]).int()
    weights = torch.rand(T, top_k)
    got = aiter.fused_moe(
        x,
        aiter.shuffle_weight(w1.data_as_float4),
        aiter.shuffle_weight(w2.data_as_float4),
        weights,
        ids,
        quant_type=aiter.QuantType.per_1x32,
        w1_scale=aiter.e8m0_shuffle(w1.scale.view(-1, H // 32)),
        w2_scale=aiter.e8m0_shuffle(w2.scale.view(-1, I // 32)),
    )
    # The oracle keeps x and the hidden values as they are; aiter quantizes both, at about 0.1 of their size each.
    gate, up = reference.to_float64(w1).chunk(2, 1)
    exact = reference.moe(quantize(x, MXFP4), ids, weights, gate, up, w2)
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).norm() / exact.norm() < 0.15
    row = _one_token_by_hand(x[2], w1, w2, ids[2], weights[2])
    assert torch.equal(got[2], round_once(row, torch.bfloat16))


def _one_token_by_hand(x, w1, w2, ids, weights):
    x = reference.to_float64(quantize(x[None], MXFP4, scale_rule="even"))
    total = torch.zeros(w2.shape[1], dtype=torch.float64)
    for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        gate, up = (x @ reference.to_float64(w1)[expert].T).chunk(2, 1)
        hidden = (gate / (1 + (-gate).exp()) * up).bfloat16()
        total += weight * (reference.to_float64(quantize(hidden, MXFP4)) @ reference.to_float64(w2)[expert].T)[0]
    return total


def test_mla_decode_is_attention_over_a_shared_latent_head():
    heads, D, values = 3, 40, 24
    lengths, queries = [5, 1, 9], [1, 1, 2]
    starts = [torch.tensor([0, *np.cumsum(n)], dtype=torch.int32) for n in (queries, lengths)]
    q = torch.randn(sum(queries), heads, D).to(torch.float8_e4m3fn)
    kv = torch.randn(20, 1, 1, D).to(torch.float8_e4m3fn)
    pages = torch.randperm(20)[: sum(lengths)].int()
    q_scale, kv_scale, out = torch.tensor([0.5]), torch.tensor([2.0]), torch.zeros(4, heads, values).bfloat16()
    last = torch.ones(3, dtype=torch.int32)
    aiter.mla_decode_fwd(
        q, kv, out, *starts, pages, last, 2, sm_scale=0.25, q_scale=q_scale, kv_scale=kv_scale, work_meta_data=None
    )
    for query, sequence, hidden in ((0, 0, 0), (1, 1, 0), (2, 2, 1), (3, 2, 0)):
        tokens = kv[pages[starts[1][sequence] : starts[1][sequence + 1] - hidden].long()].float().view(-1, D) * 2
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[query].float()[:, None] * 0.5, tokens.expand(heads, -1, -1), tokens[:, :values].expand(heads, -1, -1),
            scale=0.25,
        )  # fmt: skip
        torch.testing.assert_close(out[query].float(), expected[:, 0], rtol=2**-7, atol=1e-3)


def test_aiter_refuses_what_it_does_not_do():
    bf16 = torch.zeros(16, 64).bfloat16()
    with pytest.raises(NotImplementedError, match="nibblas' stand-in for aiter's quantizers has per_1x32 alone"):
        aiter.get_quant(aiter.QuantType.per_Token)
    with pytest.raises(NotImplementedError, match="gemm_a4w4 takes no bias"):
        aiter.gemm_a4w4(bf16, bf16, bf16, bf16, bias=bf16)
    with pytest.raises(NotImplementedError, match=r"shuffle_weight knows the layout \(16, 16\)"):
        aiter.shuffle_weight(bf16, layout=(32, 16))
    with pytest.raises(ValueError, match=r"need bytes \(\.\.\., 16 n, 32 k\)"):
        aiter.shuffle_weight(torch.zeros(8, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="3 scales can't hold"):
        aiter.e8m0_unshuffle(torch.zeros(3, dtype=torch.uint8), 2, 2)
    with pytest.raises(NotImplementedError, match="fused_moe takes SiLU"):
        aiter.fused_moe(bf16, bf16, bf16, bf16, bf16)
    with pytest.raises(NotImplementedError, match="pages of one token"):
        aiter.mla_decode_fwd(*[bf16] * 7, 1, page_size=16)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1), 0])
def test_tensors_on_a_gpu_are_made_on_the_cpu(stand_ins, device):
    made = [
        torch.zeros(3, device=device),
        torch.randint(0, 4, (3,), device=device),
        torch.tensor([1, 2, 3], device=device),
        torch.ones(3).new_zeros(3, device=device),
        torch.ones(3).to(device),
        torch.ones(3).to(device=device, dtype=torch.float16),
        torch.ones(3).cuda(device),
        torch.nn.Linear(3, 3, device=device).weight,
        torch.nn.Linear(3, 3).to(torch.device(device)).weight if device else torch.nn.Linear(3, 3).cuda(device).weight,
    ]
    assert {t.device for t in made} == {CPU}
    assert made[5].dtype == torch.float16
    assert stand_ins.used[CUDA] >= len(made)


def test_calls_that_name_no_gpu_are_not_counted(stand_ins):
    torch.zeros(3, device="cpu").to(torch.float16).to(torch.ones(2)).to("cpu", non_blocking=True).new_ones(2)
    torch.manual_seed(1)
    assert not stand_ins.used
    assert torch.zeros(3, device="meta").device.type == "meta"


def test_random_numbers_of_the_gpu_come_from_the_cpu_and_are_repeatable(stand_ins):
    generator = torch.Generator(device="cuda")
    drawn = [torch.randn(3, device="cuda", generator=generator.manual_seed(5)) for _ in range(2)]
    assert torch.equal(*drawn)
    torch.cuda.manual_seed(7)
    first = torch.randn(3, device="cuda")
    torch.cuda.manual_seed_all(7)
    assert torch.equal(torch.randn(3, device="cuda"), first)


def test_events_count_milliseconds(stand_ins, monkeypatch):
    times = iter([1_000_000, 4_500_000])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(times))
    start, end = torch.cuda.Event(), torch.cuda.Event()
    start.record()
    end.record()
    assert start.elapsed_time(end) == 3.5


def test_streams_and_events_are_the_hosts(stand_ins):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="both events must be recorded first"):
        start.elapsed_time(end)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        start.record()
        torch.randn(200, 200) @ torch.randn(200, 200)
        end.record(stream)
    torch.cuda.synchronize()
    assert 0 < start.elapsed_time(end) < 60_000
    assert torch.cuda.current_device() == 0
    assert not torch.cuda.is_available()


def test_nothing_is_left_behind(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in ("aiter", "gone")]:
        monkeypatch.delitem(sys.modules, name)
    before = (dict(vars(torch)), dict(vars(torch.Tensor)), dict(vars(torch.cuda)), set(sys.modules))
    with install(CPU, sources=["from gone.away import Lost\ntry: ...\nexcept Lost: ...\n"]):
        assert torch.zeros is not before[0]["zeros"]
        assert {"aiter.ops.shuffle", "gone.away"} <= set(sys.modules)
    assert (dict(vars(torch)), dict(vars(torch.Tensor)), dict(vars(torch.cuda)), set(sys.modules)) == before
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_names_choose_the_stand_ins():
    with install(CPU, [CUDA]):
        assert torch.zeros(1, device="cuda").device == CPU
        assert "aiter" not in sys.modules
    with install(CPU, [AITER, SCALED_MM]), pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with pytest.raises(ValueError, match=r"stand-ins gpu are unknown, there are torch\._scaled_mm with FP4"):
        install(CPU, ["gpu"])
    assert set(ALL) == {SCALED_MM, CUDA, AITER, NAMES_ONLY}


def test_used_names_are_handed_out_once(stand_ins):
    torch.zeros(1, device="cuda")
    assert stand_ins.take_used() == (CUDA,)
    assert stand_ins.take_used() == ()


def test_modules_that_give_exceptions_only(monkeypatch):
    sources = [
        "from gone.deep.down import OpError, Other as O\ntry: ...\nexcept (OpError, O): ...\n",
        "from used_gone import Thing\ntry: ...\nexcept Thing: ...\nThing()\n",
        "from mixed_gone import Error\nimport mixed_gone.cute\ntry: ...\nexcept Error: ...\n",
        "not python (",
    ]
    with install(CPU, [NAMES_ONLY], sources):
        module = importlib.import_module("gone.deep.down")
        assert issubclass(module.OpError, Exception)
        assert module.Other.__name__ == "Other"
        for name in ("used_gone", "mixed_gone"):
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(name)


def test_the_documentation_names_every_stand_in():
    page = (Path(__file__).parents[2] / "docs" / "arena.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|", page.split("## What stands in", 1)[1], re.MULTILINE)
    for name in ALL:
        assert any(row.replace('"', "").startswith(name) for row in rows), name


def test_what_is_provided():
    assert provides("aiter")
    assert provides("aiter.utility", "fp4_utils")
    assert provides("aiter.utility.fp4_utils", "e8m0_shuffle")
    assert not provides("aiter.ops.shuffle", "shuffle_everything")
    assert not provides("cutlass")
