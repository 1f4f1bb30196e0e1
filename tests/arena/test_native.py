"""Problems whose evaluation is a program of their own, with a C compiler in the place of nvcc."""

import shutil

import pytest

from nibblas.arena.native import read_lines

TASK = """
description: Count upwards.
lang: cu
files:
  - {name: submission.cu, source: "@SUBMISSION@"}
  - {name: eval.cu, source: eval.cu}
config: {sources: [eval.cu, submission.cu], compile_flags: [-O1], defines: {STEP: 2}}
tests:
  - {start: 1}
  - {start: 40}
benchmarks:
  - {start: 7}
ranking_by: mean
test_timeout: 5
"""
EVAL = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int next(int n);

int main(int argc, char** argv) {
  FILE* out = fdopen(atoi(getenv("POPCORN_FD")), "w");
  FILE* cases = fopen(argv[2], "r");
  int start, good = 1, is_test = !strcmp(argv[1], "test");
  for (int i = 0; fscanf(cases, "start: %d\n", &start) == 1; ++i) {
    int right = next(start) == start + STEP;
    good &= right;
    if (is_test) fprintf(out, "test.%d.status: %s\n", i, right ? "pass" : "fail");
    else fprintf(out, "benchmark.%d.mean: 12.5\nbenchmark.%d.seeded: %d\n", i, i, getenv("POPCORN_SEED") != NULL);
  }
  fprintf(out, "check: %s\n", good ? "pass" : "fail");
  fclose(out);
  return good ? 0 : 112;
}
"""


@pytest.fixture
def native(tmp_path, monkeypatch, arena):
    """native(code, **options) is the record of a submission with this code."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\nexec cc -x c "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent), prepend=":")
    directory = tmp_path / "count"
    directory.mkdir()
    (directory / "task.yml").write_text(TASK)
    (directory / "eval.cu").write_text(EVAL)

    def start(code: str, **options):
        path = tmp_path / "own" / "submission.cu"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
        return arena(directory, path, **options)

    return start


def test_what_the_program_says_is_kept_and_said_to_be_its_own(native):
    found = native("int next(int n) { return n + 2; }", mode="leaderboard")
    assert found.verdict == "correct here", found.reason
    assert [case.kind for case in found.cases] == ["test", "test", "benchmark", "leaderboard"]
    assert {finding.class_id for case in found.cases for finding in case.findings} == {"own-evaluation"}
    assert found.cases[2].report == "mean: 12.5\nseeded: 0"
    assert found.cases[3].report == "mean: 12.5\nseeded: 1"
    assert found.score is None, "no time was seen from outside"
    assert found.isolation["privileges"] is True


def test_wrong_broken_and_endless_submissions(native):
    found = native("int next(int n) { return n > 9 ? n : n + 2; }")
    assert [case.verdict for case in found.cases] == ["correct", "wrong"]
    found = native("int next(int n) { return n + 2 }")
    assert found.verdict == "crashed"
    assert "nvcc failed" in found.reason
    found = native("#include <stdlib.h>\nint next(int n) { abort(); }")
    assert found.verdict == "crashed"
    assert "SIGABRT" in found.reason
    found = native("#include <stdlib.h>\nint next(int n) { exit(110); }")
    assert found.verdict == "incompatible here"
    found = native("int next(int n) { for (;;); }")
    assert found.verdict == "timeout"


def test_results_that_are_there_twice_are_refused(native):
    code = r"""
#include <stdlib.h>
#include <unistd.h>
int next(int n) { write(atoi(getenv("POPCORN_FD")), "check: pass\ntest.0.status: pass\n", 32); return n; }
"""
    found = native(code)
    assert found.verdict == "refused"
    assert found.cases[0].findings[0].class_id == "result-channel"


def test_without_a_compiler_it_is_incompatible(native, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    found = native("int next(int n) { return n; }")
    assert found.verdict == "incompatible here"
    assert "nvcc is not here" in found.reason


def test_lines_that_are_no_results_are_left_out():
    values, twice = read_lines("hello\ntest.0.status: pass\n  x: 1\ntest.0.error: a: b\ntest.0.status: fail\n")
    assert values == {"test.0.status": "pass", "test.0.error": "a: b"}
    assert twice == ["test.0.status"]
