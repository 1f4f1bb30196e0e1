"""What the judge finds out about a problem: how much must be read, and that want of memory is nobody's wrong answer."""

import pytest
import torch

from nibblas.arena.correctness import passes
from nibblas.arena.judge import read_bytes
from nibblas.arena.wire import pack


def needed(ref_kernel, data) -> int | None:
    return read_bytes(ref_kernel, pack(data), 20.0)


def test_what_an_answer_depends_on_must_be_read():
    table, rows = torch.randn(4096, 128), torch.randint(4096, (16,))
    assert needed(lambda data: data[0].sum(1), (table, rows)) == table.nbytes
    assert needed(lambda data: data[0][:2048].sum(1), (table,)) <= table.nbytes // 2
    of_few = needed(lambda data: data[0][data[1]], (table, rows))
    assert rows.nbytes <= of_few <= table.nbytes // 4, "of a table whose rows are looked up few blocks matter"
    assert needed(lambda data: torch.randn(3), (table,)) is None, "no two answers are the same"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_check_that_finds_no_memory_judges_nothing(error):
    def check(data, output):
        raise error

    with pytest.raises(type(error)):
        passes(check, None, None)
