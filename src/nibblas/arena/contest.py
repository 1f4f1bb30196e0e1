"""Every contest entry against decoding all weights and calling cuBLAS, on every benchmark case of its problem.

`python -m nibblas.arena.contest CHECKOUT RECORDS` times what the folder RECORDS holds no complete record of, and prints
the table in Markdown; with --write it goes between the marks of contest/README.md, of a CPU and of a GPU in two places.
With --evidence FILE what was measured is added to that file, once. It goes on after an entry that fails, and with a run
that was stopped.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nibblas import evidence
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
from nibblas.arena.measurements import measurements
from nibblas.arena.problem import ArenaError, read_task
from nibblas.arena.record import CaseResult, Record
from nibblas.arena.submission import read_submission
from nibblas.generated import ROOT, Part

MODULE = "nibblas.arena.contest"
PARTS = {
    "cpu": Part("contest/README.md", "contest", MODULE),
    "cuda": Part("contest/README.md", "contest-gpu", MODULE),
}
FOLDER = ROOT / "contest"
BASELINE = "dequantized.py"
HEAD = ("problem", "case", "median", "95 % interval", "of floor", "of dequantized", "95 % interval", "verdict")


@dataclass(frozen=True)
class Entry:
    """An entry of the folder contest/ with its record; without one, why there is none."""

    name: str
    found: Record | str

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Its lines of the table, one a case, in the order of HEAD, and one for a run that did not end."""
        if isinstance(self.found, str):
            yield (self.name, *[""] * 6, brief(self.found))
            return
        ratios = {} if self.found.comparison is None else {r.text: r for r in self.found.comparison.ratios}
        for case in self.found.cases:
            ratio = ratios.get(case.text) if case.verdict == "correct" else None
            of_other = (f"{ratio.ratio:.3g}", f"{ratio.low:.3g} to {ratio.high:.3g}") if ratio else ("", "")
            yield (self.name, sizes(case), *times(case), *of_other, _verdict(case))
        if not self.found.complete or not self.found.cases:
            yield (self.name, *[""] * 6, brief(f"{self.found.verdict}: {why_not(self.found)}"))


def _verdict(case: CaseResult) -> str:
    told = [case.message] if case.verdict != "correct" else []
    told += [finding.what for finding in case.findings if finding.severity != "info"]
    return brief(f"{case.verdict}: {'; '.join(told)}" if told else case.verdict)


def contest(checkout: Path, folder: Path, device: str, budget: float, seconds: float, only: str) -> list[Entry]:
    """Run each entry that has no complete record in the folder, and return all with their records.

    budget : seconds for one case. seconds : after which the run of a problem is stopped, with what it has.
    """
    found = []
    for path in sorted(FOLDER.glob("*/submission.py")):
        name = path.parent.name
        if not re.search(only, name):
            continue
        found.append(Entry(name, _run(name, path, checkout, folder, device, budget, seconds)))
        for row in found[-1].rows():
            print(" | ".join(row), file=sys.stderr, flush=True)
    return found


def _run(
    name: str, path: Path, checkout: Path, folder: Path, device: str, budget: float, seconds: float
) -> Record | str:
    from nibblas.arena.options import Options

    directory = next(iter(sorted(checkout.glob(f"problems/*/{name}"))), checkout / "problems" / name)
    try:
        task = replace(read_task(directory), ranking_by="geom")  # all of its cases are run, not the last alone
        entry, baseline = (read_submission(one, task) for one in (path, path.with_name(BASELINE)))
    except ArenaError as error:
        return str(error)
    options = Options("benchmark", device, budget=budget, command=f"python -m {MODULE}, {name}")
    return kept_run(
        folder / f"{name}.{device_kind(device)}.json", seconds, task, entry, options, against=baseline, resumes=True
    )


def table(found: list[Entry]) -> str:
    """The table in Markdown, below a line that names the machine."""
    runs = [entry.found for entry in found if isinstance(entry.found, Record)]
    line = where_and_when(runs) if runs else "No runs."
    return markdown(line, HEAD, (row for entry in found for row in entry.rows()))


def add_evidence(found: list[Entry], path: Path) -> int:
    """Add what was measured to a file of evidence, but for what it has; how many rows were added."""
    known = {row.to_json() for row in evidence.read(path)} if path.exists() else set()
    rows = [row for entry in found if isinstance(entry.found, Record) for row in measurements(entry.found)]
    new = [row for row in rows if row.to_json() not in known]
    if new:
        evidence.append(path, new)
    return len(new)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of gpu-mode/reference-kernels")
    parser.add_argument("records", type=Path, help="the folder that keeps the records")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for one case")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which the run of a problem is stopped")
    parser.add_argument("--only", default="", help="a regular expression for the entries")
    parser.add_argument("--evidence", type=Path, help="a file of evidence that measurements are added to")
    parser.add_argument("--write", action="store_true", help="write the table to contest/README.md")
    given = parser.parse_args()
    if not (given.checkout / "problems").is_dir():
        parser.error(f"{given.checkout} has no folder problems")
    given.device = device_option(parser, given.device)
    found = contest(given.checkout, given.records, given.device, given.budget, given.seconds, given.only)
    if given.evidence is not None:
        print(f"{given.evidence}: {add_evidence(found, given.evidence)} rows added", file=sys.stderr)
    if given.write:
        PARTS[device_kind(given.device)].write(table(found))
    else:
        print(table(found))


if __name__ == "__main__":
    main()
