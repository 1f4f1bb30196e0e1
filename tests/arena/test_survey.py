"""The survey of a checkout: which problems and submissions it runs, what it keeps, and its table."""

import signal
import time
from dataclasses import replace

import pytest
import torch

from nibblas.arena import record as records
from nibblas.arena import run as arena_run
from nibblas.arena.new import new
from nibblas.arena.record import CaseResult, Environment, Protocol, Record, Sample, Seed, Statistics, TaskFacts
from nibblas.arena.survey import entries, survey, table
from nibblas.roofline import device_name


@pytest.fixture
def checkout(tmp_path):
    """Three problems: one that works, one whose baseline imports what is not there, one with its own evaluation."""
    problems = tmp_path / "problems"
    for name in ("b/good", "a/missing", "a/own"):
        (problems / name).parent.mkdir(parents=True, exist_ok=True)
        new(name.split("/")[1], (problems / name).parent)
    baseline = problems / "a/missing/submission.py"
    baseline.write_text("import module_of_tomorrow\n" + baseline.read_text())
    (problems / "a/own/reference.py").write_text("def reference_forward(x): ...\n")
    return tmp_path


def recorded(task, submission, options, path, **_):
    """What a run of the arena leaves, without running anything."""
    missing = b"module_of_tomorrow" in submission.files[submission.main]
    kind, verdict = ("incompatible", "incompatible here") if missing else ("correct", "correct here")
    timed = options.mode == "benchmark" and not missing
    samples = tuple(Sample({"host": ns}, ns + 9e3) for ns in (2e6, 2.5e6, 3e6)) if timed else ()
    statistics = Statistics("host", 2.5e6, 2e6, 3e6, 3) if timed else None
    record = Record(
        id="1",
        when="2026-01-02T00:00:00+00:00",
        command="",
        mode=options.mode,
        task=TaskFacts(task.name, task.digests),
        submission=submission.facts,
        environment=Environment(device_name(torch.device("cpu")), "cpu", 2, "", "", "", ""),
        isolation={},
        protocol=Protocol(options.mode, (Seed("0" * 64),)),
        stand_ins=("aiter.gemm_a4w4", "aiter.mla.mla_decode_fwd"),
        cases=tuple(
            CaseResult(options.mode, case.text, case.values, kind, samples=samples, statistics=statistics, floor_ns=5e5)
            for case in task.cases(options.mode)
        ),
        verdict=verdict,
        reason="submission.py:1 imports module_of_tomorrow" if missing else "",
        complete=True,
    )
    records.write(record, path)
    return record


@pytest.fixture
def runs(monkeypatch):
    """The arena's runs, recorded in place of done."""
    done = []

    def run(task, submission, options, path, **_):
        done.append((task.name, submission.path.name, options.mode, len(task.cases(options.mode))))
        return recorded(task, submission, options, path)

    monkeypatch.setattr(arena_run, "run", run)
    return done


def test_entries_are_each_problem_with_its_baseline_and_its_reference(checkout):
    found = list(entries(checkout))
    assert [(entry.problem, entry.kind) for entry in found] == [
        ("a/missing", "baseline"),
        ("a/missing", "reference"),
        ("a/own", "baseline"),
        ("b/good", "baseline"),
        ("b/good", "reference"),
    ]
    assert found[2].task is None
    assert found[2].refusal.startswith("reference.py defines no generate_input")
    text = found[4].submission.files["submission.py"].decode()
    assert text.startswith(found[4].task.file("reference.py").content.decode())
    assert text.endswith("custom_kernel = ref_kernel\n")


def test_what_has_a_record_is_not_run_again(checkout, runs, tmp_path):
    found = survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "")
    assert runs == [
        ("missing", "submission.py", "test", 4),
        ("missing", "reference.py", "test", 4),
        ("missing", "reference.py", "benchmark", 1),
        ("good", "submission.py", "test", 4),
        ("good", "submission.py", "benchmark", 1),
    ]
    again = survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "")
    assert len(runs) == 5
    assert table(again) == table(found)
    assert [entry.problem for entry in survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "^b/")] == ["b/good"]


def test_a_record_of_another_device_or_of_another_submission_is_made_anew(checkout, runs, tmp_path, monkeypatch):
    survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "^b/")
    assert len(runs) == 2
    baseline = checkout / "problems/b/good/submission.py"
    baseline.write_text(baseline.read_text() + "# faster\n")
    survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "^b/")
    assert len(runs) == 4
    monkeypatch.setattr("nibblas.arena.batch.device_name", lambda device: "another CPU")
    survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "^b/")
    assert len(runs) == 6


