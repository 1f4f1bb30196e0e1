"""What is known of an implementation's results and speed, by a numbered policy, and who stands where in a cohort.

Two axes, never one ladder, as in nibblas.evidence; here somebody else's word counts too, under names of its own. Nobody
types a level in: all is computed from stored runs and events, so that a new policy needs no new data.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from nibblas.index.model import Event, digest_of

POLICY = "evidence-1"
Numerics = Literal["none", "claimed", "checked", "checked-hardened"]
Timing = Literal["none", "compiled", "reported", "measured", "reproduced"]
StateKind = Literal["not reproduced", "incompatible here", "disputed", "refuted", "retracted"]
NUMERICS: tuple[Numerics, ...] = get_args(Numerics)
TIMING: tuple[Timing, ...] = get_args(Timing)
# Times that differ by less agree, as in nibblas.evidence.timing_level.
AGREEMENT = 0.1
# Facts of an environment that make it another device for a comparison, beside its name and its threads.
SETTINGS = ("power.limit", "mig")


class Observed(NamedTuple):
    """What the policy looks at in one run. What identifies a workload, a device or a host is only compared."""

    run: str
    status: str
    claimed: bool
    workload: str | int | None = None
    device: str | None = None
    threads: int | None = None
    host: str | None = None
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    error: float | None = None
    hardened: bool = False
    refusals: tuple[str, ...] = ()  # classes of integrity findings that ended the run

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds from low to high; a point where no interval is known. Needs seconds."""
        return _interval(self.seconds, self.low, self.high)


@dataclass(frozen=True)
class State:
    """Something beside the levels that a reader must know.

    `ratio` is the later time over the earlier one, of "not reproduced"; `run` the digest of the run that shows it, None
    where somebody says it of the implementation.
    """

    kind: StateKind
    reason: str | None = None
    ratio: float | None = None
    run: str | None = None


@dataclass(frozen=True)
class Gap:
    """The facts that a level would need beyond those that are stored."""

    level: str
    facts: tuple[str, ...]


@dataclass(frozen=True)
class Levels:
    """Both levels, the states beside them, and what the next level of each axis lacks; None where there is no next."""

    numerics: Numerics
    timing: Timing
    states: tuple[State, ...]
    next_numerics: Gap | None
    next_timing: Gap | None
    policy: str = POLICY


