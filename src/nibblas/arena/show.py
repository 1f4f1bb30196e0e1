"""A record for people: tables and plots in a terminal. page.py makes a page of the same."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nibblas.arena.coverage import gaps
from nibblas.arena.record import (
    CaseResult,
    ClocksSeen,
    Comparison,
    Errors,
    Finding,
    PairedRatio,
    Protocol,
    Record,
    Traced,
)
from nibblas.statistics import quartiles
from nibblas.terminal import table_of
from nibblas.words import counted, time_text

BARS = " ▁▂▃▄▅▆▇█"
MOST_BINS = 40  # of a histogram, one character each
LONGEST = 2000  # characters of a message that are shown
COLOURS = {
    **{"correct here": "green", "correct": "green", "wrong": "red", "crashed": "red", "timeout": "red"},
    **{"refused": "red", "incompatible here": "yellow", "incompatible": "yellow", "unfinished": "yellow"},
    **{"not run": "dim", "refuse": "red", "flag": "yellow", "info": "dim"},
}
RANKINGS = {"last": "of the last case", "mean": "mean of the cases", "geom": "geometric mean of the cases"}
# What could move the cursor, colour the screen, or reverse the reading order: C0 and C1 but for newlines, surrogates,
# and the marks that direct text.
_UNSAFE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def clean(text: str, longest: int = LONGEST) -> str:
    """Text that a submission or problem may have written, safe to print: what is not plain text becomes U+FFFD."""
    text = _UNSAFE.sub("\ufffd", text.replace("\t", "    ").replace("\r\n", "\n"))
    return text if len(text) <= longest else text[: longest - 3] + "..."


def ns_text(ns: float) -> str:
    """A time in nanoseconds, told in four digits with the unit that suits.

    >>> ns_text(950), ns_text(12346), ns_text(1e9)
    ('950.0 ns', '12.35 us', '1.000 s')
    """
    return time_text(ns * 1e-9, digits=4)


def main_errors(case: CaseResult) -> Errors | None:
    """The largest errors of a case: against the exact answer where that is known, else against the reference."""
    exact = [e for e in case.errors if e.against == "exact"]
    return max(exact or case.errors, key=lambda e: e.max_relative_rms or 0.0, default=None)


def error_in_words(e: Errors) -> tuple[str, str]:
    """The largest error in units in the last place, and as a share of the RMS; what can't be measured so is said."""
    if e.special_mismatches:
        return f"{e.special_mismatches} NaN or inf", ""
    ulp = "" if e.max_ulp is None else f"{e.max_ulp:.3g}"
    if e.max_relative_rms is not None:
        return ulp, f"{e.max_relative_rms:.1e}" if e.max_relative_rms else "0"
    return ulp, "0" if e.max_absolute == 0 else f"{e.max_absolute:.3g} absolute"


def answers_in_words(cases: Sequence[CaseResult]) -> str:
    """What the errors of these cases are against."""
    kinds = {e.against for case in cases if (e := main_errors(case))}
    words = {"exact": "the exact answer in float64", "reference": "the problem's reference, rounded as it rounds"}
    if len(kinds) == 2:
        return f"Errors are against {words['exact']} where it is known, else against {words['reference']}."
    return "".join(f"Errors are against {words[kind]}." for kind in kinds)


def shared_values(cases: Sequence[CaseResult]) -> list[str]:
    """The values, as "seed: 1111", that all of several cases have, so that they need telling only once."""
    parts = [case.text.split("; ") for case in cases]
    return [part for part in parts[0] if all(part in other for other in parts[1:])] if len(parts) > 1 else []


def short_text(case: CaseResult, shared: Sequence[str]) -> str:
    """The case's text without what others share; all of it where nothing else is left."""
    own = [part for part in case.text.split("; ") if part not in shared]
    return "; ".join(own) or case.text


def span_in_words(low: float, high: float) -> str:
    """Two times in one unit: "24.43 - 24.63 us"."""
    (first, unit), (second, other) = ns_text(low).split(), ns_text(high).split()
    return f"{first} - {second} {unit}" if unit == other else f"{first} {unit} - {second} {other}"


def floor_share(case: CaseResult) -> str:
    """How much of the median the floor explains, "54%", or "≥ 54%" where not all inputs were tried for it.

    Empty where one of them is not known.
    """
    if case.floor_ns is None or case.statistics is None:
        return ""
    return f"{'≥ ' if case.has_partial_floor else ''}{case.floor_ns / case.statistics.median_ns:.0%}"


def traced_in_words(found: Traced) -> str:
    """What a profiler saw of one call, or why it saw nothing.

    >>> traced_in_words(Traced(kernels=8, span_ns=21_000.0, busy_ns=17_500.0, event_ns=24_000.0))
    '8 kernels, copies and fills in 21.00 us, 17.50 us of them at work; 24.00 us by events'
    """
    if not found.kernels:
        return found.why_not
    by_events = "" if found.event_ns is None else f"; {ns_text(found.event_ns)} by events"
    span, busy = ns_text(found.span_ns), ns_text(found.busy_ns)
    return f"{found.kernels} kernels, copies and fills in {span}, {busy} of them at work{by_events}"


