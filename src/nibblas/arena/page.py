"""A record as one page of HTML that needs nothing else: no script, no fonts, no other file; light and dark."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from nibblas.arena.coverage import gaps
from nibblas.arena.record import CaseResult, Comparison, Coverage, Finding, Record, Sample
from nibblas.arena.show import (
    RANKINGS,
    answers_in_words,
    clean,
    clocks_in_words,
    comparison_in_words,
    error_in_words,
    floor_share,
    isolation_in_words,
    left_out_in_words,
    main_errors,
    ns_text,
    shared_values,
    short_text,
    span_in_words,
    timing_in_words,
)
from nibblas.words import counted, time_text

# Of a plot, in its own units.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 220, 66, 8, 12, 28
TIMES = ("median", "interval", "of floor", "samples")
TONES = {
    **{"correct here": "good", "correct": "good", "wrong": "bad", "crashed": "bad", "timeout": "bad", "refused": "bad"},
    **{"incompatible here": "warn", "incompatible": "warn", "unfinished": "warn", "not run": "none"},
    **{"refuse": "bad", "flag": "warn", "info": "none"},
}

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #57606a; --line: #d0d7de; --paper: #ffffff; --band: #f3f5f7;
  --good: #116329; --bad: #a40e26; --warn: #7d4e00; --blue: #0550ae; --soft: #cfe0f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9ba6b2; --line: #3a424c; --paper: #0f1318;
  --band: #181d24; --good: #56d364; --bad: #ff8182; --warn: #e3b341; --blue: #79b8ff; --soft: #1d3557; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; font-weight: 600; }
p { margin: .4rem 0; } .dim { color: var(--dim); } .small { font-size: .9rem; }
code, pre, td, .num { font-variant-numeric: tabular-nums; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; } pre { background: var(--band); padding: .7rem .9rem;
  border-radius: 6px; white-space: pre-wrap; margin: .4rem 0; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .none { color: var(--dim); }
.verdict { font-size: 1.15rem; font-weight: 600; } .score { font-size: 1.9rem; font-weight: 600; margin: .6rem 0 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; min-width: 100%; overflow-wrap: normal; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { font-weight: 500; color: var(--dim); font-size: .9rem; white-space: nowrap; }
tbody th { font-weight: 400; min-width: 8rem; }
td { white-space: nowrap; } td.num, th.num { text-align: right; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2rem; }
figure { margin: .3rem 0 1rem; } figcaption { font-size: .9rem; color: var(--dim); }
svg { display: block; width: 100%; max-width: 36rem; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--dim); } .axis { stroke: var(--line); }
.sample { fill: var(--blue); fill-opacity: .75; } .left-out { fill: none; stroke: var(--dim); }
.throttled { fill: none; stroke: var(--warn); stroke-width: 1.5; } .median { stroke: var(--blue); stroke-width: 1.5; }
.interval { fill: var(--soft); } .floor { stroke: var(--good); stroke-width: 1.5; stroke-dasharray: 6 4; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: .4rem 0; }
dt { color: var(--dim); }
dd { margin: 0; } @media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; } }
ul { padding-left: 1.2rem; margin: .4rem 0; } li { margin: .25rem 0; } summary { cursor: pointer; color: var(--blue); }
.wide:focus-visible, summary:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
"""


def page(record: Record) -> str:
    """The whole document, in ASCII. What submissions and problems wrote is escaped, and rid of what directs text."""
    title = f"{record.task.name}, {record.submission.name}: {record.verdict}"
    parts = [
        _head(record),
        *(_stage(kind, list(cases)) for kind, cases in groupby(record.cases, key=lambda case: case.kind)),
        _comparison(record.comparison) if record.comparison and record.comparison.ratios else "",
        _findings(record.all_findings),
        _inputs(record.cases),
        _how(record),
    ]
    document = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main></body></html>\n"
    )
    return document.encode("ascii", "xmlcharrefreplace").decode()


def _text(value: object, longest: int = 2000) -> str:
    return escape(clean(str(value), longest))


