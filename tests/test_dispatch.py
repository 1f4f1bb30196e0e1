"""Which kernel is chosen, on what evidence, and what is said of it."""

from dataclasses import replace

import pytest
import torch

from nibblas import dispatch
from nibblas.dispatch import NoKernelError, choose, explain_problem, rank
from nibblas.evidence import Measurement, Store
from nibblas.kernel import Kernel, storage_layouts
from nibblas.layouts import LINEAR, BLOCKED_128x4, ROWS_16x1, ROWS_16x4
from nibblas.problem import Problem
from nibblas.roofline import Roofline
from nibblas.words import time_text

CPU = torch.device("cpu")
PROBLEM = Problem("linear", 1, 1024, 1024)
LINE = Roofline("a CPU", "cpu", 1, 1e10, {"fp32": 1e11, "bf16": 1e11}, "measured")


def made(name: str, seconds: float = 1.0, **facts) -> Kernel:
    """A kernel that is never launched; its cost model says `seconds`."""
    facts = {"archs": ("cpu",), "operands": (("bf16", "nvfp4"),), "outs": ("bf16",), "op": "linear"} | facts
    return Kernel(name=name, launch=print, sources=(), cost=lambda problem, line: seconds, **facts)


class Setting:
    """The kernels and the evidence that dispatch sees."""

    def __init__(self, folder, monkeypatch):
        self.kernels: list[Kernel] = []
        self.store = Store(folder / "shipped", folder / "local")
        self.line = LINE
        monkeypatch.setattr(dispatch, "kernels", lambda: tuple(self.kernels))
        monkeypatch.setattr(dispatch.evidence, "store", lambda: self.store)
        monkeypatch.setattr(dispatch, "roofline", lambda device, threads: self.line)
        monkeypatch.setattr(dispatch, "device_name", lambda device: "a CPU")
        monkeypatch.setattr(dispatch, "threads_of", lambda device: 1)

    def measure(self, kernel: Kernel, seconds: float, problem: Problem = PROBLEM, **fields) -> Measurement:
        facts = {"device": "a CPU", "threads": 1, "when": "2026-01", "command": "test", "samples": (seconds,)} | fields
        m = Measurement(kernel.name, facts.pop("digest", kernel.digest), problem, **facts)
        self.store.add([m])
        return m


@pytest.fixture
def setting(tmp_path, monkeypatch):
    dispatch.forget()
    yield Setting(tmp_path, monkeypatch)
    dispatch.forget()


def test_a_choice_that_may_not_depend_on_rows_is_made_as_for_one(setting):
    few = replace(made("few", batch_invariant=True), cost=lambda problem, line: 2.0 * problem.M)
    many = replace(made("many", batch_invariant=True), cost=lambda problem, line: 10.0 + problem.M)
    setting.kernels += [many, few]
    for M in (1, 5, 100):
        assert choose(replace(PROBLEM, M=M, batch_invariant=True), CPU) is few
    assert choose(replace(PROBLEM, M=100), CPU) is many
    assert [c.seconds for c in rank(replace(PROBLEM, M=100, batch_invariant=True), CPU, 1)] == [200.0, 110.0]


def basis(kernel: Kernel, problem: Problem = PROBLEM) -> tuple[str, float]:
    (found,) = [c for c in rank(problem, CPU, 1) if c.kernel is kernel]
    return found.basis, found.seconds


# --- the order -----------------------------------------------------------------------------------------------------


def test_without_evidence_the_cost_model_decides(setting):
    slow, fast = setting.kernels = [made("slow", 3.0), made("fast", 2.0)]
    assert choose(PROBLEM, CPU) is fast
    assert basis(slow) == ("cost", 3.0)


def test_equal_times_go_by_name(setting):
    setting.kernels = [made("b"), made("a"), made("c")]
    assert choose(PROBLEM, CPU).name == "a"


@pytest.mark.parametrize(("rival", "winner"), [(0.98, "usual"), (0.8, "rival")])
def test_evidence_moves_a_choice_only_beyond_its_noise(setting, rival, winner):
    usual, other = setting.kernels = [made("usual", 1.0), made("rival", 2.0)]
    noisy = (0.9, 0.95, 1.0, 1.05, 1.1)
    setting.measure(usual, 1.0, samples=noisy)
    setting.measure(other, rival, samples=tuple(rival * s for s in noisy))
    assert choose(PROBLEM, CPU).name == winner


@pytest.mark.parametrize(("measured", "winner"), [(5.0, "other"), (0.1, "tested")])
def test_a_measurement_beats_the_kernels_own_cost_model(setting, measured, winner):
    tested, _ = setting.kernels = [made("tested", 1.0), made("other", 2.0)]
    setting.measure(tested, measured)
    assert basis(tested) == ("measured", measured)
    assert choose(PROBLEM, CPU).name == winner


