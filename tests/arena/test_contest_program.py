"""The program that times contest entries against their baselines: what it runs, keeps and adds, and its table."""

import os
from dataclasses import replace

import pytest
import torch
from arena_records import GOOD

from nibblas import evidence
from nibblas.arena import contest
from nibblas.arena import record as records
from nibblas.arena import run as arena_run
from nibblas.arena.new import new
from nibblas.arena.record import Comparison, PairedRatio
from nibblas.roofline import device_name


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Two problems of which both have an entry and a baseline, and an entry whose problem is not there."""
    for name in ("nvfp4_gemv", "broken", "elsewhere"):
        folder = tmp_path / "contest" / name
        folder.mkdir(parents=True)
        for file in ("submission.py", "dequantized.py"):
            (folder / file).write_text(f"# {file}\ndef custom_kernel(data): ...\n")
    (tmp_path / "problems" / "set").mkdir(parents=True)
    for name in ("nvfp4_gemv", "broken"):
        new(name, tmp_path / "problems" / "set")
    monkeypatch.setattr(contest, "FOLDER", tmp_path / "contest")
    return tmp_path


@pytest.fixture
def runs(monkeypatch):
    """The arena's runs, recorded in place of done; those of "broken" fail."""
    done = []

    def run(task, submission, options, path, *, against, resumed):
        done.append((task.name, options.mode, submission.main, against.path.name, resumed is not None))
        if task.name == "broken":
            raise RuntimeError("no worker")
        found = replace(
            GOOD,
            task=replace(GOOD.task, name=task.name, files=task.digests),
            submission=submission.facts,
            environment=replace(GOOD.environment, device=device_name(torch.device("cpu"))),
            complete=True,
        )
        records.write(found, path)
        return found

    monkeypatch.setattr(arena_run, "run", run)
    return done


def test_each_entry_is_timed_against_its_baseline_and_a_fault_stops_no_other(checkout, runs, tmp_path):
    found = contest.contest(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "")
    assert [entry.name for entry in found] == ["broken", "elsewhere", "nvfp4_gemv"]
    assert runs == [
        ("broken", "benchmark", "submission.py", "dequantized.py", False),
        ("nvfp4_gemv", "benchmark", "submission.py", "dequantized.py", False),
    ]
    lines = contest.table(found).splitlines()
    assert lines[2].startswith("| problem | case | median ")
    assert "the arena failed: RuntimeError: no worker" in lines[4]
    assert "no task.yml" in lines[5]
    assert len(lines) == 6 + len(GOOD.cases)


def test_the_table_has_the_ratio_to_the_baseline_with_its_interval():
    ratio = PairedRatio(GOOD.cases[-1].text, 0.25, 0.24, 0.27, 0.99, 1.01)
    compared = replace(GOOD, comparison=Comparison(GOOD.submission, (ratio,)))
    row = list(contest.Entry("nvfp4_gemv", compared).rows())[-1]
    assert row[5:7] == ("0.25", "0.24 to 0.27")
    assert row[2].endswith(" us")


def test_a_case_that_is_not_correct_has_no_time_and_an_interrupted_run_says_so():
    *others, last = GOOD.cases
    ratio = PairedRatio(last.text, 0.25, 0.24, 0.27, 0.99, 1.01)
    cases = (*others, replace(last, verdict="refused", message="faster than light"))
    found = replace(GOOD, cases=cases, comparison=Comparison(GOOD.submission, (ratio,)))
    *_, row = contest.Entry("nvfp4_gemv", found).rows()
    assert row[2:] == ("", "", "", "", "", "refused: faster than light")
    stopped = replace(GOOD, complete=False, verdict="unfinished", reason="interrupted")
    *rows, end = contest.Entry("nvfp4_gemv", stopped).rows()
    assert len(rows) == len(GOOD.cases)
    assert end == ("nvfp4_gemv", *[""] * 6, "unfinished: stopped by the time limit")


def test_complete_records_are_kept_and_others_resumed(checkout, runs, tmp_path):
    kept = tmp_path / "kept"
    contest.contest(checkout, kept, "cpu", 1.0, 60.0, "gemv")
    contest.contest(checkout, kept, "cpu", 1.0, 60.0, "gemv")
    assert len(runs) == 1
    path = kept / "nvfp4_gemv.cpu.json"
    records.write(replace(records.read(path), complete=False, verdict="unfinished", score=None), path)
    contest.contest(checkout, kept, "cpu", 1.0, 60.0, "gemv")
    assert [resumes for *_, resumes in runs] == [False, True]


def test_evidence_is_added_once(checkout, runs, tmp_path):
    found = contest.contest(checkout, tmp_path / "kept", "cpu", 1.0, 60.0, "gemv")
    path = tmp_path / "gpu.jsonl"
    added = contest.add_evidence(found, path)
    assert added == len(evidence.read(path)) > 0
    assert contest.add_evidence(found, path) == 0
    assert len(evidence.read(path)) == added


def test_every_entry_has_a_baseline_and_the_readme_a_place_for_the_table():
    names = {path.parent.name for path in contest.FOLDER.glob("*/submission.py")}
    assert names == {path.parent.name for path in contest.FOLDER.glob(f"*/{contest.BASELINE}")}
    assert os.listdir(contest.FOLDER) != []
    assert all(part.read() for part in contest.PARTS.values())
