"""Imports: one list of importers, and `add`, which gives each file to the first that takes it.

Things are stored in batches, each in one transaction with a savepoint for every thing: a process that is killed loses
what it had not stored, and the same import called again goes on there. Nothing is stored twice, because everything is
known by its content.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from nibblas.index.ingest import arena, evidence, files, kernelbot, page
from nibblas.index.ingest.reading import Attached, Importer, Known, Options, Read, Skipped
from nibblas.index.model import Item
from nibblas.index.scan import Scan, Scanner, scanner, versions
from nibblas.index.store import Outcome, Store, StoreError

# In the order in which they are asked, and in which what they take is imported: records come after the submissions
# that they are of.
IMPORTERS: tuple[Importer, ...] = (page, kernelbot, files, evidence, arena)
# Read for facts about the sources beside them, never as sources.
BESIDE = ("readme", "license", "licence", "copying", "notice", "task.yml", "leaderboards.parquet")
BATCH = 200

Progress = Callable[[int, int, str], None]
Waiting = Callable[[], Scan]  # gives it when it is there
T = TypeVar("T")


@dataclass
class Report:
    """What an import did: how many implementations it added and so on, and what it left out, with reasons."""

    added: int = 0
    revised: int = 0
    updated: int = 0
    unchanged: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def total(self) -> int:
        """How many things were read."""
        return self.added + self.revised + self.updated + self.unchanged + len(self.skipped)

    @property
    def reasons(self) -> dict[str, list[str]]:
        """What was left out, by reason."""
        found: dict[str, list[str]] = {}
        for what, why, _ in self.skipped:
            found.setdefault(why, []).append(what)
        return found

    def __add__(self, other: "Report") -> "Report":
        return Report(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict:
        """As JSON can hold it."""
        return {**asdict(self), "skipped": [skipped._asdict() for skipped in self.skipped]}

    def count(self, outcome: Outcome) -> None:
        """One more."""
        setattr(self, outcome, getattr(self, outcome) + 1)


class Entry(NamedTuple):
    """A file and the importer that takes it; None where none does."""

    importer: Importer | None
    path: Path


def add(
    store: Store,
    paths: Iterable[str | Path],
    options: Options = Options(),  # noqa: B008
    progress: Progress = lambda done, total, text: None,
) -> Report:
    """Import files and folders.

    Parameters
    ----------
    progress : called with things done, things in all (about), and the file's name.

    Raises FileNotFoundError for a path that is not there, before anything is stored. What can't be read or stored is
    told in the report.
    """
    entries = sorted(_entries(paths), key=lambda entry: _order(entry.importer))
    total = sum(_count(entry) for entry in entries)
    report = Report()
    with scanner(total) as scans:
        # A batch never spans importers, so that a record finds what was imported before it.
        for importer, group in groupby(entries, key=lambda entry: entry.importer):
            things = _read(importer, [entry.path for entry in group], options, store)
            for batch in _ahead(_batches(things, scans, store)):
                _keep(store, batch, report)
                progress(report.total, max(total, report.total), batch.things[-1][0].name)
    return report


def add_own(store: Store) -> Report:
    """Import nibblas's own kernels and the Measurements of them."""
    report = Report()
    with scanner(0) as scans:
        for batch in _batches(((Path("nibblas"), thing) for thing in evidence.read_own(store)), scans, store):
            _keep(store, batch, report)
    return report


def scan(store: Store, progress: Progress = lambda done, total, text: None) -> int:
    """Read the files again that were not read by the rules as they are now, and say how many that were."""
    left = store.unscanned(versions())
    with scanner(len(left)) as scans:

        def started() -> Iterator[dict[int, Waiting]]:
            for start in range(0, len(left), BATCH):
                some = left[start : start + BATCH]
                yield scans.start({key: (path, store.content(sha256)) for key, path, sha256 in some})

        done = 0
        for batch in _ahead(started()):
            store.keep_scans({key: found() for key, found in batch.items()})
            done += len(batch)
            progress(done, len(left), "files")
    return len(left)


class Batch(NamedTuple):
    """Things that were read, each with its file, and the scans of new sources by digest and type of the source."""

    things: list[tuple[Path, Read]]
    scans: dict[tuple[str, str], Waiting]


def _batches(things: Iterator[tuple[Path, Read]], scans: Scanner, store: Store) -> Iterator[Batch]:
    while some := list(islice(things, BATCH)):
        items = [thing for _, thing in some if isinstance(thing, Item)]
        new = {
            (file.sha256, file.media_type): (file.path, item.contents[file.path])
            for item in items
            for file in item.implementation.files
            if not store.is_scanned(file, versions())
        }
        yield Batch(some, scans.start(new))


def _ahead(batches: Iterator[T]) -> Iterator[T]:
    """The same, each a step later, so that the scans of the next batch go on while one is stored."""
    waiting: list[T] = []
    for batch in batches:
        yield from waiting
        waiting = [batch]
    yield from waiting


def _keep(store: Store, batch: Batch, report: Report) -> None:
    """Store a batch in one transaction; what can't be stored is undone alone, and told."""
    with store.transaction():
        for path, thing in batch.things:
            if isinstance(thing, Skipped):
                report.skipped.append(thing)
            elif isinstance(thing, Known):
                report.count("unchanged")
            elif isinstance(thing, Attached):
                report.count(store.attach(thing.digest, thing.runs, thing.facts))
            else:
                try:
                    report.count(store.add(thing, _scans_of(thing, batch)))
                except (ValueError, StoreError) as error:
                    report.skipped.append(Skipped(f"{path}: {thing.implementation.slug}", str(error)))


def _scans_of(item: Item, batch: Batch) -> dict[str, Scan]:
    waiting = {file.path: batch.scans.get((file.sha256, file.media_type)) for file in item.implementation.files}
    return {path: found() for path, found in waiting.items() if found}


def _read(
    importer: Importer | None, paths: Iterable[Path], options: Options, store: Store
) -> Iterator[tuple[Path, Read]]:
    for path in paths:
        if importer is None:
            yield path, Skipped(str(path), f"no importer takes {path.suffix or 'such'} files")
            continue
        try:
            for thing in importer.read(path, options, store):
                yield path, thing
        except (OSError, ValueError) as error:
            yield path, Skipped(str(path), str(error))


def _entries(paths: Iterable[str | Path]) -> Iterator[Entry]:
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        found |= dict.fromkeys(_inside(path) if path.is_dir() else [path])
    given = {path: next((importer for importer in IMPORTERS if importer.takes(path)), None) for path in found}
    yield from dict.fromkeys(
        Entry(importer, files.main(path) if importer is files else path) for path, importer in given.items()
    )


def _inside(folder: Path) -> Iterator[Path]:
    """The files of a folder, sorted; hidden ones, byte code and what only tells about others are left out."""
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(names):
            if not name.startswith(".") and not name.lower().startswith(BESIDE) and not name.endswith(".pyc"):
                yield Path(directory, name)


def _order(importer: Importer | None) -> int:
    return len(IMPORTERS) if importer is None else IMPORTERS.index(importer)


def _count(entry: Entry) -> int:
    try:
        return entry.importer.count(entry.path) if entry.importer else 1
    except (OSError, ValueError):
        return 1
