"""The index's one SQLite file: opened, migrated, written an item at a time, read back, checked and copied.

One process writes at a time, and says so in a lock file beside the index; any number read meanwhile (write-ahead log).
An item is stored in one transaction or not at all, so a process that is killed leaves nothing half done. Events are
only ever added: triggers refuse the rest. Full-text search is kept by triggers on the table `searched`.

PostgreSQL: nothing here needs more than SQL with transactions, so a shared index with many writers would keep model.py,
the importers and the readers as they are. What differs is in this file and in schema/: STRICT tables become plain ones,
INTEGER PRIMARY KEY becomes an identity column, JSON text becomes jsonb, BLOB becomes bytea; the FTS5 table and its
triggers become a generated tsvector column with a GIN index; BEGIN IMMEDIATE and the lock file become the server's own
row locks and unique constraints (an import would retry when two writers add the same slug), and the backup is its
pg_dump. It is not built: one file, no server and no account serve a person, a team on one machine and a static site.
"""

import array
import hashlib
import json
import os
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

from nibblas.index import licence
from nibblas.index.model import (
    Claim,
    CompatFact,
    Environment,
    Event,
    Figure,
    Implementation,
    Item,
    Operation,
    Protocol,
    Run,
    Source,
    SourceFile,
    Tensor,
    Workload,
    digest_of,
    now,
)
from nibblas.index.scan import Scan, identifiers
from nibblas.paths import cache_dir

if TYPE_CHECKING:
    from nibblas.index.machine_code import Confirmation

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SCHEMA = Path(__file__).parent / "schema"
APPLICATION_ID = 0x6E69626C  # "nibl", in the file's header
# Kinds of source of which only what they hold now is current; a data set's older snapshot supersedes nothing.
LOCAL = ("file", "nibblas")
RANKING_METRICS = ("latency", "score")

Outcome = Literal["added", "revised", "updated", "unchanged"]
Spec = TypeVar("Spec")


class StoreError(RuntimeError):
    """The index can't be opened, read or written as asked; nothing was changed."""


DEMO = "index-demo.sqlite"  # beside the default index: what `nibblas index demo` fills


def no_index(path: Path) -> StoreError:
    """What is said where a path should hold an index."""
    demo = default_path().with_name(DEMO)
    other = f", --db {demo} is the demo's" if demo.exists() and demo != path else ""
    return StoreError(f"{path}: no index there; `nibblas index add --own` makes one of nibblas's own kernels{other}")


def default_path() -> Path:
    """The index of this user on this machine."""
    return cache_dir() / "index.sqlite"