def _tone(word: str) -> str:
    return f'<span class="{TONES[word]}">{word}</span>'


def _head(record: Record) -> str:
    e = record.environment
    lines = [f"<h1>{_text(record.task.name)}, {_text(record.submission.name)}</h1>"]
    lines.append(f'<p class="verdict">{_tone(record.verdict)}</p>')
    if record.score is not None:
        lines.append(f'<p class="score">{time_text(record.score, digits=4)}</p>')
        lines.append(f'<p class="dim">score, {_text(RANKINGS.get(record.task.ranking_by, record.task.ranking_by))}</p>')
    if record.reason:
        lines.append(f"<p>{_text(record.reason)}</p>")
    threads = f", {counted(e.threads, 'thread')}" if e.threads else ""
    hardened = " with hardened inputs too" if record.protocol.hardened else ""
    lines.append(f'<p class="dim">{record.mode}{hardened} on {_text(e.device)}{threads}, {_text(record.when)}</p>')
    if record.stand_ins:
        names = _text(", ".join(record.stand_ins))
        lines.append(f'<p><span class="warn">Stood in for what this machine lacks:</span> {names}.</p>')
    return "\n".join(lines)


def _table(
    name: str, headers: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", text_columns: int = 1
) -> str:
    """A table that scrolls on a narrow screen; cells are HTML, the first of a row its heading, later ones numbers."""
    kinds = ["" if i < text_columns else ' class="num"' for i in range(len(headers))]
    head = "".join(f'<th scope="col"{kind}>{header}</th>' for header, kind in zip(headers, kinds, strict=True))
    body = "".join(
        f'<tr><th scope="row">{first}</th>'
        + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(rest, kinds[1:], strict=True))
        + "</tr>"
        for first, *rest in rows
    )
    above = f'<p class="dim small">{_text(caption)}</p>' if caption else ""
    return (
        f'{above}<div class="wide" tabindex="0" role="region" aria-label="{_text(name)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _stage(kind: str, cases: list[CaseResult]) -> str:
    is_timed = any(case.statistics for case in cases)
    shared = shared_values(cases)
    headers = ["case", "verdict", *(TIMES if is_timed else ()), "ulp", "of RMS"]
    caption = f"All cases: {'; '.join(shared)}." if shared else ""
    caption = " ".join(filter(None, [caption, answers_in_words(cases)]))
    rows = [_row(case, shared, is_timed) for case in cases]
    parts = [f"<h2>{kind.capitalize()}</h2>", _table(f"Cases of {kind}", headers, rows, caption, text_columns=2)]
    for case in cases:
        if case.message and case.verdict not in ("correct", "not run"):
            parts.append(f"<h3>{_text(short_text(case, shared))}: {_tone(case.verdict)}</h3>")
            parts.append(f"<pre>{_text(clean(case.message).strip())}</pre>")
        if case.report:
            summary = f"<summary>Profile of {_text(case.text)}</summary>"
            parts.append(f"<details>{summary}<pre>{_text(case.report, 20_000)}</pre></details>")
    parts += [
        f'<p class="dim small">{_text(short_text(case, shared))}: {_text(clocks_in_words(case.clocks))}.</p>'
        for case in cases
        if case.clocks is not None
    ]
    figures = [_figure(case, short_text(case, shared)) for case in cases if case.statistics]
    parts.append(f'<div class="plots">{"".join(figures)}</div>' if figures else "")
    return "\n".join(parts)


def _row(case: CaseResult, shared: Sequence[str], is_timed: bool) -> list[str]:
    e, found = main_errors(case), case.statistics
    cells = [_text(short_text(case, shared)), _tone(case.verdict)]
    if is_timed and found:
        mark = ' <span class="warn">(through a stand-in)</span>' if case.stand_ins else ""
        cells += [f"<b>{ns_text(found.median_ns)}</b>{mark}", span_in_words(found.low_ns, found.high_ns)]
        cells += [floor_share(case), str(found.n)]
    elif is_timed:
        cells += [""] * len(TIMES)
    return [*cells, *(error_in_words(e) if e else ("", ""))]


# --- plots ---------------------------------------------------------------------------------------------------------


def _figure(case: CaseResult, name: str) -> str:
    """Every sample by its place in the run, with the median, its interval and the floor, where that is near."""
    found = case.statistics
    assert found is not None
    samples = [(i, s, ns) for i, s in enumerate(case.samples) if (ns := s.claimed_ns.get(found.timer)) is not None]
    times = case.times
    high = _upper_end([ns for *_, ns in samples], times)
    floor = case.floor_ns if case.floor_ns and 0.5 * min(times) <= case.floor_ns <= high else None
    low = min([*times, *([floor] if floor else [])])
    low = max(0.0, low - 0.08 * (high - low))
    last, right = len(case.samples) - 1, WIDTH - RIGHT

    def y(ns: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (min(max(ns, low), high) - low) / ((high - low) or 1.0))

    def x(place: float) -> float:
        return LEFT + (right - LEFT) * place / max(last, 1)

    def across(kind: str, ns: float) -> str:
        return f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{y(ns):.1f}" y2="{y(ns):.1f}"/>'

    def label(text: str, x: float, y: float, anchor: str) -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'

    thick = max(y(found.low_ns) - y(found.high_ns), 1)
    marks = [
        f'<rect class="interval" x="{LEFT}" y="{y(found.high_ns):.1f}" width="{right - LEFT}" height="{thick:.1f}"/>'
    ]
    for tick in _ticks(low, high):
        marks += [across("axis", tick), label(ns_text(tick), LEFT - 8, y(tick) + 4, "end")]
    marks.append(across("median", found.median_ns))
    if floor:
        marks += [across("floor", floor), label(f"floor {ns_text(floor)}", right, y(floor) - 5, "end")]
    marks += [_mark(s, x(i), y(ns), ns > high) for i, s, ns in samples]
    marks.append(label(f"calls 0 to {last}", (LEFT + right) / 2, HEIGHT - 10, "middle"))
    words = (
        f"{found.n} samples from {ns_text(min(times))} to {ns_text(max(times))}, median {ns_text(found.median_ns)}, "
        f"interval {span_in_words(found.low_ns, found.high_ns)}"
    ) + (f", floor {ns_text(case.floor_ns)}" if case.floor_ns else "")
    left_out = left_out_in_words([case])
    caption = f"{words}." + (f" Hollow, not counted: {left_out}." if left_out else "")
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(words)}">{"".join(marks)}</svg>'
    return f"<section><h3>{_text(name)}</h3><figure>{svg}<figcaption>{_text(caption)}</figcaption></figure></section>"


