"""The queries behind every page, its JSON twin, the API and the command line.

Each takes a Catalog and gives a document (documents.py). NotFoundError says that there is no such thing, NotShownError
that terms forbid to show it, QueryError that a filter or a cursor is none.
"""

import base64
import json
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal, get_args

import numpy as np

from nibblas.index.catalog import Catalog
from nibblas.index.documents import (
    Card,
    Cell,
    CohortTable,
    Comparison,
    Coverage,
    Difference,
    Dossier,
    Facet,
    FacetValue,
    Finding,
    HardwareLine,
    HardwarePage,
    Include,
    Licence,
    NotFoundError,
    NotShownError,
    OperationLine,
    OperationPage,
    Pair,
    Query,
    QueryError,
    Ref,
    Results,
    Revision,
    RunFilter,
    RunLine,
    RunPage,
    RunsPage,
    SourceLine,
    SourceText,
    TechniqueLine,
    TechniquePage,
    TechniqueUse,
    Way,
    WorkloadLine,
)
from nibblas.index.evidence_levels import NUMERICS, TIMING, Cohort, levels
from nibblas.index.lines import RUNS, cards, run_line, run_lines
from nibblas.index.model import Figure, Implementation, Operation, Run, RunStatus, Workload
from nibblas.index.names import device_slug
from nibblas.index.prepared import OBSERVED, Prepared, Ranked
from nibblas.index.rule import techniques as known_techniques
from nibblas.index.selection import size
from nibblas.index.store import made, unpack

STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)
FACETS = ("operation", "language", "framework", "uses", "timing", "numerics", "licence", "origin", "source")
MOST_VALUES = 12  # of a facet
MOST_LIMIT = 200  # lines of a page
MOST_RUNS = 100  # of a dossier
MOST_COHORTS = 12  # of a page
MOST_OPTIONS = 50  # cohorts to choose from
MOST_WORDS = 32  # of a text
MOST_TECHNIQUES = 16
SHOWN_FINDINGS = 3  # of a technique, unless all are asked for
LATEST = "9"  # after every time (ISO 8601)
MOST_ID = 1 << 62  # after every row


def search(catalog: Catalog, query: Query, facets: bool = True) -> Results:
    """One page of the implementations that a query selects, with what each facet would leave."""
    _check(query)
    prepared = catalog.prepared
    filters = prepared.selection.filters(query)
    found = prepared.selection.both(filters.values())
    ids, following = prepared.selection.page(found, query)
    counted = tuple(_facet(prepared, name, query, filters) for name in FACETS) if facets else ()
    return Results(query, int(size(found)), cards(catalog, ids), following, counted)


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MOST_LIMIT:
        raise QueryError(f"limit: {limit}, need 1 to {MOST_LIMIT}")


def _check(query: Query) -> None:
    _check_limit(query.limit)
    rules = {
        f"sort: {query.sort!r}, need evidence, newest or name": query.sort in ("evidence", "newest", "name"),
        f"numerics: {query.numerics!r}, need one of {', '.join(NUMERICS)}": query.numerics in (None, *NUMERICS),
        f"timing: {query.timing!r}, need one of {', '.join(TIMING)}": query.timing in (None, *TIMING),
        f"answer: {query.answer!r}, need yes, no or unknown": query.answer in ("yes", "no", "unknown"),
        f"text: more than {MOST_WORDS} words": len(query.text.split()) <= MOST_WORDS,
        f"techniques: more than {MOST_TECHNIQUES}": len(query.uses) + len(query.mentions) <= MOST_TECHNIQUES,
    }
    for rule, holds in rules.items():
        if not holds:
            raise QueryError(rule)


def _facet(prepared: Prepared, name: str, query: Query, filters: Mapping[str, np.ndarray]) -> Facet:
    """A facet with one value at a time is counted as if it were not chosen; `uses` adds to what is chosen."""
    selection = prepared.selection
    others = (found for filter_name, found in filters.items() if filter_name != name or name == "uses")
    chosen = getattr(query, name)
    kept = chosen if isinstance(chosen, tuple) else () if chosen is None else (chosen,)
    counts, more = selection.count(name, selection.both(others), kept, MOST_VALUES)
    values = tuple(FacetValue(value, _label(prepared, name, value), count, value in kept) for value, count in counts)
    return Facet(name, values, more)


