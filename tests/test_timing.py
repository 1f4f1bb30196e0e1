"""The timing helpers, the sweep's own check of kernels, and the roofline probe."""

import math
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from rich.console import Console

from nibblas import dispatch, evidence, reference, roofline
from nibblas.bench import operands, probe, sweep, tune
from nibblas.bench.sweep_quantize import sweep_quantize
from nibblas.bench.timing import (
    AT_LEAST,
    CPU,
    SHORTEST,
    Rotation,
    interleaved,
    torch_threads,
)
from nibblas.formats import FORMATS, MXFP4, NVFP4
from nibblas.kernels import composite, torch_linear, torch_quantize
from nibblas.memory import cold_bytes, last_level_cache
from nibblas.problem import Problem
from nibblas.statistics import Ratio, paired_ratio, quartiles

# --- interleaved ---------------------------------------------------------------------------------------------------


def test_every_round_calls_every_function_once_in_changing_order():
    calls: list[str] = []
    slow = {name: lambda name=name: (calls.append(name), time.sleep(2 * SHORTEST)) for name in "abcd"}
    samples = interleaved(slow, rounds=12, warmup=2)
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys("abcd", 12)
    rounds = ["".join(calls[8:][i : i + 4]) for i in range(0, 48, 4)]
    assert len(calls) == 8 + 48
    assert all(sorted(order) == list("abcd") for order in rounds)
    assert len(set(rounds)) > 3


def test_samples_are_seconds_of_one_call():
    count = Counter[str]()

    def quick():
        count["quick"] += 1

    samples = interleaved({"quick": quick, "slow": partial(time.sleep, 0.003)}, rounds=5, warmup=50)
    assert count["quick"] > 5 * 20, "a short function must be called many times a sample"
    assert 0 < min(samples["quick"]) < SHORTEST / 10
    assert min(samples["slow"]) >= 0.003


def test_time_limit_leaves_enough_rounds():
    samples = interleaved({"a": partial(time.sleep, 0.01)}, rounds=1000, seconds=0)
    assert len(samples["a"]) == AT_LEAST


@pytest.mark.parametrize("fails", [False, True])
def test_threads_are_set_and_restored(fails):
    before, seen = torch.get_num_threads(), []

    def look():
        seen.append(torch.get_num_threads())
        if fails:
            raise ZeroDivisionError

    wanted = before + 1
    if fails:
        with pytest.raises(ZeroDivisionError):
            interleaved({"look": look}, rounds=5, threads=wanted)
    else:
        interleaved({"look": look}, rounds=5, threads=wanted)
    assert set(seen) == {wanted}
    assert torch.get_num_threads() == before
    with torch_threads(None):
        assert torch.get_num_threads() == before


def test_no_gradients_while_timing():
    seen = set()
    interleaved({"look": lambda: seen.add(torch.is_grad_enabled())}, rounds=5)
    assert seen == {False}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("waits", [False, True], ids=["graph", "not capturable"])
def test_cuda_times_the_device(waits):
    device = torch.device("cuda", 0)
    x = torch.ones(1 << 28, device=device)

    def product():
        x.mul_(1.0)
        if waits:
            x[0].item()

    (samples,) = interleaved({"product": product}, rounds=5, device=device, launches=4).values()
    assert x.nbytes / 8e12 < min(samples) < 0.1  # neither faster than any memory, nor nothing


# --- cold operands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_copies_are_equal_and_apart(dtype):
    operand = torch.arange(33).to(dtype).reshape(3, 11)
    rotation = Rotation(operand, beyond=operand.nbytes * 4 + 1)
    assert len(rotation.copies) == 5
    assert rotation.is_cold
    assert all(torch.equal(copy, operand) for copy in rotation.copies)
    starts = sorted(copy.data_ptr() for copy in [*rotation.copies, operand])
    assert all(b - a >= operand.nbytes for a, b in pairwise(starts))
    assert len(set(starts)) == 6
    assert len({copy.data_ptr() % 64 for copy in rotation.copies}) == 1
    taken = [rotation().data_ptr() for _ in range(10)]
    assert taken[:5] == taken[5:] == [copy.data_ptr() for copy in rotation.copies]


