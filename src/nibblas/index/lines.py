"""Rows of an index as the lines of documents: runs in tables, implementations in lists."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from nibblas.index.catalog import Catalog
from nibblas.index.documents import Card, Fastest, Ref, RunLine, Standing
from nibblas.index.evidence_levels import Place
from nibblas.index.model import Claim, Figure
from nibblas.index.prepared import Ranked

KEPT_CARDS = 20_000
# What a rule read of implementation i, without the line of source itself where that may not be shown.
FINDING_BODY = "CASE WHEN i.may_show THEN finding.body ELSE json_remove(finding.body, '$.snippet') END"
# What a catalog says of a technique is the line of source that it cites.
CITING = "technique"
# The figure that ranks comes with its run.
RUNS = """
SELECT r.id, r.digest, r.implementation, r.status, r.reason, r.claimed, r.workload, r.device, r.environment, r.seconds,
    length(r.samples) / 8 AS samples, r.error, r.hardened, r.integrity, r.floor, r.observed_at, r.operation,
    i.digest AS revision_digest, i.slug, i.name, i.revision, i.may_show, s.kind AS source_kind,
    o.slug AS operation_slug, o.name AS operation_name, w.digest AS workload_digest, w.name AS workload_name,
    p.name AS protocol, e.arch,
    (SELECT json_group_array(name) FROM (
        SELECT a.name FROM implementation_author ia JOIN author a ON a.id = ia.author
        WHERE ia.implementation = i.id ORDER BY ia.position
    )) AS authors,
    f.metric, f.statistic, f.value, f.low, f.high, f.n
FROM run r
JOIN implementation i ON i.id = r.implementation
JOIN source s ON s.id = i.source
JOIN operation o ON o.id = r.operation
JOIN protocol p ON p.id = r.protocol
JOIN environment e ON e.id = r.environment
LEFT JOIN workload w ON w.id = r.workload
LEFT JOIN figure f ON f.run = r.id AND f.position = (
    SELECT min(position) FROM figure WHERE run = r.id AND metric IN ('latency', 'score')
)
"""
CARDS = """
SELECT i.id, i.slug, i.name, i.digest, i.revision, o.slug, o.name, i.language, i.framework, i.origin, i.licence,
    i.licence_concluded, s.kind, i.may_show, i.package, i.imported_at
FROM json_each(?) wanted
JOIN implementation i ON i.id = wanted.value
JOIN source s ON s.id = i.source
LEFT JOIN operation o ON o.id = i.operation
"""
FASTEST = """
SELECT r.implementation, r.digest, r.device, r.claimed, w.digest AS workload_digest, w.name AS workload_name,
    f.metric, f.statistic, f.value, f.low, f.high, f.n
