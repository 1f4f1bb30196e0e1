"""Sizes of this machine's caches and of its free memory."""

import os
import re
from pathlib import Path

import torch


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
