"""What is computed of one state of an index and kept in memory: levels, places in cohorts, bits to select by.

Each part is made when it is first asked for.
"""

import json
import math
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from nibblas.index import compatibility, counts
from nibblas.index.compatibility import Device
from nibblas.index.documents import Card, Coverage, Facet, HardwareLine, OperationLine, Query, SourceLine
from nibblas.index.evidence_levels import (
    Cohort,
    Entrant,
    Levels,
    Observed,
    Place,
    levels,
    rank,
    refusals,
    settings,
    voided,
)
from nibblas.index.model import Event
from nibblas.index.selection import Selection, Sets

if TYPE_CHECKING:
    from nibblas.index.catalog import Catalog

# What the policy looks at. The length of a blob is known without reading it.
OBSERVED = """
SELECT r.implementation, r.digest, r.status, r.claimed, r.workload, r.device, r.environment, r.seconds, f.low, f.high,
    length(r.samples) / 8 AS samples, r.error, r.hardened, r.integrity
FROM run r LEFT JOIN figure f ON f.run = r.id AND f.position = (
    SELECT min(position) FROM figure WHERE run = r.id AND metric IN ('latency', 'score')
)
"""
SILENT = ("passed", "compiled")  # statuses that tell nothing against an implementation
OF_THESE = "WHERE r.implementation IN (SELECT value FROM json_each(?))"
# Implementations of one run each that tells nothing against them, by all that decides on their levels.
ALIKE = """
SELECT json_group_array(implementation) AS ids, status, claimed, device, environment, timed, sampled, checked, hardened
FROM (
    SELECT implementation, count(*) AS runs, status, claimed, device, environment, seconds IS NOT NULL AS timed,
        samples IS NOT NULL AS sampled, error BETWEEN -1e300 AND 1e300 AS checked, hardened, integrity
    FROM run GROUP BY implementation
)
WHERE runs = 1 AND status IN ('passed', 'compiled') AND integrity = '[]'
GROUP BY status, claimed, device, environment, timed, sampled, checked, hardened
"""
ENTRANTS = """
SELECT r.digest, i.slug, i.digest AS revision, i.current, r.status, r.seconds, f.low, f.high, r.observed_at,
    r.workload, w.digest AS workload_digest, r.protocol, p.digest AS protocol_digest, r.device, r.claimed, r.environment
FROM run r
JOIN implementation i ON i.id = r.implementation
JOIN protocol p ON p.id = r.protocol
LEFT JOIN workload w ON w.id = r.workload
LEFT JOIN figure f ON f.run = r.id AND f.position = (
    SELECT min(position) FROM figure WHERE run = r.id AND metric IN ('latency', 'score')
)
WHERE r.operation = ? AND r.device IS NOT NULL
"""


