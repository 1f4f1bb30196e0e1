"""What KernelBot's tools read: a run as `key: value` lines and an exit status, and evaluation by its protocol."""

import base64
import math
import statistics
from collections.abc import Iterator

from nibblas.arena.record import CaseResult, Record

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
    """The lines of a run: tests, then benchmarks, then `check`. Each value stays on its line, whatever it holds."""
    return "".join(f"{key}: {_on_one_line(str(value))}\n" for key, value in _entries(record))


def _entries(record: Record) -> Iterator[tuple[str, object]]:
    tests = [case for case in record.cases if case.kind == "test"]
    benchmarks = [case for case in record.cases if case.kind != "test"]
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
    times = _times(case)
    if times:
        deviation = statistics.stdev(times) if len(times) > 1 else 0.0
        yield "runs", len(times)
        yield "mean", statistics.fmean(times)
        yield "std", deviation
        yield "err", deviation / math.sqrt(len(times))
        yield "best", float(min(times))
        yield "worst", float(max(times))
    if case.stand_ins:
        yield "message", f"these times are not the submission's own: it called {', '.join(case.stand_ins)}"


def _times(case: CaseResult) -> list[float]:
    if case.statistics is None:
        return []
    timer = case.statistics.timer
    claimed = [sample.claimed_ns.get(timer) for sample in case.samples if sample.valid]
    return [time for time in claimed if time is not None]


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
