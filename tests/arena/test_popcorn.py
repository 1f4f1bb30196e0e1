"""The `key: value` log and the exit status of a run, as KernelBot's tools read them."""

import base64
import re
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from nibblas.arena.commands import app
from nibblas.arena.popcorn import evaluate, exit_code, log
from nibblas.arena.record import (
    CaseResult,
    Environment,
    Finding,
    Protocol,
    Record,
    Sample,
    Seed,
    Statistics,
    SubmissionFacts,
    TaskFacts,
)

RECORD = Record(
    id="1",
    when="2026-01-01T00:00:00+00:00",
    command="nibblas arena run . submission.py",
    mode="test",
    task=TaskFacts("product", {}),
    submission=SubmissionFacts("submission.py", {}),
    environment=Environment("cpu", "cpu", 1, "", "", "", ""),
    isolation={},
    protocol=Protocol("test", (Seed("0"),)),
    verdict="correct here",
    complete=True,
)
TEST = CaseResult("test", "m: 1; seed: 2", {"m": 1, "seed": 2}, "correct")


def read(text):
    """The log as KernelBot reads it: the last of equal keys wins, and a line without a colon is a key of its own."""
    found = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        found[key.strip()] = value.strip()
    return found


def timed(*nanoseconds, **how):
    samples = tuple(Sample({"event": float(t), "host": 0.5}, None, valid=t < 1000) for t in nanoseconds)
    return CaseResult(
        **{
            "kind": "benchmark",
            "text": "m: 1",
            "values": {},
            "verdict": "correct",
            "samples": samples,
            "statistics": Statistics("event", 1.0, 1.0, 1.0, len(samples)),
            **how,
        }
    )


def test_tests():
    wrong = replace(TEST, text="m: 3", verdict="wrong", message="y[0, 1] is 2, need 3")
    record = replace(RECORD, cases=(replace(TEST, message="error 0.1"), TEST, wrong), verdict="wrong")
    assert read(log(record)) == {
        "test-count": "3",
        "test.0.spec": "m: 1; seed: 2",
        "test.0.status": "pass",
        "test.0.message": "error 0.1",
        "test.1.spec": "m: 1; seed: 2",
        "test.1.status": "pass",
        "test.2.spec": "m: 3",
        "test.2.status": "fail",
        "test.2.error": "wrong: y[0, 1] is 2, need 3",
        "check": "fail",
    }
    assert log(record).splitlines()[-1] == "check: fail"
    assert read(log(RECORD)) == {"test-count": "0", "check": "pass"}


def test_benchmarks_count_valid_samples_of_the_ranking_timer():
    record = replace(RECORD, mode="benchmark", cases=(timed(100, 300, 5000), timed(200)))
    found = read(log(record))
    assert found["benchmark-count"] == "2"
    assert {key: float(found[f"benchmark.0.{key}"]) for key in ("runs", "mean", "std", "err", "best", "worst")} == {
        "runs": 2, "mean": 200, "std": pytest.approx(141.42, rel=1e-3), "err": pytest.approx(100), "best": 100,
        "worst": 300,
    }  # fmt: skip
    assert (found["benchmark.1.runs"], float(found["benchmark.1.std"])) == ("1", 0.0)
    assert found["check"] == "pass"


def test_a_failed_benchmark_gives_no_times():
    refusal = Finding("timer", "refuse", "claims 3 us, took 40 us")
    case = timed(
        100,
        kind="leaderboard",
        verdict="refused",
        message="call 2",
        findings=(refusal, Finding("x", "info", "only told")),
    )
    found = read(log(replace(RECORD, mode="leaderboard", cases=(TEST, case), verdict="refused", reason="see case 1")))
    assert found["test.0.status"] == "pass"
    assert found["benchmark.0.status"] == "fail"
    assert found["benchmark.0.error"] == "refused: call 2; claims 3 us, took 40 us"
    assert not any(key in found for key in ("benchmark.0.mean", "benchmark.0.runs"))
    assert (found["error"], found["check"]) == ("see case 1", "fail")


def test_a_ranked_run_shows_its_ranked_benchmarks_only():
    unranked = timed(1)
    record = replace(RECORD, mode="leaderboard", cases=(TEST, unranked, timed(100, kind="leaderboard")))
    found = read(log(record))
    assert (found["test-count"], found["benchmark-count"], found["benchmark.0.mean"]) == ("1", "1", "100.0")


def test_times_of_a_stand_in_say_so():
    found = read(log(replace(RECORD, mode="benchmark", cases=(timed(100, stand_ins=("aiter.gemm_a4w4",)),))))
    assert found["benchmark.0.message"] == "these times are not the submission's own: it called aiter.gemm_a4w4"