def _label(prepared: Prepared, facet: str, value: str) -> str:
    if facet == "operation":
        return prepared.operation_names.get(value, value)
    return _technique(value).name if facet == "uses" else value


def _technique(slug: str) -> Ref:
    """A technique by the name that the rules give it."""
    known = known_techniques().get(slug)
    return Ref(slug, known.name if known else slug)


def implementation(catalog: Catalog, name: str, include: Collection[Include] = ()) -> Dossier:
    """All that is known of the current revision of a slug, or of the revision with a digest.

    include: "source" gives texts where they may be shown, "samples" those of each run, "findings" each one of a
    technique, not only the first few uses.
    """
    key, digest, what = _implementation(catalog, name)
    findings = _findings(catalog, key)
    licence = _licence(catalog, key, findings)
    lines, more = _runs_of(catalog, key, "samples" in include)
    return Dossier(
        digest=digest,
        implementation=what,
        revisions=_revisions(catalog, what.slug),
        previous=_texts(catalog, what.supersedes, "source" in include) if what.supersedes else (),
        files=_texts(catalog, digest, "source" in include),
        levels=catalog.prepared.levels_of(key, digest),
        cells=_cells(catalog, key, digest),
        runs=lines,
        more_runs=more,
        ways=_ways(what, licence),
        facts=catalog.store.facts(digest),
        hardware=(),
        techniques=_techniques_of(findings["technique"], "findings" in include),
        licence=licence,
        claims=catalog.store.claims(digest),
        events=tuple(catalog.store.events(digest)),
    )


def _implementation(catalog: Catalog, name: str) -> tuple[int, str, Implementation]:
    """Row id, digest and record of the current revision of a slug, or of the revision with a digest."""
    row = catalog.one(
        "SELECT id, digest FROM implementation WHERE digest = ?1 UNION ALL"
        " SELECT id, digest FROM implementation WHERE slug = ?1 AND current LIMIT 1",
        name.removeprefix("sha256:"),
    )
    if row is None:
        raise NotFoundError(f"no implementation has the slug or digest {name!r}")
    return row["id"], row["digest"], catalog.store.implementation(row["digest"])


def _revisions(catalog: Catalog, slug: str) -> tuple[Revision, ...]:
    rows = catalog.all(
        "SELECT revision, digest, imported_at FROM implementation WHERE slug = ? ORDER BY revision DESC", slug
    )
    return tuple(Revision(*row) for row in rows)


def _texts(catalog: Catalog, digest: str, with_text: bool) -> tuple[SourceText, ...]:
    rows = catalog.all(
        "SELECT f.path, file.sha256, file.size, file.lines, scan.media_type, i.may_show FROM implementation i"
        " JOIN implementation_file f ON f.implementation = i.id JOIN scan ON scan.id = f.scan"
        " JOIN file ON file.id = scan.file WHERE i.digest = ? ORDER BY f.path",
        digest,
    )
    found = []
    for *facts, may_show in rows:
        text = SourceText(*facts)
        if with_text and may_show:
            raw = catalog.store.content(text.sha256)
            read = raw.decode("utf-8", "replace")
            text = replace(text, text=read, exact=read.encode() == raw)
        found.append(text)
    return tuple(found)


def file(catalog: Catalog, name: str, path: str) -> tuple[SourceText, bytes]:
    """A file of an implementation and its raw bytes; NotShownError where the terms don't allow to hand it on."""
    _, digest, _ = _implementation(catalog, name)
    found = next((text for text in _texts(catalog, digest, False) if text.path == path), None)
    if found is None:
        raise NotFoundError(f"{name} has no file {path!r}")
    row = catalog.one(
        "SELECT i.may_show, i.licence_concluded, s.terms FROM implementation i JOIN source s ON s.id = i.source"
        " WHERE i.digest = ?",
        digest,
    )
    if row is None or not row["may_show"]:
        terms = f"its source hands it on under {row['terms']}" if row and row["terms"] else "its terms are unknown"
        licence = row["licence_concluded"] if row and row["licence_concluded"] else "unknown"
        raise NotShownError(f"{path} of {name} may not be shown: {terms}, and its licence is {licence}")
    return found, catalog.store.content(found.sha256)


