"""What the parts of the command line share: how they print and show progress, and which options they refuse."""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from nibblas.words import json_text

PIPED_WIDTH = 100  # columns of what goes to no terminal
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def console_of_stdout(widest: int | None = None, piped: int = PIPED_WIDTH) -> Console:
    """As wide as the terminal, but no wider than `widest` columns; `piped` columns where there is none."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = piped
    elif widest is not None:
        console.width = min(console.width, widest)
    return console


def refuse(context: typer.Context, why: str, **refused: bool) -> None:
    """Wrong usage where the command line gives an option that is refused; `why` stands before the options' names."""

    def is_given(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    options = {parameter.name or "": parameter.opts[0] for parameter in context.command.params}
    if given := [options[name] for name, is_refused in refused.items() if is_refused and is_given(name)]:
        raise typer.BadParameter(f"{why} {', '.join(given)}")


def print_json(data: Any) -> None:
    """One document on the standard output."""
    print(json_text(data))


def table_of(*columns: str, right: Collection[str] = (), whole: Collection[str] = (), edge: bool = True) -> Table:
    """A table with a line below its head, and an empty one above and below it if it has an `edge`.

    Texts that are too long are folded, but for those of the columns `right`, which are numbers, and `whole`.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=edge)
    for name in columns:
        no_wrap = name in right or name in whole
        made.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=no_wrap)
    return made


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, as progress(done, total or 0, text); nothing where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total or None, description=f"{what} {escape(_shorten(text))}")

        yield advance


def _shorten(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"...{text[3 - most :]}"
