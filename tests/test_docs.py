"""What the documentation shows is what the code does."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nibblas as nb
from nibblas.arena import fields
from nibblas.bench import tables

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


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