def _runs_of(catalog: Catalog, key: int, with_samples: bool) -> tuple[tuple[RunLine, ...], int]:
    order = "ORDER BY r.claimed, r.seconds IS NULL, r.seconds, r.id LIMIT ?"
    rows = catalog.all(f"{RUNS} WHERE r.implementation = ? {order}", key, MOST_RUNS)
    (total,) = catalog.one("SELECT count(*) FROM run WHERE implementation = ?", key) or (0,)
    samples: Mapping[int, tuple[float, ...]] = {}
    if with_samples:
        wanted = json.dumps([row["id"] for row in rows])
        found = catalog.all("SELECT id, samples FROM run WHERE id IN (SELECT value FROM json_each(?))", wanted)
        samples = {run: unpack(blob) for run, blob in found}
    return tuple(run_line(catalog, row, samples.get(row["id"], ())) for row in rows), total - len(rows)


def _cells(catalog: Catalog, key: int, digest: str) -> tuple[Cell, ...]:
    """The evidence on each workload and device, those with a measured time first."""
    rows = catalog.all(f"{OBSERVED} WHERE r.implementation = ?", key)
    groups = defaultdict(list)
    for row in rows:
        groups[row["workload"], row["device"]].append(catalog.prepared.observed(row))
    wanted = json.dumps([workload for workload, _ in groups if workload is not None])
    names = {
        key: Ref(digest, name)
        for key, digest, name in catalog.all(
            "SELECT id, digest, name FROM workload WHERE id IN (SELECT value FROM json_each(?))", wanted
        )
    }
    cells = [
        Cell(
            names.get(workload),
            device,
            levels(observed, catalog.prepared.events(digest, [o.run for o in observed])),
        )
        for (workload, device), observed in groups.items()
    ]
    cells.sort(key=lambda cell: (-TIMING.index(cell.levels.timing), cell.device or "", str(cell.workload)))
    return tuple(cells)


def _findings(catalog: Catalog, key: int) -> defaultdict[str, list[Finding]]:
    """What the rules read from the files of an implementation, by topic, in the order of the lines."""
    rows = catalog.all(
        "SELECT finding.topic, f.path, finding.line, finding.body FROM implementation_file f"
        " JOIN finding ON finding.scan = f.scan WHERE f.implementation = ? ORDER BY f.path, finding.line, finding.id",
        key,
    )
    found = defaultdict(list)
    for topic, path, line, body in rows:
        found[topic].append(Finding(path, line, json.loads(body)))
    return found


def _techniques_of(findings: Iterable[Finding], every: bool) -> tuple[TechniqueUse, ...]:
    """Techniques that are used come first; of each the uses before the mentions."""
    groups = defaultdict(list)
    for finding in findings:
        groups[finding.body["technique"]].append(finding)
    found = []
    for technique, of in groups.items():
        uses = [finding for finding in of if finding.body["kind"] == "use"]
        shown = of if every else (uses or of)[:SHOWN_FINDINGS]
        found.append(TechniqueUse(_technique(technique), len(uses), len(of) - len(uses), tuple(shown)))
    found.sort(key=lambda use: (use.uses == 0, use.technique.slug))
    return tuple(found)


def _ways(what: Implementation, licence: Licence) -> tuple[Way, ...]:
    """How it can be used: its files copied, a module imported, a package installed; and for each why not."""
    files = " and ".join(f"{file.path} ({file.lines} lines)" for file in what.files)
    if not what.files:
        vendor = Way("vendor", None, "no source is stored")
    elif licence.shown:
        vendor = Way("vendor", f"Copy {files}, under {licence.shown_under}.", None)
    else:
        vendor = Way("vendor", None, "its terms don't allow to hand on the source")
    module = f"import {what.import_path.rpartition('.')[0] or what.import_path}" if what.import_path else None
    install = f"pip install {what.package}" if what.package else None
    return (
        vendor,
        Way("import", module, None if module else "its source names no module to import"),
        Way("install", install, None if install else "it is in no package that its source names"),
    )


def operations(catalog: Catalog, family: str | None = None) -> tuple[OperationLine, ...]:
    """Every operation, those with most runs first."""
    return tuple(line for line in catalog.prepared.operation_lines.values() if family in (None, line.family))