def test_a_problem_that_can_not_run_here_stands_on_one_line(checkout, runs, tmp_path, monkeypatch):
    def impossible(task, submission, options, path, **_):
        record = recorded(task, submission, options, path)
        return replace(record, verdict="incompatible here", reason="its cases need 8 GPUs")

    monkeypatch.setattr(arena_run, "run", impossible)
    found = survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "^b/")
    assert [entry.kind for entry in found] == ["baseline"]


def test_table(checkout, runs, tmp_path):
    found = survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "")
    lines = table(found).splitlines()
    machine = device_name(torch.device("cpu"))
    assert lines[0] == f"2 of 3 submissions passed all their tests; {machine}, 2 threads; 2026-01-02."
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines[4:]]
    assert cells[0][:3] == ["| a/missing", "baseline", "incompatible here"]
    assert "imports module_of_tomorrow; stand-ins: aiter |" in cells[0][-1]
    assert cells[1] == [
        "| a/missing", "reference", "correct here", "4 of 4", "m 1, n 2048, k 2048", "2.50 ms",
        "2.00 ms to 3.00 ms", "20%", "stand-ins: aiter |",
    ]  # fmt: skip
    assert cells[2][:3] == ["| a/own", "baseline", "refused"]
    assert cells[2][-1].startswith("reference.py defines no generate_input")


def test_an_interrupted_run_is_told_from_a_finished_one(checkout, runs, tmp_path):
    (entry,) = survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "^b/")
    test = entry.runs["test"]
    entry.runs["test"] = replace(test, verdict="unfinished", reason="interrupted", cases=test.cases[:2])
    assert entry.cells()[2:4] == ("correct so far", "2 of 4")
    assert "stopped by the time limit" in entry.cells()[-1]
    entry.runs["test"] = replace(test, verdict="unfinished", cases=())
    assert entry.cells()[2:4] == ("unfinished", "0 of 4")


def test_a_run_that_is_not_correct_gives_the_verdict_and_no_time(checkout, runs, tmp_path):
    (entry,) = survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "^b/")
    good = entry.runs["benchmark"]
    late = "the device went on for 41.9 us after the last event of a call"
    refused = tuple(replace(case, verdict="refused", message=late) for case in good.cases)
    entry.runs["benchmark"] = replace(good, verdict="refused", reason=late, cases=refused)
    assert entry.cells()[2:8] == ("refused", "4 of 4", "", "", "", "")
    assert entry.cells()[-1] == f"{late}; stand-ins: aiter"
    entry.runs["benchmark"] = replace(good, verdict="unfinished", reason="interrupted", cases=())
    assert entry.cells()[2:5] == ("correct so far", "4 of 4", "")
    assert entry.cells()[-1].startswith("stopped by the time limit; ")
    del entry.runs["benchmark"]
    entry.faults.append("the arena failed")
    assert entry.cells()[-1].startswith("the arena failed; "), "of a benchmark after good tests"


def test_a_run_is_stopped_after_its_time_and_a_persons_interrupt_goes_on(checkout, tmp_path, monkeypatch):
    def endless(task, submission, options, path, **_):
        recorded(task, submission, options, path)
        time.sleep(10)

    monkeypatch.setattr(arena_run, "run", endless)
    started = time.monotonic()
    survey(checkout, tmp_path / "kept", "cpu", 1.0, 0.1, "^b/")
    assert time.monotonic() - started < 5
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0

    def interrupted(task, submission, options, path, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(arena_run, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        survey(checkout, tmp_path / "others", "cpu", 1.0, 60.0, "^b/")


def test_a_fault_of_the_arena_is_told_and_the_survey_goes_on(checkout, tmp_path, monkeypatch, capsys):
    def broken(task, submission, options, path, **_):
        if task.name == "missing":
            raise RuntimeError("no worker")
        return recorded(task, submission, options, path)

    monkeypatch.setattr(arena_run, "run", broken)
    found = survey(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "", ("test",))
    rows = {(entry.problem, entry.kind): entry.cells() for entry in found}
    assert rows["a/missing", "baseline"][2] == "not run"
    assert rows["a/missing", "baseline"][-1] == "the arena failed: RuntimeError: no worker"
    assert rows["b/good", "baseline"][2:5] == ("correct here", "4 of 4", ""), "only its tests were asked for"
    assert "no worker" in capsys.readouterr().err


def test_a_record_that_can_not_be_read_stands_for_itself(checkout, runs, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "b.good.baseline.test.cpu.json").write_text("{}")
    (entry, *_) = survey(checkout, kept, "cpu", 1.0, 60.0, "^b/")
    assert runs == []
    assert entry.cells()[-1].startswith("the record can't be read here: ")