def test_copies_of_views_hold_their_elements():
    operand = torch.arange(64.0).reshape(8, 8).t()[1:5]
    assert all(torch.equal(copy, operand) for copy in Rotation(operand, beyond=1000).copies)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_copies_of_scaled_tensors(format):
    w = operands.draw(48, 64, format, (100, 120), torch.Generator().manual_seed(0))
    w = w.with_layout("ROWS_16x1", "ROWS_16x4")
    rotation = Rotation(w, beyond=3 * w.nbytes)
    assert len(rotation.copies) == 3
    assert len({copy.data.data_ptr() for copy in rotation.copies} | {w.data.data_ptr()}) == 4
    for copy in rotation.copies:
        assert (copy.format, copy.layout, copy.data_layout, copy.matrix) == (
            w.format,
            w.layout,
            w.data_layout,
            w.matrix,
        )
        assert torch.equal(copy.data, w.data)
        assert torch.equal(copy.scale, w.scale)
        assert (copy.global_scale is None) == (w.global_scale is None)


def test_a_rotation_that_stays_in_the_caches_says_so():
    rotation = Rotation(torch.zeros(4), beyond=1 << 20, at_most=10)
    assert len(rotation.copies) == 10
    assert not rotation.is_cold


def test_caches(tmp_path):
    for i, size in enumerate(["32K\n", "2048K\n", "300M\n", "unknown"]):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(size)
    assert last_level_cache(tmp_path) == 300 * 2**20
    assert last_level_cache(tmp_path / "none") == 32 * 2**20
    assert 0 < cold_bytes(CPU) <= 2 * last_level_cache()


# --- what samples say ----------------------------------------------------------------------------------------------


def test_quartiles():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)


def test_paired_ratio_is_blind_to_drift():
    drift = [1.0, 10.0, 3.0, 0.1, 50.0]
    assert paired_ratio([2 * d for d in drift], drift) == Ratio(2.0, 2.0, 2.0)


def test_paired_ratio_knows_its_uncertainty():
    generator = torch.Generator().manual_seed(0)

    def noisy(n: int) -> Ratio:
        ours, theirs = (1 + 0.1 * torch.randn(n, generator=generator) for _ in range(2))
        return paired_ratio((3 * theirs).tolist(), ours.tolist())

    few, many = noisy(10), noisy(1000)
    for ratio in (few, many):
        assert ratio.low < ratio.value < ratio.high
        assert ratio.low < 3 < ratio.high
    assert many.high - many.low < (few.high - few.low) / 3
    assert str(Ratio(3.214, 3.1, 3.33)) == "3.21x (3.10-3.33)"


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0])])
def test_paired_ratio_refuses(a, b):
    with pytest.raises(ValueError, match="paired_ratio"):
        paired_ratio(a, b)


