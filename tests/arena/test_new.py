"""A problem made by `arena new` works: it is read, its own submission is right, wrong answers are not."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from nibblas import quantize, reference
from nibblas.arena.lint import lint_problem
from nibblas.arena.new import TEMPLATE, new
from nibblas.arena.problem import ArenaError, read_task
from nibblas.arena.submission import read_submission, why_not
from nibblas.formats import MXFP4
from nibblas.tensor import ScaledTensor

MODULES = ("task", "utils", "reference", "submission")


@pytest.fixture
def problem(tmp_path, monkeypatch):
    """The modules of a fresh problem."""
    folder = new("my_product", tmp_path)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(folder)
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_problem_carries_its_name_and_is_read(tmp_path):
    folder = new("my-product", tmp_path)
    task = read_task(folder)
    assert (task.name, task.lang, task.ranking_by) == ("my-product", "py", "geom")
    assert read_task(folder, "kernelbot").tests == task.tests
    submission = read_submission(folder / "submission.py", task)
    assert submission.leaderboard == "my-product"
    assert why_not(submission, task, "cpu") is None
    assert sorted(path.name for path in folder.iterdir()) == sorted(p.name for p in TEMPLATE.iterdir() if p.is_file())
    assert not any("PROBLEM_NAME" in path.read_text() for path in folder.iterdir())


@pytest.mark.parametrize("name", ["", "../up", "a b", "1st", ".hidden", "a/b"])
def test_a_name_is_a_plain_word(tmp_path, name):
    with pytest.raises(ArenaError, match="is no name for a problem"):
        new(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ArenaError, match="taken is there already"):
        new("taken", tmp_path)
    with pytest.raises(ArenaError, match="is no folder"):
        new("name", tmp_path / "gone")
    assert (tmp_path / "taken").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_its_answers_are_right_and_wrong_ones_are_told(problem, tmp_path):
    given, task = problem["reference"], read_task(tmp_path / "my_product")
    for case in task.tests:
        data = given.generate_input(**case.values)
        good, message = given.check_implementation(data, problem["submission"].custom_kernel(data))
        assert good, message
        right = given.ref_kernel(data)
        x, codes, scales = data
        even_only = (codes.view(torch.uint8) & 0xF).view(codes.dtype)
        ones = torch.full_like(scales.view(torch.uint8), 127).view(scales.dtype)
        wrong = {
            "zeros": torch.zeros_like(right),
            "another shape": right[:, :-1],
            "another dtype": right.float(),
            "one NaN": right.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(torch.nan).bfloat16()),
            "half of K": given.ref_kernel((x, even_only, scales)),
            "scales ignored": given.ref_kernel((x, codes, ones)),
            "another input": given.ref_kernel((x.flip(1), codes, scales)),
            "x in fp8": given.ref_kernel((x.to(torch.float8_e4m3fn).bfloat16(), codes, scales)),
        }
        for name, output in wrong.items():
            assert not given.check_implementation(data, output)[0], f"{name} passed {case.text}"


def test_its_decoding_is_the_formats(problem):
    w = quantize(torch.randn(6, 96), MXFP4)
    decoded = problem["utils"].decode(w.data_as_float4, w.scale_as_float8, torch.float64)
    assert torch.equal(decoded, reference.to_float64(w))
    _, codes, scales = problem["reference"].generate_input(m=1, n=300, k=640, seed=3)
    drawn = ScaledTensor.from_parts(codes, scales, MXFP4)
    assert len(drawn.data.unique()) == 256
    assert (int(drawn.scale.min()), int(drawn.scale.max())) == (115, 138)


def test_its_evaluation_speaks_kernelbots_protocol(tmp_path):
    folder = new("product", tmp_path)
    (folder / "task.yml").unlink()  # KernelBot copies the files that it names, not itself
    (tmp_path / "cases").write_text("m: 2; n: 5; k: 64; seed: 3\n")
    reading, writing = os.pipe()
    done = subprocess.run(
        [sys.executable, "eval.py", "test", str(tmp_path / "cases")],
        cwd=folder,
        env={**os.environ, "POPCORN_FD": str(writing), "POPCORN_SEED": "1"},
        pass_fds=[writing],
        capture_output=True,
        text=True,
    )
    os.close(writing)
    with open(reading) as lines:
        results = dict(line.rstrip().split(": ", 1) for line in lines)
    assert done.returncode == 0, done.stderr
    assert results.pop("test.0.message").startswith("the largest error is")
    assert results == {
        "test-count": "1",
        "test.0.spec": "m: 2; n: 5; k: 64; seed: 3",
        "test.0.status": "pass",
        "check": "pass",
    }


def test_lint_finds_no_fault_with_it(tmp_path):
    """Nor is there a mutant that no input could show: e8m0 scales, for one, have no mantissa to ignore."""
    found = lint_problem(new("my_product", tmp_path), budget=30.0, kinds=("test",))
    assert found
    for case in found:
        assert (case.weak, case.faults) == ((), ())
        assert case.mutants["mantissas of scales ignored"] == "none"