class Store:
    """An open index. As a context manager it closes itself."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: BinaryIO | None):
        self.path, self.connection, self._lock = path, connection, lock
        connection.row_factory = sqlite3.Row

    @classmethod
    def open(cls, path: str | Path, read_only: bool = False, wait: float = 5.0) -> "Store":
        """Open an index; the writer makes and migrates it where needed.

        Parameters
        ----------
        wait : seconds to wait for another writer.

        Raises StoreError where there is none to read, where the file is something else, or of a newer nibblas, or where
        another process is writing it (named).
        """
        path = Path(path)
        if read_only:
            return cls(path, _connect_to_read(path), None)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path, wait)
        try:
            return cls(path, _connect_to_write(path, wait), lock)
        except BaseException:
            lock.close()
            raise

    def close(self) -> None:
        """Close the file, and let another process write."""
        self.connection.close()
        if self._lock:
            self._lock.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written inside is kept together, or not at all. Inside another, it can be undone alone."""
        nested = self.connection.in_transaction
        begin, commit, rollback = (
            ("SAVEPOINT item", "RELEASE item", "ROLLBACK TO item")
            if nested
            else ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK")
        )
        self.connection.execute(begin)
        try:
            yield
            self.connection.execute(commit)
        except BaseException:
            # SQLite ends the transaction by itself where the disk is full or the file can't be read.
            if self.connection.in_transaction:
                self.connection.execute(rollback)
                if nested:
                    self.connection.execute(commit)
            raise

    def add(self, item: Item, scans: Mapping[str, Scan] | None = None) -> Outcome:
        """Store an item, in one transaction. `scans` holds what the rules found in its files, by path.

        A known implementation (by digest) gains the runs, facts and claims that it lacks: "updated", or "unchanged"
        where there are none. A new one under a known slug becomes the revision that supersedes the current one:
        "revised". So does an earlier revision that is what a local source holds again.

        Raises ValueError where contents and files do not fit, and StoreError where the slug of a local file belongs to
        a file from another place.
        """
        implementation = item.implementation
        _check_contents(item)
        with self.transaction():
            found = self._one("SELECT id, current FROM implementation WHERE digest = ?", implementation.digest)
            outcome: Outcome = "unchanged"
            if found is None:
                key, outcome = self._insert_implementation(item)
            else:
                key, is_current = found
                if self._describe(key, implementation):
                    outcome = "updated"
                if not is_current and implementation.source.kind in LOCAL:
                    self._supersede(implementation, now())
                    self.connection.execute("UPDATE implementation SET current = 1 WHERE id = ?", (key,))
                    outcome = "revised"
            for workload in item.workloads:
                self._workload(workload)
            new = self._attach(key, implementation.digest, item.runs, item.facts, item.claims)
            if outcome == "unchanged" and new:
                outcome = "updated"
            if outcome in ("added", "revised") and not scans:
                self._conclude(key)
            self.keep_scans({self._scan_of(key, path): scan for path, scan in (scans or {}).items()})
        return outcome

    def attach(self, digest: str, runs: Iterable[Run], facts: Iterable[CompatFact] = ()) -> Outcome:
        """Add those runs and facts that a stored revision lacks; KeyError where there is none of this digest."""
        found = self._one("SELECT id FROM implementation WHERE digest = ?", digest)
        if found is None:
            raise KeyError(f"{digest}: no implementation of this digest in {self.path}")
        with self.transaction():
            return "updated" if self._attach(found[0], digest, runs, facts, ()) else "unchanged"

    def _attach(
        self, key: int, digest: str, runs: Iterable[Run], facts: Iterable[CompatFact], claims: Iterable[Claim]
    ) -> bool:
        """Add what is new of these; whether something was."""
        new = [self._add_run(key, digest, run) for run in runs]
        new += [self._add_owned("compat", key, fact) for fact in facts]
        new += [self._add_owned("claim", key, claim) for claim in claims]
        return any(new)

    def keep_scans(self, scans: Mapping[int, Scan]) -> None:
        """Keep what the rules found in files, by the keys that `unscanned` gave, and all that follows from it."""
        with self.transaction():
            for key, scan in scans.items():
                self._keep_scan(key, scan)
            touched = {
                implementation
                for key in scans
                for (implementation,) in self.connection.execute(
                    "SELECT implementation FROM implementation_file WHERE scan = ?", (key,)
                )
            }
            for implementation in sorted(touched):
                self._conclude(implementation)

    def confirm(self, digest: str, path: str, answer: "Confirmation", by: str) -> None:
        """Keep with a technique's finding in a file what machine code says of it; one that stays open says nothing.

        A scan by newer rules finds anew, and forgets this.
        """
        if answer.state == "open":
            return
        found = answer.finding
        self.connection.execute(
            "UPDATE finding SET body = json_set(body, '$.machine_code', json(?))"
            " WHERE topic = 'technique' AND line = ? AND json_extract(body, '$.technique') = ? AND scan ="
            " (SELECT f.scan FROM implementation_file f JOIN implementation i ON i.id = f.implementation"
            " WHERE i.digest = ? AND f.path = ?)",
            (
                _json({"state": answer.state, "opcode": answer.opcode, "by": by}),
                found.line,
                found.technique,
                digest,
                path,
            ),
        )

    def record(self, event: Event) -> None:
        """Add an event; KeyError where its subject is the digest of no implementation and no run."""
        if self.subject(event.subject) != event.subject:
            raise KeyError(f"{event.subject}: a slug, an event needs a digest")
        with self.transaction():
            self._add_event(event)

    def subject(self, name: str) -> str:
        """The digest of the current revision of a slug; a digest of an implementation or a run is its own.

        KeyError where there is none of these.
        """
        found = self._one(
            "SELECT digest FROM implementation WHERE digest = ?1 UNION ALL SELECT digest FROM run WHERE digest = ?1"
            " UNION ALL SELECT digest FROM implementation WHERE slug = ?1 AND current",
            name,
        )
        if found is None:
            raise KeyError(f"{name}: no implementation or run of this slug or digest in {self.path}")
        return found[0]

    def _insert_implementation(self, item: Item) -> tuple[int, Outcome]:
        new = item.implementation
        at = new.imported_at or now()
        before = self._supersede(new, at)
        (last,) = self._the("SELECT ifnull(max(revision), 0) FROM implementation WHERE slug = ?", new.slug)
        revision = last + 1
        key = self._insert(
            "implementation",
            digest=new.digest,
            slug=new.slug,
            revision=revision,
            supersedes=before,
            current=1,
            name=new.name,
            operation=self._operation(new.operation) if new.operation else None,
            **_description(new),
            origin=new.origin,
            licence=new.licence,
            package=new.package,
            import_path=new.import_path,
            source=self._identified("source", new.source),
            record=new.record,
            imported_at=at,
        )
        for position, name in enumerate(new.authors):
            self.connection.execute("INSERT OR IGNORE INTO author (name) VALUES (?)", (name,))
            (author,) = self._the("SELECT id FROM author WHERE name = ?", name)
            self._insert("implementation_author", implementation=key, position=position, author=author)
        for file in new.files:
            scan = self._scan(self._file(file, item.contents[file.path]), file.media_type)
            self._insert("implementation_file", implementation=key, path=file.path, scan=scan)
        self._add_event(Event("publish", new.digest, body={"slug": new.slug, "revision": revision}, at=at))
        return key, "added" if before is None else "revised"

    def _supersede(self, new: Implementation, at: str) -> int | None:
        """Let the slug's current revision make room for another; its key."""
        before = self._one(
            "SELECT i.id, i.digest, s.kind, s.locator, i.record FROM implementation i JOIN source s ON s.id = i.source"
            " WHERE i.slug = ? AND i.current",
            new.slug,
        )
        if before is None:
            return None
        key, digest, kind, locator, record = before
        # A local file's name says nothing about files elsewhere; all other slugs name one thing everywhere.
        if "file" in (kind, new.source.kind) and (locator, record) != (new.source.locator, new.record):
            raise StoreError(f"slug {new.slug} belongs to {record or locator} from {locator}; give another by --slug")
        self.connection.execute("UPDATE implementation SET current = 0 WHERE id = ?", (key,))
        self.connection.execute("DELETE FROM searched WHERE implementation = ?", (key,))
        self.connection.execute("DELETE FROM implementation_technique WHERE implementation = ?", (key,))
        self._add_event(Event("supersede", digest, body={"by": new.digest}, at=at))
        return key

    def _describe(self, key: int, implementation: Implementation) -> bool:
        """Keep what an importer read from the files; whether that was new."""
        new = _description(implementation)
        old = self._the(f"SELECT {', '.join(new)} FROM implementation WHERE id = ?", key)
        if tuple(old) == tuple(new.values()):
            return False
        columns = ", ".join(f"{name} = :{name}" for name in new)
        self.connection.execute(f"UPDATE implementation SET {columns} WHERE id = :id", {**new, "id": key})
        return True

    def _file(self, file: SourceFile, raw: bytes) -> int:
        found = self._one("SELECT id FROM file WHERE sha256 = ?", file.sha256)
        if found:
            return found[0]
        return self._insert(
            "file", sha256=file.sha256, size=file.size, lines=file.lines, content=zlib.compress(raw, level=6)
        )

    def _scan(self, file: int, media_type: str) -> int:
        found = self._one("SELECT id FROM scan WHERE file = ? AND media_type = ?", file, media_type)
        return found[0] if found else self._insert("scan", file=file, media_type=media_type)

    def _operation(self, operation: Operation) -> int:
        """The row of an operation. Each of its fields is what the first source that gave it said."""
        row = _row(operation)
        found = self._one("SELECT id, digest FROM operation WHERE slug = ?", operation.slug)
        if found is None:
            return self._insert("operation", digest=operation.digest, **row)
        key, digest = found
        if digest != operation.digest:
            old = self._get(Operation, key)
            empty = {f.name for f in fields(Operation) if getattr(old, f.name) in (None, ())}
            merged = replace(old, **{name: getattr(operation, name) for name in empty})
            if merged != old:
                row = {**_row(merged), "digest": merged.digest}
                columns = ", ".join(f"{name} = :{name}" for name in row)
                self.connection.execute(f"UPDATE operation SET {columns} WHERE id = :id", {**row, "id": key})
        return key

    def _workload(self, workload: Workload) -> int:
        return self._identified("workload", workload, operation=self._operation(workload.operation))

    def _identified(self, table: str, spec: Workload | Protocol | Environment | Source, **replaced: int) -> int:
        # A Source's identity is its terms alone; its row is found by all of it.
        digest = digest_of("Source", _values(spec)) if isinstance(spec, Source) else spec.digest
        found = self._one(f"SELECT id FROM {table} WHERE digest = ?", digest)
        return found[0] if found else self._insert(table, digest=digest, **{**_row(spec), **replaced})

    def _add_run(self, implementation: int, of: str, run: Run) -> bool:
        digest = run.digest_for(of)
        if self._one("SELECT 1 FROM run WHERE digest = ?", digest):
            return False
        ranking = [figure.value for figure in run.figures if figure.metric in RANKING_METRICS]
        key = self._insert(
            "run",
            digest=digest,
            implementation=implementation,
            operation=self._operation(run.operation),
            workload=self._workload(run.workload) if run.workload else None,
            protocol=self._identified("protocol", run.protocol),
            environment=self._identified("environment", run.environment),
            status=run.status,
            claimed=run.claimed,
            reason=run.reason,
            observed_at=run.observed_at,
            samples=_pack(run.samples),
            floor=run.floor,
            error=run.error,
            hardened=run.hardened,
            beside=_json(run.beside),
            config=_json(run.config),
            integrity=_json(run.integrity),
            kernel_digest=run.kernel_digest,
            command=run.command,
            record=run.record,
            device=run.environment.device,
            seconds=ranking[0] if ranking else None,
        )
        for position, figure in enumerate(run.figures):
            self._insert("figure", run=key, position=position, **_row(figure))
        return True

    def _add_owned(self, table: str, implementation: int, spec: CompatFact | Claim) -> bool:
        before = self.connection.total_changes
        self._insert(table, "OR IGNORE", implementation=implementation, **_row(spec))
        return self.connection.total_changes > before

    def _add_event(self, event: Event) -> None:
        self._insert(
            "event",
            at=event.at or now(),
            kind=event.kind,
            subject=event.subject,
            author=event.by,
            reason=event.reason,
            body=_json(event.body),
        )

    def _scan_of(self, implementation: int, path: str) -> int:
        return self._the(
            "SELECT scan FROM implementation_file WHERE implementation = ? AND path = ?", implementation, path
        )[0]

    def _keep_scan(self, key: int, scan: Scan) -> None:
        if self._the("SELECT versions FROM scan WHERE id = ?", key)["versions"] == scan.versions:
            return
        self.connection.execute("DELETE FROM finding WHERE scan = ?", (key,))
        self.connection.executemany(
            "INSERT INTO finding (scan, topic, line, body) VALUES (?, ?, ?, ?)", [(key, *found) for found in scan.found]
        )
        self.connection.execute(
            "UPDATE scan SET versions = ?, problem = ? WHERE id = ?", (scan.versions, scan.problem, key)
        )

    def _conclude(self, key: int) -> None:
        """Compute anew what follows from the findings in an implementation's files, and from their text."""
        row = self._the(
            "SELECT i.name, i.slug, i.current, i.licence, s.terms, o.slug AS operation, o.name AS of, o.family"
            " FROM implementation i JOIN source s ON s.id = i.source LEFT JOIN operation o ON o.id = i.operation"
            " WHERE i.id = ?",
            key,
        )
        shown = self._conclude_licence(key, row["licence"], row["terms"])
        if not row["current"]:
            return
        self.connection.execute("DELETE FROM implementation_technique WHERE implementation = ?", (key,))
        self.connection.execute(
            "INSERT INTO implementation_technique (technique, implementation, uses, mentions)"
            " SELECT json_extract(f.body, '$.technique') AS technique, i.implementation,"
            " sum(json_extract(f.body, '$.kind') = 'use'), sum(json_extract(f.body, '$.kind') <> 'use')"
            " FROM implementation_file i JOIN finding f ON f.scan = i.scan AND f.topic = 'technique'"
            " WHERE i.implementation = ? GROUP BY technique",
            (key,),
        )
        techniques = self.connection.execute(
            "SELECT technique FROM implementation_technique WHERE implementation = ? AND uses ORDER BY technique",
            (key,),
        )
        authors = self.connection.execute(
            "SELECT a.name FROM implementation_author ia JOIN author a ON a.id = ia.author WHERE ia.implementation = ?"
            " ORDER BY ia.position",
            (key,),
        )
        contents = self.connection.execute(
            "SELECT f.content FROM implementation_file i JOIN scan s ON s.id = i.scan JOIN file f ON f.id = s.file"
            " WHERE i.implementation = ? ORDER BY i.path",
            (key,),
        )
        self.connection.execute(
            "INSERT INTO searched (implementation, name, authors, operation, techniques, source)"
            " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (implementation) DO UPDATE SET name = excluded.name,"
            " authors = excluded.authors, operation = excluded.operation, techniques = excluded.techniques,"
            " source = excluded.source",
            (
                key,
                f"{row['name']} {row['slug']}",
                " ".join(name for (name,) in authors),
                " ".join(row[name] or "" for name in ("operation", "of", "family")).strip(),
                " ".join(technique for (technique,) in techniques),
                identifiers(zlib.decompress(content) for (content,) in contents) if shown else "",
            ),
        )

    def _conclude_licence(self, key: int, declared: str | None, terms: str | None) -> bool:
        """Keep which licence follows for an implementation; whether its source may be shown."""
        found: dict[str, list[dict[str, Any]]] = {"licence": [], "third party": []}
        for topic, body in self.connection.execute(
            "SELECT f.topic, f.body FROM implementation_file i JOIN finding f ON f.scan = i.scan"
            " AND f.topic IN ('licence', 'third party') WHERE i.implementation = ? ORDER BY i.path, f.line, f.id",
            (key,),
        ):
            found[topic].append(json.loads(body))
        conclusion = licence.conclude(
            declared,
            [licence.LicenceFinding(**{"expression": None, **body}) for body in found["licence"]],
            terms,
            [licence.ThirdParty(**body) for body in found["third party"]],
        )
        shown, under = licence.may_show(conclusion, terms)
        self.connection.execute(
            "UPDATE implementation SET licence_concluded = ?, licence_reason = ?, may_show = ?, shown_under = ?"
            " WHERE id = ?",
            (conclusion.expression, conclusion.reason, shown, under, key),
        )
        return shown

    def _insert(self, table: str, conflict: str = "", /, **row: Any) -> int:
        names = ", ".join(row)
        marks = ", ".join("?" * len(row))
        query = f"INSERT {conflict} INTO {table} ({names}) VALUES ({marks})"
        return self.connection.execute(query, tuple(row.values())).lastrowid or 0

    # Reading

    def _one(self, query: str, *values: Any) -> sqlite3.Row | None:
        return self.connection.execute(query, values).fetchone()

    def _the(self, query: str, *values: Any) -> sqlite3.Row:
        """The row of a query that always finds one."""
        found = self._one(query, *values)
        if found is None:
            raise StoreError(f"{self.path}: damaged: {query} {values} finds nothing; `nibblas index check` tells more")
        return found

    def _get(self, kind: type[Spec], key: int) -> Spec:
        return made(kind, self._the(f"SELECT * FROM {kind.__name__.lower()} WHERE id = ?", key))

    def digests(self, slug: str | None = None) -> list[str]:
        """The digests of every revision stored, or of those of one slug, the oldest first."""
        rows = (
            self.connection.execute("SELECT digest FROM implementation ORDER BY id")
            if slug is None
            else self.connection.execute("SELECT digest FROM implementation WHERE slug = ? ORDER BY revision", (slug,))
        )
        return [digest for (digest,) in rows]

    def implementation(self, name: str) -> Implementation:
        """The current revision of a slug, or the one with a digest; KeyError where there is none."""
        query = (
            "SELECT * FROM implementation WHERE digest = ?1 UNION ALL"
            " SELECT * FROM implementation WHERE slug = ?1 AND current LIMIT 1"
        )
        row = self._one(query, name)
        if row is None:
            raise KeyError(f"{name}: no implementation of this slug or digest in {self.path}")
        key, operation = row["id"], row["operation"]
        supersedes = self._one("SELECT digest FROM implementation WHERE id = ?", row["supersedes"])
        authors = self.connection.execute(
            "SELECT a.name FROM implementation_author ia JOIN author a ON a.id = ia.author"
            " WHERE ia.implementation = ? ORDER BY ia.position",
            (key,),
        )
        files = self.connection.execute(
            "SELECT i.path, f.sha256, f.size, f.lines, s.media_type FROM implementation_file i"
            " JOIN scan s ON s.id = i.scan JOIN file f ON f.id = s.file WHERE i.implementation = ? ORDER BY i.path",
            (key,),
        )
        return made(
            Implementation,
            row,
            source=self._get(Source, row["source"]),
            operation=operation and self._get(Operation, operation),
            supersedes=supersedes and supersedes[0],
            authors=tuple(author for (author,) in authors),
            files=tuple(SourceFile(*file) for file in files),
        )

    def content(self, sha256: str) -> bytes:
        """The raw bytes of a file; KeyError where it isn't stored."""
        found = self._one("SELECT content FROM file WHERE sha256 = ?", sha256)
        if found is None:
            raise KeyError(f"{sha256}: no such file in {self.path}")
        return zlib.decompress(found[0])

    def runs(self, digest: str) -> tuple[Run, ...]:
        """The runs of the implementation that has this digest, in the order in which they came."""
        rows = self.connection.execute(
            "SELECT r.* FROM run r JOIN implementation i ON i.id = r.implementation WHERE i.digest = ? ORDER BY r.id",
            (digest,),
        )
        return tuple(self._run(row) for row in rows.fetchall())

    def run(self, digest: str) -> Run:
        """The run that has this digest; KeyError where there is none."""
        row = self._one("SELECT * FROM run WHERE digest = ?", digest)
        if row is None:
            raise KeyError(f"{digest}: no run of this digest in {self.path}")
        return self._run(row)

    def _run(self, row: sqlite3.Row) -> Run:
        figures = self.connection.execute("SELECT * FROM figure WHERE run = ? ORDER BY position", (row["id"],))
        operation, workload = self._get(Operation, row["operation"]), row["workload"]
        return made(
            Run,
            row,
            operation=operation,
            workload=workload and replace(self._get(Workload, workload), operation=operation),
            protocol=self._get(Protocol, row["protocol"]),
            environment=self._get(Environment, row["environment"]),
            figures=tuple(made(Figure, figure) for figure in figures),
            samples=unpack(row["samples"]),
        )

    def item(self, name: str) -> Item:
        """All that is stored of the current revision of a slug, or of the one with a digest; KeyError where none is."""
        implementation = self.implementation(name)
        digest = implementation.digest
        return Item(
            implementation,
            {file.path: self.content(file.sha256) for file in implementation.files},
            runs=self.runs(digest),
            facts=self.facts(digest),
            claims=self.claims(digest),
        )

    def facts(self, digest: str) -> tuple[CompatFact, ...]:
        """What the source of the implementation that has this digest says of compatibility."""
        return self._owned(CompatFact, "compat", digest)

    def claims(self, digest: str) -> tuple[Claim, ...]:
        """What the source of the implementation that has this digest says in its own words."""
        return self._owned(Claim, "claim", digest)

    def _owned(self, kind: type[Spec], table: str, digest: str) -> tuple[Spec, ...]:
        rows = self.connection.execute(
            f"SELECT t.* FROM {table} t JOIN implementation i ON i.id = t.implementation"
            " WHERE i.digest = ? ORDER BY t.id",
            (digest,),
        )
        return tuple(made(kind, row) for row in rows.fetchall())

    def events(self, subject: str | None = None) -> list[Event]:
        """Every event, or those of the implementation or run that has a digest, the oldest first."""
        where, values = ("", ()) if subject is None else (" WHERE subject = ?", (subject,))
        query = f"SELECT kind, subject, author, reason, body, at FROM event{where} ORDER BY id"
        rows = self.connection.execute(query, values)
        return [Event(kind, of, by, reason, json.loads(body), at) for kind, of, by, reason, body, at in rows]

    def is_scanned(self, file: SourceFile, versions: str) -> bool:
        """Whether a file was scanned by these versions, of whatever implementation it is."""
        query = "SELECT s.versions FROM file f JOIN scan s ON s.file = f.id WHERE f.sha256 = ? AND s.media_type = ?"
        found = self._one(query, file.sha256, file.media_type)
        return found is not None and found[0] == versions

    def unscanned(self, versions: str) -> list[tuple[int, str, str]]:
        """Files not scanned by these versions: key, a path, and sha256."""
        rows = self.connection.execute(
            "SELECT s.id, min(i.path), f.sha256 FROM scan s JOIN file f ON f.id = s.file"
            " JOIN implementation_file i ON i.scan = s.id WHERE s.versions IS NOT ? GROUP BY s.id ORDER BY s.id",
            (versions,),
        )
        return [tuple(row) for row in rows]

    # Keeping

    def check(self, progress: Callable[[int, int, str], None] = lambda *_: None) -> list[str]:
        """What is wrong with the file, in words: its structure, its references, its text index, and every digest."""
        wrong = [text for (text,) in self.connection.execute("PRAGMA integrity_check") if text != "ok"]
        if wrong:
            return wrong
        for table, row, parent, _ in self.connection.execute("PRAGMA foreign_key_check"):
            wrong.append(f"{table} {row}: refers to a row of {parent} that is not there")
        try:
            with self.transaction():
                self.connection.execute("INSERT INTO search (search, rank) VALUES ('integrity-check', 1)")
        except sqlite3.DatabaseError as error:
            wrong.append(f"text index: {error}")
        (files,) = self._the("SELECT count(*) FROM file")
        digests = self.digests()
        total = files + len(digests)
        rows = self.connection.execute("SELECT sha256, size, lines, content FROM file")
        for done, (sha256, size, lines, content) in enumerate(rows, 1):
            wrong += _wrong_with_file(sha256, size, lines, content)
            progress(done, total, "files")
        for done, digest in enumerate(digests, files + 1):
            wrong += self._wrong_with_implementation(digest)
            progress(done, total, "implementations")
        return wrong

    def _wrong_with_implementation(self, digest: str) -> list[str]:
        implementation = self.implementation(digest)
        if implementation.digest != digest:
            return [f"{implementation.slug} revision {implementation.revision}: its digest is not {digest}"]
        rows = self.connection.execute(
            "SELECT r.* FROM run r JOIN implementation i ON i.id = r.implementation WHERE i.digest = ?", (digest,)
        )
        changed = [row["record"] for row in rows.fetchall() if self._run(row).digest_for(digest) != row["digest"]]
        return [
            f"{implementation.slug}: a run ({record or 'no record'}) is not what its digest says" for record in changed
        ]

    def backup(self, target: str | Path) -> Path:
        """Copy the index as it is at one moment, while others may write; the target is replaced whole or not at all.

        StoreError where the target is this index, or a file that is no SQLite database.
        """
        target = Path(target)
        if target.is_dir():
            target = target / self.path.name
        if target.resolve() == self.path.resolve():
            raise StoreError(f"backup: {target} is the index itself")
        if target.exists() and not _is_database(target):
            raise StoreError(f"backup: {target} holds something that is no index; give a new file, or a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            copy = sqlite3.connect(partial)
            try:
                self.connection.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
            finally:
                copy.close()
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        return target


def _is_database(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def _connect_to_read(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise no_index(path)
    # Reading a write-ahead log takes a file beside it, which only the owner of the folder can make.
    mode = "mode=ro" if os.access(path.parent, os.W_OK) or _beside(path, "-wal").exists() else "immutable=1"
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?{mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    try:
        version = _version(path, connection)
        if version < len(_migrations()):
            raise StoreError(f"{path}: of an older nibblas; any `nibblas index add` brings it up to date")
        connection.execute("PRAGMA query_only = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_to_write(path: Path, wait: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=wait, isolation_level=None, cached_statements=256)
    try:
        version = _version(path, connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA recursive_triggers = ON")
        for number, migration in enumerate(_migrations()[version:], version + 1):
            head = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number};"
            connection.executescript(f"BEGIN IMMEDIATE; {head} {migration.read_text()} COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def _migrations() -> list[Path]:
    return sorted(SCHEMA.glob("[0-9]*.sql"))


def _version(path: Path, connection: sqlite3.Connection) -> int:
    """The number of the last migration that the file has seen."""
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path}: can't be read as an index: {error}") from None
    if application != APPLICATION_ID and (application or version or tables):
        raise StoreError(f"{path}: an SQLite file, but not an index of nibblas")
    if version > (known := len(_migrations())):
        raise StoreError(f"{path}: of a newer nibblas (schema {version}, this one knows {known})")
    return version


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _lock(path: Path, wait: float) -> BinaryIO:
    """The lock of the one writer, released when the file is closed, also by a process that is killed."""
    file = open(_beside(path, ".writer"), "a+b")  # noqa: SIM115
    until = time.monotonic() + wait
    while fcntl:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until:
                file.seek(0)
                other = file.read().decode(errors="replace").strip() or "another process"
                file.close()
                raise StoreError(f"{path}: {other} is writing it; wait for it, or stop it") from None
            time.sleep(0.05)
    file.truncate(0)
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
    file.write(f"process {os.getpid()} ({command}), since {now()},".encode())
    file.flush()
    return file


def _check_contents(item: Item) -> None:
    implementation = item.implementation
    paths = [file.path for file in implementation.files]
    if paths != sorted(item.contents):
        raise ValueError(f"{implementation.slug}: files are {paths}, need the contents' paths {sorted(item.contents)}")
    for path in paths:
        if not _is_inside(path):
            raise ValueError(f"{implementation.slug}: a file is called {path!r}, need a plain relative path")
    for file in implementation.files:
        if SourceFile.of(file.path, item.contents[file.path]) != file:
            raise ValueError(f"{implementation.slug}: the content of {file.path} is not what its description says")


def _is_inside(path: str) -> bool:
    pieces = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(pieces)


def _wrong_with_file(sha256: str, size: int, lines: int, content: bytes) -> list[str]:
    try:
        raw = zlib.decompress(content)
    except zlib.error as error:
        return [f"file {sha256}: its content is damaged: {error}"]
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        return [f"file {sha256}: its content has the digest {found}"]
    described = SourceFile.of("", raw)
    return [] if (described.size, described.lines) == (size, lines) else [f"file {sha256}: not {size} B, {lines} lines"]


def _description(implementation: Implementation) -> dict[str, Any]:
    """What an importer reads from the files, as columns."""
    return {
        "language": implementation.language,
        "framework": implementation.framework,
        "entry_point": implementation.entry_point,
        "signature": implementation.signature,
        "tensors": _json(implementation.tensors),
        "limitations": _json(implementation.limitations),
    }


def _values(spec: Any) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in fields(spec)}


def _row(spec: Any) -> dict[str, Any]:
    """The fields as columns hold them: mappings and tuples as JSON."""
    return {
        name: _json(value) if isinstance(value, Mapping | tuple) else value for name, value in _values(spec).items()
    }


def _json(value: Any) -> str:
    """JSON text; the model's classes inside are objects."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_values)


JSON_COLUMNS = frozenset(
    (
        "axes",
        "parameters",
        "correctness",
        "details",
        "versions",
        "facts",
        "beside",
        "config",
        "integrity",
        "limitations",
    )
)


def made(kind: type[Spec], row: sqlite3.Row, **given: Any) -> Spec:
    """A row as an instance of one of the model's classes; `given` are the fields that other tables hold."""
    names = {f.name for f in fields(kind)} & set(row.keys()) - set(given)  # type: ignore[arg-type]
    return kind(**{name: _field(name, row[name]) for name in names}, **given)


def _field(name: str, value: Any) -> Any:
    """A column as the field of the same name holds it."""
    if name == "tensors":
        return tuple(Tensor(**{**tensor, "shape": _tuple(tensor["shape"])}) for tensor in json.loads(value))
    if name in JSON_COLUMNS:
        return _tuple(json.loads(value))
    return bool(value) if name in ("claimed", "hardened") else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _pack(samples: Iterable[float]) -> bytes | None:
    packed = array.array("d", samples)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes() or None


def unpack(blob: bytes | None) -> tuple[float, ...]:
    """The samples of a run, from its column."""
    samples = array.array("d", blob or b"")
    if sys.byteorder == "big":
        samples.byteswap()
    return tuple(samples)
