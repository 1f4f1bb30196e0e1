"""The commands `nibblas index ...`. Only typer and rich are imported before one runs."""

import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from nibblas.terminal import AsJson, console_of_stdout, print_json, progress
from nibblas.words import counted, time_text

if TYPE_CHECKING:
    from nibblas.index.catalog import Catalog
    from nibblas.index.documents import Dossier, Results
    from nibblas.index.ingest import Report
    from nibblas.index.store import Store

app = typer.Typer(
    help="A local catalog of kernels: which there are, what they run on, who measured them, how they may be used.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Database = Annotated[
    Path | None, typer.Option("--db", help="The index; index.sqlite in nibblas's cache by default.", show_default=False)
]
SHOWN_REASONS = 12
SHOWN_OF_A_REASON = 3
RESULTS_WIDTH = 160  # columns of a search's table that goes to no terminal


@app.command(no_args_is_help=True)
def add(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH...",
            help="Source files, folders, KernelBot's parquet files, texts of its submissions, saved catalog pages, "
            "records of `nibblas arena`, JSONL files of measurements.",
            show_default=False,
        ),
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="Add nibblas's own kernels and what was measured of them.")
    ] = False,
    db: Database = None,
    slug: Annotated[str | None, typer.Option(help="Name of the one implementation, in place of what is read.")] = None,
    author: Annotated[list[str] | None, typer.Option(help="Where the source names none. Can be repeated.")] = None,
    licence: Annotated[str | None, typer.Option(help="SPDX expression that the author declares.")] = None,
    terms: Annotated[
        str | None, typer.Option(help="SPDX expression or LicenseRef under which the source is handed on.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of the data set or repository.")] = None,
    attribution: Annotated[str | None, typer.Option(help="The sentence that the data set asks for.")] = None,
    board: Annotated[str | None, typer.Option(help="KernelBot problem that a submission is for.")] = None,
    submission: Annotated[str | None, typer.Option(help="KernelBot's number of the submission.")] = None,
    problem: Annotated[
        Path | None,
        typer.Option(help="Folder of the KernelBot problem, with its task.yml.", exists=True, file_okay=False),
    ] = None,
    boards: Annotated[
        list[str] | None, typer.Option("--only", metavar="BOARD", help="Of a data set only this. Can be repeated.")
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Of a data set, so many of each board and runner.")] = None,
    as_json: AsJson = False,
) -> None:
    """Import implementations, what their sources claim, and what was measured of them.

    The same again changes nothing; other content under a known name becomes a revision. An import that was stopped goes
    on when called again. Nothing is invented: what a source does not say stays unknown.

    Examples:

    - `nibblas index add --own`
    - `nibblas index add kernels/ --author me --licence Apache-2.0`
    - `nibblas index add nvidia_nvfp4.parquet --terms CC-BY-4.0 --top 50`
    """
    from nibblas.index import ingest
    from nibblas.index.ingest.reading import Options
    from nibblas.index.model import kebab

    if not paths and not own:
        raise typer.BadParameter("need a path, or --own")
    if slug and len(paths or []) != 1:
        raise typer.BadParameter(f"--slug names one implementation; got {len(paths or [])} paths")
    if slug and slug != kebab(slug):
        raise typer.BadParameter(f"--slug is {slug!r}, need words of a-z and 0-9 joined by hyphens: {kebab(slug)}")
    options = Options(
        slug,
        tuple(author or ()),
        licence,
        terms,
        revision,
        attribution,
        board,
        submission,
        problem,
        tuple(boards or ()),
        top,
    )
    with _writing(db) as store:
        report = ingest.Report()
        if own:
            report += ingest.add_own(store)
        if paths:
            with progress("import") as advance:
                report += ingest.add(store, paths, options, advance)
    if as_json:
        print_json(report.as_dict())
    else:
        _print_report(report)


@app.command()
def scan(db: Database = None) -> None:
    """Read all sources again that were read by older rules, for techniques, requirements and licences.

    Examples:

    - `nibblas index scan`
    """
    from nibblas.index import ingest

    with _writing(db, make=False) as store, progress("scan") as advance:
        count = ingest.scan(store, advance)
    print(f"{counted(count, 'file')} read by newer rules" if count else "every file was read by the rules as they are")


