"""What the index stores, as frozen data. A value that a source does not give is None or empty, never a guess.

Importers make an `Item`; the store takes it apart and puts it together again. What somebody else says of an
implementation is a `Claim`, or a `Run` with claimed=True, and never mixes with what was measured by nibblas.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, ClassVar, Literal

from nibblas.index import languages

Origin = Literal["human", "model", "unknown"]
FactKind = Literal["declared", "required", "compiled", "measured", "refused"]
RunStatus = Literal["passed", "wrong", "crashed", "timeout", "refused", "incompatible", "compiled", "not run"]
EventKind = Literal["publish", "supersede", "attest", "dispute", "refute", "retract"]


def digest_of(kind: str, spec: Mapping[str, Any]) -> str:
    """sha256, in hexadecimal, of the RFC 8785 canonical JSON of {"kind": kind, "spec": spec}."""
    import rfc8785

    return hashlib.sha256(rfc8785.dumps({"kind": kind, "spec": dict(spec)})).hexdigest()


def kebab(*parts: str) -> str:
    """Lower-case words of a-z and 0-9 joined by hyphens, as slugs are made; ValueError where nothing is left."""
    slug = re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
    if not slug:
        raise ValueError(f"{' '.join(parts)!r}: a slug needs a letter or a digit")
    return slug


def kernelbot_slug(board: str, submission: int | str) -> str:
    """ "nvfp4_gemv", 111151 -> "kernelbot-nvfp4-gemv-111151"."""
    return kebab("kernelbot", board, str(submission))


def now() -> str:
    """The time, ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class _Spec:
    """Something identified by its content: `digest` covers every field but those in `outside`."""

    outside: ClassVar[frozenset[str]] = frozenset()

    @cached_property
    def digest(self) -> str:
        return digest_of(type(self).__name__, self.spec)

    @property
    def identity(self) -> Any:
        """What stands for this inside the spec of something else."""
        return self.digest

    @property
    def spec(self) -> dict[str, Any]:
        """The fields that identify this, as JSON holds them; those that are empty are left out."""
        return _spec(self, self.outside)


def _spec(data: Any, outside: frozenset[str] = frozenset()) -> dict[str, Any]:
    found = {f.name: _plain(getattr(data, f.name)) for f in fields(data) if f.name not in outside}
    return {name: value for name, value in found.items() if value not in (None, [], {}, "")}


def _plain(value: Any) -> Any:
    if hasattr(value, "identity"):
        return value.identity
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return _spec(value) if is_dataclass(value) else value


@dataclass(frozen=True)
class SourceFile:
    """A file of an implementation: a relative path, and the sha256 of its bytes as `sha256sum` prints it."""

    path: str
    sha256: str
    size: int  # bytes
    lines: int
    media_type: str

    @classmethod
    def of(cls, path: str, raw: bytes) -> "SourceFile":
        """The description of these bytes; lines are counted as an editor numbers them."""
        lines = raw.count(b"\n") + bool(raw and not raw.endswith(b"\n"))
        language = languages.of_file(path, raw.decode(errors="replace"))
        media_type = f"text/x-{language}" if language else "text/plain"
        return cls(path, hashlib.sha256(raw).hexdigest(), len(raw), lines, media_type)


@dataclass(frozen=True)
class Tensor:
    """One operand as its source describes it. `shape` holds axis names or numbers; None where a source is silent."""

    name: str
    role: Literal["input", "output"]
    dtype: str | None = None
    shape: tuple[str, ...] | None = None
    layout: str | None = None


@dataclass(frozen=True)
class Operation(_Spec):
    """What is computed. `slug` is the board's, or the nibblas op's, name."""

    slug: str
    name: str
    family: str | None = None  # gemv, gemm, grouped_gemm, quantize ...
    axes: tuple[str, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    semantics: str | None = None  # a formula or a sentence
    reference: str | None = None  # where its reference is

    @property
    def identity(self) -> str:
        """The slug: a better description of an operation makes no other implementation or run."""
        return self.slug


@dataclass(frozen=True)
class Workload(_Spec):
    """One case of an operation. `axes` are its sizes; `parameters` all else that the case fixes."""

    operation: Operation
    name: str
    axes: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    correctness: Mapping[str, Any] = field(default_factory=dict)  # oracle, rtol, atol ...


@dataclass(frozen=True)
class Protocol(_Spec):
    """How a run was timed and checked. Runs under different protocols are never ranked together."""

    name: str
    harness: str | None = None
    version: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)  # timer, flush, inputs, stop rule ...


@dataclass(frozen=True)
class Environment(_Spec):
    """Where a run took place. `device` is the product's name ("NVIDIA B200"), `arch` as in Problem.arch."""

    device: str | None = None
    arch: str | None = None
    threads: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)  # torch, cuda, driver ...
    facts: Mapping[str, Any] = field(default_factory=dict)  # host, clocks, the runner's label ...


