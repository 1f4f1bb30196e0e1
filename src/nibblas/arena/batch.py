"""What programs that run many problems share: runs whose records are kept, and tables of them in Markdown."""

import argparse
import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nibblas.arena import record as records
from nibblas.arena.problem import Task
from nibblas.arena.record import CaseResult, Record
from nibblas.arena.show import floor_share
from nibblas.arena.submission import Submission
from nibblas.roofline import device_called, device_name
from nibblas.words import counted, time_text

if TYPE_CHECKING:
    from nibblas.arena.options import Options

MAX_NOTE = 110


def kept_run(
    path: Path,
    seconds: float,
    task: Task,
    submission: Submission,
    options: "Options",
    *,
    against: Submission | None = None,
    resumes: bool = False,
) -> Record | str:
    """The record in a file, which is made by a run where it is not there, or, with `resumes`, where it isn't complete.

    One of another device, or of other files, is made anew. A run is stopped after so many seconds, and its record keeps
    what it has. Where the arena itself fails, why.
    """
    from nibblas.arena import run as arena

    path.parent.mkdir(parents=True, exist_ok=True)
    with records.only_writer(path):
        resumed = _read(path) if path.exists() else None
        if isinstance(resumed, Record) and not _is_of(resumed, task, submission, options.device):
            resumed = None
        if isinstance(resumed, str) or (resumed is not None and (resumed.complete or not resumes)):
            return resumed
        try:
            with _interrupted_after(seconds):
                return arena.run(task, submission, options, path, against=against, resumed=resumed)
        except Exception as error:
            traceback.print_exc()
            return f"the arena failed: {type(error).__name__}: {error}"
        return _read(path) if path.exists() else f"not started within {seconds:g} s"


def _is_of(record: Record, task: Task, submission: Submission, device: str) -> bool:
    found = record.task.files, record.submission.files, record.environment.device
    return found == (task.digests, submission.facts.files, device_name(torch.device(device)))


def device_option(parser: argparse.ArgumentParser, name: str) -> str:
    """The device that a program's --device names, with its number; the parser's error where it is not here."""
    try:
        return str(device_called(name))
    except ValueError as error:
        parser.error(str(error))


def device_kind(device: str) -> str:
    """What sort of device one is: "cuda" of "cuda:1"."""
    return device.split(":")[0]


def _read(path: Path) -> Record | str:
    try:
        return records.read(path)
    except (OSError, ValueError, ImportError) as error:  # what checks a record may not be installed where it is made
        return f"the record can't be read here: {error}"


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """What takes longer is told to stop as by Ctrl-C, and ends quietly."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except KeyboardInterrupt:
        if signal.getitimer(signal.ITIMER_REAL)[0]:
            raise  # by a person
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def markdown(line: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table below a line."""
    cells = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([line, "", next(cells), "|---" * len(head) + "|", *cells])


def where_and_when(runs: Sequence[Record]) -> str:
    """The machines of runs, and the days from the first to the last."""
    days = sorted({run.when[:10] for run in runs})
    machines = ", ".join(sorted({machine(run) for run in runs}))
    return f"{machines}; {' to '.join(dict.fromkeys([days[0], days[-1]])) if days else 'no runs'}."


def machine(run: Record) -> str:
    """The device of a run, of a CPU with its threads."""
    found = run.environment
    return f"{found.device}, {counted(found.threads, 'thread')}" if found.threads else found.device


def sizes(case: CaseResult) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.values.items() if key != "seed")


def times(case: CaseResult) -> tuple[str, str, str]:
    """The median of a case, its interval and the share of the floor; empty where it is not correct and timed."""
    found = case.statistics
    if found is None or case.verdict != "correct":
        return "", "", ""
    median, low, high = (time_text(ns * 1e-9) for ns in (found.median_ns, found.low_ns, found.high_ns))
    return median, f"{low} to {high}", floor_share(case)


def why_not(run: Record) -> str:
    """Why a run is not correct here; of one that was interrupted, in the words of these programs."""
    return run.reason.replace("interrupted", "stopped by the time limit") if run.verdict != "correct here" else ""


def brief(text: str) -> str:
    """The start of a text, for a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= MAX_NOTE else f"{text[: MAX_NOTE - 3]}..."
