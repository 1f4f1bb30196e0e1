"""The rows of evidence in a record, for tasks that are products nibblas has a name for."""

import hashlib

from nibblas.arena.products import problem_of
from nibblas.arena.record import CaseResult, Record, SubmissionFacts
from nibblas.evidence import Measurement
from nibblas.problem import Problem


def measurements(record: Record) -> list[Measurement]:
    """One Measurement for each product that was timed, correct and computed by the submission itself; else none.

    Where a case was timed twice, with a public seed and with secret ones, the later one counts. The kernel is called
    by task and submission, and its digest is that of the submission's files.
    """
    rows: dict[Problem, Measurement] = {}
    for case in record.cases:
        problem = problem_of(record.task.name, case.values, record.environment.arch)
        if problem is not None and case.statistics is not None and case.verdict == "correct" and not case.stand_ins:
            rows[problem] = _measurement(record, case, problem)
    return list(rows.values())


def _measurement(record: Record, case: CaseResult, problem: Problem) -> Measurement:
    protocol, e = record.protocol, record.environment
    tests = [test for test in record.cases if test.kind == "test"]
    errors = [found.max_relative_size for found in case.errors if found.max_relative_size is not None]
    assert case.statistics is not None
    timer = case.statistics.timer
    return Measurement(
        kernel=f"{record.task.name}/{record.submission.name}",
        digest=submission_digest(record.submission),
        problem=problem,
        device=e.device,
        threads=e.threads,
        when=record.when,
        command=record.command,
        method=f"arena {case.kind}, {protocol.flush_bytes >> 20} MiB flushed, fresh inputs, {timer} timer",
        samples=tuple(ns * 1e-9 for ns in case.times),
        floor=None if case.floor_ns is None or case.has_partial_floor else case.floor_ns * 1e-9,
        error=max(errors, default=None),
        hardened=protocol.hardened and bool(tests) and all(test.verdict == "correct" for test in tests),
        beside=_beside(record, case),
        versions={**e.versions, "python": e.python, "torch": e.torch},
        facts=e.facts,
    )


def _beside(record: Record, case: CaseResult) -> dict[str, float]:
    """The other submission's median where `--against` timed it in the same run, seconds."""
    if record.comparison is None or case.statistics is None:
        return {}
    ratio = next((r.ratio for r in record.comparison.ratios if r.text == case.text), None)
    return {} if ratio is None else {record.comparison.against.name: case.statistics.median_ns * 1e-9 / ratio}


def submission_digest(submission: SubmissionFacts) -> str:
    """The sha256 of a submission's only file; of several, that of what `sha256sum` prints for them, sorted by name."""
    if len(submission.files) == 1:
        return next(iter(submission.files.values()))
    listing = "".join(f"{digest}  {name}\n" for name, digest in sorted(submission.files.items()))
    return hashlib.sha256(listing.encode()).hexdigest()
