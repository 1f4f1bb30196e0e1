"""The rows of evidence that a record gives."""

from dataclasses import replace

import pytest
from arena_records import BAD, GOOD, SIZES, timed, untimed

from nibblas.arena.measurements import measurements, submission_digest
from nibblas.arena.record import Comparison, Finding, PairedRatio, SubmissionFacts, TaskFacts
from nibblas.evidence import Measurement


def test_a_row_for_each_product_of_the_last_timing():
    first, second = measurements(GOOD)
    assert str(first.problem) == "linear M=1 N=7168 K=16384 nvfp4 x nvfp4 -> fp16 on sm_90"
    assert str(second.problem) == "linear M=1 N=4096 K=7168 L=8 nvfp4 x nvfp4 -> fp16 on sm_90"
    assert first.kernel == "nvfp4_gemv/submission.py"
    assert first.digest == "1" * 64
    assert first.method.startswith("arena leaderboard")
    assert len(first.samples) == 40
    assert first.median == pytest.approx(GOOD.cases[4].statistics.median_ns * 1e-9)
    assert (first.floor, first.error, first.hardened) == (pytest.approx(15e-6), 4e-4, False)
    assert Measurement.from_json(first.to_json()) == first


def test_a_floor_from_a_part_of_the_data_is_none():
    partial = Finding("partial-floor", "info", "the floor is from 1 of 2 MB tried")
    (row,) = measurements(replace(GOOD, cases=(timed(findings=(partial,)),)))
    assert row.floor is None


def test_hardened_tests_count_if_they_passed():
    protocol = replace(GOOD.protocol, hardened=True)
    assert all(m.hardened for m in measurements(replace(GOOD, protocol=protocol)))
    without_tests = replace(GOOD, protocol=protocol, cases=GOOD.cases[2:])
    wrong = replace(GOOD, protocol=protocol, cases=(*GOOD.cases, untimed(1, verdict="wrong")))
    assert not any(m.hardened for record in (without_tests, wrong) for m in measurements(record))


@pytest.mark.parametrize(
    "record",
    [
        BAD,
        replace(GOOD, task=TaskFacts("vectoradd", {})),
        replace(GOOD, cases=(untimed(256), timed(verdict="refused"), timed(stand_ins=("aiter.gemm_a4w4",)))),
        replace(GOOD, cases=(timed(values={"size": 3}),)),
    ],
    ids=["other task", "a task that is no product", "nothing of its own that is right", "other values"],
)
def test_other_records_give_none(record):
    assert measurements(record) == []


def test_the_other_submission_stands_beside():
    text = timed(values=SIZES[0]).text
    comparison = Comparison(SubmissionFacts("other.py", {}), (PairedRatio(text, 0.5, 0.4, 0.6, 1.0, 1.0),))
    first, second = measurements(replace(GOOD, comparison=comparison))
    assert first.beside == {"other.py": pytest.approx(2 * first.median)}
    assert second.beside == {}


def test_a_digest_of_several_files_is_what_sha256sum_makes_of_its_listing():
    """printf '%s  a.py\\n%s  b.py\\n' 0... 1... | sha256sum"""
    files = {"b.py": "1" * 64, "a.py": "0" * 64}
    assert submission_digest(SubmissionFacts("b.py", files)) == (
        "bc63d06dc98d76511e4a691272f5719d6e367b110bad39a258a9ff83c46f20cd"
    )