@dataclass(frozen=True)
class Figure:
    """One number of a run; low and high are its 95 % interval.

    The metrics "latency" and "score" (a board's one figure over all its cases) are in seconds.
    """

    metric: str
    statistic: str | None
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class Run(_Spec):
    """One implementation on one workload under one protocol in one environment.

    Parameters
    ----------
    workload : None where the source gives one figure for a whole board.
    claimed : somebody else's word; False means that nibblas ran it and keeps how.
    reason : of a status that is not "passed".
    observed_at : when it ran; where a source gives only that, when it was handed in.
    samples : seconds, in order.
    floor : the least seconds that physics allows there, where known.
    error, hardened : the largest deviation from the oracle, and whether the inputs covered all codes and scales.
    beside : medians, in seconds, of what else was timed in the same run.
    config : of the implementation, as it was run.
    integrity : findings of the arena on its conduct, each {"class", "severity", "what", ...}.
    record : where the whole record lies: a file's name, a line, a row.
    """

    outside = frozenset({"record"})

    operation: Operation
    workload: Workload | None
    protocol: Protocol
    environment: Environment
    status: RunStatus
    claimed: bool
    reason: str | None = None
    observed_at: str | None = None  # ISO 8601, UTC
    figures: tuple[Figure, ...] = ()
    samples: tuple[float, ...] = ()
    floor: float | None = None
    error: float | None = None
    hardened: bool = False
    beside: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    integrity: tuple[Mapping[str, Any], ...] = ()
    kernel_digest: str | None = None  # Kernel.digest at that time, of nibblas's own kernels
    command: str | None = None
    record: str | None = None

    def digest_for(self, implementation: str) -> str:
        """The digest of this run of the implementation that has the given digest."""
        return digest_of("Run", {**self.spec, "implementation": implementation})


@dataclass(frozen=True)
class CompatFact:
    """One of the five separate facts: what a source declares, requires, was compiled for, ran on, or was refused by.

    A fact names a `gpu` (a product), an `arch` ("sm_100a", "gfx950"), or a `needs` (a package, a tool) with its version
    constraint. `path` and `line` (from 1) cite the source where the fact was read from one. `claimed` marks another's
    word for what nibblas would have to see itself: that it was compiled, measured or refused.
    """

    kind: FactKind
    gpu: str | None = None
    arch: str | None = None
    needs: str | None = None
    reason: str | None = None
    path: str | None = None
    line: int | None = None
    claimed: bool = False


@dataclass(frozen=True)
class Claim:
    """What a source says in its own words, kept as it stands: subject "licence", "revision digest", "lines" ...

    value : the words; None only where a document leaves out a line of source that may not be shown.
    """

    subject: str
    value: str | None
    line: int | None = None  # of the text that was imported


@dataclass(frozen=True)
class Source:
    """Where an implementation came from, and under which terms.

    Parameters
    ----------
    kind : file, kernelbot-dataset, kernelbot-submission, catalog-page, arena or nibblas.
    locator : path, address or data set that finds it again.
    revision : of the data set or repository.
    terms : SPDX expression or LicenseRef under which the source hands it on; None is unknown.
    attribution : the sentence that the source asks for.
    verified_on : the day on which a person or the importer saw the terms, ISO 8601.
    """

    kind: str
    locator: str
    revision: str | None = None
    terms: str | None = None
    attribution: str | None = None
    verified_on: str | None = None

    @property
    def identity(self) -> str | None:
        """The terms: the same files under other terms are another revision, from another place they are not."""
        return self.terms


@dataclass(frozen=True)
class Implementation(_Spec):
    """One revision of an implementation. Its identity is what its source says and its files hold.

    What an importer reads from the files, and when and from where they came, are outside of that.

    Parameters
    ----------
    slug : the same for all revisions, unique among implementations.
    operation : the Operation that it computes, None if its source doesn't say.
    licence : declared for the implementation itself, as the source writes it.
    entry_point, signature : the function that a user calls, and its line.
    package, import_path : what to install, and what to import, where there is such.
    limitations : what is known to be lost or missing, in sentences.
    record : what finds it again inside the source: a row, a submission, a relative path.
    revision, supersedes : number from 1, and digest of the one before; the store gives both.
    """

    outside = frozenset(
        {
            "language",
            "framework",
            "entry_point",
            "signature",
            "tensors",
            "limitations",
            "record",
            "revision",
            "supersedes",
            "imported_at",
        }
    )

    slug: str
    name: str
    source: Source
    files: tuple[SourceFile, ...] = ()  # sorted by path
    operation: Operation | None = None
    authors: tuple[str, ...] = ()
    language: str | None = None
    framework: str | None = None
    entry_point: str | None = None
    signature: str | None = None
    tensors: tuple[Tensor, ...] = ()
    origin: Origin = "unknown"
    licence: str | None = None
    package: str | None = None
    import_path: str | None = None
    limitations: tuple[str, ...] = ()
    record: str | None = None
    revision: int | None = None
    supersedes: str | None = None
    imported_at: str | None = None


@dataclass(frozen=True)
class Event:
    """Something that happened to a subject; never changed or removed.

    subject is the digest of an implementation or of a run. attest: `body` holds the outcome ("reproduced", "not
    reproduced" with its ratio ...); dispute, refute and retract: `reason` says why.
    """

    kind: EventKind
    subject: str
    by: str | None = None
    reason: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    at: str | None = None


@dataclass(frozen=True)
class Item:
    """What an importer makes of one thing: it is stored in one transaction, or not at all.

    contents: raw bytes of each of implementation.files, by path. `workloads` are those that the source defines beyond
    the ones that its runs name.
    """

    implementation: Implementation
    contents: Mapping[str, bytes]
    runs: tuple[Run, ...] = ()
    facts: tuple[CompatFact, ...] = ()
    claims: tuple[Claim, ...] = ()
    workloads: tuple[Workload, ...] = ()