def test_a_near_measurement_corrects_the_cost_model(setting):
    (kernel,) = setting.kernels = [replace(made("near"), cost=lambda problem, line: 3.0 + problem.N)]
    half = replace(PROBLEM, N=512)
    record = setting.measure(kernel, 0.5, half)
    found = rank(PROBLEM, CPU, 1)[0]
    assert (found.basis, found.record, found.distance) == ("near", record, 1.0)
    assert found.seconds == pytest.approx(0.5 * 1027 / 515)


def test_the_very_problem_beats_a_near_one(setting):
    (kernel,) = setting.kernels = [made("both")]
    setting.measure(kernel, 0.3)
    setting.measure(kernel, 0.1, replace(PROBLEM, N=1040), when="2026-12")
    assert basis(kernel) == ("measured", 0.3)


def test_two_octaves_are_near_and_more_are_not(setting):
    (kernel,) = setting.kernels = [made("far", 7.0)]
    setting.measure(kernel, 0.1, replace(PROBLEM, M=4))
    assert basis(kernel)[0] == "near"
    assert basis(kernel, replace(PROBLEM, K=2048)) == ("cost", 7.0)


@pytest.mark.parametrize(
    "other",
    [{"digest": "stale"}, {"device": "another CPU"}, {"threads": 2}, {"samples": ()}],
    ids=str,
)
def test_evidence_of_another_source_or_device_is_ignored(setting, other):
    (kernel,) = setting.kernels = [made("kernel", 7.0)]
    setting.measure(kernel, 0.1, **other)
    assert basis(kernel) == ("cost", 7.0)


def test_evidence_for_other_layouts_is_ignored(setting):
    (kernel,) = setting.kernels = [made("kernel", 7.0, b_layouts=None)]
    setting.measure(kernel, 0.1, replace(PROBLEM, b_layouts=("ROWS_16x1", "ROWS_16x4")))
    assert basis(kernel) == ("cost", 7.0)


def test_a_kernel_that_cannot_run_is_never_chosen_however_fast(setting):
    elsewhere, here = setting.kernels = [made("elsewhere", 1e-9, archs=("sm_90",)), made("here", 9.0)]
    setting.measure(elsewhere, 1e-9)
    assert choose(PROBLEM, CPU) is here
    assert [c.kernel.name for c in rank(PROBLEM, CPU, 1)] == ["here", "elsewhere"]


def test_a_choice_is_remembered_until_forgotten(setting):
    first, second = setting.kernels = [made("first", 1.0), made("second", 2.0)]
    assert choose(PROBLEM, CPU) is first
    setting.measure(second, 0.1)
    assert choose(PROBLEM, CPU) is first
    dispatch.forget()
    assert choose(PROBLEM, CPU) is second


# --- forcing, and nothing to choose --------------------------------------------------------------------------------


def test_a_named_kernel_is_taken_even_if_slower(setting):
    slow, _ = setting.kernels = [made("slow", 9.0), made("fast", 1.0)]
    assert choose(PROBLEM, CPU, "slow") is slow


def test_a_named_kernel_that_cannot_run_says_why(setting):
    setting.kernels = [made("gpu", archs=("sm_90", "sm_100")), made("cpu")]
    with pytest.raises(NoKernelError, match=r"^linear: kernel 'gpu' runs on sm_90, sm_100, this is cpu$"):
        choose(PROBLEM, CPU, "gpu")


def test_an_unknown_name_lists_the_kernels_of_the_operation(setting):
    setting.kernels = [made("one"), made("two"), made("quantizer", op="quantize")]
    with pytest.raises(NoKernelError, match=r"^linear: no kernel is called 'three'; there are one, two$"):
        choose(PROBLEM, CPU, "three")


def test_no_kernel_names_the_problem_and_every_reason(setting):
    setting.kernels = [made("gpu", archs=("sm_90",)), made("wide", outs=("fp32",))]
    with pytest.raises(NoKernelError) as caught:
        choose(PROBLEM, CPU)
    assert str(caught.value) == (
        f"no kernel for {PROBLEM}: gpu runs on sm_90, this is cpu; wide writes fp32; asked for bf16"
    )
    setting.kernels = []
    with pytest.raises(NoKernelError, match="none exists"):
        choose(replace(PROBLEM, M=2), CPU)


PACKED = ((ROWS_16x1, ROWS_16x4), (LINEAR, LINEAR))


