"""The index as static files: the same pages and JSON twins, with relative links that work from any folder.

Nothing answers a search there, so lists take its place. Their number stays bounded: a page of a list holds PAGE_SIZE
implementations and at most a dozen links to other pages of it. The lists of all and of each operation are complete, so
that every implementation is found; those of each technique, language, device and source stop after MOST_PAGES pages,
best evidence first, and say how many they leave out. Runs stop likewise, newest first; each is linked from its
implementation.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

from nibblas.index import pages, read, render
from nibblas.index.catalog import Catalog
from nibblas.index.documents import Card, Query, RunFilter, RunsPage, to_json
from nibblas.index.model import now
from nibblas.index.render import MENU, Links, Page, Pairs

PAGE_SIZE = 200
MOST_PAGES = 25
MARK = "nibblas-index.json"  # a folder that holds it may be replaced
FIELDS = {
    "operation": "Operation",
    "uses": "Technique used",
    "hardware": "Runs on",
    "language": "Language",
    "source": "Kind of source",
}
LONGEST_NAME = 120  # of a file, before its suffix

Progress = Callable[[int, int, str], None]


class SiteError(RuntimeError):
    """The site can't be written there; nothing was changed."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    pages: int
    bytes: int


class LocalLinks(Links):
    """Where pages lie in a folder, seen from one of them."""

    live = False
    implementations = "/browse"
    menu: Pairs = (("Browse", "/browse"), *(entry for entry in MENU if entry[1] not in ("/search", "/compare")))

    def __init__(self, here: str):
        self._here = PurePosixPath(file_of(here)).parent

    def url(self, path: str, query: Pairs = ()) -> str:
        """ValueError for an address with a query, which no file answers."""
        if query:
            raise ValueError(f"{path}: a static page can't answer the query {dict(query)}")
        return self._to(file_of(path))

    def twin(self, path: str, query: Pairs = ()) -> str:
        return self._to(file_of(path, ".json"))

    def static(self, name: str) -> str:
        return self._to(f"static/{name}")

    def browse(self, name: str | None = None, value: str = "") -> str:
        return self.url(list_address(name, value))

    def raw(self, implementation: str, path: str) -> str:
        return self._to(raw_file_of(implementation, path))

    def _to(self, file: str) -> str:
        return os.path.relpath(file, self._here)


def file_of(path: str, suffix: str = ".html") -> str:
    """The file that holds the page at an address, relative to the site; no part of it leads out of the site."""
    if path == "/":
        return f"index{suffix}"
    *folders, last = path.strip("/").split("/")
    return "/".join([*map(_safe, folders), _safe(last) + suffix])


def raw_file_of(implementation: str, path: str) -> str:
    """The file that holds the bytes of a source file; .txt, so that no browser runs it."""
    return file_of(f"/implementations/{implementation}/raw/{path}", ".txt")


def list_address(name: str | None = None, value: str = "", number: int = 1) -> str:
    """The address of one page of a list of implementations."""
    first = "/browse" + (f"/{name}/{_safe(value)}" if name else "")
    return first if number == 1 else f"{first}/page/{number}"


def _safe(name: str) -> str:
    """A part of a path as the name of a file that is the same on every system and in every address."""
    kept = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)
    if kept == name and 0 < len(name) <= LONGEST_NAME and not name.startswith("."):
        return name
    return f"{kept.strip('.')[:LONGEST_NAME]}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:8]}"


def export(catalog: Catalog, site: str | Path, progress: Progress = lambda done, total, text: None) -> Exported:
    """Write all pages to a folder: a new or an empty one, or one that an earlier export wrote, which is replaced.

    The folder is complete or as it was before. Raises SiteError where it holds anything else.
    """
    site = Path(site).resolve()
    if site.exists() and not site.is_dir():
        raise SiteError(f"{site}: not a folder")
    if site.exists() and any(site.iterdir()) and not (site / MARK).is_file():
        raise SiteError(f"{site}: holds something that is no exported index; give a new or an empty folder")
    making = site.with_name(f"{site.name}.{os.getpid()}.partial")
    try:
        found = _write(catalog, making, progress)
        _replace(site, making)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return found


def _replace(site: Path, made: Path) -> None:
    old = site.with_name(f"{site.name}.{os.getpid()}.old")
    if site.exists():
        site.rename(old)
    made.rename(site)
    shutil.rmtree(old, ignore_errors=True)


def _write(catalog: Catalog, site: Path, progress: Progress) -> Exported:
    total, done, count, size = read.coverage(catalog).implementations, 0, 0, 0
    for entry in (files("nibblas.index") / "static").iterdir():
        size += _write_file(site / "static" / entry.name, entry.read_bytes())
    for page in _every(catalog):
        size += _write_page(catalog, site, page)
        count += 1
        if page.template == "implementation.html":
            done += 1
            progress(min(done, total), total, page.name)
    _write_file(site / MARK, json.dumps({"made_at": now(), "pages": count}).encode())
    return Exported(count, size)


def _write_page(catalog: Catalog, site: Path, page: Page) -> int:
    size = _write_file(site / file_of(page.path), render.html(page, LocalLinks(page.path)).encode())
    size += _write_file(site / file_of(page.path, ".json"), to_json(page.document).encode())
    if page.template == "file.html" and page.values["lines"] is not None:
        name, path = page.values["name"], page.values["file"].path
        _, raw = read.file(catalog, name, path)
        size += _write_file(site / raw_file_of(name, path), raw)
    return size


def _write_file(path: Path, content: bytes) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return len(content)