def _upper_end(all_times: Sequence[float], valid: Sequence[float]) -> float:
    """The top of a plot: above nearly all samples; a few that are far slower are drawn as triangles at the edge."""
    ordered = sorted(valid)
    usual = ordered[int(0.9 * (len(ordered) - 1))]
    return min(max(all_times), usual + 1.5 * max(usual - ordered[0], 0.05 * usual)) * 1.01


def _mark(sample: Sample, x: float, y: float, is_beyond: bool) -> str:
    kind = "sample" if sample.valid else "throttled" if sample.throttled else "left-out"
    if is_beyond:
        return f'<path class="{kind}" d="M{x - 4:.1f} {y + 6:.1f} L{x:.1f} {y:.1f} L{x + 4:.1f} {y + 6:.1f} Z"/>'
    if sample.throttled:
        return f'<rect class="{kind}" x="{x - 2.5:.1f}" y="{y - 2.5:.1f}" width="5" height="5"/>'
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'


def _ticks(low: float, high: float) -> list[float]:
    """Some three to six round numbers between two."""
    wanted = (high - low) / 5 or 1.0
    unit = 10.0 ** math.floor(math.log10(wanted))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= wanted)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


# --- the rest ------------------------------------------------------------------------------------------------------


def _comparison(comparison: Comparison) -> str:
    rows = [
        [
            _text(r.text),
            comparison_in_words(r),
            f"<b>{r.ratio:.3f}</b>",
            f"{r.low:.3f} - {r.high:.3f}",
            f"{r.noise_low:.3f} - {r.noise_high:.3f}",
        ]
        for r in comparison.ratios
    ]
    caption = "Ratio of times, pair by pair; below 1 this submission is faster. The last column is the noise."
    headers = ["case", "so it is", "ratio", "interval", "against itself"]
    table = _table("Comparison", headers, rows, caption, text_columns=2)
    return f"<h2>Time over that of {_text(comparison.against.name)}</h2>{table}"


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    items = []
    for f in findings:
        evidence = ", ".join(f"{name} {value}" for name, value in f.evidence.items())
        beside = "; ".join(filter(None, [f.where, evidence]))
        dim = f' <span class="dim">({_text(beside)})</span>' if beside else ""
        items.append(f"<li>{_tone(f.severity)} {_text(f.class_id, 60)}: {_text(f.what)}{dim}</li>")
    return f"<h2>Findings</h2><ul>{''.join(items)}</ul>"


