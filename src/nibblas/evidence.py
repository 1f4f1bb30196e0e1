"""Measurements: written by the benchmark and the arena, read by the dispatcher, shown by the index.

Two axes, never one ladder. What is known of a kernel's numerics and of its timing is computed from the stored
Measurements; nobody types a level in.
"""

import json
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Literal

from nibblas.paths import cache_dir, writing_cache
from nibblas.problem import Problem

SCHEMA = 1
Numerics = Literal["none", "checked", "checked-hardened"]
Timing = Literal["none", "compiled", "measured", "reproduced"]
# How far a measured problem may lie from the one asked: the sum over M, N, K, L, G of |log2 of the ratio|.
NEAR = 2.0
SIZES = ("M", "N", "K", "L", "G")
_sizes: Callable[[Problem], tuple[int, ...]] = attrgetter(*SIZES)
_kind = attrgetter(*(field.name for field in fields(Problem) if field.name not in SIZES))


@dataclass(frozen=True)
class Measurement:
    """One kernel on one problem on one device, as it happened.

    Times are seconds. `error` is the largest deviation of this run's output from the float64 oracle, each element's
    over its expected size (reference.magnitude); `hardened` says that the inputs covered all codes and scales. `beside`
    holds the medians of what else was timed, interleaved, in the same run. No samples: the kernel was only compiled.
    `config` holds how the kernel was run; times under {"dependent_launch": true} are shown on their own, and no choice
    is made by them.
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
    def is_dependent(self) -> bool:
        """Whether launches overlapped with those before them."""
        return bool(self.config.get("dependent_launch"))

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
            found = cls(**values)
            found._check()
            return found
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a Measurement: {error}") from None

    def _check(self) -> None:
        """Raise TypeError or ValueError unless all that is computed with, or looked up, is of its type and range."""
        p = self.problem
        hash(p)
        texts = (self.kernel, self.digest, self.device, self.when, self.command, self.method, p.op, p.a, p.b, p.out)
        named = (*self.versions.values(), *self.facts.values())
        wholes = (self.threads, *_sizes(p))
        numbers = (*self.beside.values(), *(n for n in (self.floor, self.error) if n is not None))
        rules = {
            "kernel, digest, device, when, command, method and names need strings": all(
                isinstance(text, str) for text in texts
            ),
            "versions and facts need strings": all(isinstance(text, str) for text in named),
            "config needs a table": isinstance(self.config, dict),
            "hardened needs true or false": isinstance(self.hardened, bool),
            "threads and sizes need whole numbers": all(type(n) is int and n >= 0 for n in wholes) and p.K > 0,
            "samples need positive numbers": all(isinstance(t, int | float) and 0 < t < math.inf for t in self.samples),
            "floor, error and beside need numbers": all(isinstance(n, int | float) for n in numbers),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"not a Measurement: {rule}")


def numerics_level(measurements: Iterable[Measurement]) -> Numerics:
    """The best that is known of a kernel's results."""
    errors = [m for m in measurements if m.error is not None and math.isfinite(m.error)]
    if not errors:
        return "none"
    return "checked-hardened" if any(m.hardened for m in errors) else "checked"


def timing_level(measurements: Iterable[Measurement]) -> Timing:
    """The best that is known of a kernel's speed: reproduced takes two hosts whose medians agree within 10 %."""
    measurements = list(measurements)
    timed = [m for m in measurements if m.samples]
    if not timed:
        return "compiled" if measurements else "none"
    alike = defaultdict(list)
    for m in timed:
        alike[m.kernel, m.digest, m.problem, m.device, m.threads].append(m)
    for m, other in (pair for group in alike.values() for pair in combinations(group, 2)):
        hosts = {m.facts.get("host"), other.facts.get("host")} - {None}
        if len(hosts) == 2 and abs(m.median / other.median - 1) < 0.1:
            return "reproduced"
    return "measured"


def distance(p: Problem, q: Problem) -> float:
    """How unlike two problems are in size; infinite where anything but a size differs."""
    return _octaves(_sizes(p), _sizes(q)) if _kind(p) == _kind(q) else math.inf


def _octaves(ours: Sequence[int], theirs: Sequence[int]) -> float:
    total = 0.0
    for n, m in zip(ours, theirs, strict=True):
        if n != m:
            if n == 0 or m == 0:
                return math.inf
            total += abs(math.log2(n / m))
    return total


class Store:
    """Measurements in JSONL files: those shipped with nibblas, then this machine's own."""

    def __init__(self, shipped: Path, local: Path):
        self.shipped, self.local = shipped, local
        self._shipped: list[Measurement] | None = None
        self._read: list[Measurement] | None = None
        # By all that must be equal, then by sizes: the latest Measurement that was timed.
        self._timed: dict[tuple, dict[tuple[int, ...], Measurement]] = defaultdict(dict)

    def all(self) -> list[Measurement]:
        """Every readable Measurement, shipped ones first; unreadable lines are named on stderr, once."""
        if self._read is None:
            found = self.shipped_only() + _read_folder(self.local)
            self._index(found)
            self._read = found
        return self._read

    def shipped_only(self) -> list[Measurement]:
        """Every readable Measurement that came with nibblas."""
        if self._shipped is None:
            self._shipped = _read_folder(self.shipped)
        return self._shipped

    def local_only(self) -> list[Measurement]:
        """Every readable Measurement of this machine's own."""
        return self.all()[len(self.shipped_only()) :]

    def nearest(
        self, problem: Problem, kernel: str, digest: str, device: str, threads: int
    ) -> tuple[Measurement, float] | None:
        """The latest timed Measurement of the problem nearest to this one, and its distance; None beyond NEAR.

        Only those of this kernel as it is now, on this device, with as many threads.
        """
        self.all()
        sizes = _sizes(problem)
        alike = self._timed.get((kernel, digest, device, threads, _kind(problem)), {})
        if sizes in alike:
            return alike[sizes], 0.0
        best = None
        for theirs, m in alike.items():
            d = _octaves(sizes, theirs)
            if d <= NEAR and (best is None or (d, best[0].when) <= (best[1], m.when)):
                best = m, d
        return best

    def add(self, measurements: Iterable[Measurement]) -> Path | None:
        """Append to the local store, a line each, and return the file; other processes may append at the same time.

        Where the store can't be written, this warns and returns None; this process knows the measurements all the same.
        """
        measurements, known = list(measurements), self.all()
        known += measurements
        self._index(measurements)
        path = self.local / "measured.jsonl"
        with writing_cache():
            append(path, measurements)
            return path
        return None

    def _index(self, measurements: Iterable[Measurement]) -> None:
        for m in measurements:
            alike = self._timed[m.kernel, m.digest, m.device, m.threads, _kind(m.problem)]
            sizes = _sizes(m.problem)
            if m.samples and not m.is_dependent and (sizes not in alike or alike[sizes].when <= m.when):
                alike[sizes] = m


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
    """The Measurements of a JSONL file; a line that is none, or a file that can't be read, is named on stderr."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        print(f"nibblas: {path} ignored: {error.strerror or error}", file=sys.stderr)
        return []
    found = []
    for number, line in enumerate(lines, 1):
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
