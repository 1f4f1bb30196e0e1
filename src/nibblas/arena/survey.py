"""Every problem of a checkout of gpu-mode/reference-kernels with its own baseline, and the table of what came of it.

`python -m nibblas.arena.survey CHECKOUT RECORDS` runs what the folder RECORDS holds no record of yet, and prints the
table in Markdown; with --write it goes between the marks of docs/arena.md, of a GPU and of a CPU in two places. Where a
baseline can't run here, the problem's reference is run as a submission too, which shows whether the problem can be
judged. Several may run at once with --tests-only; times need the machine alone.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nibblas.arena.batch import (
    brief,
    device_kind,
    device_option,
    kept_run,
    markdown,
    sizes,
    times,
    where_and_when,
    why_not,
)
from nibblas.arena.problem import ArenaError, Task, read_task
from nibblas.arena.record import Mode, Record
from nibblas.arena.submission import Submission, read_submission
from nibblas.generated import Part

MODULE = "nibblas.arena.survey"
PARTS = {
    "cpu": Part("docs/arena.md", "reference-kernels", MODULE),
    "cuda": Part("docs/arena.md", "reference-kernels-gpu", MODULE),
}
HEAD = ("problem", "submission", "verdict", "tests passed", "timed", "median", "95 % interval", "of floor", "notes")
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
        """Its line of the table, in the order of HEAD; the first of its runs that is not correct gives the verdict."""
        test = self.runs.get("test")
        if test is None or self.task is None:
            verdict = "refused" if self.refusal else "not run"
            return (self.problem, self.kind, verdict, *[""] * 5, brief(self.refusal or self.reason))
        run = next((run for run in self.runs.values() if run.verdict != "correct here"), test)
        passed = sum(case.verdict == "correct" for case in test.cases)
        is_judged = test.verdict not in ("incompatible here", "refused")
        return (
            self.problem,
            self.kind,
            "correct so far" if run.verdict == "unfinished" and passed else run.verdict,
            f"{passed} of {len(self.task.tests)}" if is_judged else "",
            *self._times(),
            self._notes(run, test.stand_ins),
        )

    def _times(self) -> tuple[str, str, str, str]:
        cases = self.runs["benchmark"].cases if "benchmark" in self.runs else ()
        return next(((sizes(case), *found) for case in cases if any(found := times(case))), ("", "", "", ""))

    def _notes(self, run: Record, stand_ins: Sequence[str]) -> str:
        why = "; ".join(filter(None, [why_not(run), *self.faults]))
        used = sorted({name.split(".")[0] if name.startswith("aiter") else name for name in stand_ins})
        return "; ".join(filter(None, [brief(why), f"stand-ins: {', '.join(used)}" if used else ""]))


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
        name = f"{entry.problem.replace('/', '.')}.{entry.kind}.{mode}.{device_kind(device)}.json"
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


def table(found: list[Entry]) -> str:
    """The table in Markdown, below a line that names the machine."""
    runs = [run for entry in found for run in entry.runs.values()]
    tested = [entry.runs["test"].verdict for entry in found if "test" in entry.runs]
    passed = f"{tested.count('correct here')} of {len(tested)} submissions passed all their tests; "
    return markdown(passed + where_and_when(runs), HEAD, (entry.cells() for entry in found))


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
    given.device = device_option(parser, given.device)
    found = survey(given.checkout, given.records, given.device, given.budget, given.seconds, given.only, modes)
    if given.write:
        PARTS[device_kind(given.device)].write(table(found))
    else:
        print(table(found))


if __name__ == "__main__":
    main()
