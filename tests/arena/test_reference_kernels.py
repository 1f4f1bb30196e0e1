"""A checkout of gpu-mode/reference-kernels, if NIBBLAS_REFERENCE_KERNELS names one: its problems are read and run."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nibblas.arena.options import Options
from nibblas.arena.problem import DIALECTS, read_task
from nibblas.arena.run import run
from nibblas.arena.standins import AITER, CUDA, SCALED_MM
from nibblas.arena.submission import read_submission, why_not
from nibblas.arena.survey import entries, reference_as_submission

CHECKOUT = os.environ.get("NIBBLAS_REFERENCE_KERNELS")

pytestmark = pytest.mark.skipif(not CHECKOUT, reason="NIBBLAS_REFERENCE_KERNELS names no checkout")

# Those whose evaluation is their own, and those for several GPUs.
REFUSED = {"princeton/cross_entropy_py"}
MULTI_GPU = {"amd_distributed/ag-gemm", "amd_distributed/all2all", "amd_distributed/gemm-rs"}
# Problems whose first test takes seconds on a CPU, with what must have stood in on the way.
QUICK = {
    "amd/identity": {CUDA},
    "amd/fp8-mm": {CUDA},
    "amd_202602/mxfp4-mm": {CUDA, AITER},
    "helion/fp8_quant_py": {CUDA},
    "linalg/qr_py": set(),
    "nvidia/nvfp4_gemv": {CUDA, SCALED_MM},
    "nvidia/nvfp4_gemm": {CUDA, SCALED_MM},
    "nvidia/nvfp4_group_gemm": {CUDA, SCALED_MM},
    "pmpp/sort_py": {CUDA},
    "pmpp_v2/vectoradd_py": {CUDA},
}


def problem(name):
    return Path(CHECKOUT or "", "problems", name)


def test_every_problem_is_read_but_those_with_an_evaluation_of_their_own():
    found = list(entries(Path(CHECKOUT or "")))
    assert {entry.problem for entry in found if entry.task is None} == REFUSED
    tasks = {entry.problem: entry.task for entry in found if entry.task is not None}
    assert len(tasks) > 40
    assert {name for name, task in tasks.items() if task.why_not(1)} == MULTI_GPU
    for task in tasks.values():
        assert task.tests
        assert task.benchmarks


@pytest.mark.parametrize("name", ["bioml/trimul", "nvidia/nvfp4_group_gemm"])
def test_dialects_differ_where_kernelbot_loses_types(name):
    own, kernelbots = (read_task(problem(name), dialect) for dialect in DIALECTS)
    pairs = list(zip(own.tests, kernelbots.tests, strict=True))
    assert all(a.text == b.text for a, b in pairs)
    types = {(type(a.values[key]), type(b.values[key])) for a, b in pairs for key in a.values}
    assert types == {(int, int), (bool, str), (str, str)} or types == {(int, int), (list, tuple)}


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens on a CPU")
def test_a_problem_is_judged_with_stand_ins(name, tmp_path):
    """By its baseline where that can run here, else by its reference as a submission."""
    task = read_task(problem(name))
    task = replace(task, tests=task.tests[:1])
    baseline = read_submission(task.directory / task.submission_name, task)
    entry = baseline if why_not(baseline, task, "cpu") is None else reference_as_submission(task)
    record = run(task, entry, Options(), tmp_path / "record.json")
    assert (record.verdict, record.reason) == ("correct here", "")
    assert {used.split(".")[0] if used.startswith("aiter") else used for used in record.stand_ins} == QUICK[name]
