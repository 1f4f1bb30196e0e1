"""The record of a run: what was judged, where, by which protocol, and everything that was seen.

One JSON document a run. record.schema.json beside this file describes it field by field, and docs/arena.md shows the
same as a table. A number that is not finite (a time that a submission claims, for instance) is written as null.
What is read must also agree with itself: a record that was changed afterwards mostly does not.
"""

import hashlib
import json
import math
import os
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, Literal, Union, get_args, get_origin, get_type_hints

from nibblas.paths import write_atomically

SCHEMA = 1

Mode = Literal["test", "benchmark", "leaderboard", "profile"]
TIMED: tuple[Mode, ...] = ("benchmark", "leaderboard")  # modes whose cases have statistics
Dialect = Literal["nibblas", "kernelbot"]  # how the cases of task.yml are read
StandInChoice = Literal["auto", "none"]  # whether something of ours may take the place of what a machine lacks
CaseVerdict = Literal["correct", "wrong", "crashed", "timeout", "refused", "incompatible", "not run"]
RunVerdict = Literal["correct here", "wrong", "crashed", "timeout", "refused", "incompatible here", "unfinished"]
Severity = Literal["info", "flag", "refuse"]
Scalar = str | int | float | bool | None

# From the gravest: what the worst of its cases makes of a run.
GRAVITY: tuple[tuple[CaseVerdict, RunVerdict], ...] = (
    ("refused", "refused"),
    ("wrong", "wrong"),
    ("crashed", "crashed"),
    ("timeout", "timeout"),
    ("incompatible", "incompatible here"),
    ("not run", "unfinished"),
    ("correct", "correct here"),
)
ROUNDING = 1e-9  # by which a number that is computed anew may differ, relatively