def _inputs(cases: Sequence[CaseResult]) -> str:
    """What the inputs leave out, and the values of each tensor of the first case that tells them."""
    told = [case for case in cases if case.coverage]
    if not told:
        return ""
    left_out = dict.fromkeys(gap for case in told for gap in gaps(case.coverage))
    items = "".join(f"<li>{_text(gap)}</li>" for gap in left_out)
    rows = [_values(c) for c in told[0].coverage]
    table = _table(
        "Inputs",
        ["tensor", "dtype", "codes", "shape", "zero", "negative", "magnitudes"],
        rows,
        f"Inputs of {told[0].text}.",
        text_columns=3,
    )
    intro = f"<h3>They leave out</h3><ul>{items}</ul>" if items else ""
    return f"<h2>Inputs</h2>{intro}<details><summary>All input tensors</summary>{table}</details>"


def _values(c: Coverage) -> list[str]:
    codes = f"low {c.low_codes}, high {c.high_codes}" if c.low_codes is not None else c.byte_codes or ""
    sizes = "" if c.smallest is None or c.largest is None else f"{c.smallest:.3g} - {c.largest:.3g}"
    shape = " x ".join(map(str, c.shape))
    return [_text(c.tensor), _text(c.dtype), _text(codes), shape, f"{c.zero:.0%}", f"{c.negative:.0%}", sizes]


def _how(record: Record) -> str:
    e, protocol = record.environment, record.protocol
    rows = {
        "timing": timing_in_words(protocol),
        "timers": ", ".join(protocol.timers),
        "isolated": isolation_in_words(record),
        "device": e.device,
        "CPU": e.cpu,
        "system": ", ".join([e.system, f"Python {e.python}", f"torch {e.torch}"]),
        "versions": ", ".join(f"{name} {version}" for name, version in e.versions.items()),
        "facts": ", ".join(f"{name} {value}" for name, value in e.facts.items()),
        "bandwidth": f"{protocol.bandwidth / 1e9:.0f} GB/s ({protocol.bandwidth_source})" if protocol.bandwidth else "",
        "command": record.command,
        "record": f"{record.id}, schema {record.schema}",
    }
    listed = "".join(f"<dt>{name}</dt><dd>{_text(text)}</dd>" for name, text in rows.items() if text)
    files = {**record.task.files, **record.submission.files}
    sums = "\n".join(f"{digest}  {name}" for name, digest in files.items())
    seeds = "\n".join(f"{seed.commitment}  of {seed.salt}:{seed.seed}" for seed in protocol.seeds)
    return (
        f"<h2>How</h2><dl>{listed}</dl>"
        f"<details><summary>sha256 of the files</summary><pre>{_text(sums, 20_000)}</pre></details>"
        f"<details><summary>Commitments to the secret seeds</summary><pre>{_text(seeds)}</pre></details>"
    )
