"""The commands `nibblas arena run | show | new | lint`. Only typer and rich are imported before one runs."""

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Annotated

import typer
from rich.console import Console

from nibblas.arena.record import TIMED, Dialect, Mode, StandInChoice
from nibblas.terminal import console_of_stdout, refuse

app = typer.Typer(
    help="Judge kernel submissions on this machine: a KernelBot problem directory and a submission.py give a record.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Directory = Annotated[Path, typer.Argument(metavar="PROBLEM", help="A folder with a task.yml.", show_default=False)]


@app.command("run", no_args_is_help=True)
def _run(
    context: typer.Context,
    problem: Directory,
    submission: Annotated[
        Path, typer.Argument(metavar="SUBMISSION", help="A file or folder with custom_kernel.", show_default=False)
    ],
    mode: Annotated[
        Mode, typer.Option(help="leaderboard is test, then benchmark, then ranked with a secret seed.")
    ] = "test",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; the first GPU by default.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own number by default.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="In place of the cases' public seeds, to look at one.")
    ] = None,
    budget: Annotated[
        float, typer.Option(min=0.1, help="Seconds of calls after warm-up, for one benchmark case.")
    ] = 30.0,
    output: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="The record's file; arena-NAME-TIME.json by default.", show_default=False),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Go on with an interrupted run's record, by the same options."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Compare times pair by pair with another submission, or `self`.")
    ] = None,
    hardened: Annotated[bool, typer.Option(help="Also inputs with all codes and scales, and NaN in padding.")] = False,
    dialect: Annotated[
        Dialect, typer.Option(help="kernelbot reads cases as upstream does, booleans as words.")
    ] = "nibblas",
    stand_ins: Annotated[
        StandInChoice, typer.Option("--stand-ins", help="auto: ours for what this machine lacks.")
    ] = "auto",
    popcorn: Annotated[bool, typer.Option("--popcorn", help="Print KernelBot's lines, exit with its status.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record.")] = False,
) -> None:
    """Run a submission on a problem and keep a record. Exits with 0 where it is correct here, else with 1."""
    from nibblas import evidence
    from nibblas.arena import popcorn as popcorn_log
    from nibblas.arena import record as records
    from nibblas.arena.measurements import measurements
    from nibblas.arena.options import Options
    from nibblas.arena.problem import ArenaError, read_task
    from nibblas.arena.run import run
    from nibblas.arena.submission import read_submission
    from nibblas.roofline import device_called

    refuse(context, "mode test takes no times and has no", budget=mode == "test")
    if popcorn and as_json:
        raise typer.BadParameter("--popcorn and --json are given, need one of them")
    device = str(device_called(device))
    if against is not None and mode not in TIMED:
        raise ArenaError(f"--against compares times, which mode {mode} takes none of: use --mode benchmark")
    with _told_as(popcorn, ValueError, OSError):
        task = read_task(problem, dialect)
        entry = read_submission(submission, task)
        other = None if against is None else entry if against == "self" else read_submission(Path(against), task)
    path = output or resume or Path(f"arena-{task.name}-{datetime.now(UTC):%Y%m%dT%H%M%S}-{token_hex(2)}.json")
    path = path.absolute()
    if resume is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    # An end by SIGTERM, as by Ctrl-C, leaves a record that can be resumed.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = Options(
        mode,
        device,
        threads,
        seed,
        budget,
        hardened,
        dialect,
        stand_ins,
        shlex.join(["nibblas", *sys.argv[1:]]),
    )
    console = Console(stderr=True, soft_wrap=True)
    try:
        with records.only_writer(path), console.status("") as status, _told_as(popcorn, ArenaError):
            with _told_as(popcorn, ValueError, OSError):
                resumed = None if resume is None else records.read(resume)
            if resumed is not None and resumed.complete:
                raise ArenaError(f"{resume}: this run is complete, there is nothing to go on with")
            found = run(
                task,
                entry,
                options,
                path,
                against=other,
                resumed=resumed,
                progress=lambda text: status.update(text, spinner="dots"),
            )
    except KeyboardInterrupt:
        if path.exists():
            text = f"interrupted: {path} holds what was done; the same command with --resume {path} goes on"
            console.print(text, highlight=False, markup=False)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    if rows := measurements(found):
        evidence.store().add(rows)
    if as_json:
        print(found.to_json(), end="")
    elif popcorn:
        print(popcorn_log.log(found), end="")
    else:
        from nibblas.arena.show import print_record

        print_record(found, console_of_stdout())
        print(f"record: {path}")
    raise typer.Exit(popcorn_log.exit_code(found) if popcorn else int(found.verdict != "correct here"))


@contextmanager
def _told_as(popcorn: bool, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds are of cases or files that can't be read: with `popcorn`, in its lines and status."""
    from nibblas.arena import popcorn as popcorn_log

    try:
        yield
    except kinds as error:
        if not popcorn:
            raise
        print(popcorn_log.log_of_error(error), end="")
        raise typer.Exit(popcorn_log.BAD_CASES) from None


@app.command("show", no_args_is_help=True)
def _show(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="A file that `run` wrote.", show_default=False)],
    html: Annotated[
        Path | None,
        typer.Option(metavar="PAGE", dir_okay=False, help="Write one self-contained page instead.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record, checked against its schema.")] = False,
) -> None:
    """Show a record: verdicts, errors, times and how they spread, findings, and how it was done."""
    from nibblas.arena import record as records

    if html is not None and as_json:
        raise typer.BadParameter("--html and --json are given, need one of them")
    found = records.read(record)
    if html is not None:
        from nibblas.arena.page import page

        html.write_text(page(found))
    elif as_json:
        print(found.to_json(), end="")
    else:
        from nibblas.arena.show import print_record

        print_record(found, console_of_stdout())


@app.command("new", no_args_is_help=True)
def _new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for the problem.", show_default=False)],
    parent: Annotated[Path, typer.Option(metavar="FOLDER", help="Where its folder is to be.")] = Path(),
) -> None:
    """Make a problem directory from the template, with a first submission that is right."""
    from nibblas.arena.new import new

    print(new(name, parent))


@app.command("lint", no_args_is_help=True)
def _lint(
    problem: Directory,
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:1 ...")] = "cpu",
    hardened: Annotated[bool, typer.Option(help="Lint the inputs that `run --hardened` adds.")] = False,
    budget: Annotated[float, typer.Option(min=1, help="Seconds for one case.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Try each case of a problem with wrong answers. Exits with 1 where one would pass, or the problem has a fault."""
    import json
    from dataclasses import asdict

    from nibblas.arena.lint import lint_problem, print_lint
    from nibblas.roofline import device_called

    console = Console(stderr=True)
    with console.status("") as status:
        found = lint_problem(
            problem, str(device_called(device)), hardened=hardened, budget=budget, progress=status.update
        )
    if as_json:
        print(json.dumps([{**asdict(case), "weak": case.weak} for case in found], indent=1))
    else:
        print_lint(found, console_of_stdout())
    raise typer.Exit(int(any(case.weak or case.faults for case in found)))