def refusals(integrity: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The classes of those integrity findings that end a run."""
    return tuple(str(finding.get("class")) for finding in integrity if finding.get("severity") == "refuse")


def levels(observed: Iterable[Observed], events: Iterable[Event] = (), compiled: bool = False) -> Levels:
    """What is known of one implementation, or of one of its workloads on one device.

    `compiled` says that a compile of nibblas's own is stored as a fact. Events whose subject is none of the runs speak
    of the whole.
    """
    observed, events = list(observed), list(events)
    void = voided([o.run for o in observed], events)
    counted = [o for o in observed if o.run not in void]
    wrong_on = {o.workload for o in counted if not o.claimed and (o.status == "wrong" or o.refusals)}
    claims = [
        o
        for o in counted
        if o.claimed and o.status == "passed" and not (wrong_on if o.workload is None else o.workload in wrong_on)
    ]
    passed = [o for o in counted if not o.claimed and o.status == "passed" and not o.refusals]
    timed = [o for o in passed if o.samples and o.seconds is not None]
    compiled = compiled or any(o.status == "compiled" for o in counted)

    checked = [o for o in passed if o.error is not None and math.isfinite(o.error)]
    numerics: Numerics = "claimed" if claims else "none"
    if checked:
        numerics = "checked-hardened" if any(o.hardened for o in checked) else "checked"

    reports = [o for o in claims if o.seconds is not None]
    timing: Timing = "compiled" if compiled else "none"
    if reports:
        timing = "reported"
    if timed:
        timing = "reproduced" if _agreeing(timed) else "measured"

    states = (*_said(observed, events), *_seen(counted), *_disagreements(timed, reports))
    return Levels(numerics, timing, states, _next_numerics(numerics, passed), _next_timing(timing, timed, states))


def voided(runs: Sequence[str], events: Iterable[Event]) -> dict[str, str]:
    """Why runs don't count, by digest: they were retracted or refuted, alone or with their implementation."""
    found: dict[str, str] = {}
    for event in events:
        if event.kind in ("retract", "refute"):
            why = "retracted" if event.kind == "retract" else "refuted"
            why += f": {event.reason}" if event.reason else ""
            found |= dict.fromkeys([event.subject] if event.subject in runs else runs, why)
    return found


def _said(observed: Sequence[Observed], events: Iterable[Event]) -> Iterable[State]:
    runs = {o.run for o in observed}
    for event in events:
        run = event.subject if event.subject in runs else None
        if event.kind == "retract":
            yield State("retracted", event.reason, run=run)
        elif event.kind == "refute":
            yield State("refuted", event.reason, run=run)
        elif event.kind == "dispute":
            yield State("disputed", event.reason, run=run)
        elif event.kind == "attest" and event.body.get("outcome") == "not reproduced":
            yield State("not reproduced", event.reason, event.body.get("ratio"), run)


def _seen(counted: Iterable[Observed]) -> Iterable[State]:
    for o in counted:
        if o.claimed:
            continue
        if o.refusals:
            yield State("refuted", ", ".join(o.refusals), run=o.run)
        elif o.status == "wrong":
            yield State("refuted", "wrong result", run=o.run)
        elif o.status == "incompatible":
            yield State("incompatible here", o.device, run=o.run)


def _disagreements(timed: Iterable[Observed], reports: Iterable[Observed]) -> Iterable[State]:
    """A time reported, or measured on another machine, that a measured one doesn't bear out."""
    reported = _alike(reports)
    for key, group in _alike(timed).items():
        for i, o in enumerate(group):
            for other in (*reported.get(key, ()), *(other for other in group[:i] if _two_hosts(o, other))):
                if not agree(o, other):
                    source = "reported" if other.claimed else f"measured on {other.host}"
                    yield State("not reproduced", f"{source}, on {o.device}", ratio(o, other), o.run)


def _agreeing(timed: Iterable[Observed]) -> bool:
    return any(
        _two_hosts(o, other) and agree(o, other)
        for group in _alike(timed).values()
        for i, o in enumerate(group)
        for other in group[:i]
    )


def ratio(o: Observed, other: Observed) -> float:
    """One run's seconds over another's; ValueError where one has none."""
    if o.seconds is None or other.seconds is None:
        raise ValueError("a ratio needs two times")
    return o.seconds / other.seconds


def agree(o: Observed, other: Observed) -> bool:
    """Whether two times are the same within AGREEMENT, or their intervals overlap."""
    (low, high), (other_low, other_high) = o.interval, other.interval
    return abs(ratio(o, other) - 1) < AGREEMENT or (low <= other_high and other_low <= high)


def _alike(observed: Iterable[Observed]) -> dict[tuple, list[Observed]]:
    """Runs by workload, device and threads, those left out of which the workload or the device is unknown."""
    found = defaultdict(list)
    for o in observed:
        if o.workload is not None and o.device is not None:
            found[o.workload, o.device, o.threads].append(o)
    return found


def _two_hosts(o: Observed, other: Observed) -> bool:
    return len({o.host, other.host} - {None}) == 2


def _next_numerics(level: Numerics, passed: Sequence[Observed]) -> Gap | None:
    if level == "none":
        return Gap("claimed", ("a source that says it passed a check",))
    if level == "claimed":
        run = "the error of the run here" if passed else "a run here that passes, with its error"
        return Gap("checked", (f"{run} against the float64 oracle",))
    if level == "checked":
        return Gap("checked-hardened", ("a run here whose inputs cover all codes and scales",))
    return None


def _next_timing(level: Timing, timed: Sequence[Observed], states: Iterable[State]) -> Gap | None:
    if level == "none":
        return Gap("compiled", ("a compile for an architecture",))
    if level == "compiled":
        return Gap("reported", ("a time that its source states",))
    if level == "reported":
        refused = {state.reason for state in states if state.kind == "incompatible here" and state.reason}
        elsewhere = f", on another device than {', '.join(sorted(refused))}" if refused else ""
        return Gap("measured", (f"a run here that passes, with its samples{elsewhere}",))
    if level == "measured":
        facts = [] if any(o.host for o in timed) else ["the host of the run"]
        apart = [state.ratio for state in states if state.kind == "not reproduced" and state.ratio]
        devices = sorted({o.device for o in timed if o.device})
        facts.append(f"a run on another machine with {' or '.join(devices) or 'the same device'}")
        if apart:
            facts.append(f"times that agree within {AGREEMENT:.0%}; the ratio is {apart[-1]:.2f}")
        return Gap("reproduced", tuple(facts))
    return None


@dataclass(frozen=True)
class Cohort:
    """What times have in common that may be ranked together.

    operation is a slug, workload and protocol are digests. Somebody else's word is never ranked with what was run here.
    """

    operation: str
    workload: str | None
    protocol: str
    device: str
    threads: int | None
    claimed: bool
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """Identifies the cohort in addresses, 32 hexadecimal digits."""
        return digest_of("Cohort", {**vars(self), "settings": dict(self.settings)})[:32]


def settings(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Those facts of an environment that make it another device for a comparison."""
    return tuple((name, str(facts[name])) for name in SETTINGS if facts.get(name) is not None)


class Entrant(NamedTuple):
    """A run of a cohort. `implementation` is the same for all of its revisions; `void` says why it doesn't count."""

    run: str
    implementation: str
    status: str
    seconds: float | None
    low: float | None = None
    high: float | None = None
    observed_at: str | None = None
    current: bool = True
    void: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A run's place: ranks count from 1 without gaps, and `tied` says that the rank is shared."""

    run: str
    rank: int
    tied: bool


@dataclass(frozen=True, slots=True)
class Excluded:
    """A run that has no rank, and every reason why."""

    run: str
    reasons: tuple[str, ...]


def rank(entrants: Iterable[Entrant]) -> tuple[list[Place], list[Excluded]]:
    """Order one cohort, fastest first; runs share a rank while the intervals of all of them have a time in common.

    Each implementation stands once, by its latest run that counts, so that running often wins nothing.
    """
    excluded: list[Excluded] = []
    latest: dict[str, Entrant] = {}
    for entrant in sorted(entrants, key=lambda e: (e.observed_at or "", e.run)):
        reasons = tuple(_reasons(entrant))
        if reasons:
            excluded.append(Excluded(entrant.run, reasons))
            continue
        earlier = latest.pop(entrant.implementation, None)
        if earlier:
            excluded.append(Excluded(earlier.run, ("a later run of the same implementation counts",)))
        latest[entrant.implementation] = entrant

    groups: list[list[str]] = []
    shared_low, shared_high = -math.inf, -math.inf
    for entrant in sorted(latest.values(), key=lambda e: (e.seconds, e.implementation)):
        low, high = _interval(entrant.seconds, entrant.low, entrant.high)
        if groups and low <= shared_high and shared_low <= high:
            shared_low, shared_high = max(shared_low, low), min(shared_high, high)
            groups[-1].append(entrant.run)
        else:
            shared_low, shared_high = low, high
            groups.append([entrant.run])
    places = [Place(run, number, len(group) > 1) for number, group in enumerate(groups, start=1) for run in group]
    return places, excluded


def _reasons(entrant: Entrant) -> Iterable[str]:
    if entrant.status != "passed":
        yield f"its status is {entrant.status}"
    if entrant.seconds is None:
        yield "it has no time"
    if not entrant.current:
        yield "a later revision supersedes it"
    if entrant.void:
        yield entrant.void


def _interval(seconds: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    if seconds is None:
        raise ValueError("a run without a time has no interval")
    return (low, high) if low is not None and high is not None else (seconds, seconds)