# --- the sweep -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_drawn_operands_cover_codes_and_scales(format):
    low, high = operands.legal_scales("linear", format, "bf16")
    w = operands.draw(512, 1024, format, (low, high), torch.Generator().manual_seed(1))
    assert len(w.data.unique()) == 256
    assert w.scale.unique().tolist() == list(range(low, high + 1))
    assert not format.scale_code.is_nan(w.scale).any()
    spread = w.scale.amax(1).int() - w.scale.amin(1).int()
    assert spread.max() < operands.SPREAD[format.name]


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compare_takes_a_rounded_answer_and_refuses_a_wrong_element(format, dtype):
    generator = torch.Generator().manual_seed(2)
    w = operands.draw(256, 128, format, {"nvfp4": (0, 126), "mxfp4": (107, 129)}[format.name], generator)
    x = torch.randn(4, 128, generator=generator)
    exact, size = reference.matmul(x, w), reference.magnitude(x, w)
    good = exact.to(dtype)
    error, fault = operands.compare(good, exact, size, 128)
    assert fault is None
    assert error <= torch.finfo(dtype).eps
    smallest = tuple(i.item() for i in torch.unravel_index(size.argmin(), size.shape))
    for change in (4 * torch.finfo(dtype).eps * size[smallest].item() + 1e-6, math.nan, math.inf):
        bad = good.clone()
        bad[smallest] += change
        if bad[smallest] != good[smallest]:
            _, fault = operands.compare(bad, exact, size, 128)
            assert fault is not None
            assert fault.startswith("1 of 1024 elements")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The sweep with a fixed roofline, small caches, and kernels to name: right, wrong, unable."""
    line = roofline.Roofline("a CPU", "cpu", 1, 1e10, {"fp32": 1e11}, "measured")
    (right,) = torch_linear.KERNELS

    def high_nibble_first(a, b, bias, out):
        torch_linear.launch(a, replace(b, data=(b.data << 4) | (b.data >> 4)), bias, out)

    def slow(a, b, bias, out):
        time.sleep(0.02)
        torch_linear.launch(a, b, bias, out)

    found = (
        replace(right, name="right", cost=lambda problem, line: 1e-3),
        replace(right, name="slow", launch=slow, cost=lambda problem, line: 1e-6),
        replace(right, name="wrong", launch=high_nibble_first, cost=lambda problem, line: 10.0),
        replace(right, name="unable", also=lambda problem: "no library"),
        replace(right, name="elsewhere", archs=("sm_90",)),
    )
    monkeypatch.setattr(sweep, "all_kernels", lambda: found)
    monkeypatch.setattr(dispatch, "kernels", lambda: found)
    monkeypatch.setattr(probe, "measure", lambda device, threads: line)
    monkeypatch.setattr(sweep, "cold_bytes", lambda device: 1 << 16)
    monkeypatch.setattr(evidence, "store", lambda: evidence.Store(tmp_path, tmp_path))
    dispatch.forget()
    yield sweep.sweep
    dispatch.forget()


@pytest.mark.parametrize("activations", ["bf16", "fp32", "fp4"])
def test_sweep(bench, activations):
    steps = []
    results = bench(
        [(64, 128)], [1, 3], [NVFP4, "mxfp4"], activations, rounds=6, progress=lambda *step: steps.append(step)
    )
    assert [step[:2] for step in steps] == [(i, 4) for i in range(4)]
    assert [(r.problem.b, r.problem.M) for r in results] == [("nvfp4", 1), ("nvfp4", 3), ("mxfp4", 1), ("mxfp4", 3)]
    for result in results:
        p = result.problem
        assert (p.N, p.K, p.a) == (64, 128, p.b if activations == "fp4" else activations)
        assert {t.name for t in result.timed} == {"right", "slow", "torch bf16", "torch fp32"}
        assert [t.median for t in result.timed] == sorted(t.median for t in result.timed)
        assert list(result.wrong) == ["wrong"]
        assert result.unable == {"unable": "no library"}
        # The cost models are the wrong way round, so the dispatcher loses, and the sweep tells by how much.
        (chosen,) = [t for t in result.timed if t.chosen]
        assert chosen.name == "slow"
        (best,) = [t for t in result.timed if t.name == "right"]
        assert result.regret == {"LINEAR/LINEAR": chosen.median / best.median}
        for m in result.measurements:
            assert (m.problem, m.device, m.threads) == (p, "a CPU", 1)
            assert m.error is not None
            assert m.floor == result.floor
            assert set(m.beside) == {t.name for t in result.timed} - {m.kernel}
            assert evidence.Measurement.from_json(m.to_json()) == m
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        sweep.print_results(results, console)
    text = capture.get()
    assert "> slow" in text
    assert "not timed" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("op", ["linear", "grouped_linear", "gated_linear"])
@pytest.mark.parametrize("activations", ["bf16", "fp16", "fp4"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_sweep_of_other_products(op, activations, format, monkeypatch, bench):
    """Right kernels pass, with inputs of all scales; one that takes another matrix of the batch does not."""
    right = {
        "linear": torch_linear.KERNELS[0],
        "grouped_linear": composite.KERNELS[0],
        "gated_linear": composite.KERNELS[1],
    }[op]

    def others_weights(x, w, *rest, **options):
        if op == "gated_linear":
            right.launch(x, rest[0], w, *rest[1:], **options)
        else:
            right.launch(x, replace(w, data=w.data.roll(1, 0)), *rest, **options)

    found = (
        *torch_linear.KERNELS,
        replace(right, name="right"),
        replace(right, name="wrong", launch=others_weights, cost=lambda problem, line: 1e9),
    )
    monkeypatch.setattr(sweep, "all_kernels", lambda: found)
    monkeypatch.setattr(dispatch, "kernels", lambda: found)
    sizes = {"linear": {"L": 2}, "grouped_linear": {"G": 3}, "gated_linear": {}}[op]
    results = sweep.sweep([(48, 64)], [1, 9], [format], activations, op=op, **sizes, rounds=5)
    for result, M in zip(results, (1, 9), strict=True):
        p = result.problem
        assert (p.op, p.M, p.L, p.G) == (op, M, 2 if op == "linear" else 1, 3 if op == "grouped_linear" else 1)
        assert "elements are wrong" in result.wrong["wrong"]
        assert {"right", *sweep.TORCH} <= {t.name for t in result.timed}
        measured = next(m for m in result.measurements if m.kernel == "right")
        assert evidence.Measurement.from_json(measured.to_json()) == measured
        size = {
            "linear": "--L 2 ",
            "grouped_linear": "--op grouped_linear --G 3 ",
            "gated_linear": "--op gated_linear ",
        }
        assert f"bench {size[op]}--shapes 48x64 --M {M} " in measured.command


def test_sweep_refuses_sizes_that_an_operation_lacks(bench):
    for op, sizes, message in (
        ("gated_linear", {"L": 2}, "gated_linear has no L"),
        ("linear", {"G": 8}, "linear has no G"),
        ("quantize", {}, "op 'quantize' is no product"),
    ):
        with pytest.raises(ValueError, match=message):
            bench([(64, 128)], [1], [NVFP4], op=op, **sizes)


def test_tune_tells_of_a_choice_that_was_not_timed(bench):
    """A kernel that takes any layouts is timed in LINEAR ones, and may be expected to be the best in others."""
    (result,) = bench([(64, 128)], [1], [NVFP4], rounds=5, names=["slow"])
    (slow,) = [t for t in result.timed if t.chosen]
    found = replace(slow, problem=replace(slow.problem, b_layouts=("ROWS_16x1", "ROWS_16x4")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "kernels", lambda: (sweep.named_kernels("bench", "linear", ["right"], "cpu")[0],))
        (tuned,) = tune._compare(replace(result, timed=(found,)), CPU)
    assert (tuned.before, tuned.after, tuned.times["right"]) == ("slow", "right", 1e-3)


def test_rows_are_dealt_to_groups():
    drawn = operands.drawn("grouped_linear", [4, 64], 16, 32, NVFP4, "bf16", (80, 126), 1 << 16, CPU, L=1, G=16)
    offsets = drawn.offsets(64)
    assert offsets.tolist() == sorted(offsets.tolist())
    assert (offsets[0], offsets[-1]) == (0, 64)
    assert drawn.share(64) > drawn.share(4) > 0
    assert drawn.beyond == math.ceil((1 << 16) / drawn.share(4)), "what has no rows is not read, and makes nothing cold"


def test_peers_are_checked_before_they_are_timed(bench, monkeypatch):
    def refuses(b, dtype, copies):
        raise NotImplementedError("not for this format")

    peers = {
        "right": lambda b, dtype, copies: lambda a: reference.matmul(a, b).to(dtype),
        "off": lambda b, dtype, copies: lambda a: reference.matmul(a, b).to(dtype) * 0,
        "none": refuses,
    }
    monkeypatch.setattr(sweep, "PEERS", peers)
    (result,) = bench([(64, 128)], [3], [NVFP4], peers=("right", "cublas", "off", "none"), rounds=5, names=["right"])
    assert {t.name for t in result.timed} == {"right", *sweep.TORCH}
    assert "off by 100.0% of the exact ones' RMS" in result.unable["off"]
    assert result.unable["none"] == "NotImplementedError: not for this format"
    with pytest.raises(ValueError, match="no peer is called absent; there are right, off, none, cublas"):
        bench([(64, 128)], [3], [NVFP4], peers=("absent",))


def test_random_problems():
    found = sweep.random_problems(200)
    assert found == sweep.random_problems(200)
    assert len(set(found)) > 190
    for N, K, M in found:
        assert N % 64 == K % 64 == 0
        assert 64 <= N <= 16384
        assert 64 <= K <= 16384
        assert 1 <= M <= 64


def test_sweep_feeds_the_dispatcher(bench):
    problem = Problem("linear", 1, 64, 128)
    assert dispatch.choose(problem, CPU).name == "slow"
    (result,) = bench([(64, 128)], [1], [NVFP4], threads=1, rounds=6)
    store = evidence.store()
    store.add([replace(m, device=roofline.device_name(CPU)) for m in result.measurements])
    with pytest.MonkeyPatch.context() as patch, torch_threads(1):
        patch.setattr(evidence, "store", lambda: store)
        dispatch.forget()
        assert dispatch.choose(problem, CPU).name == "right"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([(64, 128)], [1], ["nvfp4"], "bf16", ["right", "absent"]),
            "no linear kernel is called absent; there are right",
        ),
        (([(64, 128)], [1], ["fp8"], "bf16", None), "format 'fp8' is unknown"),
        (([(64, 128)], [1], ["nvfp4"], "int8", None), "activations 'int8' are unknown"),
        (([(64, 40)], [1], [MXFP4], "bf16", None), "K = 40 is not a multiple"),
    ],
)
def test_sweep_refuses(bench, arguments, message):
    *rest, names = arguments
    with pytest.raises(ValueError, match=message):
        bench(*rest, names=names)


def test_a_name_that_is_none_is_refused_by_the_command_that_was_called():
    with pytest.raises(ValueError, match=r"^tune: no linear kernel is called absent"):
        sweep.named_kernels("tune", "linear", ["absent"], "cpu")


def test_a_kernel_that_was_named_says_why_it_cannot_run(bench):
    (result,) = bench([(64, 128)], [1], [NVFP4], rounds=5, names=["elsewhere"])
    assert result.unable == {"elsewhere": "runs on sm_90, this is cpu"}
    assert {t.name for t in result.timed} == set(sweep.TORCH)
    assert (result.measurements, result.regret) == ((), {})


def test_sweep_quantize(bench, monkeypatch):
    (reference,) = torch_quantize.KERNELS

    def drops_signs(x, format, rule, global_scale):
        return torch_quantize.launch(x + 0.0, format, rule, global_scale)

    found = (
        replace(reference, name="right"),
        replace(reference, name="wrong", launch=drops_signs, cost=lambda problem, line: 1e9),
        replace(reference, name="unable", also=lambda problem: "no library"),
    )
    monkeypatch.setattr(sweep, "all_kernels", lambda: found)
    monkeypatch.setattr(dispatch, "kernels", lambda: found)
    results = sweep_quantize([(8, 64)], ["nvfp4", MXFP4], "fp16", threads=1, rounds=6)
    assert [(r.problem.b, r.problem.rule) for r in results] == [
        (format.name, rule) for format in (NVFP4, MXFP4) for rule in format.scale_rules
    ]
    for result in results:
        assert (result.problem.M, result.problem.K, result.problem.a) == (8, 64, "fp16")
        assert result.floor == result.problem.bytes / 1e10
        assert {t.name for t in result.timed} == {"right", "torch copy"}
        assert "bytes of codes differ" in result.wrong["wrong"]
        assert result.unable == {"unable": "no library"}
        assert result.regret == {"LINEAR/LINEAR": 1.0}
        (m,) = result.measurements
        assert (m.kernel, m.problem, m.error, m.hardened) == ("right", result.problem, 0.0, True)
        assert evidence.Measurement.from_json(m.to_json()) == m
        assert all("faster_than_torch_copy" in t for t in result.as_dict()["timed"])
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        sweep.print_results(results, console)
    assert "four_over_six" in capture.get()
    assert "vs torch copy" in capture.get()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([(8, 64)], ["nvfp4"], "fp4"), "activations 'fp4' can't be quantized"),
        (([(8, 40)], ["mxfp4"], "bf16"), "K = 40 is not a multiple"),
    ],
)
def test_sweep_quantize_refuses(bench, arguments, message):
    with pytest.raises(ValueError, match=message):
        sweep_quantize(*arguments)


# --- the probe -----------------------------------------------------------------------------------------------------


def test_probe_measures_once_and_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("NIBBLAS_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "SECONDS", 0.0)
    monkeypatch.setattr(probe, "last_level_cache", lambda: 1 << 20)
    monkeypatch.setattr(probe, "_rates", lambda device, size, dtypes: {"fp32": 1e9, "bf16": 2e9})
    roofline.roofline.cache_clear()
    try:
        assert roofline.roofline(CPU, 1).source == "assumed"
        line = probe.measure(CPU, 1)
        assert (line.source, line.threads, line.arch, line.device) == ("measured", 1, "cpu", roofline.device_name(CPU))
        assert 1e8 < line.read_bandwidth < 1e13
        assert line.rates["bf16"] >= 2e9
        assert roofline.roofline(CPU, 1) == line
        monkeypatch.setattr(probe, "_rates", lambda device, size, dtypes: {"fp32": 1e15})
        assert probe.measure(CPU, 1) == line
        assert probe.measure(CPU, 1, again=True).rates["fp32"] == 1e15
        assert roofline.roofline(CPU, 2).source == "assumed"
    finally:
        roofline.roofline.cache_clear()


def test_probe_rates_are_those_of_products():
    rates = probe._rates(CPU, 128, {"fp32": torch.float32, "bf16": torch.bfloat16})
    assert {"fp32", "bf16"} <= set(rates)
    assert all(1e7 < rate < 1e15 for rate in rates.values())
