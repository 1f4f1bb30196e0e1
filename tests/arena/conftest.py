"""What tests of the arena share: small problems, and short runs of them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nibblas import dispatch
from nibblas.arena.options import Options
from nibblas.arena.problem import read_task
from nibblas.arena.record import Record
from nibblas.arena.run import run
from nibblas.arena.submission import read_submission
from nibblas.roofline import roofline

PROBLEMS = Path(__file__).parent / "problems"


@pytest.fixture(autouse=True)
def no_roofline_stays() -> Iterator[None]:
    """What a test keeps as this machine's roofline is forgotten with it."""
    yield
    roofline.cache_clear()
    dispatch.forget()


@pytest.fixture
def problem() -> Callable[[str], Path]:
    """The directory of a small problem: vector_add, softmax, fill_c or scaled_layers."""
    return lambda name: PROBLEMS / name


@pytest.fixture
def arena(tmp_path) -> Callable[..., Record]:
    """arena(directory, submission, **options) runs a submission, one thread, and returns the record."""

    def start(directory: Path, submission: Path, *, against: Path | None = None, resumed=None, **options) -> Record:
        task = read_task(directory)
        entry = read_submission(submission, task)
        other = None if against is None else read_submission(against, task)
        wanted = Options(**{"threads": 1, "budget": 0.5, **options})
        return run(task, entry, wanted, tmp_path / "record" / "record.json", against=other, resumed=resumed)

    return start
