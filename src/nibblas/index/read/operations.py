"""Operations with the ranks of their cohorts, and workloads."""

import sqlite3
from collections.abc import Sequence

from nibblas.index.catalog import Catalog
from nibblas.index.documents import (
    CohortTable,
    NotFoundError,
    OperationLine,
    OperationPage,
    Query,
    WorkloadLine,
)
from nibblas.index.lines import run_lines
from nibblas.index.model import Operation, Workload
from nibblas.index.prepared import Ranked
from nibblas.index.read.limits import check_limit
from nibblas.index.read.search import search
from nibblas.index.store import made

MOST_COHORTS = 12  # of a page
MOST_OPTIONS = 50  # cohorts to choose from


def operations(catalog: Catalog, family: str | None = None) -> tuple[OperationLine, ...]:
    """Every operation, those with most runs first."""
    return tuple(line for line in catalog.prepared.operation_lines.values() if family in (None, line.family))


def operation(
    catalog: Catalog, slug: str, workload: str | None = None, cohort: str | None = None, limit: int = 50
) -> OperationPage:
    """An operation with its cohorts, or those of one workload (a digest), or one alone (a key).

    limit: ranked runs of each cohort. NotFoundError where the operation has no such workload or cohort.
    """
    check_limit(limit)
    row = _operation(catalog, slug)
    record = made(Operation, row)
    found = _cohorts(catalog, row["id"], record.slug, workload, cohort)
    tables = cohort_tables(catalog, found[:MOST_COHORTS], limit)
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
    return cohort_tables(catalog, found[:MOST_OPTIONS], 1), next(iter(cohort_tables(catalog, chosen, limit)), None)


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


def cohort_tables(catalog: Catalog, found: Sequence[Ranked], limit: int) -> tuple[CohortTable, ...]:
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
