"""Every problem of a checkout of gpu-mode/reference-kernels with its own baseline, and the table of what came of it.

`python -m nibblas.arena.survey CHECKOUT RECORDS` runs what the folder RECORDS holds no record of yet, and prints the
table in Markdown; with --write it goes between the marks of docs/arena.md, of a GPU and of a CPU in two places. Where a
baseline can't run here, the problem's reference is run as a submission too, which shows whether the problem can be
judged. Several may run at once with --tests-only; times need the machine alone.
"""

import argparse
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nibblas.arena import record as records
from nibblas.arena.problem import ArenaError, Task, read_task
from nibblas.arena.record import CaseResult, Mode, Record
from nibblas.arena.show import floor_share
from nibblas.arena.submission import Submission, read_submission
from nibblas.generated import Part
from nibblas.roofline import device_called, device_name
from nibblas.words import counted, time_text

if TYPE_CHECKING:
    from nibblas.arena.options import Options

MODULE = "nibblas.arena.survey"
PARTS = {
    "cpu": Part("docs/arena.md", "reference-kernels", MODULE),
    "cuda": Part("docs/arena.md", "reference-kernels-gpu", MODULE),
}
HEAD = ("problem", "submission", "verdict", "tests passed", "timed", "median", "95 % interval", "of floor", "notes")
MAX_NOTE = 110
MODES: tuple[Mode, ...] = ("test", "benchmark")


@dataclass(frozen=True)
class Entry:
    """A problem of the checkout with a submission to it; without a task, why the arena refuses the problem."""

    problem: str  # set/name
    kind: str  # "baseline", or "reference" for the problem's own reference as a submission
    task: Task | None = None
    submission: Submission | None = None
    refusal: str = ""
    runs: dict[Mode, Record] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)  # of the arena itself, in place of runs

    @property
    def reason(self) -> str:
        """Why the tests did not pass."""
        return self.runs["test"].reason if "test" in self.runs else "; ".join(self.faults)

    def cells(self) -> tuple[str, ...]:
        """Its line of the table, in the order of HEAD."""
        test = self.runs.get("test")
        if test is None or self.task is None:
            verdict = "refused" if self.refusal else "not run"
            return (self.problem, self.kind, verdict, *[""] * 5, brief(self.refusal or self.reason))
        passed = sum(case.verdict == "correct" for case in test.cases)
        is_judged = test.verdict not in ("incompatible here", "refused")
        return (
            self.problem,
            self.kind,
            "correct so far" if test.verdict == "unfinished" and passed else test.verdict,
            f"{passed} of {len(self.task.tests)}" if is_judged else "",
            *self._times(),
            self._notes(test),
        )

    def _times(self) -> tuple[str, str, str, str]:
        case = next((case for case in self._timed() if case.statistics is not None), None)
        return ("", "", "", "") if case is None else (sizes(case), *times(case))

    def _timed(self) -> tuple[CaseResult, ...]:
        benchmark = self.runs.get("benchmark")
        return benchmark.cases if benchmark is not None else ()

    def _notes(self, test: Record) -> str:
        reason = (
            "" if test.verdict == "correct here" else test.reason.replace("interrupted", "stopped by the time limit")
        )
        used = sorted({name.split(".")[0] if name.startswith("aiter") else name for name in test.stand_ins})
        return "; ".join(filter(None, [brief(reason), f"stand-ins: {', '.join(used)}" if used else ""]))


def entries(checkout: Path) -> Iterator[Entry]:
    """The problems of a checkout in the order of their names, each with its baseline and its reference."""
    for path in sorted(checkout.glob("problems/*/*/task.yml")):
        problem = path.parent.relative_to(checkout / "problems").as_posix()
        try:
            task = read_task(path.parent)
            baseline = read_submission(path.parent / task.submission_name, task)
        except ArenaError as error:
            yield Entry(problem, "baseline", refusal=str(error).removeprefix(f"{path}: "))
            continue
        yield Entry(problem, "baseline", task, baseline)
        yield Entry(problem, "reference", task, reference_as_submission(task))


