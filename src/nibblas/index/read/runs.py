"""Runs, newest first, and all of one."""

import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import get_args

from nibblas.index import cursor
from nibblas.index.catalog import Catalog
from nibblas.index.compatibility import device_of
from nibblas.index.documents import NotFoundError, QueryError, RunFilter, RunPage, RunsPage
from nibblas.index.evidence_levels import Cohort
from nibblas.index.lines import RUNS, run_line
from nibblas.index.model import Run, RunStatus
from nibblas.index.read.dossier import licence_of
from nibblas.index.read.limits import check_limit

STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)
LATEST = "9"  # after every time (ISO 8601)
MOST_ID = 1 << 62  # after every row


def runs(catalog: Catalog, wanted: RunFilter) -> RunsPage:
    """One page of the runs that a filter selects, newest first and those of an unknown time last.

    Only those that passed, unless a status is named.
    """
    conditions = run_conditions(catalog, wanted)
    at, before = _after(wanted.cursor) if wanted.cursor is not None else (LATEST, 0)
    rows: list[sqlite3.Row] = []
    if at is not None:
        known = {**conditions, "(r.observed_at, r.id) < (?, ?)": (at, before)}
        rows = _rows(catalog, known, wanted.limit + 1)
        before = MOST_ID
    if len(rows) <= wanted.limit and wanted.since is None:
        unknown = {**conditions, "r.observed_at IS NULL AND r.id < ?": (before,)}
        rows += _rows(catalog, unknown, wanted.limit + 1 - len(rows))
    shown = rows[: wanted.limit]
    following = cursor.encode(shown[-1]["observed_at"], shown[-1]["id"]) if len(rows) > wanted.limit else None
    return RunsPage(wanted, tuple(run_line(catalog, row) for row in shown), following)


def run_conditions(catalog: Catalog, wanted: RunFilter) -> dict[str, tuple]:
    check_limit(wanted.limit)
    status = wanted.status or "passed"
    if status not in STATUSES:
        raise QueryError(f"status: {status!r}, need one of {', '.join(STATUSES)}")
    found: dict[str, tuple] = {"r.status = ?": (status,)}
    if wanted.operation is not None:
        row = catalog.one("SELECT id FROM operation WHERE slug = ?1 OR digest = ?1", wanted.operation)
        found["r.operation = ?"] = (row["id"] if row else None,)
    if wanted.hardware is not None:
        device = device_of(catalog.prepared.devices, wanted.hardware)
        names = (device.names if device else ()) or ("",)
        # Of one name the index gives the runs in order.
        found[f"r.device IN ({', '.join('?' * len(names))})" if names[1:] else "r.device = ?"] = names
    if wanted.source is not None:
        found["s.kind = ?"] = (wanted.source,)
    if wanted.since is not None:
        found["r.observed_at >= ?"] = (_moment(wanted.since),)
    return found


def _rows(catalog: Catalog, conditions: Mapping[str, tuple], limit: int) -> list[sqlite3.Row]:
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


def _after(text: str) -> tuple[str | None, int]:
    """The time and the row id that a page ended with."""
    at, key = cursor.decode(text, 2)
    if not (isinstance(at, str | None) and type(key) is int and 0 <= key <= MOST_ID):
        raise QueryError(f"cursor: {text!r} is none of a list of runs")
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
        licence_of(catalog, row["implementation"], {}),
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