class Machine(NamedTuple):
    """What of an environment decides on comparisons."""

    threads: int | None
    host: str | None
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A cohort with all of its runs. workload and protocol are row ids; `excluded` holds the reasons by run."""

    key: str
    cohort: Cohort
    workload: int | None
    protocol: int
    places: tuple[Place, ...]
    excluded: dict[str, tuple[str, ...]]


@lru_cache(1024)
def _alone(
    status: str,
    claimed: bool,
    device: str | None,
    host: str | None,
    timed: bool,
    sampled: bool,
    checked: bool,
    hardened: bool,
) -> Levels:
    """Levels of a single run that tells nothing against its implementation: there are many such, and few kinds."""
    seconds, error = 1.0 if timed else None, 0.0 if checked else None
    return levels(
        [Observed("", status, claimed, None, device, None, host, seconds, None, None, int(sampled), error, hardened)]
    )


class Prepared:
    """One state of an index. `seconds` is what making its parts has taken so far."""

    def __init__(self, catalog: "Catalog"):
        self._catalog = catalog
        self._lock = threading.RLock()
        self._busy = False
        self._cohorts: dict[int, dict[str, Ranked]] = {}
        self._standings: dict[int, dict[str, tuple[Ranked, Place | None]]] = {}
        self.cards: dict[int, Card] = {}  # those that were shown, by row id
        self.facets: dict[Query, tuple[Facet, ...]] = {}  # of searches, whatever their page
        self.seconds = 0.0

    @contextmanager
    def making(self) -> Iterator[None]:
        """Make a part: one thread at a time, and the time is counted."""
        with self._lock:
            if self._busy:
                yield
                return
            self._busy, start = True, time.monotonic()
            try:
                yield
            finally:
                self._busy = False
                self.seconds += time.monotonic() - start

    @cached_property
    def said(self) -> dict[str, list[Event]]:
        """What somebody said of implementations and runs, by their digest."""
        found = defaultdict(list)
        with self.making():
            for row in self._catalog.all(
                "SELECT kind, subject, author, reason, body, at FROM event"
                " WHERE kind IN ('attest', 'dispute', 'refute', 'retract') ORDER BY id"
            ):
                kind, subject, author, reason, body, at = row
                found[subject].append(Event(kind, subject, author, reason, json.loads(body), at))
        return dict(found)

    @cached_property
    def machines(self) -> dict[int, Machine]:
        """What decides on comparisons, by the row id of an environment."""
        with self.making():
            return {
                key: Machine(threads, facts.get("host"), settings(facts))
                for key, threads, facts in (
                    (key, threads, json.loads(text))
                    for key, threads, text in self._catalog.all("SELECT id, threads, facts FROM environment")
                )
            }

    @cached_property
    def levels(self) -> dict[int, Levels]:
        """What is known of each current revision, by its row id."""
        with self.making():
            current = self._keys("SELECT id AS key FROM implementation WHERE current")
            found = dict.fromkeys(current, levels(()))
            compiled = self._compiled()
            apart = self._keys("SELECT DISTINCT implementation AS key FROM run") | compiled
            for row in self._catalog.all(ALIKE):
                alike = set(json.loads(row["ids"])) & current
                found |= dict.fromkeys(alike, self._of_one_run(row))
                apart -= alike - compiled
            apart |= self._keys(
                "SELECT id AS key FROM implementation WHERE digest IN (SELECT value FROM json_each(?1))"
                " UNION SELECT implementation FROM run WHERE digest IN (SELECT value FROM json_each(?1))",
                json.dumps(list(self.said)),
            )
            wanted = json.dumps(list(apart & current))
            runs = defaultdict(list)
            for row in self._catalog.all(f"{OBSERVED} {OF_THESE}", wanted):
                runs[row["implementation"]].append(row)
            digests = self._catalog.all(
                "SELECT id, digest FROM implementation WHERE id IN (SELECT value FROM json_each(?))", wanted
            )
            return found | {key: self._levels(digest, runs[key], key in compiled) for key, digest in digests}

    def _of_one_run(self, row: sqlite3.Row) -> Levels:
        machine = self.machines[row["environment"]]
        known = row["timed"], row["sampled"], row["checked"]
        return _alone(row["status"], bool(row["claimed"]), row["device"], machine.host, *known, bool(row["hardened"]))

    def levels_of_run(self, o: Observed, digest: str) -> Levels:
        """What is known by one run of the implementation that has a digest."""
        events = self.events(digest, [o.run])
        if events or o.refusals or o.status not in SILENT:
            return levels([o], events)
        checked = o.error is not None and math.isfinite(o.error)
        known = o.seconds is not None, o.samples > 0, checked
        return _alone(o.status, o.claimed, o.device, o.host, *known, o.hardened)

    def _keys(self, query: str, *values: str) -> set[int]:
        """The keys that a query gives, as one text, which is far quicker than many rows."""
        row = self._catalog.one(f"SELECT json_group_array(key) FROM ({query})", *values)
        return set(json.loads(row[0])) if row else set()

    def levels_of(self, key: int, digest: str) -> Levels:
        """What is known of a revision, current or not, by its row id and digest."""
        found = self.levels.get(key)
        if found is not None:
            return found
        rows = self._catalog.all(f"{OBSERVED} WHERE r.implementation = ?", key)
        compiled = "SELECT 1 FROM compat WHERE implementation = ? AND kind = 'compiled' AND NOT claimed"
        return self._levels(digest, rows, self._catalog.one(compiled, key) is not None)

    def _compiled(self) -> set[int]:
        return self._keys("SELECT DISTINCT implementation AS key FROM compat WHERE kind = 'compiled' AND NOT claimed")

    def _levels(self, digest: str, rows: Collection[sqlite3.Row], compiled: bool) -> Levels:
        observed = [self.observed(row) for row in rows]
        return levels(observed, self.events(digest, (o.run for o in observed)), compiled)

    def observed(self, row: sqlite3.Row) -> Observed:
        """What the policy looks at, of a row with the columns of OBSERVED; workloads are told apart by row id."""
        machine = self.machines[row["environment"]]
        return Observed(
            row["digest"],
            row["status"],
            bool(row["claimed"]),
            row["workload"],
            row["device"],
            machine.threads,
            machine.host,
            row["seconds"],
            row["low"],
            row["high"],
            row["samples"] or 0,
            row["error"],
            bool(row["hardened"]),
            refusals(json.loads(row["integrity"])) if row["integrity"] != "[]" else (),
        )

    def events(self, digest: str, runs: Iterable[str]) -> list[Event]:
        """What somebody said of an implementation or of one of its runs."""
        return [event for subject in (digest, *runs) for event in self.said.get(subject, ())] if self.said else []

    def cohorts(self, operation: int, slug: str) -> dict[str, Ranked]:
        """The cohorts of an operation by key, those with most ranked runs first."""
        with self.making():
            if operation not in self._cohorts:
                found = [self._ranked(slug, rows) for rows in self._comparable(operation)]
                found.sort(key=lambda ranked: (-len(ranked.places), -len(ranked.excluded), ranked.key))
                self._cohorts[operation] = {ranked.key: ranked for ranked in found}
                self._standings[operation] = {
                    **{run: (ranked, None) for ranked in found for run in ranked.excluded},
                    **{place.run: (ranked, place) for ranked in found for place in ranked.places},
                }
            return self._cohorts[operation]

    def standing(self, operation: int, slug: str, run: str) -> tuple[Ranked, Place | None] | None:
        """A run's cohort and its place there; None where it can be compared with nothing."""
        self.cohorts(operation, slug)
        return self._standings[operation].get(run)

    def _comparable(self, operation: int) -> Iterable[list[sqlite3.Row]]:
        groups = defaultdict(list)
        for row in self._catalog.all(ENTRANTS, operation):
            machine = self.machines[row["environment"]]
            alike = (row["workload"], row["protocol"], row["device"], row["claimed"], machine.threads, machine.settings)
            groups[alike].append(row)
        return groups.values()

    def _ranked(self, slug: str, rows: list[sqlite3.Row]) -> Ranked:
        one = rows[0]
        machine = self.machines[one["environment"]]
        cohort = Cohort(
            slug,
            one["workload_digest"],
            one["protocol_digest"],
            one["device"],
            machine.threads,
            bool(one["claimed"]),
            machine.settings,
        )
        places, excluded = rank(self._entrant(row) for row in rows)
        reasons = {run.run: run.reasons for run in excluded}
        return Ranked(cohort.key, cohort, one["workload"], one["protocol"], tuple(places), reasons)

    def _entrant(self, row: sqlite3.Row) -> Entrant:
        run = row["digest"]
        void = voided([run], self.events(row["revision"], [run])).get(run) if self.said else None
        return Entrant(
            run,
            row["slug"],
            row["status"],
            row["seconds"],
            row["low"],
            row["high"],
            row["observed_at"],
            bool(row["current"]),
            void,
        )

    @cached_property
    def selection(self) -> Selection:
        """What search filters and counts with."""
        with self.making():
            return Selection(self._catalog, self.levels)

    @cached_property
    def updated_at(self) -> str:
        """The time of the latest event; empty where there is none."""
        row = self._catalog.one("SELECT at FROM event ORDER BY id DESC LIMIT 1")
        return row["at"] if row else ""

    @cached_property
    def operation_lines(self) -> dict[str, OperationLine]:
        """How much there is of each operation, by slug."""
        with self.making():
            return counts.operation_lines(self._catalog)

    @cached_property
    def operation_names(self) -> dict[str, str]:
        """Names of operations by slug."""
        return {slug: line.name for slug, line in self.operation_lines.items()}

    @cached_property
    def workload_counts(self) -> dict[int, tuple[int, int]]:
        """Runs that passed and implementations of them, by the row id of a workload."""
        with self.making():
            return counts.workload_counts(self._catalog)

    @cached_property
    def source_lines(self) -> tuple[SourceLine, ...]:
        """How much came from each source."""
        with self.making():
            return counts.source_lines(self._catalog)

    @cached_property
    def coverage(self) -> Coverage:
        """How much there is in all."""
        with self.making():
            return counts.coverage(self._catalog)

    @cached_property
    def devices(self) -> dict[str, Device]:
        """Every device, by slug."""
        with self.making():
            return compatibility.devices(self._catalog)

    @cached_property
    def answers(self) -> dict[str, Sets]:
        """The implementations by each answer to "runs on it?", by the device's slug."""
        with self.making():
            found = compatibility.answers(self._catalog, self.devices.values())
            return {slug: self.selection.sets(of) for slug, of in found.items()}

    @cached_property
    def hardware_lines(self) -> dict[str, HardwareLine]:
        """How much was run on each device, by slug."""
        with self.making():
            return counts.hardware_lines(self._catalog)
