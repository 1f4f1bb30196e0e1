"""What the runner makes of the times that a worker claims and of those that it sees itself. Pure functions.

A worker claims the span of a call by its own timers. The runner sees how long the reply took. From that comes off what
a call of an empty function takes, seen in the same worker before it had loaded the submission. A submission that makes
its timers lie, or that does its work outside the span, disagrees with what is seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from nibblas.arena.clocks import SLOWDOWNS, ClockState
from nibblas.arena.record import ClocksSeen, Finding, PairedRatio, Sample, Severity, Statistics, Traced, claimed
from nibblas.statistics import Interval, median_interval, paired_ratio

REFUSE: Severity = "refuse"
FLAG: Severity = "flag"
WARMUP = 2  # calls of a case, by the same requests as all others, whose times don't count
AT_LEAST = 10  # samples before the interval may end a case
FEWEST = 3  # samples that are taken when the time is used
PRECISION = 0.01  # of the median: half the width of its interval
CONFIDENCE = 0.95
# What may lie between the claimed and the seen time of an honest call: a share of it, and what scheduling costs.
SHARE = 0.25
EVENT_STEP_NS = 500.0  # between the times that two events can be apart, as CUDA's documentation states it
EVENT_SLACK_NS, HOST_SLACK_NS = 150e3, 20e6
CPU_SLACK_NS = 150e3  # of CPU time: a call may leave the caches cold for the reply
LEAD_SHARE = 1.02  # of the lead of calls of nothing: a longer one is that of a slower clock, or claimed
TAIL_NS = 15e3  # for which a device may go on after the last event of a call
IDLE_NS = 60e3  # that it may take to wait for an idle device: 10 us in most processes, up to 50 in one with graphs
TRACED_NS = 5e3  # by which a profiler may see more work than the events: each kernel starts a little later under it
OUTSIDE_NS = 10e6  # a thread, of CPU time around a call: libraries let threads spin before they sleep
LONGEST_NS = 1e18  # of a span: 30 years
FLOOR_SHARE = 0.75  # of a floor: measured bandwidths are those of one access pattern, others reach somewhat more


@dataclass(frozen=True)
class Stopping:
    """When a case has been sampled enough.

    `budget` is in seconds, for all that its calls after warm-up take, checks included.
    """

    budget: float

    def __str__(self) -> str:
        return (
            f"at least {AT_LEAST} samples and the {CONFIDENCE:.0%} interval of the median within "
            f"{PRECISION:.0%}; or {self.budget:g} s used and {FEWEST} samples, or {AT_LEAST} that don't count"
        )

    def is_reached(self, samples: Sequence[float], taken: int, seconds: float) -> bool:
        """Whether these valid samples, of so many taken in that time, are enough."""
        if seconds >= self.budget:
            return len(samples) >= FEWEST or taken >= AT_LEAST
        # Looked at after each sixteenth more: an interval costs more than a sample where there are many.
        if len(samples) < AT_LEAST or len(samples) % max(len(samples) // 16, 1):
            return False
        return median_interval(samples, confidence=CONFIDENCE).half_width <= PRECISION


def statistics_of(samples: Sequence[Sample], timer: str) -> Statistics | None:
    """The median of a timer's valid claims with its interval, wider by half a step of the timer; None without any."""
    values = claimed(samples, timer)
    if not values:
        return None
    found, half = median_interval(values, confidence=CONFIDENCE), step_ns(values, timer) / 2
    return Statistics(timer, found.value, found.low - half, found.high + half, len(values))


def step_ns(values: Sequence[float], timer: str) -> float:
    """The step between the times that a timer can tell, as far as these values show one: 0 where none occurs twice.

    A time between two ticks is told as one of them. Where many samples are the same their median says nothing of where
    between its neighbours the time lies, however narrow the bootstrap makes the interval.
    """
    ticks = sorted(set(values))
    if len(ticks) == len(values):
        return 0.0
    # Where all are the same the timer's documentation has to tell. No timer tells a time below one step.
    stated = EVENT_STEP_NS if timer == "event" else 0.0
    return min(ticks[0], min((b - a for a, b in pairwise(ticks)), default=stated))


def floor_ns(read_bytes: int | None, written_bytes: int, cache_bytes: int, bandwidth: float | None) -> float | None:
    """The least that a case can take: bytes that must be read, and written bytes that no cache can hold back.

    Bandwidth is in bytes a second. None where it, or what must be read, is not known.
    """
    if bandwidth is None or read_bytes is None:
        return None
    return (read_bytes + max(written_bytes - cache_bytes, 0)) / bandwidth * 1e9


def below_floor(sample_ns: float, floor: float | None) -> bool:
    """Whether a time is one that no device of this bandwidth can reach."""
    return floor is not None and sample_ns < FLOOR_SHARE * floor


