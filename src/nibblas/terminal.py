"""What the parts of the command line share: how wide they print, and which options they refuse."""

import os

import typer
from rich.console import Console

PIPED_WIDTH = 100  # columns of what goes to no terminal


def console_of_stdout(widest: int | None = None) -> Console:
    """As wide as the terminal, but no wider than `widest` columns; PIPED_WIDTH where there is none."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
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