@dataclass(frozen=True)
class Finding:
    """Something about a submission's conduct. "info" only tells, "flag" asks a person to look, "refuse" ends a case.

    `class_id` names the kind, as docs/arena.md lists them; `where` is a file and line, a case or a call.
    """

    class_id: str
    severity: Severity
    what: str
    where: str = ""
    evidence: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One timed call: what each timer inside the worker claims, and what the runner saw from outside, in nanoseconds.

    `observed_ns` is None where the call never ended. A sample that is not valid is kept with its reason, and left out
    of the statistics.
    """

    claimed_ns: dict[str, float | None]  # by timer: "event", "host", "tail" or "late", "lead"
    observed_ns: float | None
    valid: bool = True
    reason: str = ""
    throttled: bool = False
    fresh_addresses: bool = False  # whether the inputs lay elsewhere than in the call before


def claimed(samples: Iterable[Sample], timer: str) -> list[float]:
    """The valid claims of one timer, in nanoseconds."""
    return [ns for sample in samples if sample.valid and (ns := sample.claimed_ns.get(timer)) is not None]


@dataclass(frozen=True)
class Statistics:
    """Of the valid samples of one timer: the median with its bootstrap confidence interval, in nanoseconds."""

    timer: str
    median_ns: float
    low_ns: float
    high_ns: float
    n: int


@dataclass(frozen=True)
class Traced:
    """What a profiler (CUPTI) saw on the GPU during one more call, after the samples: kernels, copies and fills.

    Nanoseconds. `span_ns` is from the first start to the last end, `busy_ns` the part in which at least one ran, both
    0 where it saw none; `why_not` says why. `event_ns` is what the events around this same call gave, and `early_ns`
    for how long before the first of them something ran.
    """

    kernels: int = 0
    span_ns: float = 0.0
    busy_ns: float = 0.0
    event_ns: float | None = None
    why_not: str = ""
    early_ns: float = 0.0


@dataclass(frozen=True)
class ClocksSeen:
    """The SM clock of a GPU while a case was sampled, as read after each call but those of warm-up."""

    low_mhz: int
    high_mhz: int
    reasons: tuple[str, ...] = ()  # that it was no higher, in any of the calls


@dataclass(frozen=True)
class Errors:
    """How far an output lies from an answer; the largest over the calls of a case.

    `against` is "exact" (float64, rounded nowhere) or "reference" (what the problem's own code gives). `max_ulp` is in
    units of the last place of the output's dtype, None for integers. `max_relative_rms` is the largest error over the
    RMS of the answer, None where that is zero; `max_relative_size` each error over the element's expected size
    (reference.magnitude), known for exact FP4 products. Only elements that are finite on both sides are measured;
    `special_mismatches` counts those where NaN or infinity stand on one side alone.
    """

    output: str  # "result" or, of several, "result[1]"
    against: Literal["exact", "reference"]
    dtype: str
    elements: int
    max_ulp: float | None
    max_absolute: float
    max_relative_rms: float | None
    rms: float | None  # of the answer
    worst_index: tuple[int, ...]  # of the largest error
    worst_got: float | None
    worst_answer: float | None
    max_relative_size: float | None = None
    special_mismatches: int = 0


@dataclass(frozen=True)
class Coverage:
    """Which values occurred in one input tensor over the calls of a case; shares are of its elements.

    `kind` says how the bytes were read. The codes are those that occurred, in hexadecimal: "0127" for the e2m1 codes of
    low and of high nibbles, "00-7e 80" for bytes. Magnitudes are of finite values that are not zero.
    """

    tensor: str  # "data[0]"
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["e2m1 pairs", "perhaps e2m1 pairs", "e4m3", "e8m0", "float", "integer", "bool", "other"]
    zero: float = 0.0
    negative: float = 0.0
    nan: float = 0.0
    infinite: float = 0.0
    smallest: float | None = None
    largest: float | None = None
    low_codes: str | None = None
    high_codes: str | None = None
    byte_codes: str | None = None


@dataclass(frozen=True)
class CaseResult:
    """One case of the task in one mode, over all its calls."""

    kind: Mode
    text: str  # the case as KernelBot writes it: "m: 128; k: 256"
    values: dict[str, Any]
    verdict: CaseVerdict
    message: str = ""
    calls: int = 0
    errors: tuple[Errors, ...] = ()
    coverage: tuple[Coverage, ...] = ()
    first_call_ns: float | None = None  # the first call of the worker on this case: compilation, plans
    samples: tuple[Sample, ...] = ()
    statistics: Statistics | None = None
    floor_ns: float | None = None  # the least that the bytes which must move take on this device
    findings: tuple[Finding, ...] = ()
    stand_ins: tuple[str, ...] = ()  # that the submission itself called: then the times are not its own
    start: int = 0  # which of Protocol.seeds this case was run with
    report: str = ""  # of profile mode
    traced: Traced | None = None
    clocks: ClocksSeen | None = None  # of a timed case, where NVML tells them

    @property
    def times(self) -> list[float]:
        """The samples that the statistics count, in nanoseconds; none where there are no statistics."""
        return claimed(self.samples, self.statistics.timer) if self.statistics else []

    @property
    def has_partial_floor(self) -> bool:
        """Whether some of the inputs were not tried for the floor, so that it may be too low."""
        return any(finding.class_id == "partial-floor" for finding in self.findings)


@dataclass(frozen=True)
class TaskFacts:
    """The problem as it was on disk. `files` maps a path to the sha256 that `sha256sum` prints."""

    name: str
    files: dict[str, str]
    lang: str = "py"
    ranking_by: str = "last"


@dataclass(frozen=True)
class SubmissionFacts:
    """The submission as it was on disk; `files` as in TaskFacts, the main file first."""

    name: str
    files: dict[str, str]
    leaderboard: str | None = None
    gpus: tuple[str, ...] = ()
    language: str = "py"


@dataclass(frozen=True)
class Environment:
    """The machine. `device` and `arch` are named as in a Measurement; `threads` is 0 on a GPU."""

    device: str
    arch: str
    threads: int
    cpu: str
    system: str
    python: str
    torch: str
    versions: dict[str, str] = field(default_factory=dict)  # nibblas, triton, cuda, driver, kernelguard ...
    facts: dict[str, str] = field(default_factory=dict)  # host, clocks before the run, power limit ...


@dataclass(frozen=True)
class Seed:
    """The secret seed of one start of the run: a commitment from the first, the seed and salt once all is over."""

    commitment: str  # commit(seed, salt)
    seed: int | None = None
    salt: str | None = None


@dataclass(frozen=True)
class Protocol:
    """How it was judged and timed. `seeds` has one entry for each time that the run was started or resumed."""

    mode: Mode
    seeds: tuple[Seed, ...]
    dialect: Dialect = "nibblas"
    hardened: bool = False
    public_seed: int | None = None  # in place of those of the cases
    stand_ins: StandInChoice = "auto"
    budget: float | None = None  # seconds for one benchmark case
    timer: str = "host"  # whose samples make the statistics
    timers: tuple[str, ...] = ("host",)
    flush_bytes: int = 0
    warmup: int = 0
    stopping_rule: str = ""
    confidence: float = 0.95
    empty_call_ns: float | None = None  # what the runner takes off the observed times
    bandwidth: float | None = None  # bytes a second, of the floors
    bandwidth_source: str = ""
    timeouts: dict[str, float] = field(default_factory=dict)  # seconds by mode


@dataclass(frozen=True)
class PairedRatio:
    """Times of this submission over those of the other, pair by pair, with the ratio of the submission to itself.

    A ratio inside the noise interval can't be told from 1. Samples are pairs (this, other) in nanoseconds.
    """

    text: str
    ratio: float
    low: float
    high: float
    noise_low: float
    noise_high: float
    samples: tuple[tuple[float, float], ...] = ()
    noise_samples: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What `--against` found; below 1 this submission is faster."""

    against: SubmissionFacts
    ratios: tuple[PairedRatio, ...] = ()


@dataclass(frozen=True)
class Record:
    """One run, as it happened. `complete` is False while it goes on and after an interruption."""

    id: str
    when: str  # ISO 8601, UTC
    command: str
    mode: Mode
    task: TaskFacts
    submission: SubmissionFacts
    environment: Environment
    isolation: dict[str, bool | str]  # true: in force; a text: why it is not
    protocol: Protocol
    stand_ins: tuple[str, ...] = ()  # that judge or submission used
    cases: tuple[CaseResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    comparison: Comparison | None = None
    verdict: RunVerdict = "unfinished"
    reason: str = ""
    score: float | None = None  # seconds, by TaskFacts.ranking_by
    complete: bool = False
    schema: int = SCHEMA

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Findings of the whole run, then those of each case."""
        return self.findings + tuple(finding for case in self.cases for finding in case.findings)

    def to_json(self) -> str:
        """The document, ASCII and one field a line."""
        return json.dumps(_finite(asdict(self)), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """The inverse of to_json; ValueError for what is not a record of this schema, with the field at fault.

        So for a record that contradicts itself: seeds and commitments, statistics and samples, verdicts, the score.
        """
        values = _parsed(text)
        if not isinstance(values, dict) or "schema" not in values:
            raise ValueError("not a record: the document has no field schema")
        if values["schema"] != SCHEMA:
            raise ValueError(f"the record has schema {values['schema']!r}, this nibblas reads schema {SCHEMA}")
        _validate(values)
        record = _built(cls, values)
        for place, what in _contradictions(record):
            raise ValueError(f"the record contradicts itself: at {place}: {what}")
        return record


def verdict_of(cases: Iterable[CaseResult]) -> RunVerdict:
    """What the cases make of a run that has ended; those that were not run count where no other was."""
    verdicts: set[CaseVerdict] = {case.verdict for case in cases if case.verdict != "not run"} or {"not run"}
    return next(run for case, run in GRAVITY if case in verdicts)


def commit(seed: int, salt: str) -> str:
    """The commitment to a seed: sha256 of "salt:seed". The salt (32 hex digits or more) keeps it from being guessed."""
    return hashlib.sha256(f"{salt}:{seed}".encode()).hexdigest()


def write(record: Record, path: Path) -> None:
    """Write the record so that a reader finds the old or the new one, never a part."""
    write_atomically(path, record.to_json())


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Within, no other process may enter this for the same record: BlockingIOError there.

    The lock is on a file beside the record, which goes when the block is left; of a process that was killed the file
    stays, and is no lock.
    """
    beside = path.with_name(f".{path.name}.writer")
    try:
        file = _locked(beside)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "another run is writing this record", str(path)) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    with file:
        try:
            yield
        finally:
            beside.unlink(missing_ok=True)


def _locked(path: Path) -> BinaryIO:
    """The file of this name, open and locked."""
    import fcntl  # which machines have that the arena runs on

    while True:
        with ExitStack() as stack:
            file = stack.enter_context(open(path, "ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # its last holder has just taken it away
                if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                    stack.pop_all()
                    return file


def read(path: Path) -> Record:
    """The record in a file; ValueError naming the file where it is none, OSError where it can't be read."""
    try:
        return Record.from_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@cache
def schema() -> dict:
    """The JSON Schema (2020-12) of a record."""
    return json.loads(Path(__file__).with_name("record.schema.json").read_text())


def _parsed(text: str) -> Any:
    try:
        values = json.loads(text)
        place = _not_finite(values)
    except ValueError as error:
        raise ValueError(f"not a record: {error}") from None
    except RecursionError:
        raise ValueError("not a record: it is nested too deeply") from None
    if place is not None:
        raise ValueError(f"not a record: at ${place}: a number that is not finite, which is null in a record")
    return values


def _not_finite(value: Any) -> str | None:
    """The place of the first number that no float holds: NaN and Infinity, which json reads, or 1e999. None without."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if (place := _not_finite(item)) is not None:
                return (f"[{key}]" if isinstance(value, list) else f".{key}") + place
    elif isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        return ""
    return None


def _contradictions(record: Record) -> Iterator[tuple[str, str]]:
    """Places in a record that disagree with others, and how."""
    for i, seed in enumerate(record.protocol.seeds):
        if (what := _of_seed(seed)) is not None:
            yield f"$.protocol.seeds[{i}]", what
    starts = len(record.protocol.seeds)
    for i, case in enumerate(record.cases):
        if not 0 <= case.start < starts:
            yield f"$.cases[{i}].start", f"{case.start}, and the seeds of the protocol are {starts}, from 0"
        if (least := min(claimed(case.samples, record.protocol.timer), default=1.0)) <= 0:
            yield f"$.cases[{i}].samples", f"a valid one claims {least} ns, and times are positive"
        if (what := _of_statistics(case, record.protocol.timer)) is not None:
            yield f"$.cases[{i}].statistics", what
        if case.clocks is not None and case.clocks.low_mhz > case.clocks.high_mhz:
            yield f"$.cases[{i}].clocks", f"the lowest is {case.clocks.low_mhz}, the highest {case.clocks.high_mhz}"
    expected = verdict_of(record.cases) if record.complete else "unfinished"
    if record.verdict != expected:
        why = "its cases make it" if record.complete else "a run that is not complete is"
        yield "$.verdict", f"{record.verdict!r}, and {why} {expected!r}"
    if record.score is not None and (what := _of_score(record)) is not None:
        yield "$.score", what


def _of_seed(seed: Seed) -> str | None:
    if seed.seed is None and seed.salt is None:
        return None
    if seed.seed is None or seed.salt is None:
        return "of seed and salt only one is told"
    return None if commit(seed.seed, seed.salt) == seed.commitment else "the commitment is not that of seed and salt"


def _of_statistics(case: CaseResult, timer: str) -> str | None:
    found, times = case.statistics, claimed(case.samples, timer)
    if found is None:
        is_lacking = bool(times) and case.kind in TIMED
        return f"null, and {len(times)} samples of the timer {timer!r} are valid" if is_lacking else None
    if found.timer != timer:
        return f"of the timer {found.timer!r}, and that of the protocol is {timer!r}"
    if found.n != len(times) or not times:
        return f"n is {found.n}, and {len(times)} samples are valid"
    if not math.isclose(found.median_ns, median(times), rel_tol=ROUNDING):
        return f"median_ns is {found.median_ns}, and the median of the valid samples is {median(times)}"
    if not found.low_ns <= found.median_ns <= found.high_ns:
        return "the median is not within its interval"
    return None


def _of_score(record: Record) -> str | None:
    ranked = [case.statistics for case in record.cases if case.kind == record.mode]
    seconds = [found.median_ns * 1e-9 for found in ranked if found is not None]
    if record.verdict != "correct here" or not seconds or len(seconds) < len(ranked):
        return "told of a run that is not correct here, or in which not every case was timed"
    expected = score_of(seconds, record.task.ranking_by)
    if math.isclose(record.score or 0.0, expected, rel_tol=ROUNDING):
        return None
    return f"{record.score}, and the medians make it {expected} (ranking_by {record.task.ranking_by})"


def score_of(seconds: list[float], ranking_by: str) -> float:
    """The score that medians make: the last, their mean, or their geometric mean."""
    if ranking_by == "last":
        return seconds[-1]
    if ranking_by == "mean":
        return math.fsum(seconds) / len(seconds)
    return math.exp(math.fsum(map(math.log, seconds)) / len(seconds)) if min(seconds) > 0 else 0.0


def _validate(values: dict) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema()).iter_errors(values))
    if error is not None:
        raise ValueError(f"not a record: at {error.json_path}: {error.message[:300]}")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _built(kind: Any, value: Any) -> Any:
    """A value of the annotated type from plain JSON that the schema has let pass."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        kinds = [argument for argument in arguments if argument is not type(None)]
        return _built(kinds[0], value) if len(kinds) == 1 else value
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _built(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if origin is tuple:
        item_kinds = arguments if arguments[-1] is not Ellipsis else (arguments[0],) * len(value)
        return tuple(_built(item_kind, item) for item_kind, item in zip(item_kinds, value, strict=True))
    if origin is dict:
        return {key: _built(arguments[1], item) for key, item in value.items()}
    return value
