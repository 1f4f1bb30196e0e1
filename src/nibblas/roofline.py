"""What a device can do at best, and so the least time (the floor) a problem can take on it."""

import hashlib
import json
import math
import platform
import re
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from nibblas.paths import cache_dir, write_atomically, writing_cache
from nibblas.problem import Problem


@dataclass(frozen=True)
class Roofline:
    """Rates of one device, as used by a given number of threads (0 where that has no meaning).

    read_bandwidth is in bytes a second, from memory; rates in operations (a multiply-add is two) a second by the type
    that the multipliers take. `source` is "measured" here, "stated" (measured elsewhere on such a device, shipped as
    data) or "assumed" (a guess for the cost model: no floor is named from it).

    Raises ValueError where one of these is not positive and finite, or the rate of fp32 is missing.
    """

    device: str
    arch: str
    threads: int
    read_bandwidth: float
    rates: dict[str, float]
    source: str

    def __post_init__(self) -> None:
        for name, value in {"fp32": None, **self.rates, "read_bandwidth": self.read_bandwidth}.items():
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} is {value!r}, need a positive number")

    def rate(self, a: str) -> float:
        """The best rate at which operand a can be multiplied by FP4 weights without losing a bit of either."""
        bf16 = self.rates.get("bf16", 0.0)
        exact = {
            "bf16": [bf16],
            "fp16": [self.rates.get("fp16", 0.0), bf16 / 2],  # two bf16 terms hold an fp16
            "fp32": [bf16 / 3],  # three hold an fp32
        }
        codes = [self.rates.get(name, 0.0) for name in ("fp4", "int8", "fp8", "bf16")]
        return max(self.rates["fp32"], *exact.get(a, codes))

    def floor(self, problem: Problem) -> float:
        """Least seconds: max(bytes / bandwidth, operations / rate)."""
        return max(problem.bytes / self.read_bandwidth, problem.operations / self.rate(problem.a))


# Stated: medians of our own measurements on one such device.
STATED = {
    "NVIDIA H200": Roofline(
        "NVIDIA H200", "sm_90", 0, 4.40e12, {"fp32": 60e12, "fp16": 750e12, "bf16": 750e12, "fp8": 1200e12}, "stated"
    ),
}
# Assumed: orders of magnitude, only to rank kernels on a device that nobody measured.
ASSUMED_CPU_THREAD = Roofline("a CPU", "cpu", 1, 10e9, {"fp32": 80e9, "bf16": 80e9, "int8": 160e9}, "assumed")
ASSUMED_GPU = Roofline("a GPU", "", 0, 1e12, {"fp32": 30e12, "bf16": 150e12}, "assumed")


@cache
def device_name(device: torch.device) -> str:
    """What the device calls itself; for a CPU its model and the parts of its instruction set that matter here."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            text = cpuinfo.read()
    except OSError:
        return platform.processor() or platform.machine()
    # A virtual machine may hide the model's name, but not its family and model number.
    keys = ("model name", "cpu family", "model\t")
    facts = [found[1].strip() for key in keys if (found := re.search(rf"^{key}\s*:(.*)$", text, re.MULTILINE))]
    return f"{facts[0]} ({'/'.join(facts[1:])})" if facts else platform.machine()


def host_digest() -> str:
    """What is kept of this machine's name, never the name: the first 12 hexadecimal digits of its sha256."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def device_called(name: str | None = None) -> torch.device:
    """The device of a command's `--device`, with its number; by default the first GPU, or the CPU where there is none.

    Raises ValueError for a name other than cpu, cuda, cuda:1 and so on, and for a GPU that isn't here.
    """
    gpus = torch.cuda.device_count()
    name = name or ("cuda:0" if gpus else "cpu")
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if found is None:
        raise ValueError(f"device {name!r} is unknown; need cpu, cuda, or cuda:1 ...")
    if name == "cpu":
        return torch.device("cpu")
    if int(found[1] or 0) >= gpus:
        seen = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no GPU"
        raise ValueError(f"device {name!r} is not here; torch sees {seen} (`nibblas doctor` tells what there is)")
    return torch.device("cuda", int(found[1]) if found[1] else torch.cuda.current_device())


def threads_of(device: torch.device) -> int:
    """CPU threads that a product will use; 0 on other devices."""
    return torch.get_num_threads() if device.type == "cpu" else 0


@cache
def roofline(device: torch.device, threads: int) -> Roofline:
    """The device's Roofline: measured and kept by `nibblas doctor`, else stated, else assumed.

    A file that is damaged is named on stderr and ignored.
    """
    path = _path(device, threads)
    if path in _kept:
        return _kept[path]
    try:
        return Roofline(**json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, TypeError) as error:
        print(f"nibblas: {path} ignored: {error}", file=sys.stderr)
    name = device_name(device)
    if name in STATED:
        return STATED[name]
    if device.type != "cpu":
        return ASSUMED_GPU
    one = ASSUMED_CPU_THREAD
    return Roofline(name, "cpu", threads, one.read_bandwidth * min(threads, 4), _times(one.rates, threads), one.source)


def _times(rates: dict[str, float], factor: int) -> dict[str, float]:
    return {name: rate * factor for name, rate in rates.items()}


def _path(device: torch.device, threads: int) -> Path:
    key = re.sub(r"[^A-Za-z0-9]+", "-", f"{device_name(device)} {threads or ''}").strip("-").lower()
    return cache_dir() / "roofline" / f"{key}.json"


_kept: dict[Path, Roofline] = {}  # by this process, whose cache may not be writable


def keep(found: Roofline, device: torch.device) -> None:
    """Keep what was measured of a device for this process and, where the cache can be written, for later ones."""
    path = _path(device, found.threads)
    _kept[path] = found
    with writing_cache():
        write_atomically(path, json.dumps(asdict(found), indent=1))
    roofline.cache_clear()