def clocks_in_words(found: ClocksSeen) -> str:
    """The range of the SM clock while a case was sampled, and why it was no higher.

    >>> clocks_in_words(ClocksSeen(1740, 1980, ("SW power cap",)))
    'SM clock 1740 - 1980 MHz while sampled (SW power cap)'
    """
    low, high = found.low_mhz, found.high_mhz
    span = f"{low} - {high}" if low < high else f"{high}"
    return f"SM clock {span} MHz while sampled" + (f" ({', '.join(found.reasons)})" if found.reasons else "")


def histogram(values: Sequence[float], bins: int) -> tuple[str, float, float]:
    """How often values occur, as a row of block characters from `low` to `high`, which are returned too.

    What lies far out (beyond three times the distance of the quartiles) is counted in the last column, so that a single
    slow call does not flatten the rest. A column that holds anything shows at least an eighth.

    >>> histogram([1, 2, 2, 3], bins=3)
    ('▄█▄', 1, 3)
    """
    low, high = min(values), max(values)
    q1, _, q3 = quartiles(values)
    limit = q3 + 3 * (q3 - q1)
    high = min(high, max(limit, low)) if q3 > q1 else high
    counts = [0] * bins
    for value in values:
        place = (value - low) / (high - low) if high > low else 0.0
        counts[min(int(place * bins), bins - 1)] += 1
    top = max(counts)
    return "".join(BARS[math.ceil(count / top * 8)] for count in counts), low, high


def print_record(record: Record, console: Console) -> None:
    """What was run and what came of it, its cases with errors and times, how samples spread, and what was noticed."""
    _print_head(record, console)
    for kind, cases in groupby(record.cases, key=lambda case: case.kind):
        _print_cases(kind, list(cases), console)
    if record.comparison is not None and record.comparison.ratios:
        _print_comparison(record.comparison, console)
    _print_findings(record.all_findings, console)
    _print_inputs(record, console)
    _print_machine(record, console)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False)


def _heading(console: Console, text: str, beside: str = "") -> None:
    console.print()
    _say(console, f"[bold]{text}[/]" + (f" [dim]({escape(clean(beside, 200))})[/]" if beside else ""))


def _verdict(text: str) -> str:
    return f"[{COLOURS[text]}]{text}[/]"


def _print_head(record: Record, console: Console) -> None:
    name, entry = (escape(clean(text, 80)) for text in (record.task.name, record.submission.name))
    _say(console, f"[bold]{name}[/], {entry}: [bold]{_verdict(record.verdict)}[/]")
    if record.reason:
        _say(console, escape(clean(record.reason, 400)))
    if record.score is not None:
        cases = RANKINGS.get(record.task.ranking_by, record.task.ranking_by)
        _say(console, f"score [bold]{time_text(record.score, digits=4)}[/], {cases}")
    threads = f", {counted(record.environment.threads, 'thread')}" if record.environment.threads else ""
    hardened = ", hardened inputs too" if record.protocol.hardened else ""
    _say(
        console,
        f"[dim]{record.mode}{hardened} on {escape(clean(record.environment.device, 80))}{threads}, {record.when}[/]",
    )
    if record.stand_ins:
        names = escape(clean(", ".join(record.stand_ins), 400))
        _say(console, f"[yellow]stood in for what this machine lacks:[/] {names}")


def _print_cases(kind: str, cases: Sequence[CaseResult], console: Console) -> None:
    is_timed = any(case.statistics for case in cases)
    shared = shared_values(cases)
    _heading(console, kind.capitalize(), "; ".join(shared))
    numbers = ("ulp", "of RMS", *(("median", "interval", "of floor", "n") if is_timed else ()))
    table = table_of("case", "verdict", *numbers, right=numbers, whole=["verdict"], edge=False)
    table.columns[0].min_width = 12
    for case in cases:
        e = main_errors(case)
        cells = [escape(clean(short_text(case, shared), 400)), _verdict(case.verdict)]
        cells += error_in_words(e) if e else ("", "")
        table.add_row(*cells, *(_times(case) if is_timed else ()))
    console.print(table)
    for case in cases:
        if case.message and case.verdict not in ("correct", "not run"):
            _say(console, f"{escape(clean(short_text(case, shared), 400))}: {_verdict(case.verdict)}")
            console.print(Padding(Text(clean(case.message).strip()), (0, 0, 0, 2)))
        if case.report:
            console.print(Text(clean(case.report, 20_000)))
    if is_timed:
        _print_samples([case for case in cases if case.statistics], shared, console)
        for case in cases:
            if case.traced is not None:
                text = escape(clean(short_text(case, shared), 400))
                _say(console, f"[dim]Under a profiler, {text}: {escape(clean(traced_in_words(case.traced), 400))}.[/]")
    for case in cases:
        if case.clocks is not None:
            text = escape(clean(short_text(case, shared), 400))
            _say(console, f"[dim]{text}: {escape(clean(clocks_in_words(case.clocks), 400))}.[/]")
    if answers := answers_in_words(cases):
        _say(console, f"[dim]{answers}[/]")


