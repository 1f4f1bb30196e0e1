"""What KernelBot's tools read: a run as `key: value` lines and an exit status, and evaluation by its protocol."""

import base64
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from nibblas.arena.problem import ArenaError, Case, Task, TaskFile, parse_case
from nibblas.arena.record import CaseResult, Mode, Record

# Exit statuses of KernelBot's evaluation programs.
OK = 0
FAILED = 1  # what Python gives an exception: nothing was judged
BAD_ARGUMENTS = 2
CUDA_FAILED = 110
NO_DESCRIPTOR = 111
WRONG = 112
BAD_CASES = 113
TIMEOUT = 114


def log(record: Record) -> str:
    """The lines of a run: its tests, the benchmarks of its own mode, then `check`. No value can leave its line."""
    return _lines(_entries(record))


def log_of_error(error: Exception) -> str:
    """The lines of a run that did not begin, since something can't be read."""
    return _lines([("error", str(error)), ("check", "fail")])


def _lines(entries: Iterable[tuple[str, object]]) -> str:
    return "".join(f"{key}: {_on_one_line(str(value))}\n" for key, value in entries)


def _entries(record: Record) -> Iterator[tuple[str, object]]:
    tests = [case for case in record.cases if case.kind == "test"]
    benchmarks = [case for case in record.cases if case.kind == record.mode != "test"]
    if tests or record.mode == "test":
        yield "test-count", len(tests)
    for i, case in enumerate(tests):
        yield f"test.{i}.spec", case.text
        yield f"test.{i}.status", "pass" if case.verdict == "correct" else "fail"
        if case.verdict != "correct":
            yield f"test.{i}.error", _reason(case)
        elif case.message:
            yield f"test.{i}.message", case.message
    if benchmarks or record.mode != "test":
        yield "benchmark-count", len(benchmarks)
    for i, case in enumerate(benchmarks):
        yield f"benchmark.{i}.spec", case.text
        yield from ((f"benchmark.{i}.{key}", value) for key, value in _benchmark(case))
    if record.reason:
        yield "error", record.reason
    yield "check", "pass" if record.verdict == "correct here" else "fail"


def _benchmark(case: CaseResult) -> Iterator[tuple[str, object]]:
    """Times in nanoseconds, of the samples that the statistics count."""
    if case.verdict != "correct":
        yield "status", "fail"
        yield "error", _reason(case)
        return
    if case.kind == "profile":
        yield "report", base64.b64encode(case.report.encode(), b"+*").decode()
    if times := case.times:
        deviation = statistics.stdev(times) if len(times) > 1 else 0.0
        yield "runs", len(times)
        yield "mean", statistics.fmean(times)
        yield "std", deviation
        yield "err", deviation / math.sqrt(len(times))
        yield "best", float(min(times))
        yield "worst", float(max(times))
    if case.stand_ins:
        yield "message", f"these times are not the submission's own: it called {', '.join(case.stand_ins)}"


def _reason(case: CaseResult) -> str:
    refusals = [finding.what for finding in case.findings if finding.severity == "refuse"]
    return f"{case.verdict}: {'; '.join([case.message] * bool(case.message) + refusals)}".removesuffix(": ")


def _on_one_line(text: str) -> str:
    """The text with what is not printable, line ends above all, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def exit_code(record: Record) -> int:
    """The status of KernelBot's evaluation programs that says the same; 1 where nothing was judged."""
    if record.verdict == "crashed":
        return CUDA_FAILED if "CUDA error" in record.reason else FAILED
    return {"correct here": OK, "wrong": WRONG, "refused": WRONG, "timeout": TIMEOUT}.get(record.verdict, FAILED)


# Where KernelBot puts the submission, beside the other files of the problem.
SUBMISSION_NAME = "submission.py"
OUTER_TIMEOUT = 24 * 3600.0  # seconds; KernelBot has a timeout of its own around the program


def evaluate(arguments: Sequence[str]) -> int:
    """Judge submission.py in the current folder as an evaluation program of KernelBot: its exit status.

    arguments : a mode, and a file with a case on each line. The results go to the file descriptor POPCORN_FD names.
    Seeds are secret in any case; POPCORN_SEED is not needed and not read.
    """
    try:
        descriptor = int(os.environ["POPCORN_FD"])
        os.fstat(descriptor)
    except (KeyError, ValueError, OSError):
        return _complain(
            "POPCORN_FD names no open descriptor; by hand, use `nibblas arena run . submission.py`", NO_DESCRIPTOR
        )
    modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
    if len(arguments) != 2 or arguments[0] not in modes:
        return _complain(f"need a mode ({', '.join(modes)}) and a file of cases", BAD_ARGUMENTS)
    mode = modes[arguments[0]]
    import torch

    from nibblas.arena.options import Options
    from nibblas.arena.run import run
    from nibblas.arena.submission import read_submission

    try:
        task = _task_here(mode, Path(arguments[1]))
        submission = read_submission(SUBMISSION_NAME, task)
    except (ArenaError, OSError) as error:
        return _complain(str(error), BAD_CASES)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch, os.fdopen(descriptor, "w") as results:
        record = run(task, submission, Options(mode, device, dialect="kernelbot"), Path(scratch, "record.json"))
        results.write(log(record))
    return exit_code(record)


def _complain(text: str, status: int) -> int:
    print(f"nibblas: {text}", file=sys.stderr)
    return status


def _task_here(mode: Mode, cases: Path) -> Task:
    """The problem whose files lie in the current folder, with the cases of a file."""
    lines = [line for line in cases.read_text().splitlines() if line.strip()]
    if not lines:
        raise ArenaError(f"{cases} has no cases")
    found = tuple(Case(parse_case(line), line) for line in lines)
    here = Path.cwd()
    names = sorted(path for path in here.glob("*.py") if path.name != SUBMISSION_NAME)
    return Task(
        here,
        here.name,
        "py",
        "",
        tuple(TaskFile(path.name, path, path.read_bytes()) for path in names),
        SUBMISSION_NAME,
        {"main": "eval.py"},
        tests=found if mode == "test" else (),
        benchmarks=found if mode != "test" else (),
        test_timeout=OUTER_TIMEOUT,
        benchmark_timeout=OUTER_TIMEOUT,
        ranked_timeout=OUTER_TIMEOUT,
        ranking_by="geom",
        dialect="kernelbot",
    )