@app.command("compile", no_args_is_help=True)
def compile_(
    name: Annotated[str, typer.Argument(help="Slug or digest of an implementation.", show_default=False)],
    arch: Annotated[str, typer.Option(help="Architecture, such as sm_90a.", show_default=False)],
    db: Database = None,
) -> None:
    """Compile an implementation's CUDA with nvcc, running none of it, and keep that it compiled.

    Where nvdisasm is at hand, the uses of techniques are confirmed or refuted by the machine code. Exits with 1 where a
    file doesn't compile.

    Examples:

    - `nibblas index compile kernelbot-nvfp4-gemv-111151 --arch sm_100a`
    """
    from nibblas.index.compilation import compile_stored

    with _writing(db, make=False) as store:
        outcomes = compile_stored(store, name, arch)
    for outcome in outcomes:
        told = f"{outcome.path}, {outcome.compiler}, {outcome.arch}: "
        if outcome.problem:
            told += outcome.problem
        elif outcome.confirmed is None:
            told += "compiled; without nvdisasm its machine code can't be read"
        else:
            told += (
                f"compiled; {counted(outcome.confirmed, 'use')} confirmed, {outcome.refuted} refuted by machine code"
            )
        print(told)
    if any(outcome.problem for outcome in outcomes):
        raise typer.Exit(1)


