"""What the judge finds out about a problem: how much must be read, and that want of memory is nobody's wrong answer."""

import random
from types import SimpleNamespace

import pytest
import torch

from nibblas.arena import judge
from nibblas.arena.correctness import passes
from nibblas.arena.judge import read_bytes
from nibblas.arena.wire import pack


def needed(ref_kernel, data) -> int | None:
    found = read_bytes(ref_kernel, pack(data), 20.0)
    return found and found[0]


@pytest.fixture
def calls(monkeypatch):
    """calls(ref_kernel) is a reference of which each call takes a second by the judge's clock."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(judge, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def slow(ref_kernel):
        def call(data):
            clock.now += 1
            return ref_kernel(data)

        return call

    return slow


def test_what_an_answer_depends_on_must_be_read():
    table, rows = torch.randn(4096, 128), torch.randint(4096, (16,))
    assert needed(lambda data: data[0].sum(1), (table, rows)) == table.nbytes
    assert needed(lambda data: data[0][:2048].sum(1), (table,)) <= table.nbytes // 2
    of_few = needed(lambda data: data[0][data[1]], (table, rows))
    assert rows.nbytes // 2 <= of_few <= table.nbytes // 4, "of a table whose rows are looked up few blocks matter"
    bags = torch.randint(4096, (2000,))
    summed = needed(lambda data: data[0][data[1]].sum(0), (torch.randint(100, (4096, 32), dtype=torch.int32), bags))
    assert summed <= 4096 * 128 * 0.75 + bags.nbytes, "of which 2,000 draws meet two fifths"
    assert needed(lambda data: torch.randn(3), (table,)) is None, "no two answers are the same"


@pytest.mark.parametrize(
    ("seconds", "tried_groups", "tried_scales"),
    [(1000, 8, 16), (50, 8, 16), (2 + 16 + 10, 8, 5), (2 + 8, 4, 0), (1, 0, 0)],
)
def test_of_many_tensors_the_largest_are_tried_first_and_what_is_untried_is_told(
    seconds, tried_groups, tried_scales, calls
):
    """Groups of a weight and two copies of its scales, of which the reference reads one."""
    weights = [torch.randn(160, 128) for _ in range(8)]
    scales = [torch.randn(20, 128) for _ in range(8)]
    copies = [scale.clone() for scale in scales]
    data = [*zip(weights, scales, copies, strict=True)]

    def ref_kernel(data):
        return [weight.sum(1) + scale.sum() for weight, scale, _ in data]

    read, tried = read_bytes(calls(ref_kernel), pack(data), seconds)
    weight, scale = weights[0].nbytes, scales[0].nbytes
    assert tried == tried_groups * weight + tried_scales * scale
    assert read == tried_groups * weight + -(-tried_scales // 2) * scale, "every second one is the copy that is read"


def test_what_is_read_in_part_counts_for_less():
    """Half of the pages of six pools, drawn anew each time."""
    random.seed(0)
    torch.manual_seed(0)
    pools = [torch.randn(16, 4096) for _ in range(6)]
    half, found = sum(pool.nbytes for pool in pools) // 2, []
    for _ in range(20):
        pages = [torch.randperm(16)[:8] for _ in pools]
        found.append(needed(lambda data: [pool[at].sum(1) for pool, at in zip(*data, strict=True)], (pools, pages)))
    assert 0 < sum(found) / 20 < 0.75 * half
    assert max(found) <= 1.5 * half


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_check_that_finds_no_memory_judges_nothing(error):
    def check(data, output):
        raise error

    with pytest.raises(type(error)):
        passes(check, None, None)