def unseen_time(samples: Sequence[Sample], empty_ns: float, timer: str, lead_ns: float = 0.0) -> Finding | None:
    """A finding where the timer claims less than the runner saw, by more than chance and the cost of a call explain.

    Of the calls that count, so that a lie in most of those shows, whatever warm-up tells.
    `empty_ns` is what the runner sees of a call of nothing, beyond what it claims and its "lead", which is usually
    `lead_ns`: calls that claim a longer one can't be checked, and a case of such calls is flagged. Calls wait for the
    machine here and there, so that the quietest tenth counts, in which least is missing: of a timer that lies it is
    missing there too, or, where that lies in the other calls only, those claim less. On a CPU that others use too,
    waiting is all that this can show for sure, so that it only asks a person to look; unseen_cpu_time is the stricter
    test there. A single call that took longer, and says so, is no lie of the others, in which nothing is missing.
    """
    told = [
        (sample.observed_ns - empty_ns, ns, sample.claimed_ns.get("lead") or 0.0)
        for sample in samples
        if sample.valid and sample.observed_ns is not None and (ns := sample.claimed_ns.get(timer)) is not None
    ]
    if len(told) < FEWEST:
        return None
    pairs = [(seen - lead - ns, ns) for seen, ns, lead in told if lead <= LEAD_SHARE * lead_ns]
    if len(pairs) < FEWEST:
        return Finding(
            "timer",
            FLAG,
            f"before most calls the device was kept busy for longer than {lead_ns / 1e6:.1f} ms, as before calls of "
            "nothing, so that their times were not checked from outside",
            evidence={"lead_ns": lead_ns, "checked": len(pairs)},
        )
    share, slack, severity = (SHARE, EVENT_SLACK_NS, REFUSE) if timer == "event" else (1.0, HOST_SLACK_NS, FLAG)
    quiet = sorted(pairs)[: len(pairs) // 10 + 1]
    usual = median(ns for _, ns in pairs)
    truth = median(ns for _, ns in quiet)
    missing = max(quiet[-1][0], min(truth - usual, median(more for more, _ in pairs)))
    if missing <= share * usual + slack:
        return None
    return Finding(
        "timer",
        severity,
        f"the {timer} timer claims {usual / 1e3:.1f} us a call, and the runner saw {missing / 1e3:.1f} us more",
        evidence={"claimed_ns": usual, "missing_ns": missing},
    )


def unseen_cpu_time(samples: Sequence[Sample], inside_ns: Sequence[float], timer: str, cpus: int) -> Finding | None:
    """A finding where a call used more CPU time than so many CPUs have in the time that the host's timer claims.

    `inside_ns` is the CPU time of each call beyond that of a call of nothing, in the order of the samples. Unlike the
    clock it does not tick while the worker waits for the machine.
    """
    pairs = [
        (ns, used - cpus * ns)
        for sample, used in zip(samples, inside_ns, strict=False)
        if (ns := sample.claimed_ns.get("host")) is not None
    ]
    if timer != "host" or len(pairs) < FEWEST:
        return None
    more = median_interval([more for _, more in pairs], confidence=0.99)
    usual = median_interval([ns for ns, _ in pairs]).value
    if more.low <= SHARE * usual + CPU_SLACK_NS:
        return None
    return Finding(
        "timer",
        REFUSE,
        f"the host timer claims {usual / 1e3:.1f} us a call, in which {more.value / 1e3:.1f} us more of CPU time were "
        "used than there are",
        evidence={"claimed_ns": usual, "more_ns": more.value, "more_low_ns": more.low, "cpus": cpus},
    )


def other_streams(samples: Sequence[Sample]) -> Finding | None:
    """A finding where the device went on after the last event: work on streams that the events don't see.

    To wait for a device takes time where it is idle too, and more where a process has several streams. So the usual
    wait at once after the event, "tail", is compared with the shortest wait some time after it, "late", of other calls,
    or with IDLE_NS where that is less: work that goes on for longer in some calls, at random, hides little in either.
    """
    tails, lates = (
        [ns for sample in samples if (ns := sample.claimed_ns.get(wait)) is not None] for wait in ("tail", "late")
    )
    if len(tails) < FEWEST - 1 or not lates:
        return None
    found, late = median_interval(tails, confidence=0.99), min(*lates, IDLE_NS)
    if found.low - late <= TAIL_NS and found.value <= IDLE_NS + TAIL_NS:
        return None
    return Finding(
        "side-stream",
        REFUSE,
        f"the device went on for {(found.value - late) / 1e3:.1f} us or longer after the last event of a call",
        evidence={"tail_ns": found.value, "tail_low_ns": found.low, "late_ns": late},
    )


def traced(work: object, event_ns: float | None) -> Traced:
    """What a worker tells of one call under a profiler, with the events of the same call."""
    told = work if isinstance(work, dict) else {}
    kernels, span, busy, early = (_positive(told.get(name)) for name in ("kernels", "span_ns", "busy_ns", "early_ns"))
    if kernels is None or span is None or busy is None:
        return Traced(event_ns=event_ns, why_not="the profiler saw no kernels")
    return Traced(int(kernels), span, busy, event_ns, early_ns=early or 0.0)


def early_work(found: Traced) -> Finding | None:
    """A finding where the profiler saw the call at work before its span began."""
    if found.early_ns <= TRACED_NS:
        return None
    return Finding(
        "side-stream",
        FLAG,
        f"in a call that was traced the device worked for it {found.early_ns / 1e3:.1f} us before its span began",
        evidence={"early_ns": found.early_ns, "kernels": found.kernels},
    )


def untraced_work(found: Traced, samples: Sequence[Sample], timer: str) -> Finding | None:
    """A finding where the profiler saw the device at work for longer than events claim.

    The median of the events is compared with the time in which something ran. Not with the whole span: under the
    profiler launches take longer, so that there are gaps which there are not without it.
    """
    usual = claimed(samples, timer)
    if not usual or timer != "event":
        return None
    event = median_interval(usual)
    if found.busy_ns <= event.high * (1 + SHARE) + TRACED_NS:
        return None
    return Finding(
        "timer",
        FLAG,
        f"the device worked for {found.busy_ns / 1e3:.1f} us in a call that was traced, and the event timer claims "
        f"{event.value / 1e3:.1f} us a call",
        evidence={
            "busy_ns": found.busy_ns,
            "span_ns": found.span_ns,
            "kernels": found.kernels,
            "claimed_ns": event.value,
        },
    )


def outside_work(
    samples: Sequence[Sample], outside_ns: Sequence[float], timer: str, threads: int, flush_ns: float
) -> Finding | None:
    """A finding where a worker uses CPU time for handing over data and output as if it computed there.

    `outside_ns` is what was used beyond the need, for each call. Threads that have computed may go on spinning a while,
    and emptying the caches, usually in `flush_ns`, takes twice that beside others who want the memory.
    """
    usual = claimed(samples, timer)
    if len(usual) < FEWEST:
        return None
    found = median_interval(outside_ns, confidence=0.99)
    if found.low <= OUTSIDE_NS * max(threads, 1) + flush_ns + median_interval(usual).value:
        return None
    return Finding(
        "outside-work",
        FLAG,
        f"the worker used {found.value / 1e6:.1f} ms of CPU time a call outside the call",
        evidence={"outside_ns": found.value, "outside_low_ns": found.low},
    )


def clocks_seen(states: Sequence[ClockState]) -> ClocksSeen | None:
    """The range of a clock over these moments, with all reasons that it was no higher; None without any."""
    clocks = [state.sm_mhz for state in states if state.sm_mhz is not None]
    if not clocks:
        return None
    return ClocksSeen(min(clocks), max(clocks), tuple(sorted(frozenset().union(*(state.reasons for state in states)))))


def slowed(found: ClocksSeen | None) -> Finding | None:
    """A finding where heat or the power brake held the clocks back while a case was sampled."""
    reasons = [] if found is None else [reason for reason in found.reasons if reason in SLOWDOWNS]
    if found is None or not reasons:
        return None
    return Finding(
        "throttled",
        "info",
        f"heat or the power brake held the clocks back in some calls: {', '.join(reasons)}",
        evidence={"low_mhz": found.low_mhz, "high_mhz": found.high_mhz},
    )


def compared(
    text: str, pairs: Sequence[tuple[float, float]], noise_pairs: Sequence[tuple[float, float]], timer: str
) -> PairedRatio:
    """The ratio of pairs (this, other), and of pairs of the same submission in two workers."""
    ratio, noise = _ratio(pairs, timer), _ratio(noise_pairs, timer)
    return PairedRatio(
        text, ratio.value, ratio.low, ratio.high, noise.low, noise.high, tuple(pairs), tuple(noise_pairs)
    )


def _ratio(pairs: Sequence[tuple[float, float]], timer: str) -> Interval:
    """The ratio of pairs, its interval wider by what half a step of the timer is of both times."""
    sides = list(zip(*pairs, strict=True))
    found = paired_ratio(*sides, confidence=CONFIDENCE)
    more = found.value * sum(step_ns(side, timer) / 2 / median(side) for side in sides)
    return Interval(found.value, found.low - more, found.high + more)


def nanoseconds(spans: object, timers: Sequence[str]) -> dict[str, float | None]:
    """Spans that a worker claims, by timer; None for one that was not taken or is no positive number."""
    told = spans if isinstance(spans, dict) else {}
    return {timer: _positive(told.get(timer)) for timer in timers}


def _positive(ns: object) -> float | None:
    is_number = isinstance(ns, int | float) and not isinstance(ns, bool)
    return float(ns) if is_number and 0 < ns < LONGEST_NS else None  # type: ignore[operator,arg-type]