def operation(
    catalog: Catalog, slug: str, workload: str | None = None, cohort: str | None = None, limit: int = 50
) -> OperationPage:
    """An operation with its cohorts, or those of one workload (a digest), or one alone (a key).

    limit: ranked runs of each cohort. NotFoundError where the operation has no such workload or cohort.
    """
    _check_limit(limit)
    row = _operation(catalog, slug)
    record = made(Operation, row)
    found = _cohorts(catalog, row["id"], record.slug, workload, cohort)
    tables = _tables(catalog, found[:MOST_COHORTS], limit)
    results = search(catalog, Query(operation=record.slug, limit=limit), facets=False)
    return OperationPage(
        row["digest"],
        record,
        catalog.prepared.operation_lines.get(record.slug)
        or OperationLine(record.slug, record.name, record.family, 0, 0, 0, None),
        workloads(catalog, record.slug),
        tables,
        len(found) - len(tables),
        results.cards,
        results.total - len(results.cards),
    )


def cohorts(
    catalog: Catalog, operation: str, workload: str | None, cohort: str | None, limit: int
) -> tuple[tuple[CohortTable, ...], CohortTable | None]:
    """The cohorts to choose from, each with its fastest run alone, and the chosen one, else the largest, in full."""
    row = _operation(catalog, operation)
    found = _cohorts(catalog, row["id"], row["slug"], workload, None)
    chosen = _cohorts(catalog, row["id"], row["slug"], workload, cohort)[:1]
    return _tables(catalog, found[:MOST_OPTIONS], 1), next(iter(_tables(catalog, chosen, limit)), None)


def _operation(catalog: Catalog, name: str) -> sqlite3.Row:
    row = catalog.one(
        "SELECT * FROM operation WHERE slug = ?1 UNION ALL SELECT * FROM operation WHERE digest = ?1",
        name.removeprefix("sha256:"),
    )
    if row is None:
        raise NotFoundError(f"no operation has the slug or digest {name!r}")
    return row


def _cohorts(catalog: Catalog, key: int, slug: str, workload: str | None, cohort: str | None) -> list[Ranked]:
    """The cohorts of an operation: all, those of a workload, or one."""
    found = list(catalog.prepared.cohorts(key, slug).values())
    if workload is not None:
        workload = workload.removeprefix("sha256:")
        if not catalog.one("SELECT 1 FROM workload WHERE digest = ? AND operation = ?", workload, key):
            raise NotFoundError(f"{slug} has no workload {workload!r}")
        found = [ranked for ranked in found if ranked.cohort.workload == workload]
    if cohort is not None:
        found = [ranked for ranked in found if ranked.key == cohort]
        if not found:
            raise NotFoundError(f"{slug} has no cohort {cohort!r}")
    return found


def _tables(catalog: Catalog, found: Sequence[Ranked], limit: int) -> tuple[CohortTable, ...]:
    """Cohorts as tables: so many ranked runs of each, and as many of those left out."""
    ranked = [[place.run for place in cohort.places[:limit]] for cohort in found]
    left_out = [list(cohort.excluded)[:limit] for cohort in found]
    lines = {line.digest: line for line in run_lines(catalog, [run for runs in (*ranked, *left_out) for run in runs])}
    tables = []
    for cohort, runs, excluded in zip(found, ranked, left_out, strict=True):
        one = lines[(runs or excluded)[0]]
        tables.append(
            CohortTable(
                key=cohort.key,
                operation=one.operation,
                workload=one.workload,
                protocol=one.protocol,
                device=cohort.cohort.device,
                threads=cohort.cohort.threads,
                settings=dict(cohort.cohort.settings),
                claimed=cohort.cohort.claimed,
                size=len(cohort.places),
                runs=tuple(lines[run] for run in runs),
                more=len(cohort.places) - len(runs),
                excluded=tuple(lines[run] for run in excluded),
                more_excluded=len(cohort.excluded) - len(excluded),
            )
        )
    return tuple(tables)


def workloads(catalog: Catalog, operation: str | None = None) -> tuple[WorkloadLine, ...]:
    """Every workload, or those of an operation, those with most runs first."""
    operations = {row["id"]: made(Operation, row) for row in catalog.all("SELECT * FROM operation")}
    counts = catalog.prepared.workload_counts
    rows = catalog.all(
        "SELECT w.* FROM workload w JOIN operation o ON o.id = w.operation WHERE ?1 IS NULL OR o.slug = ?1", operation
    )
    found = [
        WorkloadLine(
            row["digest"],
            made(Workload, row, operation=operations[row["operation"]]),
            *counts.get(row["id"], (0, 0)),
        )
        for row in rows
    ]
    found.sort(key=lambda line: (-line.runs, line.workload.operation.slug, line.workload.name))
    return tuple(found)


