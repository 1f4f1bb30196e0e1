"""Measuring what a device can do at best: the roofline that floors are named from."""

import itertools
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial

import torch

from nibblas.bench.timing import CPU, torch_threads
from nibblas.kernels import cpu_library
from nibblas.memory import free_memory, last_level_cache
from nibblas.problem import arch_of
from nibblas.roofline import Roofline, device_name, host_digest, keep, roofline

SECONDS = 0.3  # spent on each figure, by runs that are short, so that some meet no other process


def measure(device: torch.device = CPU, threads: int | None = None, again: bool = False) -> Roofline:
    """The device's Roofline, measured now and kept unless one was kept before (`again`: in any case). A few seconds.

    threads : of the CPU, torch's own number by default; without meaning elsewhere.

    On a CPU each figure is the best that the C library's probes (where it is loaded) and torch reach: a limit that
    something exceeds is none.
    """
    threads = (threads or torch.get_num_threads()) if device.type == "cpu" else 0
    known = roofline(device, threads)
    if known.source == "measured" and not again:
        return known
    with torch_threads(threads), torch.no_grad():
        bandwidth, rates = _cpu(threads) if device.type == "cpu" else _cuda(device)
    found = Roofline(device_name(device), arch_of(device), threads, bandwidth, rates, "measured")
    keep(found, device)
    return found


def _times(run: Callable[[], object], device: torch.device = CPU, seconds: float = SECONDS) -> list[float]:
    """Seconds of each run that fits in the time, at least three, in ascending order."""
    times, start = [_once(run, device)], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        times.append(_once(run, device))
    return sorted(times)


def _once(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def _cpu(threads: int) -> tuple[float, dict[str, float]]:
    size = 768 if threads < 8 else 4096
    bandwidth = _read_bandwidth(CPU, min(max(2 * last_level_cache(), 2**28), free_memory() // 8), 2**25)
    rates = _rates(CPU, size, {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
    if cpu_library.library() is not None:
        bandwidth = max(bandwidth, cpu_library.probe_bandwidth(threads))
        for name, rate in cpu_library.probe_rates(threads).items():
            rates[name] = max(rates.get(name, 0.0), rate)
    return bandwidth, rates


def _cuda(device: torch.device) -> tuple[float, dict[str, float]]:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if torch.cuda.get_device_capability(device) >= (8, 9) and not torch.version.hip:
        dtypes["fp8"] = torch.float8_e4m3fn
    free, _ = torch.cuda.mem_get_info(device)
    return _read_bandwidth(device, min(2**33, free // 4), 2**31), _rates(device, 8192, dtypes)


def _read_bandwidth(device: torch.device, nbytes: int, piece: int) -> float:
    """Bytes a second of dot products and sums over pieces of a buffer far larger than the caches.

    Of the better of the two, the best tenth: a neighbour's work slows a piece down, what a cache kept speeds one up.
    """
    pieces = torch.ones(max(nbytes // piece, 1), 2, piece // 8, dtype=torch.float32, device=device)
    turn = itertools.cycle(pieces)
    best = float("inf")
    for reduce in (lambda: torch.dot(*next(turn)), lambda: next(turn).sum()):
        times = _times(reduce, device)
        best = min(best, times[len(times) // 10])
    return pieces[0].nbytes / best


def _rates(device: torch.device, size: int, dtypes: dict[str, torch.dtype]) -> dict[str, float]:
    """Operations a second of square products, by dtype; a dtype that this torch can't multiply is left out."""
    operations = 2 * size**3
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    products: dict[str, Callable[[], object]] = {
        name: partial(torch.mm, a.to(dtype), b.to(dtype)) for name, dtype in dtypes.items() if name != "fp8"
    }
    if "fp8" in dtypes:
        x, y, one = a.to(dtypes["fp8"]), b.to(dtypes["fp8"]), torch.ones((), device=device)
        products["fp8"] = partial(torch._scaled_mm, x, y.t(), one, one, out_dtype=torch.bfloat16)
    codes = torch.randint(-8, 8, (2, size, size), dtype=torch.int8, device=device)
    products["int8"] = partial(torch._int_mm, codes[0], codes[1].t())
    rates = {}
    for name, product in products.items():
        try:
            product()
        except RuntimeError:
            continue
        rates[name] = operations / _times(product, device)[0]
    return rates


def facts(device: torch.device = CPU) -> dict[str, str]:
    """What a Measurement keeps of the machine beside the device's name: a host's digest, load, driver and clocks."""
    found = {
        "host": host_digest(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cpu":
        if hasattr(os, "getloadavg"):
            found["load"] = f"{os.getloadavg()[0]:.2f}"
        return found
    if shutil.which("nvidia-smi"):
        wanted = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit")
        command = ["nvidia-smi", f"--query-gpu={','.join(wanted)}", "--format=csv,noheader"]
        command += [f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            found |= dict(zip(wanted, (value.strip() for value in done.stdout.split(",")), strict=False))
    return found
