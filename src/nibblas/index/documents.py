"""What a read gives: one document a page, the same for its HTML, its JSON twin and the API.

A document holds the stored records themselves (model.py) beside what is computed from them. `plain` makes any of them
JSON. What no source says is None.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from typing import Any, Literal

from nibblas.index.evidence_levels import Levels, Numerics, Timing
from nibblas.index.model import (
    Claim,
    CompatFact,
    Event,
    Figure,
    Implementation,
    Operation,
    Origin,
    Run,
    Source,
    Workload,
)


class NotFoundError(LookupError):
    """There is no such thing in the index."""


class NotShownError(PermissionError):
    """The terms of a source don't allow to hand it on; the message names them."""


class QueryError(ValueError):
    """A filter, a cursor or a limit that can't be meant."""


Answer = Literal["yes", "no", "unknown"]
Include = Literal["source", "samples", "findings"]


@dataclass(frozen=True)
class Ref:
    """Something that has a page of its own."""

    slug: str
    name: str


@dataclass(frozen=True)
class Query:
    """What is searched for: each filter that is given must hold. Names are slugs as facets show them.

    Parameters
    ----------
    text : words, each of which must stand in name, authors, operation, techniques or shown source.
    uses, mentions : techniques that the source uses, or at least mentions in a comment, string or declaration.
    hardware, answer : a device of the hardware table, and what "runs on it?" must be answered with.
    numerics, timing : the least level.
    sort : "evidence" (best known first), "newest" or "name".
    cursor : where a page before ended.
    """

    text: str = ""
    operation: str | None = None
    language: str | None = None
    framework: str | None = None
    uses: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    hardware: str | None = None
    answer: Answer = "yes"
    licence: str | None = None
    numerics: Numerics | None = None
    timing: Timing | None = None
    author: str | None = None
    source: str | None = None
    origin: Origin | None = None
    sort: Literal["evidence", "newest", "name"] = "evidence"
    cursor: str | None = None
    limit: int = 20


@dataclass(frozen=True)
class FacetValue:
    """One value to filter by, and how many of the results have it (with the other filters as they are)."""

    value: str
    label: str
    count: int
    selected: bool


@dataclass(frozen=True)
class Facet:
    """A field of Query and its values, those with most results first. `more` counts the values left out."""

    name: str
    values: tuple[FacetValue, ...]
    more: int

    @cached_property
    def json(self) -> str:
        """The same as JSON, which is kept because many answers hold it."""
        return _encoded(self)


@dataclass(frozen=True)
class Standing:
    """A run's place in its cohort, or every reason why it has none."""

    cohort: str | None
    size: int
    rank: int | None
    tied: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunLine:
    """A run in a table. `figure` is the one that ranks; `workload` is None where it stands for a whole board."""

    digest: str
    implementation: Ref
    revision: int
    operation: Ref
    workload: Ref | None  # slug is the digest
    protocol: str
    device: str | None
    arch: str | None
    threads: int | None
    status: str
    reason: str | None  # of a status that is not "passed"
    claimed: bool
    observed_at: str | None
    figure: Figure | None
    floor: float | None
    error: float | None
    hardened: bool
    levels: Levels
    standing: Standing
    authors: tuple[str, ...]
    source_kind: str
    source_shown: bool
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Fastest:
    """The passed run of an implementation that took the least time; on other workloads it may be slow."""

    run: str
    figure: Figure
    workload: Ref | None
    device: str | None
    claimed: bool


@dataclass(frozen=True)
class Card:
    """An implementation in a list; techniques are those that it uses."""

    slug: str
    name: str
    digest: str
    revision: int
    operation: Ref | None
    authors: tuple[str, ...]
    language: str | None
    framework: str | None
    origin: Origin
    levels: Levels
    licence: str | None
    licence_concluded: str | None
    source_kind: str
    source_shown: bool
    techniques: tuple[str, ...]
    devices: tuple[str, ...]  # with a passed run
    fastest: Fastest | None
    package: str | None
    imported_at: str

    @cached_property
    def json(self) -> str:
        """The same as JSON, which is kept because many answers hold it."""
        return _encoded(self)


@dataclass(frozen=True)
class Results:
    """One page of a search."""

    query: Query
    total: int
    cards: tuple[Card, ...]
    next: str | None
    facets: tuple[Facet, ...]