def _times(case: CaseResult) -> tuple[str, ...]:
    found = case.statistics
    if found is None:
        return ("",) * 4
    mark = " [yellow]*[/]" if case.stand_ins else ""
    interval = span_in_words(found.low_ns, found.high_ns)
    return f"[bold]{ns_text(found.median_ns)}[/]{mark}", interval, floor_share(case), str(found.n)


def _print_samples(cases: Sequence[CaseResult], shared: Sequence[str], console: Console) -> None:
    texts = [clean(short_text(case, shared), 200) for case in cases]
    label = min(max(map(len, texts), default=0), console.width // 3)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(overflow="fold", width=label)
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(no_wrap=True, style="dim")
    bins = max(8, min(MOST_BINS, console.width - label - 42))
    for case, text in zip(cases, texts, strict=True):
        if times := case.times:
            bars, low, high = histogram(times, bins)
            beyond = f", slowest {ns_text(max(times))}" if max(times) > high else ""
            table.add_row(escape(text), ns_text(low), bars, ns_text(high) + beyond)
    console.print()
    console.print(table)
    if left_out := left_out_in_words(cases):
        _say(console, f"[dim]Not counted: {escape(left_out)}.[/]")
    if any(case.stand_ins for case in cases):
        _say(console, "[yellow]*[/] The calls went through a stand-in: the time is not the submission's own.")


def left_out_in_words(cases: Sequence[CaseResult]) -> str:
    """How many samples don't count, by reason: "6 (warm-up), 1 (below the floor)"."""
    reasons = Counter(s.reason for case in cases for s in case.samples if not s.valid)
    return ", ".join(f"{count} ({clean(reason, 60)})" for reason, count in reasons.items())


def comparison_in_words(ratio: PairedRatio) -> str:
    """What a ratio with its interval and the noise says, which could as well have been on the other side of 1."""
    noise_low = min(ratio.noise_low, 1 / ratio.noise_high if ratio.noise_high > 0 else 0.0)
    noise_high = max(ratio.noise_high, 1 / ratio.noise_low if ratio.noise_low > 0 else math.inf)
    if ratio.high < min(noise_low, 1.0):
        return f"{1 / ratio.ratio:.3g} times as fast"
    if ratio.low > max(noise_high, 1.0):
        return f"takes {ratio.ratio:.3g} times as long"
    return "no difference that can be told from noise"


def _print_comparison(comparison: Comparison, console: Console) -> None:
    numbers = ("ratio", "interval", "against itself")
    table = table_of("case", *numbers, "so it is", right=numbers, edge=False)
    table.columns[0].min_width = 12
    for r in comparison.ratios:
        table.add_row(
            escape(clean(r.text, 400)),
            f"[bold]{r.ratio:.3f}[/]",
            f"{r.low:.3f} - {r.high:.3f}",
            f"{r.noise_low:.3f} - {r.noise_high:.3f}",
            comparison_in_words(r),
        )
    _heading(console, f"Time over that of {escape(clean(comparison.against.name, 60))}")
    console.print(table)


def _print_findings(findings: Sequence[Finding], console: Console) -> None:
    if not findings:
        return
    _heading(console, "Findings")
    for f in findings:
        where = f" [dim]({escape(clean(f.where, 200))})[/]" if f.where else ""
        what = escape(clean(f.what, 400))
        console.print(
            Padding(
                Text.from_markup(f"{_verdict(f.severity)} {escape(clean(f.class_id, 60))}: {what}{where}"), (0, 0, 0, 2)
            )
        )


def _print_inputs(record: Record, console: Console) -> None:
    found = dict.fromkeys(gap for case in record.cases for gap in gaps(case.coverage))
    if not found:
        return
    _heading(console, "What the inputs leave out")
    for gap in found:
        console.print(Padding(Text(clean(gap)), (0, 0, 0, 2)))


def _print_machine(record: Record, console: Console) -> None:
    e, protocol = record.environment, record.protocol
    _heading(console, "How")
    rows = {
        "timer": timing_in_words(protocol),
        "isolated": isolation_in_words(record),
        "machine": ", ".join([e.device, e.system, f"Python {e.python}", f"torch {e.torch}"]),
        "versions": ", ".join(f"{name} {version}" for name, version in e.versions.items()),
        "facts": ", ".join(f"{name} {value}" for name, value in e.facts.items()),
        "command": record.command,
    }
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 2), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        if text:
            table.add_row(name, escape(clean(text)))
    console.print(table)


def timing_in_words(protocol: Protocol) -> str:
    flushed = f"{protocol.flush_bytes / 2**20:.0f} MiB written and read before each call"
    return f"{protocol.timer}; {counted(protocol.warmup, 'call')} of warm-up; {flushed}; {protocol.stopping_rule}"


def isolation_in_words(record: Record) -> str:
    """What is in force, then what is not and why."""
    in_force = [name for name, state in record.isolation.items() if state is True]
    missing = [
        f"not {name}: {state or 'no reason told'}" for name, state in record.isolation.items() if state is not True
    ]
    return "; ".join([", ".join(in_force), *missing]).strip("; ")