@pytest.mark.parametrize(
    ("facts", "problem", "reason"),
    [
        ({}, PROBLEM, None),
        ({"op": "quantize"}, PROBLEM, "computes quantize, asked for linear"),
        ({"archs": ()}, replace(PROBLEM, arch="sm_90"), None),
        ({}, replace(PROBLEM, arch="sm_90"), "runs on cpu, this is sm_90"),
        ({}, replace(PROBLEM, a="fp32"), "takes bf16 x nvfp4; asked for fp32 x nvfp4"),
        ({}, replace(PROBLEM, b="mxfp4"), "takes bf16 x nvfp4; asked for bf16 x mxfp4"),
        ({}, replace(PROBLEM, out="fp32"), "writes bf16; asked for fp32"),
        (
            {},
            replace(PROBLEM, b_layouts=("BLOCKED_128x4", "LINEAR")),
            "takes b in LINEAR/LINEAR; got BLOCKED_128x4/LINEAR",
        ),
        (
            {"b_layouts": PACKED},
            replace(PROBLEM, b_layouts=("ROWS_16x1", "LINEAR")),
            "takes b in ROWS_16x1/ROWS_16x4, LINEAR/LINEAR; got ROWS_16x1/LINEAR",
        ),
        ({"b_layouts": PACKED}, replace(PROBLEM, b_layouts=("ROWS_16x1", "ROWS_16x4")), None),
        ({"b_layouts": None}, replace(PROBLEM, b_layouts=("CDNA_32x8", "LINEAR")), None),
        (
            {},
            replace(PROBLEM, a_layouts=("BLOCKED_128x4", "LINEAR")),
            "takes a in LINEAR/LINEAR; got BLOCKED_128x4/LINEAR",
        ),
        (
            {},
            replace(PROBLEM, batch_invariant=True),
            "a row's result may depend on M, asked for batch_invariant",
        ),
        ({"batch_invariant": True}, replace(PROBLEM, batch_invariant=True), None),
        ({"also": lambda problem: "N is odd" if problem.N % 2 else None}, replace(PROBLEM, N=3), "N is odd"),
        ({"also": lambda problem: "N is odd" if problem.N % 2 else None}, PROBLEM, None),
    ],
)
def test_why_not(facts, problem, reason):
    assert made("kernel", **facts).why_not(problem) == reason


def test_a_digest_follows_names_and_bytes_of_the_sources(tmp_path, monkeypatch):
    monkeypatch.setattr("nibblas.kernel.PACKAGE", tmp_path)

    def digest(**files: str) -> str:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        return replace(made("kernel"), sources=tuple(files)).digest

    assert digest(a="1", b="2") == digest(a="1", b="2")
    assert len({digest(a="1", b="2"), digest(a="1", b="3"), digest(a="12", b=""), digest(a="1"), digest(b="1")}) == 5


# --- explaining ----------------------------------------------------------------------------------------------------


def test_explain_prints_every_kernel(setting):
    best, near, _, _ = setting.kernels = [
        made("best"),
        made("near"),
        made("by_cost", 0.25),
        made("gpu", archs=("sm_90",)),
    ]
    floor = LINE.floor(PROBLEM)
    setting.measure(best, 2 * floor)
    setting.measure(near, 2.5 * floor, replace(PROBLEM, M=2))
    found = explain_problem(PROBLEM, CPU)
    assert found.chosen is best
    assert str(found) == (
        "linear M=1 N=1024 K=1024 bf16 x nvfp4 -> bf16 on cpu\n"
        f"floor {time_text(floor)} (bandwidth and rates measured)\n"
        f"> best     {time_text(2 * floor):>6}  50% of floor  measured 2026-01\n"
        f"  near     {time_text(2.5 * floor):>6}  40% of floor  from linear M=2 N=1024 K=1024 "
        "bf16 x nvfp4 -> bf16 on cpu (1.0 away), measured 2026-01\n"
        "  by_cost  250 ms   0% of floor  cost model\n"
        "gpu can't: runs on sm_90, this is cpu"
    )


def test_explain_names_no_floor_from_assumed_rates(setting):
    setting.kernels, setting.line = [made("kernel", 1e-4)], replace(LINE, source="assumed")
    text = str(explain_problem(PROBLEM, CPU))
    assert "floor unknown: `nibblas doctor --threads 1` measures" in text
    assert "%" not in text


def test_explain_where_nothing_can_run(setting):
    setting.kernels = [made("gpu", archs=("sm_90",))]
    found = explain_problem(PROBLEM, CPU)
    assert found.chosen is None
    assert str(found).splitlines()[2:] == ["no kernel can run this", "gpu can't: runs on sm_90, this is cpu"]


def test_weights_stay_linear_for_a_kernel_that_takes_any_layout(setting):
    elsewhere = made("elsewhere", 0.1, archs=("sm_100",), b_layouts=((BLOCKED_128x4, LINEAR),))
    anywhere = made("anywhere", 1.0, b_layouts=None)
    setting.kernels = [elsewhere, anywhere]
    assert dispatch.best_storage(PROBLEM, CPU) == (anywhere, (LINEAR, LINEAR))


def test_weights_are_stored_in_rows_or_as_a_kernel_likes_best():
    rows, tiles, blocked = (LINEAR, LINEAR), (ROWS_16x1, ROWS_16x4), (BLOCKED_128x4, LINEAR)
    picky, easy = made("picky", b_layouts=(tiles, rows)), made("easy", b_layouts=(rows, blocked))
    assert storage_layouts([picky, easy, made("any", b_layouts=None)]) == (rows, tiles)
