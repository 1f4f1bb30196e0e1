"""Pages of memory, and want of it."""

import re
import sys
from pathlib import Path

import pytest
import torch

from nibblas.memory import HUGE_PAGE, use_huge_pages, without_memory_is_fine

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
GIVES = sys.platform == "linux" and ENABLED.exists() and "[never]" not in ENABLED.read_text()


def in_huge_pages(tensor: torch.Tensor) -> int:
    """Bytes of huge pages in the mapping that holds the middle of a tensor."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(address, 16) for address in found.groups())
            inside = first <= tensor.data_ptr() + tensor.nbytes // 2 < end
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(not GIVES, reason="this system gives no huge pages")
def test_a_large_tensor_lies_in_huge_pages():
    tensor = torch.empty(64 * HUGE_PAGE, dtype=torch.uint8)
    use_huge_pages(tensor)
    tensor.fill_(1)
    assert in_huge_pages(tensor) >= 32 * HUGE_PAGE


def test_values_stay():
    for tensor in (torch.arange(5_000_001), torch.arange(6_000_000).view(2, -1).mT, torch.empty(0), torch.ones(3)):
        before = tensor.clone()
        use_huge_pages(tensor)
        assert torch.equal(tensor, before)
    use_huge_pages(torch.empty(10, device="meta"))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("x"), RuntimeError("can't allocate memory")])
def test_want_of_memory_alone_is_suppressed(error):
    with without_memory_is_fine():
        raise error
    with pytest.raises(RuntimeError, match="other"), without_memory_is_fine():
        raise RuntimeError("other")