def runs(catalog: Catalog, wanted: RunFilter) -> RunsPage:
    """One page of the runs that a filter selects, newest first and those of an unknown time last.

    Only those that passed, unless a status is named.
    """
    conditions = _run_conditions(catalog, wanted)
    at, before = _run_cursor(wanted.cursor) if wanted.cursor is not None else (LATEST, 0)
    rows: list[sqlite3.Row] = []
    if at is not None:
        known = {**conditions, "(r.observed_at, r.id) < (?, ?)": (at, before)}
        rows = _run_rows(catalog, known, wanted.limit + 1)
        before = MOST_ID
    if len(rows) <= wanted.limit and wanted.since is None:
        unknown = {**conditions, "r.observed_at IS NULL AND r.id < ?": (before,)}
        rows += _run_rows(catalog, unknown, wanted.limit + 1 - len(rows))
    shown = rows[: wanted.limit]
    following = _encoded([shown[-1]["observed_at"], shown[-1]["id"]]) if len(rows) > wanted.limit else None
    return RunsPage(wanted, tuple(run_line(catalog, row) for row in shown), following)


def _run_conditions(catalog: Catalog, wanted: RunFilter) -> dict[str, tuple]:
    _check_limit(wanted.limit)
    status = wanted.status or "passed"
    if status not in STATUSES:
        raise QueryError(f"status: {status!r}, need one of {', '.join(STATUSES)}")
    found: dict[str, tuple] = {"r.status = ?": (status,)}
    if wanted.operation is not None:
        row = catalog.one("SELECT id FROM operation WHERE slug = ?1 OR digest = ?1", wanted.operation)
        found["r.operation = ?"] = (row["id"] if row else None,)
    if wanted.hardware is not None:
        names = catalog.prepared.devices.get(device_slug(wanted.hardware), [""])
        # Of one name the index gives the runs in order.
        found[f"r.device IN ({', '.join('?' * len(names))})" if names[1:] else "r.device = ?"] = tuple(names)
    if wanted.source is not None:
        found["s.kind = ?"] = (wanted.source,)
    if wanted.since is not None:
        found["r.observed_at >= ?"] = (_moment(wanted.since),)
    return found


def _run_rows(catalog: Catalog, conditions: Mapping[str, tuple], limit: int) -> list[sqlite3.Row]:
    values = [value for of in conditions.values() for value in of]
    order = "ORDER BY r.observed_at DESC, r.id DESC LIMIT ?"
    return catalog.all(f"{RUNS} WHERE {' AND '.join(conditions)} {order}", *values, limit)


def _moment(text: str) -> str:
    """A time in the form in which they are stored."""
    try:
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        raise QueryError(f"since: {text!r} is no time, need one such as 2026-11-29T21:54:23Z") from None


def _encoded(key: list) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def _run_cursor(cursor: str) -> tuple[str | None, int]:
    try:
        at, key = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError):
        at, key = None, None
    if not (isinstance(at, str | None) and type(key) is int and 0 <= key <= MOST_ID):
        raise QueryError(f"cursor: {cursor!r} is none of a list of runs")
    return at, key


def run(catalog: Catalog, digest: str) -> RunPage:
    """All that is known of one run."""
    row = catalog.one(f"{RUNS} WHERE r.digest = ?", digest.removeprefix("sha256:"))
    if row is None:
        raise NotFoundError(f"no run has the digest {digest!r}")
    record = catalog.store.run(row["digest"])
    line = run_line(catalog, row)
    ranked = catalog.prepared.cohorts(row["operation"], row["operation_slug"]).get(line.standing.cohort or "")
    return RunPage(
        row["digest"],
        record,
        line,
        _in_common(ranked.cohort, record) if ranked else (),
        tuple(catalog.store.events(row["digest"])),
        _licence(catalog, row["implementation"], {}),
    )


def _in_common(cohort: Cohort, record: Run) -> tuple[tuple[str, str], ...]:
    facts = {
        "operation": record.operation.name,
        "workload": record.workload.name if record.workload else "the whole board",
        "protocol": " ".join(filter(None, (record.protocol.name, record.protocol.version))),
        "device": cohort.device,
        "threads": str(cohort.threads) if cohort.threads else None,
        "word": "somebody else's" if cohort.claimed else "measured here",
        **dict(cohort.settings),
    }
    return tuple((name, value) for name, value in facts.items() if value is not None)


