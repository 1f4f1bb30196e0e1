"""Sizes of this machine's caches and of its free memory, want of it, and in which pages tensors lie."""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes, on x86 and, by default, on ARM
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of Linux's sys/mman.h


def cold_bytes(device: torch.device) -> int:
    """Bytes that a rotation must span for its next copy to be out of the caches.

    CPU: twice the last level of cache, but at most 1/16 of the free memory. CUDA: four times the L2.
    """
    if device.type == "cuda":
        return 4 * torch.cuda.get_device_properties(device).L2_cache_size
    return min(2 * last_level_cache(), free_memory() // 16)


def last_level_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of this CPU's largest cache; 32 MiB where the system doesn't tell."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [re.fullmatch(r"(\d+)([KMG]?)\s*", path.read_text()) for path in root.glob("index*/size")]
    return max((int(size[1]) * units[size[2]] for size in sizes if size), default=32 * 2**20)


def free_memory() -> int:
    """Bytes of memory that can be had without swapping; 4 GiB where the system doesn't tell."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 4 * 2**30


def use_huge_pages(tensor: Tensor) -> None:
    """Let a contiguous CPU tensor lie in huge pages, as far as Linux gives any; elsewhere nothing happens.

    For what is read once from end to end: on a Zen 4, finding the small pages of 9 MB of cold weights took a tenth of
    the time of a product with one row.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    first = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = (tensor.data_ptr() + tensor.nbytes - first) // HUGE_PAGE * HUGE_PAGE
    if length > 0:
        madvise = ctypes.CDLL(None).madvise
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):  # pages to come, and those that are there
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)


@contextmanager
def without_memory_is_fine() -> Iterator[None]:
    """Suppress want of memory, and nothing else: what is left undone then can be done without."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory; torch has no exception of its own for that of a CPU."""
    words = "can't allocate memory", "not enough memory"
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)
