"""Two implementations side by side."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from nibblas.index.catalog import Catalog
from nibblas.index.documents import Card, Comparison, Difference, Include, Pair, RunLine
from nibblas.index.lines import RUNS, cards, run_line
from nibblas.index.model import Figure, Implementation
from nibblas.index.read.dossier import find, texts_of


def compare(catalog: Catalog, a: str, b: str, include: Collection[Include] = ()) -> Comparison:
    """Two implementations side by side: times of the same cohorts, facts that differ.

    include: "source" gives texts where they may be shown.
    """
    keys = [find(catalog, name) for name in (a, b)]
    card_a, card_b = (cards(catalog, [key])[0] for key, _, _ in keys)
    lines = [_ranked_lines(catalog, key) for key, _, _ in keys]
    pairs = tuple(_pair(key, lines[0][key], lines[1][key]) for key in lines[0] if key in lines[1])
    facts = [_comparable_facts(card, what) for card, (_, _, what) in zip((card_a, card_b), keys, strict=True)]
    differences = [Difference(name, value, facts[1][name]) for name, value in facts[0].items()]
    used = [set(card.techniques) for card in (card_a, card_b)]
    return Comparison(
        card_a,
        card_b,
        pairs,
        () if pairs else tuple(_why_not(card_a, card_b, lines)),
        tuple(d for d in differences if d.a != d.b),
        tuple(d for d in differences if d.a == d.b and d.a is not None),
        {
            "both": tuple(sorted(used[0] & used[1])),
            "only a": tuple(sorted(used[0] - used[1])),
            "only b": tuple(sorted(used[1] - used[0])),
        },
        texts_of(catalog, keys[0][1], "source" in include),
        texts_of(catalog, keys[1][1], "source" in include),
    )


def _ranked_lines(catalog: Catalog, key: int) -> dict[str, RunLine]:
    """The run that stands for an implementation in each cohort, by the cohort's key."""
    rows = catalog.all(f"{RUNS} WHERE r.implementation = ? AND r.status = 'passed'", key)
    lines = (run_line(catalog, row) for row in rows)
    return {line.standing.cohort: line for line in lines if line.standing.cohort and line.standing.rank}


def _pair(cohort: str, a: RunLine, b: RunLine) -> Pair:
    assert a.figure is not None, "a run with a rank has a time"
    assert b.figure is not None
    a_low, a_high = _interval(a.figure)
    b_low, b_high = _interval(b.figure)
    low, high = a_low / b_high, a_high / b_low
    faster: Literal["a", "b", "neither"] = "a" if high < 1 else "b" if low > 1 else "neither"
    return Pair(cohort, a, b, a.figure.value / b.figure.value, low, high, faster)


def _interval(figure: Figure) -> tuple[float, float]:
    known = figure.low is not None and figure.high is not None
    return (figure.low, figure.high) if known else (figure.value, figure.value)  # type: ignore[return-value]


def _comparable_facts(card: Card, what: Implementation) -> dict[str, str | None]:
    return {
        "operation": card.operation.name if card.operation else None,
        "authors": ", ".join(card.authors) or None,
        "language": card.language,
        "framework": card.framework,
        "entry point": what.entry_point,
        "signature": what.signature,
        "numerics": card.levels.numerics,
        "timing": card.levels.timing,
        "devices with a run": ", ".join(card.devices) or None,
        "licence declared": card.licence,
        "licence concluded": card.licence_concluded,
        "terms of its source": what.source.terms,
        "kind of source": card.source_kind,
        "written by": None if card.origin == "unknown" else card.origin,
        "lines of source": str(sum(file.lines for file in what.files)) if what.files else None,
        "files": " ".join(f"{file.path} {file.sha256[:12]}" for file in what.files) or None,
    }


def _why_not(a: Card, b: Card, lines: Sequence[Mapping[str, RunLine]]) -> Iterator[str]:
    """Why no time of one can be paired with one of the other."""
    if a.operation != b.operation:
        names = (card.operation.name if card.operation else "unknown" for card in (a, b))
        yield "the operations differ: {} and {}".format(*names)
    silent = [card.name for card, of in zip((a, b), lines, strict=True) if not of]
    if silent:
        yield from (f"{name} has no ranked run" for name in silent)
        return
    for what, value_of in (
        ("devices", lambda line: line.device or "unknown"),
        ("workloads", lambda line: line.workload.name if line.workload else "the whole board"),
        ("protocols", lambda line: line.protocol),
        ("numbers of threads", lambda line: str(line.threads)),
        ("words", lambda line: "somebody else's" if line.claimed else "measured here"),
    ):
        of_a, of_b = ({value_of(line) for line in of.values()} for of in lines)
        if not of_a & of_b:
            yield f"the {what} differ: {_some(of_a)} and {_some(of_b)}"


def _some(values: Collection[str], most: int = 3) -> str:
    shown = sorted(values)[:most]
    return ", ".join(shown) + (f" and {len(values) - most} more" if len(values) > most else "")