def _licence(catalog: Catalog, key: int, findings: Mapping[str, list[Finding]]) -> Licence:
    row = catalog.one(
        "SELECT i.licence, i.licence_concluded, s.terms, s.attribution, i.may_show, i.shown_under"
        " FROM implementation i JOIN source s ON s.id = i.source WHERE i.id = ?",
        key,
    )
    assert row is not None
    return Licence(
        row["licence"],
        row["licence_concluded"],
        row["terms"],
        row["attribution"],
        bool(row["may_show"]),
        row["shown_under"],
        tuple(findings.get("licence", ())),
        tuple(findings.get("third party", ())),
    )


def techniques(catalog: Catalog) -> tuple[TechniqueLine, ...]:
    """Every technique that the rules know, those most used first."""
    selection = catalog.prepared.selection
    uses, mentions = selection.facet("uses"), selection.facet("mentions")
    found = []
    for slug, known in known_techniques().items():
        used = uses.size(slug)
        found.append(TechniqueLine(slug, known.name, known.about, used, mentions.size(slug) - used))
    found.sort(key=lambda line: (-line.uses, -line.mentions, line.slug))
    return tuple(found)


def technique(catalog: Catalog, slug: str, query: Query | None = None) -> TechniquePage:
    """A technique, and one page of the implementations that use it."""
    line = next((line for line in techniques(catalog) if line.slug == slug), None)
    if line is None:
        raise NotFoundError(f"no technique has the slug {slug!r}")
    query = query or Query()
    results = search(catalog, replace(query, uses=(*query.uses, slug) if slug not in query.uses else query.uses))
    wanted = json.dumps([card.digest for card in results.cards])
    rows = catalog.all(
        "SELECT i.slug, i.name, f.path, finding.line, finding.body FROM json_each(?) wanted"
        " JOIN implementation i ON i.digest = wanted.value JOIN implementation_file f ON f.implementation = i.id"
        " JOIN finding ON finding.scan = f.scan AND finding.topic = 'technique'"
        " WHERE finding.body ->> 'technique' = ? AND finding.body ->> 'kind' = 'use' ORDER BY wanted.key, finding.line",
        wanted,
        slug,
    )
    examples: dict[str, tuple[Ref, Finding]] = {}
    for of, name, path, number, body in rows:
        examples.setdefault(of, (Ref(of, name), Finding(path, number, json.loads(body))))
    return TechniquePage(line, results, tuple(examples.values()))


def hardware(catalog: Catalog) -> tuple[HardwareLine, ...]:
    """Every device that a run names, those with most runs first."""
    return tuple(catalog.prepared.hardware_lines.values())


def device(catalog: Catalog, slug: str, query: Query | None = None) -> HardwarePage:
    """A device with its cohorts, and one page of the implementations that run on it."""
    line = catalog.prepared.hardware_lines.get(device_slug(slug))
    if line is None:
        raise NotFoundError(f"no device has the slug or name {slug!r}")
    rows = catalog.all(
        "SELECT DISTINCT o.id, o.slug FROM json_each(?) wanted JOIN run r ON r.device = wanted.value"
        " JOIN operation o ON o.id = r.operation",
        json.dumps(catalog.prepared.devices.get(line.slug, ())),
    )
    names = set(catalog.prepared.devices.get(line.slug, ()))
    found = [
        ranked
        for key, operation in rows
        for ranked in catalog.prepared.cohorts(key, operation).values()
        if ranked.cohort.device in names
    ]
    found.sort(key=lambda ranked: (-len(ranked.places), ranked.key))
    tables = _tables(catalog, found[:MOST_COHORTS], 10)
    results = search(catalog, replace(query or Query(), hardware=line.slug))
    return HardwarePage(line, {}, tables, len(found) - len(tables), results)


def sources(catalog: Catalog) -> tuple[SourceLine, ...]:
    """Every source and its terms, those with most implementations first."""
    return catalog.prepared.source_lines


def coverage(catalog: Catalog) -> Coverage:
    """How much there is."""
    return catalog.prepared.coverage


def compare(catalog: Catalog, a: str, b: str, include: Collection[Include] = ()) -> Comparison:
    """Two implementations side by side: times of the same cohorts, facts that differ.

    include: "source" gives texts where they may be shown.
    """
    keys = [_implementation(catalog, name) for name in (a, b)]
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
        _texts(catalog, keys[0][1], "source" in include),
        _texts(catalog, keys[1][1], "source" in include),
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
