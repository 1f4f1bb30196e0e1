"""What the documentation shows is what the code does."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nibblas as nb
from nibblas import evidence
from nibblas.arena import fields
from nibblas.bench import tables
from nibblas.kernels import kernels

# Where there is no C compiler, modules warn that they keep weights decoded.
pytestmark = pytest.mark.filterwarnings("ignore:nibblas. no FP4 kernel")
ROOT = Path(__file__).parents[1]
MODULES = [m.name for m in pkgutil.walk_packages(nb.__path__, "nibblas.") if "triton" not in m.name]


@pytest.mark.parametrize("name", ["nibblas", *MODULES])
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    torch.manual_seed(0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(module, extraglobs={"nb": nb, "torch": torch}):
        runner.run(test)
    assert not runner.summarize(verbose=False).failed


GENERATED = tables.TABLES | {fields.PART: fields.fields_table}


@pytest.mark.parametrize("part", GENERATED, ids=lambda part: part.name)
def test_what_is_generated_is_up_to_date(part):
    assert part.read() == GENERATED[part](), f"`python -m {part.module}` brings it up to date"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run_and_are_short(path):
    assert len(path.read_text().splitlines()) < 40
    done = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_kernel_has_a_row_in_its_table():
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \|", (ROOT / "docs" / "kernels.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in row.split(", ")}
    assert {tables.FORMAT_SUFFIX.sub("", kernel.name) for kernel in kernels()} <= named


def test_evidence_of_an_earlier_source_is_marked(monkeypatch):
    kernel = next(kernel for kernel in kernels() if kernel.name == "torch_linear")
    problem = nb.Problem("linear", M=1, N=64, K=64, a="bf16", b="nvfp4", out="bf16")
    now = evidence.Measurement(kernel.name, kernel.digest, problem, "a CPU", 1, "", "", samples=(2e-6,) * 5)
    fast = {"samples": (1e-6,) * 5, "digest": "earlier"}
    shipped = [replace(now, problem=replace(problem, M=2), **fast), replace(now, **fast), now]
    monkeypatch.setattr(evidence.Store, "shipped_only", lambda _: shipped)
    row = "| NVFP4 64x64, 1 thread | 2.00 us | 1.00 us† |"
    assert row in tables.figures_table()
    assert tables.figures_table().endswith(f"\n\n{tables.NOTE}")
    assert tables.known(kernel, ("cpu",), False) == "measured"
    shipped.pop()
    assert tables.known(kernel, ("cpu",), False) == "measured†"
    shipped[:] = [now]
    assert tables.OLD not in tables.figures_table()


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