@dataclass(frozen=True)
class Way:
    """One way of using an implementation: how, or why not."""

    name: Literal["vendor", "import", "install"]
    how: str | None  # None where it can't be used so
    why_not: str | None


@dataclass(frozen=True)
class HardwareAnswer:
    """Whether it runs on one device, with the reason and, where one stands behind it, the line of source."""

    hardware: Ref
    arch: str | None
    answer: Answer
    reason: str
    path: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Finding:
    """What a rule read from a source file. `kind` tells a use from a declaration, a comment or a string.

    body is as the rule's own part describes it (rule, version, kind, snippet, detail ...), with `machine_code` where a
    compiled binary spoke for or against it, and without `snippet` where the source may not be shown.
    """

    path: str
    line: int | None
    body: Mapping[str, Any]


@dataclass(frozen=True)
class TechniqueUse:
    """A technique in one implementation: how often it is used and how often only mentioned, and the first lines."""

    technique: Ref
    uses: int
    mentions: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Licence:
    """What is declared, what is concluded and why, under which terms it came, and whether its source may be shown."""

    declared: str | None
    concluded: str | None
    reason: str
    terms: str | None
    attribution: str | None
    shown: bool
    shown_under: str | None
    findings: tuple[Finding, ...]
    third_party: tuple[Finding, ...]


@dataclass(frozen=True)
class SourceText:
    """A file that may be shown, or None for its text where that wasn't asked for or isn't allowed.

    The text is the file's bytes read as UTF-8; bytes that are none are replaced, and `exact` is then False.
    """

    path: str
    sha256: str
    size: int
    lines: int
    media_type: str
    text: str | None = None
    exact: bool = True


@dataclass(frozen=True)
class Revision:
    """One revision of an implementation."""

    revision: int
    digest: str
    imported_at: str


@dataclass(frozen=True)
class Cell:
    """The evidence on one workload and device."""

    workload: Ref | None
    device: str | None
    levels: Levels


