"""Timing the cuts of a kernel's work, and the cost models against what an H200 took."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from rich.console import Console

from nibblas import reference
from nibblas.bench import cuts
from nibblas.bench.cuts import KERNELS, Cut, Cuttable, choices, error, measure, print_choices, read
from nibblas.problem import Problem

SHIPPED = Path(__file__).parents[1] / "evidence" / "cuts" / "h200.jsonl"


@pytest.fixture(scope="module")
def shipped() -> list[Cut]:
    return read(SHIPPED)


@pytest.mark.parametrize("name", KERNELS)
def test_cost_models_choose_nearly_the_best_cut(shipped, name):
    found = choices(shipped, name)
    assert {choice.problem for choice in found} == set(KERNELS[name].problems)
    assert all(choice.chosen is not None for choice in found)
    assert fmean(choice.regret for choice in found) < 1.02
    assert max(choice.regret for choice in found) < 1.12
    assert error(found) < 0.1


def test_a_cut_survives_its_line(shipped):
    for cut in shipped[:: len(shipped) // 20]:
        assert Cut.from_json(cut.to_json()) == cut


@dataclass(frozen=True)
class Config:
    row_warps: int
    k_warps: int
    cluster: int
    wrong: bool = False


@pytest.fixture
def fake(monkeypatch) -> Cuttable:
    """A kernel that torch computes, with three right cuts, one wrong one, and one that is not worth timing."""

    def launch(a, b, bias, out, *, config):
        launched.append(config)
        out.copy_(reference.matmul(a, b) * (2 if config.wrong else 1))

    launched: list[Config] = []
    right = [Config(n, 1, 1) for n in (1, 2, 3)]
    made = Cuttable(
        Config,
        (Problem("linear", 2, 16, 64, b="nvfp4"), Problem("linear", 1, 8, 32, b="nvfp4")),
        lambda problem: [*right, Config(4, 1, 1, wrong=True), Config(9, 1, 1)],
        lambda config, problem: config.row_warps,
        lambda problem: right[1],
        (),
        launch,
        lambda config, problem: None,
    )
    monkeypatch.setitem(KERNELS, "fake", made)
    monkeypatch.setattr(cuts, "MOST", 4)
    return made


def test_right_cuts_are_timed_and_kept(fake, tmp_path, capsys):
    path = tmp_path / "cuts.jsonl"
    measure("fake", path, torch.device("cpu"), rounds=5)
    found = read(path)
    assert {(cut.problem, cut.config.row_warps) for cut in found} == {(p, n) for p in fake.problems for n in (1, 2, 3)}
    assert all(cut.us > 0 for cut in found)
    assert capsys.readouterr().err.count("cut as Config(row_warps=4") == len(fake.problems)
    measure("fake", path, torch.device("cpu"), rounds=5)
    assert len(read(path)) == 2 * len(found)


def test_what_is_lost_to_the_best_cut(fake, capsys):
    problem, other = fake.problems
    timed = [Cut("fake", problem, Config(n, 1, 1), us) for n, us in ((1, 2.0), (2, 3.0), (3, 5.0))]
    timed.append(Cut("fake", other, Config(1, 1, 1), 1.0))
    lost, unknown = choices(timed, "fake")
    assert (lost.chosen, lost.best, lost.regret) == (3.0, 2.0, 1.5)
    assert lost.estimates == (1 / 2, 2 / 3)  # not of the cut that is too slow to matter
    assert unknown.chosen is None
    print_choices("fake", [lost, unknown], Console(width=80))
    printed = capsys.readouterr().out
    assert "not timed" in printed
    assert "regret 1.500 on average, 1.500 at most" in printed


@pytest.mark.parametrize("change", [{"kernel": "none"}, {"config": {"warps": 3}}, {"us": None}], ids=str)
def test_a_line_that_is_no_cut_is_named(shipped, change, tmp_path):
    line = json.dumps({**json.loads(shipped[0].to_json()), **change})
    if change == {"us": None}:
        line = line[:-5]
    (tmp_path / "cuts").write_text(shipped[1].to_json() + "\n" + line + "\n")
    with pytest.raises(ValueError, match="cuts:2 is no cut"):
        read(tmp_path / "cuts")


def test_problems_differ_in_size_alone():
    for kernel in KERNELS.values():
        alike = {replace(problem, M=1, N=1, K=16, L=1) for problem in kernel.problems}
        assert len(alike) == 1