def _every(catalog: Catalog) -> Iterator[Page]:
    """Every page of the site."""
    yield pages.home(catalog)
    yield pages.operations(catalog)
    yield pages.techniques(catalog)
    yield pages.hardware(catalog)
    yield pages.sources(catalog)
    yield pages.methodology(catalog)
    yield pages.about(catalog)
    for operation in read.operations(catalog):
        yield pages.operation(catalog, operation.slug, {})
    for technique in read.techniques(catalog):
        yield pages.technique(catalog, technique.slug)
    for device in read.hardware(catalog):
        yield pages.device(catalog, device.slug)
    yield from _lists(catalog)
    yield from _runs(catalog)
    for cards in _cards(catalog, Query(sort="name", limit=PAGE_SIZE)):
        for card in cards:
            yield from _of_implementation(catalog, card.slug)


def _of_implementation(catalog: Catalog, slug: str) -> Iterator[Page]:
    """The pages of an implementation: its dossier, files and changes, and those of its earlier revisions."""
    dossier = read.implementation(catalog, slug)
    for name in (slug, *(revision.digest for revision in dossier.revisions if revision.digest != dossier.digest)):
        page = pages.implementation(catalog, name)
        yield page
        for file in page.document.files:
            yield pages.source_file(catalog, name, file.path)
        if page.document.implementation.supersedes:
            yield pages.changes(catalog, name)


def _runs(catalog: Catalog) -> Iterator[Page]:
    """The pages of all runs, and lists of the newest that passed."""
    first = pages.runs(catalog, {})
    for status in read.STATUSES:
        for number, found in enumerate(_run_pages(catalog, RunFilter(status=status, limit=PAGE_SIZE)), 1):
            if status == "passed" and number <= MOST_PAGES:
                yield _run_list(first, found, number)
            for line in found.runs:
                yield pages.run(catalog, line.digest)


def _run_pages(catalog: Catalog, wanted: RunFilter) -> Iterator[RunsPage]:
    """All pages of a list of runs; at least one, which may be empty."""
    while True:
        found = read.runs(catalog, wanted)
        yield found
        if found.next is None:
            return
        wanted = replace(wanted, cursor=found.next)


def _run_list(first: Page, found: RunsPage, number: int) -> Page:
    """One page of the list of runs, with links to those before it and the one after."""
    last = number if found.next is None or number == MOST_PAGES else number + 1
    numbers = [(str(n), f"/runs/page/{n}" if n > 1 else "/runs", n == number) for n in range(1, last + 1)]
    cut = found.next is not None and number == MOST_PAGES
    path = numbers[number - 1][1]
    return replace(first, path=path, document=found, values={**first.values, "numbers": numbers, "cut": cut})


def _lists(catalog: Catalog) -> Iterator[Page]:
    """Lists of implementations: all, then those with one value of a field."""
    facets = {facet.name: facet for facet in read.search(catalog, Query(limit=1)).facets}
    fields: dict[str, list[tuple[str, str]]] = {
        "operation": [(line.slug, line.name) for line in read.operations(catalog)],
        "uses": [(line.slug, line.name) for line in read.techniques(catalog) if line.uses],
        "hardware": [(line.slug, line.name) for line in read.hardware(catalog)],
        "language": [(value.value, value.label) for value in facets["language"].values],
        "source": [(value.value, value.label) for value in facets["source"].values],
    }
    yield from _list(catalog, Query(sort="name"), "All implementations", fields)
    for name, values in fields.items():
        for value, label in values:
            chosen: Any = (value,) if name == "uses" else value
            query = replace(Query(sort="name" if name == "operation" else "evidence"), **{name: chosen})
            yield from _list(catalog, query, f"{FIELDS[name]} {label}", {}, name, value)


def _list(
    catalog: Catalog,
    query: Query,
    heading: str,
    fields: Mapping[str, list[tuple[str, str]]],
    name: str | None = None,
    value: str = "",
) -> Iterator[Page]:
    total = read.search(catalog, replace(query, limit=1), facets=False).total
    every = max(1, math.ceil(total / PAGE_SIZE))
    last = every if query.sort == "name" else min(every, MOST_PAGES)
    for number, cards in enumerate(_cards(catalog, replace(query, limit=PAGE_SIZE)), 1):
        if number > last:
            return
        values = {
            "total": total,
            "left_out": max(0, total - last * PAGE_SIZE),
            "fields": [
                (FIELDS[field], [(label, list_address(field, v)) for v, label in of]) for field, of in fields.items()
            ],
            "numbers": [
                (str(n), list_address(name, value, n), n == number) for n in _numbers(number, last) if last > 1
            ],
        }
        yield Page(
            "browse.html",
            list_address(name, value, number),
            heading,
            f"{heading}: page {number} of {last}.",
            {"field": name, "value": value or None, "page": number, "pages": last, "total": total, "cards": cards},
            values,
            title=f"{heading}, page {number}" if number > 1 else heading,
            crumbs=(*pages.INDEX, ("Browse", "/browse")) if name else pages.INDEX,
        )


def _numbers(number: int, last: int) -> list[int]:
    """Pages to link from one: the first, the last, the neighbours, and some evenly between, so that none is far."""
    even = {1 + round(share * (last - 1) / 8) for share in range(9)}
    near = set(range(max(1, number - 1), min(last, number + 1) + 1))
    return sorted(even | near)


def _cards(catalog: Catalog, query: Query) -> Iterator[tuple[Card, ...]]:
    """All pages of a search; at least one, which may be empty."""
    while True:
        found = read.search(catalog, query, facets=False)
        yield found.cards
        if found.next is None:
            return
        query = replace(query, cursor=found.next)