@dataclass(frozen=True)
class Dossier:
    """All that is known of one implementation."""

    digest: str
    implementation: Implementation
    revisions: tuple[Revision, ...]
    previous: tuple[SourceText, ...]  # of the revision before, to compare with; texts as in `files`
    files: tuple[SourceText, ...]
    levels: Levels
    cells: tuple[Cell, ...]
    runs: tuple[RunLine, ...]  # those measured here first, then the fastest
    more_runs: int
    ways: tuple[Way, ...]
    facts: tuple[CompatFact, ...]  # of all five kinds
    hardware: tuple[HardwareAnswer, ...]
    techniques: tuple[TechniqueUse, ...]
    licence: Licence
    claims: tuple[Claim, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class RunPage:
    """All that is known of one run."""

    digest: str
    run: Run
    line: RunLine
    cohort: tuple[tuple[str, str], ...]  # what its cohort has in common
    events: tuple[Event, ...]
    licence: Licence


@dataclass(frozen=True)
class CohortTable:
    """Runs that may be compared, fastest first, then those without a rank."""

    key: str
    operation: Ref
    workload: Ref | None
    protocol: str
    device: str
    threads: int | None
    settings: Mapping[str, str]  # of the device, such as a power limit
    claimed: bool
    size: int  # with a rank
    runs: tuple[RunLine, ...]
    more: int  # ranked runs that are not among `runs`
    excluded: tuple[RunLine, ...]
    more_excluded: int


@dataclass(frozen=True)
class WorkloadLine:
    """One workload and how much there is on it."""

    digest: str
    workload: Workload
    runs: int
    implementations: int


@dataclass(frozen=True)
class OperationLine:
    """One operation and how much there is of it."""

    slug: str
    name: str
    family: str | None
    implementations: int
    workloads: int
    runs: int
    observed_at: str | None  # the latest run


@dataclass(frozen=True)
class OperationPage:
    """An operation with its cohorts; those with most ranked runs first."""

    digest: str
    operation: Operation
    line: OperationLine
    workloads: tuple[WorkloadLine, ...]
    cohorts: tuple[CohortTable, ...]
    more_cohorts: int
    implementations: tuple[Card, ...]
    more_implementations: int


@dataclass(frozen=True)
class TechniqueLine:
    """One technique and how many implementations use it, or only mention it."""

    slug: str
    name: str
    description: str | None
    uses: int
    mentions: int


@dataclass(frozen=True)
class TechniquePage:
    """A technique, the implementations that use it, and lines that show it."""

    line: TechniqueLine
    results: Results
    examples: tuple[tuple[Ref, Finding], ...]


@dataclass(frozen=True)
class HardwareLine:
    """One device: how much was run on it, and what the question "runs on it?" is answered with how often."""

    slug: str
    name: str
    vendor: str | None
    arch: str | None
    runs: int
    operations: int
    families: int
    measured: int  # implementations with a passed run on it
    yes: int
    no: int
    unknown: int
    observed_at: str | None


@dataclass(frozen=True)
class HardwarePage:
    """A device with its cohorts, and what runs on it."""

    line: HardwareLine
    facts: Mapping[str, Any]  # of the hardware table
    cohorts: tuple[CohortTable, ...]
    more_cohorts: int
    results: Results


@dataclass(frozen=True)
class Difference:
    """One fact of two implementations."""

    fact: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Pair:
    """Two runs of one cohort. `ratio` is a's time over b's, low and high what their intervals allow."""

    cohort: str
    a: RunLine
    b: RunLine
    ratio: float
    low: float
    high: float
    faster: Literal["a", "b", "neither"]


@dataclass(frozen=True)
class Comparison:
    """Two implementations side by side; `why_not` says for what reasons nothing can be paired."""

    a: Card
    b: Card
    pairs: tuple[Pair, ...]
    why_not: tuple[str, ...]
    differences: tuple[Difference, ...]
    same: tuple[Difference, ...]
    techniques: Mapping[str, tuple[str, ...]]  # "both", "only a", "only b"
    a_files: tuple[SourceText, ...]
    b_files: tuple[SourceText, ...]


@dataclass(frozen=True)
class RunFilter:
    """Which runs are listed, newest first. `hardware` is a device's name or slug, `since` a time (ISO 8601)."""

    operation: str | None = None
    hardware: str | None = None
    source: str | None = None
    status: str | None = None
    since: str | None = None
    cursor: str | None = None
    limit: int = 50


@dataclass(frozen=True)
class RunsPage:
    """One page of runs."""

    filter: RunFilter
    runs: tuple[RunLine, ...]
    next: str | None


@dataclass(frozen=True)
class SourceLine:
    """Where implementations came from, and under which terms."""

    slug: str
    source: Source
    implementations: int
    runs: int
    operations: int
    devices: int
    shown: int  # implementations whose source may be shown
    imported_at: str | None


@dataclass(frozen=True)
class Coverage:
    """How much there is: implementations by level, runs by family and device, and the policy that levels follow."""

    implementations: int
    revisions: int
    runs: int
    operations: int
    workloads: int
    numerics: Mapping[str, int]
    timing: Mapping[str, int]
    devices: tuple[str, ...]
    families: tuple[tuple[str, tuple[int, ...]], ...]  # runs on each of `devices`
    sources: tuple[SourceLine, ...]
    policy: str
    rules: Mapping[str, str] = field(default_factory=dict)  # versions


def to_json(value: Any) -> str:
    """A document as JSON. A number that is not finite is null."""
    if not isinstance(value, Results):
        return _encoded(value)
    members = {name: getattr(value, name) for name in _names(Results)}
    parts = {name: _listed(of) if name in ("cards", "facets") else _encoded(of) for name, of in members.items()}
    return "{" + ",".join(f'"{name}":{part}' for name, part in parts.items()) + "}"


def _listed(parts: Iterable[Card | Facet]) -> str:
    return f"[{','.join(part.json for part in parts)}]"


def _encoded(value: Any) -> str:
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(plain(value))


def _fields(value: Any) -> Any:
    """A dataclass or a mapping of another type as json takes it; TypeError for anything else."""
    kind: Any = type(value)
    if hasattr(kind, "__dataclass_fields__"):
        names, held = _names(kind), vars(value)
        # What is computed once and kept, such as a digest, is no field.
        return held if len(held) == len(names) else {name: held[name] for name in names}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{kind.__name__} is no part of a document")


_ENCODER = json.JSONEncoder(default=_fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def plain(value: Any) -> Any:
    """A document as objects, lists, texts and numbers; a number that is not finite is None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