def reference_as_submission(task: Task) -> Submission:
    """A submission that is the problem's own reference."""
    reference = task.file("reference.py")
    assert reference is not None  # read_task sees to it
    text = reference.content + b"\n\ncustom_kernel = ref_kernel\n"
    return Submission(reference.path, task.submission_name, {task.submission_name: text})


def survey(
    checkout: Path, folder: Path, device: str, budget: float, seconds: float, only: str, modes: Sequence[Mode] = MODES
) -> list[Entry]:
    """Run what has no record in the folder yet, and return all entries of the table with their records.

    budget : seconds for the one benchmark case, the problem's first, that is timed where the tests passed.
    seconds : after which a run is stopped, with what it has.
    """
    found: list[Entry] = []
    for entry in entries(checkout):
        if not re.search(only, entry.problem):
            continue
        before = found[-1] if entry.kind == "reference" else None
        if before is not None and not _is_incompatible(before):
            continue
        if entry.task is not None and entry.submission is not None:
            _run(entry, entry.task, entry.submission, folder, device, budget, seconds, modes)
        if before is not None and brief(entry.reason) == brief(before.reason):
            continue  # it is the problem that can't be run here, which the line before says
        found.append(entry)
        print(" | ".join(entry.cells()), file=sys.stderr)
    return found


def _is_incompatible(entry: Entry) -> bool:
    return "test" in entry.runs and entry.runs["test"].verdict == "incompatible here"


def _run(
    entry: Entry,
    task: Task,
    submission: Submission,
    folder: Path,
    device: str,
    budget: float,
    seconds: float,
    modes: Sequence[Mode],
) -> None:
    from nibblas.arena.options import Options

    for mode in modes:
        name = f"{entry.problem.replace('/', '.')}.{entry.kind}.{mode}.{device.split(':')[0]}.json"
        path = folder / name
        first_only = replace(task, benchmarks=task.benchmarks[:1])
        options = Options(mode, device, budget=budget, command=f"python -m {MODULE}, {mode}")
        found = kept_run(path, seconds, first_only, submission, options)
        if isinstance(found, str):
            entry.faults.append(found)
            return
        entry.runs[mode] = found
        if found.verdict != "correct here":
            return


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


def device_of(parser: argparse.ArgumentParser, name: str) -> str:
    """The device that a program's --device names, with its number; the parser's error where it is not here."""
    try:
        return str(device_called(name))
    except ValueError as error:
        parser.error(str(error))


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


def table(found: list[Entry]) -> str:
    """The table in Markdown, below a line that names the machine."""
    runs = [run for entry in found for run in entry.runs.values()]
    tested = [entry.runs["test"].verdict for entry in found if "test" in entry.runs]
    passed = f"{tested.count('correct here')} of {len(tested)} submissions passed all their tests; "
    return markdown(passed + where_and_when(runs), HEAD, (entry.cells() for entry in found))


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
    """The median of a case, its interval and the share of the floor; empty where it was not timed."""
    found = case.statistics
    if found is None:
        return "", "", ""
    median, low, high = (time_text(ns * 1e-9) for ns in (found.median_ns, found.low_ns, found.high_ns))
    return median, f"{low} to {high}", floor_share(case)


def brief(text: str) -> str:
    """The start of a text, for a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= MAX_NOTE else f"{text[: MAX_NOTE - 3]}..."


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m nibblas.arena.survey", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of gpu-mode/reference-kernels")
    parser.add_argument("records", type=Path, help="the folder that keeps the records")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for the timed case")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a run is stopped")
    parser.add_argument("--only", default="", help="a regular expression for set/name")
    parser.add_argument("--tests-only", action="store_true", help="time nothing, so that several may run at once")
    parser.add_argument("--write", action="store_true", help="write the table to docs/arena.md")
    given = parser.parse_args()
    if not (given.checkout / "problems").is_dir():
        parser.error(f"{given.checkout} has no folder problems")
    modes = MODES[:1] if given.tests_only else MODES
    given.device = device_of(parser, given.device)
    found = survey(given.checkout, given.records, given.device, given.budget, given.seconds, given.only, modes)
    if given.write:
        PARTS[given.device.split(":")[0]].write(table(found))
    else:
        print(table(found))


if __name__ == "__main__":
    main()
