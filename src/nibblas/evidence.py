"""Measurements: written by the benchmark and the arena, read by the dispatcher, shown by the index.

Two axes, never one ladder. What is known of a kernel's numerics and of its timing is computed from the stored
Measurements; nobody types a level in.
"""

import json
import math
import os
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path

from nibblas.paths import cache_dir
from nibblas.problem import Problem

SCHEMA = 1
NUMERICS = ("none", "claimed", "checked", "checked-hardened")
TIMING = ("none", "compiled", "reported", "measured", "reproduced")
# How far a measured problem may lie from the one asked: the sum over M, N, K, L, G of |log2 of the ratio|.
NEAR = 2.0


@dataclass(frozen=True)
class Measurement:
    """One kernel on one problem on one device, as it happened.

    Times are seconds. `error` is the largest deviation of this run's output from the float64 oracle, each element's
    over its expected size (reference.magnitude); `hardened` says that the inputs covered all codes and scales. `beside`
    holds the medians of what else was timed, interleaved, in the same run. No samples: the kernel was only compiled.
    """

    kernel: str
    digest: str  # Kernel.digest at that time
    problem: Problem
    device: str
    threads: int
    when: str  # ISO 8601, UTC
    command: str
    method: str = ""  # e.g. "cold cache, graph of 64 launches"
    samples: tuple[float, ...] = ()
    floor: float | None = None
    error: float | None = None
    hardened: bool = False
    beside: dict[str, float] = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)  # of the device: driver, clocks, host
    schema: int = SCHEMA

    @property
    def median(self) -> float:
        """The middle sample; infinite where there is none."""
        return statistics.median(self.samples) if self.samples else math.inf

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, over the median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median

    def to_json(self) -> str:
        """One line of JSON; the problem holds what differs from the defaults."""
        return json.dumps({**asdict(self), "problem": self.problem.as_dict()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "Measurement":
        """The inverse of to_json; ValueError for what isn't a Measurement of this schema."""
        try:
            values = json.loads(line)
            if values.get("schema") != SCHEMA:
                raise ValueError(f"schema is {values.get('schema')!r}, need {SCHEMA}")
            values["problem"] = Problem.from_dict(values["problem"])
            values["samples"] = tuple(values["samples"])
            return cls(**values)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a Measurement: {error}") from None


def numerics_level(measurements: Iterable[Measurement]) -> str:
    """The best that is known of a kernel's results."""
    errors = [m for m in measurements if m.error is not None and math.isfinite(m.error)]
    if not errors:
        return "none"
    return "checked-hardened" if any(m.hardened for m in errors) else "checked"


def timing_level(measurements: Iterable[Measurement]) -> str:
    """The best that is known of a kernel's speed: reproduced takes two hosts whose medians agree within 10 %."""
    measurements = list(measurements)
    timed = [m for m in measurements if m.samples]
    if not timed:
        return "compiled" if measurements else "none"
    for m, other in combinations(timed, 2):
        same = all(getattr(m, of) == getattr(other, of) for of in ("kernel", "digest", "problem", "device", "threads"))
        hosts = {m.facts.get("host"), other.facts.get("host")} - {None}
        if same and len(hosts) == 2 and abs(m.median / other.median - 1) < 0.1:
            return "reproduced"
    return "measured"


def distance(p: Problem, q: Problem) -> float:
    """How unlike two problems are in size; infinite where anything but a size differs."""
    sizes = ("M", "N", "K", "L", "G")
    if any(getattr(p, name) != getattr(q, name) for name in p.__dataclass_fields__ if name not in sizes):
        return math.inf
    total = 0.0
    for name in sizes:
        ours, theirs = getattr(p, name), getattr(q, name)
        if ours != theirs:
            if ours == 0 or theirs == 0:
                return math.inf
            total += abs(math.log2(ours / theirs))
    return total


class Store:
    """Measurements in JSONL files: those shipped with nibblas, then this machine's own."""

    def __init__(self, shipped: Path, local: Path):
        self.shipped, self.local = shipped, local
        self._read: list[Measurement] | None = None

    def all(self) -> list[Measurement]:
        """Every readable Measurement, shipped ones first; unreadable lines are named on stderr, once."""
        if self._read is None:
            self._read = _read_folder(self.shipped) + _read_folder(self.local)
        return self._read

    def shipped_only(self) -> list[Measurement]:
        """Every readable Measurement that came with nibblas."""
        return _read_folder(self.shipped)

    def find(self, kernel: str, digest: str, device: str, threads: int) -> list[Measurement]:
        """Timed Measurements of this kernel as it is now, on this device."""
        return [
            m
            for m in self.all()
            if (m.kernel, m.digest, m.device, m.threads) == (kernel, digest, device, threads) and m.samples
        ]

    def nearest(
        self, problem: Problem, kernel: str, digest: str, device: str, threads: int
    ) -> tuple[Measurement, float] | None:
        """The latest Measurement of the problem nearest to this one, and its distance; None beyond NEAR."""
        best = None
        for m in self.find(kernel, digest, device, threads):
            d = distance(problem, m.problem)
            if d <= NEAR and (best is None or (d, best[0].when) <= (best[1], m.when)):
                best = m, d
        return best

    def add(self, measurements: Iterable[Measurement]) -> Path:
        """Append to the local store, a line each, and return the file; other processes may append at the same time."""
        measurements = list(measurements)
        path = self.local / "measured.jsonl"
        append(path, measurements)
        if self._read is not None:
            self._read += measurements
        return path


def append(path: Path, measurements: Iterable[Measurement]) -> None:
    """Add lines to a JSONL file in one write at its end, so that those of other processes are not torn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(m.to_json() + "\n" for m in measurements).encode()
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.fstat(file).st_size:
            os.lseek(file, -1, os.SEEK_END)
            if os.read(file, 1) != b"\n":
                lines = b"\n" + lines  # a writer before was cut short
        written = os.write(file, lines)
        if written != len(lines):
            raise OSError(f"{path}: only {written} of {len(lines)} bytes could be written")
    finally:
        os.close(file)


def _read_folder(folder: Path) -> list[Measurement]:
    return [m for path in sorted(folder.glob("*.jsonl")) for m in read(path)]


def read(path: Path) -> list[Measurement]:
    """The Measurements of a JSONL file; a line that is none is named on stderr and skipped."""
    found = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(Measurement.from_json(line))
        except ValueError as error:
            print(f"nibblas: {path}:{number} ignored: {error}", file=sys.stderr)
    return found


@cache
def store() -> Store:
    """The one Store of this process."""
    package = Path(__file__).parent
    installed = package / "_evidence"
    return Store(installed if installed.is_dir() else package.parents[1] / "evidence", cache_dir() / "evidence")