@app.command(no_args_is_help=True)
def search(
    words: Annotated[list[str], typer.Argument(help="Words of a name, an author, a technique, a source.")],
    db: Database = None,
    operation: Annotated[str | None, typer.Option(help="Slug of an operation.")] = None,
    hardware: Annotated[str | None, typer.Option(help="A device that it must run on.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    as_json: AsJson = False,
) -> None:
    """Find implementations in which all of the words stand.

    Examples:

    - `nibblas index search gemv split-k`
    """
    from nibblas.index import read
    from nibblas.index.documents import Query, plain

    with _reading(db) as catalog:
        query = Query(" ".join(words), operation=operation, hardware=hardware, limit=limit)
        found = read.search(catalog, query, facets=False)
    if as_json:
        print_json(plain(found))
    else:
        _print_results(found)


@app.command(no_args_is_help=True)
def show(
    name: Annotated[str, typer.Argument(help="Slug or digest of an implementation.", show_default=False)],
    db: Database = None,
    source: Annotated[bool, typer.Option("--source", help="Print its source, where its terms allow that.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what is known of one implementation.

    Examples:

    - `nibblas index show nibblas-cpu-linear`, after `nibblas index add --own`
    """
    from nibblas.index import read
    from nibblas.index.documents import plain

    with _reading(db) as catalog:
        dossier = read.implementation(catalog, name, ["source"] if source else [])
    if as_json:
        print_json(plain(dossier))
    elif source:
        _print_source(dossier)
    else:
        _print_dossier(dossier)


@app.command()
def serve(
    db: Database = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8321,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name by which others call this server; a request for any other is refused. Can be repeated."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that answer.")] = 1,
) -> None:
    """Serve the index to a browser and to programs: pages, and an API under /api/v1. Read only.

    Examples:

    - `nibblas index serve`
    - `nibblas index serve --port 8000 --workers 2`
    """
    from nibblas.index.server import run_server

    run_server(_path(db), host, port, name or (), workers)


@app.command(no_args_is_help=True)
def export(
    site: Annotated[Path, typer.Argument(help="Folder to write: new, empty, or of an earlier export.")],
    db: Database = None,
) -> None:
    """Write all pages and their JSON as static files, with links that work from any folder and without a server.

    Lists of implementations take the place of the search; nothing compares two of them.

    Examples:

    - `nibblas index export site`
    """
    from nibblas.index.export import export as write

    with _reading(db) as catalog, progress("export") as advance:
        made = write(catalog, site, advance)
    print(f"{site / 'index.html'}: {counted(made.pages, 'page')}, {made.bytes / 1e6:,.1f} MB")


@app.command()
def demo(
    db: Annotated[
        Path | None,
        typer.Option(
            "--db", help="The index to fill; index-demo.sqlite in nibblas's cache by default.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8321,
    served: Annotated[bool, typer.Option("--serve/--no-serve", help="Serve it, or only fill it.")] = True,
) -> None:
    """Fill an index with nibblas's own kernels and what was measured of them, and serve it.

    Examples:

    - `nibblas index demo`
    """
    from nibblas.index import ingest
    from nibblas.index.server import run_server
    from nibblas.index.store import DEMO

    path = db or _path(None).with_name(DEMO)
    with _writing(path) as store:
        report = ingest.add_own(store)
    _print_report(report)
    if served:
        run_server(path, host, port, (), 1)


class Statement(StrEnum):
    """What may be said of an implementation or a run; publish and supersede are said by imports."""

    ATTEST = "attest"
    DISPUTE = "dispute"
    REFUTE = "refute"
    RETRACT = "retract"


class Attested(StrEnum):
    """What somebody who ran it himself found."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"


@app.command(no_args_is_help=True)
def note(
    statement: Annotated[Statement, typer.Argument(help="What is said.", show_default=False)],
    name: Annotated[
        str, typer.Argument(help="Slug or digest of an implementation, or digest of a run.", show_default=False)
    ],
    by: Annotated[str, typer.Option(help="Who says it.", show_default=False)],
    reason: Annotated[str, typer.Option(help="In a sentence.", show_default=False)],
    outcome: Annotated[Attested | None, typer.Option(help="Of attest: what was found.", show_default=False)] = None,
    ratio: Annotated[
        float | None, typer.Option(min=0, help="Of attest: the time found over the time stated.", show_default=False)
    ] = None,
    db: Database = None,
) -> None:
    """Say something of an implementation or of a run, for good: it can be answered, never changed or taken back.

    Examples:

    - `nibblas index note attest kernelbot-nvfp4-gemv-1 --by me --reason "on my B200" --outcome reproduced`
    """
    from nibblas.index.model import Event

    if not by.strip() or not reason.strip():
        raise typer.BadParameter("what stays for good needs who says it and a reason; --by or --reason is empty")
    attests = statement is Statement.ATTEST
    if attests != (outcome is not None) or (ratio is not None and not attests):
        raise typer.BadParameter("attest needs --outcome and may have --ratio; the others have neither")
    body = {"outcome": outcome.value if outcome else None, "ratio": ratio}
    with _writing(db, make=False) as store:
        subject = store.subject(name)
        known = {key: value for key, value in body.items() if value is not None}
        store.record(Event(statement.value, subject, by, reason, known))
    print(f"{statement.value}: {subject}")


@app.command(no_args_is_help=True)
def backup(
    target: Annotated[Path, typer.Argument(help="The file or folder to write.", show_default=False)],
    db: Database = None,
) -> None:
    """Copy the index as it is at this moment, also while it is being written.

    Examples:

    - `nibblas index backup ~/backups`
    """
    from nibblas.index.store import Store

    with Store.open(_path(db), read_only=True) as store:
        written = store.backup(target)
    print(written)


@app.command()
def check(db: Database = None) -> None:
    """Look for damage: the file's structure, references, the text index, and the digest of everything stored.

    Exits with 1 where something is wrong.

    Examples:

    - `nibblas index check`
    """
    with _writing(db, make=False) as store, progress("check") as advance:
        wrong = store.check(advance)
        count = len(store.digests())
    for line in wrong:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(line)}", highlight=False)
    if wrong:
        raise typer.Exit(1)
    print(f"{counted(count, 'revision')} stored, all as their digests say")


def _path(db: Path | None) -> Path:
    from nibblas.index.store import default_path

    return db or default_path()


@contextmanager
def _writing(db: Path | None, make: bool = True) -> Iterator["Store"]:
    from nibblas.index.store import Store, no_index

    path = _path(db)
    if not make and not path.exists():
        raise no_index(path)
    with _in_words(path), Store.open(path) as store:
        yield store


@contextmanager
def _reading(db: Path | None) -> Iterator["Catalog"]:
    from nibblas.index.catalog import Catalog

    with _in_words(_path(db)), Catalog(_path(db)) as catalog:
        yield catalog


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Errors of SQLite (a full disk, damage) and of names that aren't there, as errors for people."""
    from nibblas.index.store import StoreError

    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"{path}: {error}") from None
    except LookupError as error:
        raise StoreError(str(error.args[0] if error.args else error)) from None


def _print_report(report: "Report") -> None:
    done = {"added": report.added, "revised": report.revised, "updated": report.updated, "unchanged": report.unchanged}
    print(", ".join(f"{count:,} {name}" for name, count in done.items() if count) or "nothing added")
    skipped: Counter[str] = Counter()
    for left in report.skipped:
        skipped[left.why] += left.things
    reasons = sorted(report.reasons.items(), key=lambda entry: -skipped[entry[0]])
    for why, what in reasons[:SHOWN_REASONS]:
        more = f" and {len(what) - SHOWN_OF_A_REASON:,} more" if len(what) > SHOWN_OF_A_REASON else ""
        print(f"skipped {skipped[why]:,}: {why}: {', '.join(what[:SHOWN_OF_A_REASON])}{more}")
    if len(reasons) > SHOWN_REASONS:
        print(f"... {len(reasons) - SHOWN_REASONS} more reasons; --json lists all")


def _print_results(found: "Results") -> None:
    from rich.table import Table

    if not found.cards:
        print("nothing found")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("implementation", "operation", "framework", "numerics", "timing", "fastest", "licence"):
        table.add_column(name, overflow="fold", no_wrap=name == "implementation")
    for card in found.cards:
        fastest = card.fastest
        table.add_row(
            card.slug,
            card.operation.slug if card.operation else "unknown",
            card.framework or card.language or "unknown",
            card.levels.numerics,
            card.levels.timing,
            f"{time_text(fastest.figure.value)}{' claimed' if fastest.claimed else ''}" if fastest else "",
            card.licence_concluded or "unknown",
        )
    console_of_stdout(piped=RESULTS_WIDTH).print(table)
    if found.total > len(found.cards):
        print(f"{found.total:,} found, {len(found.cards)} shown")


def _print_dossier(dossier: "Dossier") -> None:
    console = Console(soft_wrap=True)
    it = dossier.implementation

    def line(name: str, value: str | None) -> None:
        console.print(f"[dim]{name:<14}[/]{escape(value or 'unknown')}", highlight=False)

    console.print(f"[bold]{escape(it.name)}[/]  {it.slug}", highlight=False)
    line("revision", f"{it.revision}, {dossier.digest}")
    line("operation", it.operation.slug if it.operation else None)
    line("authors", ", ".join(it.authors))
    line("language", " · ".join(part for part in (it.language, it.framework) if part))
    line("entry point", it.signature or it.entry_point)
    line("numerics", dossier.levels.numerics)
    line("timing", dossier.levels.timing)
    for state in dossier.levels.states:
        line(state.kind, state.reason)
    line("licence", dossier.licence.concluded)
    line("terms", dossier.licence.terms)
    line("from", f"{it.source.kind} {it.source.locator}")
    for file in dossier.files:
        line("file", f"{file.path}, {counted(file.lines, 'line')}, sha256 {file.sha256}")
    for way in dossier.ways:
        line(way.name, way.how or f"no: {way.why_not}")
    for use in dossier.techniques:
        if use.uses:
            lines = ", ".join(f"{finding.path}:{finding.line}" for finding in use.findings)
            line("uses", f"{use.technique.slug} ({lines})")
    for answer in dossier.hardware:
        line(answer.answer, f"{answer.hardware.name}: {answer.reason}")
    for run in dossier.runs:
        value = f"{run.figure.metric} {time_text(run.figure.value)}" if run.figure else "no figure"
        where = f"{run.workload.name if run.workload else 'the whole board'} on {run.device or 'an unknown device'}"
        line("claimed" if run.claimed else "measured", f"{run.status}, {value}, {where}")
    for text in it.limitations:
        line("limitation", text)


def _print_source(dossier: "Dossier") -> None:
    for file in dossier.files:
        if file.text is None:
            raise PermissionError(
                f"{dossier.implementation.slug}: its source may not be shown under the terms "
                f"{dossier.licence.terms or 'unknown'}"
            )
        sys.stdout.write(file.text)