FROM json_each(?) wanted
JOIN run r ON r.id = (
    SELECT id FROM run WHERE implementation = wanted.value AND status = 'passed' AND seconds IS NOT NULL
    ORDER BY seconds LIMIT 1
)
JOIN figure f ON f.run = r.id AND f.position = (
    SELECT min(position) FROM figure WHERE run = r.id AND metric IN ('latency', 'score')
)
LEFT JOIN workload w ON w.id = r.workload
"""


def shown_claims(claims: Iterable[Claim], may_show: bool) -> tuple[Claim, ...]:
    """Claims, without the words of those that repeat a line of source where that may not be shown."""
    return tuple(c if may_show or not c.subject.startswith(CITING) else replace(c, value=None) for c in claims)


def run_lines(catalog: Catalog, digests: Sequence[str]) -> list[RunLine]:
    """Runs as lines, in the order of their digests."""
    rows = catalog.all(f"{RUNS} WHERE r.digest IN (SELECT value FROM json_each(?))", json.dumps(digests))
    found = {row["digest"]: run_line(catalog, row) for row in rows}
    return [found[digest] for digest in digests if digest in found]


def run_line(catalog: Catalog, row: sqlite3.Row, samples: tuple[float, ...] = ()) -> RunLine:
    """A row of RUNS as a line."""
    prepared = catalog.prepared
    observed = prepared.observed(row)
    known = prepared.levels_of_run(observed, row["revision_digest"])
    return RunLine(
        row["digest"],
        Ref(row["slug"], row["name"]),
        row["revision"],
        Ref(row["operation_slug"], row["operation_name"]),
        workload_ref(row),
        row["protocol"],
        row["device"],
        row["arch"],
        observed.threads,
        row["status"],
        row["reason"],
        observed.claimed,
        row["observed_at"],
        figure(row),
        row["floor"],
        row["error"],
        observed.hardened,
        known,
        standing(prepared.standing(row["operation"], row["operation_slug"], row["digest"]), row["digest"]),
        tuple(json.loads(row["authors"])),
        row["source_kind"],
        bool(row["may_show"]),
        samples,
    )


def standing(found: tuple[Ranked, Place | None] | None, run: str) -> Standing:
    """Where a run stands, from its cohort and its place there."""
    if found is None:
        return Standing(None, 0, None, False, ("its device is unknown",))
    ranked, place = found
    if place is None:
        return Standing(ranked.key, len(ranked.places), None, False, ranked.excluded[run])
    return Standing(ranked.key, len(ranked.places), place.rank, place.tied)


def workload_ref(row: sqlite3.Row) -> Ref | None:
    """The workload of a row, by its digest."""
    return Ref(row["workload_digest"], row["workload_name"]) if row["workload_digest"] else None


def figure(row: sqlite3.Row) -> Figure | None:
    """The figure of a row, None where it has none."""
    if row["metric"] is None:
        return None
    return Figure(row["metric"], row["statistic"], row["value"], row["low"], row["high"], row["n"])


def cards(catalog: Catalog, ids: Sequence[int]) -> tuple[Card, ...]:
    """Implementations, by row id, as they stand in lists, in the same order."""
    kept = catalog.prepared.cards
    found = {key: kept[key] for key in ids if key in kept}
    missing = [key for key in ids if key not in found]
    if missing:
        read = _cards(catalog, missing)
        found |= read
        if len(kept) > KEPT_CARDS:
            kept.clear()
        kept |= read
    return tuple(found[key] for key in ids if key in found)


def _cards(catalog: Catalog, ids: Sequence[int]) -> dict[int, Card]:
    wanted = json.dumps(ids)
    authors = _lists(
        catalog,
        "SELECT ia.implementation, a.name FROM json_each(?) wanted"
        " JOIN implementation_author ia ON ia.implementation = wanted.value JOIN author a ON a.id = ia.author"
        " ORDER BY ia.implementation, ia.position",
        wanted,
    )
    techniques = _lists(
        catalog,
        "SELECT t.implementation, t.technique FROM json_each(?) wanted"
        " JOIN implementation_technique t ON t.implementation = wanted.value WHERE t.uses ORDER BY t.uses DESC",
        wanted,
    )
    devices = _lists(
        catalog,
        "SELECT DISTINCT r.implementation, r.device FROM json_each(?) wanted"
        " JOIN run r ON r.implementation = wanted.value WHERE r.status = 'passed' AND r.device IS NOT NULL"
        " ORDER BY r.device",
        wanted,
    )
    fastest = {row["implementation"]: row for row in catalog.all(FASTEST, wanted)}
    known = catalog.prepared
    found = {}
    for key, slug, name, digest, revision, of, called, *texts, kind, shown, package, at in catalog.all(CARDS, wanted):
        language, framework, origin, licence, concluded = texts
        found[key] = Card(
            slug,
            name,
            digest,
            revision,
            Ref(of, called) if of else None,
            tuple(authors[key]),
            language,
            framework,
            origin,
            known.levels_of(key, digest),
            licence,
            concluded,
            kind,
            bool(shown),
            tuple(techniques[key]),
            tuple(devices[key]),
            _fastest(fastest.get(key), known.said),
            package,
            at,
        )
    return found


def _lists(catalog: Catalog, query: str, wanted: str) -> defaultdict[int, list[str]]:
    found = defaultdict(list)
    for key, value in catalog.all(query, wanted):
        found[key].append(value)
    return found


def _fastest(row: sqlite3.Row | None, said: Collection[str]) -> Fastest | None:
    """None too where somebody disputes it or took it back: the run's own page tells what."""
    found = None if row is None or row["digest"] in said else figure(row)
    if row is None or found is None:
        return None
    return Fastest(row["digest"], found, workload_ref(row), row["device"], bool(row["claimed"]))
