"""Records for tests: one that went well, and one in which everything went wrong, with hostile texts."""

import random
from dataclasses import replace

from nibblas.arena.record import (
    CaseResult,
    Comparison,
    Coverage,
    Environment,
    Errors,
    Finding,
    PairedRatio,
    Protocol,
    Record,
    Sample,
    Seed,
    Statistics,
    SubmissionFacts,
    TaskFacts,
    commit,
)
from nibblas.statistics import median_interval

SHA = "0" * 64
HOSTILE = "\x1b[31mred\x07 [bold]x[/bold] <script>alert(1)</script> \u202egnp.exe"
ERRORS = Errors("result", "exact", "torch.float16", 7168, 0.5, 1.0, 4.9e-4, 2000.0, (3, 0, 0), 1.0, 2.0, 4e-4)
AGAINST_REFERENCE = Errors("result", "reference", "torch.float16", 7168, 0.0, 0.0, 0.0, 2000.0, (0, 0, 0), 1.0, 1.0)
COVERAGE = (
    Coverage(
        "data[0]", "torch.float4_e2m1fn_x2", (7168, 8192, 1), "e2m1 pairs", 0.62, low_codes="0123", high_codes="0"
    ),
    Coverage("data[2]", "torch.float8_e4m3fn", (7168, 1024, 1), "e4m3", 0.34, byte_codes="00 38 40"),
)
SIZES = ({"m": 7168, "k": 16384, "l": 1, "seed": 7}, {"m": 4096, "k": 7168, "l": 8, "seed": 7})


def timed(kind="benchmark", values=SIZES[0], *, ns=24_000.0, floor=15_000.0, n=40, **changes):
    """A case with samples: a warm-up, a throttled one, some that are slow."""
    generator = random.Random(0)
    samples = []
    for i in range(n + 2):
        taken = ns * (1 + abs(generator.gauss(0, 0.02)) + (i % 17 == 16) * 0.6)
        reason = {0: "warm-up", 1: "the clocks were throttled"}.get(i, "")
        samples.append(
            Sample({"event": taken, "host": taken + 4000}, taken + 9000, not reason, reason, i == 1, i % 2 == 0)
        )
    found = median_interval([s.claimed_ns["event"] for s in samples if s.valid])
    case = CaseResult(
        kind,
        "; ".join(f"{name}: {value}" for name, value in values.items()),
        values,
        "correct",
        calls=n + 2,
        errors=(ERRORS, AGAINST_REFERENCE),
        coverage=COVERAGE,
        first_call_ns=2e9,
        samples=tuple(samples),
        statistics=Statistics("event", found.value, found.low, found.high, n),
        floor_ns=floor,
    )
    return replace(case, **changes)


def untimed(k, **changes):
    """A test case."""
    values = {"m": 128, "k": k, "l": 1, "seed": 7}
    text = "; ".join(f"{name}: {value}" for name, value in values.items())
    case = CaseResult("test", text, values, "correct", calls=2, errors=(ERRORS,), coverage=COVERAGE)
    return replace(case, **changes)


CASES = (
    untimed(256),
    untimed(512),
    *(timed(kind, values) for kind in ("benchmark", "leaderboard") for values in SIZES),
)

GOOD = Record(
    id="20261201T100000-ab12cd34",
    when="2026-12-01T10:00:00+00:00",
    command="nibblas arena run nvfp4_gemv submission.py --mode leaderboard",
    mode="leaderboard",
    task=TaskFacts("nvfp4_gemv", {"task.yml": SHA}, "py", "geom"),
    submission=SubmissionFacts("submission.py", {"submission.py": "1" * 64}, "nvfp4_gemv", ("B200",)),
    environment=Environment(
        "NVIDIA H200",
        "sm_90",
        0,
        "a CPU",
        "Linux 6.1",
        "3.12.1",
        "2.13.0",
        {"nibblas": "0.1.0", "driver": "580.1"},
        {"host": "node-7", "sm clock": "1980 MHz"},
    ),
    isolation={"user": True, "network": True, "ipc": "Operation not permitted"},
    protocol=Protocol(
        "leaderboard",
        (Seed(commit(5, "aa"), 5, "aa"),),
        timer="event",
        timers=("event", "host"),
        flush_bytes=240 << 20,
        warmup=1,
        stopping_rule="at least 10 samples",
        empty_call_ns=9000.0,
        bandwidth=4.4e12,
        bandwidth_source="stated",
        timeouts={"test": 180.0},
    ),
    stand_ins=("torch._scaled_mm with FP4",),
    cases=CASES,
    findings=(Finding("static", "info", "kernelguard calls it valid", "submission.py", {"version": "0.3.2"}),),
    verdict="correct here",
    score=CASES[-1].statistics.median_ns * 1e-9,  # the same of both
    complete=True,
)

BAD = replace(
    GOOD,
    task=TaskFacts(HOSTILE, {HOSTILE: SHA}, "py", "mean"),
    submission=SubmissionFacts(HOSTILE, {HOSTILE: SHA}),
    verdict="refused",
    reason=HOSTILE,
    score=None,
    cases=(
        untimed(
            256, verdict="wrong", message=f"{HOSTILE}\nsecond line", errors=(replace(ERRORS, special_mismatches=3),)
        ),
        untimed(512, verdict="crashed", message="Traceback\n  File", errors=(), coverage=()),
        timed(ns=1000.0, verdict="refused", findings=(Finding(HOSTILE, "refuse", HOSTILE, HOSTILE, {"x": HOSTILE}),)),
        timed(values=SIZES[1], floor=None, stand_ins=("aiter.gemm_a4w4",), n=3),
        CaseResult("benchmark", HOSTILE, {}, "not run", "an earlier stage did not pass"),
        CaseResult("profile", "m: 1", {"m": 1}, "incompatible", "needs sm_100", report=HOSTILE),
    ),
    comparison=Comparison(
        SubmissionFacts(HOSTILE, {"other.py": SHA}),
        (
            PairedRatio("m: 1", 0.8, 0.79, 0.81, 0.99, 1.01, ((1.0, 2.0),), ((1.0, 1.0),)),
            PairedRatio("m: 2", 1.25, 1.24, 1.26, 0.99, 1.01),
            PairedRatio("m: 3", 1.005, 1.001, 1.009, 0.99, 1.01),
        ),
    ),
)