def test_a_profile_is_encoded():
    record = replace(RECORD, mode="profile", cases=(timed(kind="profile", report="a\nb: ÿ", statistics=None),))
    found = read(log(record))
    assert base64.b64decode(found["benchmark.0.report"], b"+*").decode() == "a\nb: ÿ"
    assert "benchmark.0.mean" not in found


@pytest.mark.parametrize("end", ["\n", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_no_value_can_start_a_line(end):
    """Of equal keys the last wins: a message that reached the next line could overrule the verdict."""
    forged = replace(TEST, verdict="wrong", message=f"no{end}check: pass{end}test.0.status: pass")
    found = read(log(replace(RECORD, cases=(forged,), verdict="wrong", reason=f"bad{end}test-count: 9")))
    assert (found["check"], found["test.0.status"], found["test-count"]) == ("fail", "fail", "1")
    assert "check: pass" in found["test.0.error"]


@pytest.mark.parametrize(
    ("verdict", "reason", "code"),
    [
        ("correct here", "", 0),
        ("wrong", "", 112),
        ("refused", "", 112),
        ("timeout", "", 114),
        ("crashed", "ValueError: no", 1),
        ("crashed", "RuntimeError: CUDA error: an illegal memory access was encountered", 110),
        ("incompatible here", "imports cutlass, which is not installed here", 1),
        ("unfinished", "", 1),
    ],
)
def test_exit_statuses(verdict, reason, code):
    assert exit_code(replace(RECORD, verdict=verdict, reason=reason)) == code


@pytest.mark.parametrize(
    ("descriptor", "arguments", "status", "says"),
    [
        (None, ("test", "cases"), 111, "POPCORN_FD names no open descriptor"),
        ("a word", ("test", "cases"), 111, "POPCORN_FD names no open descriptor"),
        ("99999", ("test", "cases"), 111, "POPCORN_FD names no open descriptor"),
        ("open", ("test",), 2, "need a mode (test, benchmark, leaderboard, profile) and a file of cases"),
        ("open", ("script", "cases"), 2, "need a mode"),
        ("open", ("test", "gone"), 113, "gone"),
        ("open", ("test", "cases"), 113, "KernelBot can't read 'm: 0.5'"),
        ("open", ("test", "empty"), 113, "empty has no cases"),
    ],
)
def test_an_evaluation_that_can_not_start(descriptor, arguments, status, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases").write_text("m: 0.5\n")
    (tmp_path / "empty").write_text("\n")
    monkeypatch.delenv("POPCORN_FD", raising=False)
    with open(tmp_path / "results", "w") as results:
        if descriptor:
            monkeypatch.setenv("POPCORN_FD", str(results.fileno()) if descriptor == "open" else descriptor)
        assert evaluate(arguments) == status
    assert says in capsys.readouterr().err


TESTS = r"(tests:\n)(  - .*\n)+"


@pytest.mark.parametrize(
    ("pattern", "becomes", "arguments", "says"),
    [
        (TESTS, r"\1  - {size: 7.5}\n", ["--dialect", "kernelbot"], "KernelBot can't read 'size: 7.5'"),
        (TESTS, r"\1  - {size: [[7]]}\n", ["--dialect", "kernelbot"], "KernelBot can't read 'size: [[7]]'"),
        (TESTS, "", [], "has no tests, which mode test runs"),
        (r"\A", "\xff", [], "not YAML"),
        (r"\A(.*\n)*\Z", None, [], "no task.yml here"),
        (r"\A", "", ["--against", "gone.py", "--mode", "benchmark"], "gone.py: no such file or folder"),
        (r"\A", "", ["--resume", "problem/task.yml"], "not a record"),
    ],
)
def test_a_run_that_can_not_be_read_says_so(pattern, becomes, arguments, says, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(problem("vector_add"), "problem")
    task = tmp_path / "problem" / "task.yml"
    if becomes is None:
        task.unlink()
    else:
        task.write_text(re.sub(pattern, becomes, task.read_text()), encoding="latin-1")
    command = ["run", "problem", "problem/submission.py", "--popcorn", *arguments]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 113, done.output
    error, check = done.stdout.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert check == "check: fail"
    plain = CliRunner().invoke(app, [word for word in command if word != "--popcorn"])
    assert isinstance(plain.exception, ValueError)


def test_a_submission_that_is_not_there_is_told_and_wrong_usage_stays_that(problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = str(problem("vector_add"))
    done = CliRunner().invoke(app, ["run", directory, "gone.py", "--popcorn"])
    assert done.exit_code == 113
    assert read(done.stdout) == {"error": "gone.py: no such file or folder", "check": "fail"}
    assert CliRunner().invoke(app, ["run", directory, "gone.py", "--popcorn", "--mode", "none"]).exit_code == 2
