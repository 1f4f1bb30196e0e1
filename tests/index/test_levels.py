"""Levels, states, gaps and ranks from stored facts."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nibblas.index.evidence_levels import (
    NUMERICS,
    TIMING,
    Cohort,
    Entrant,
    Observed,
    agree,
    levels,
    rank,
    refusals,
    settings,
)
from nibblas.index.model import Event

B200 = {"workload": "w", "device": "NVIDIA B200"}
CLAIM = Observed("claim", "passed", True, seconds=2e-5, **B200)
HERE = Observed("here", "passed", False, seconds=2e-5, samples=9, host="one", **B200)
THERE = HERE._replace(run="there", host="two")


def known(*observed, **options):
    found = levels(observed, **options)
    return found.numerics, found.timing


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ([], ("none", "none")),
        ([Observed("c", "compiled", False)], ("none", "compiled")),
        ([CLAIM], ("claimed", "reported")),
        ([CLAIM._replace(seconds=None)], ("claimed", "none")),
        ([CLAIM._replace(status="wrong")], ("none", "none")),
        ([CLAIM._replace(error=0.0, hardened=True, samples=9)], ("claimed", "reported")),
        ([HERE], ("none", "measured")),
        ([HERE._replace(samples=0)], ("none", "none")),
        ([HERE._replace(seconds=None)], ("none", "none")),
        ([HERE._replace(error=1e-3)], ("checked", "measured")),
        ([HERE._replace(error=math.inf)], ("none", "measured")),
        ([HERE._replace(error=math.nan)], ("none", "measured")),
        ([HERE._replace(error=1e-3, hardened=True)], ("checked-hardened", "measured")),
        ([HERE._replace(hardened=True)], ("none", "measured")),
        ([HERE._replace(status="wrong", error=9.0)], ("none", "none")),
        ([HERE._replace(refusals=("cached output",), error=0.0)], ("none", "none")),
        ([HERE._replace(status="incompatible")], ("none", "none")),
        ([HERE._replace(status="timeout")], ("none", "none")),
        ([HERE, THERE], ("none", "reproduced")),
        ([HERE, THERE._replace(seconds=2.3e-5)], ("none", "measured")),
        ([HERE, THERE._replace(seconds=2.3e-5, low=1.9e-5, high=2.6e-5)], ("none", "reproduced")),
        ([HERE, THERE._replace(host="one")], ("none", "measured")),
        ([HERE, THERE._replace(host=None)], ("none", "measured")),
        ([HERE, THERE._replace(workload="other")], ("none", "measured")),
        ([HERE, THERE._replace(device="NVIDIA H200")], ("none", "measured")),
        ([HERE, THERE._replace(threads=2)], ("none", "measured")),
        ([HERE._replace(workload=None), THERE._replace(workload=None)], ("none", "measured")),
        ([CLAIM, HERE], ("claimed", "measured")),
    ],
)
def test_levels(observed, expected):
    assert known(*observed) == expected


def test_a_compile_counts_only_as_a_compile():
    assert known(compiled=True) == ("none", "compiled")
    assert known(CLAIM, compiled=True) == ("claimed", "reported")


def test_a_wrong_result_takes_the_claim_of_its_workload():
    wrong = HERE._replace(status="wrong")
    assert known(CLAIM, wrong) == ("none", "none")
    assert known(CLAIM, wrong._replace(workload="other")) == ("claimed", "reported")
    # A claim for a whole board is a claim for each of its cases.
    assert known(CLAIM._replace(workload=None), wrong) == ("none", "none")
    assert [s.kind for s in levels([CLAIM, wrong]).states] == ["refuted"]


@pytest.mark.parametrize("kind", ["retract", "refute"])
def test_what_is_taken_back_counts_no_more(kind):
    of_the_run = Event(kind, "here", reason="a stale buffer")
    assert known(HERE, THERE, events=[of_the_run]) == ("none", "measured")
    of_the_whole = Event(kind, "the implementation", reason="a stale buffer")
    found = levels([HERE, THERE, CLAIM], [of_the_whole])
    assert (found.numerics, found.timing) == ("none", "none")
    state = {"retract": "retracted", "refute": "refuted"}[kind]
    assert [(s.kind, s.reason, s.run) for s in found.states] == [(state, "a stale buffer", None)]


def test_a_dispute_is_told_and_takes_nothing():
    found = levels([HERE], [Event("dispute", "here", reason="clocks were locked")])
    assert found.timing == "measured"
    assert [(s.kind, s.reason, s.run) for s in found.states] == [("disputed", "clocks were locked", "here")]


def test_somebody_s_attestation_raises_no_level():
    found = levels([HERE], [Event("attest", "here", body={"outcome": "reproduced"})])
    assert (found.timing, found.states) == ("measured", ())
    found = levels([HERE], [Event("attest", "here", body={"outcome": "not reproduced", "ratio": 1.4})])
    assert [(s.kind, s.ratio) for s in found.states] == [("not reproduced", 1.4)]


def test_not_reproduced_gives_the_ratio():
    found = levels([CLAIM, HERE._replace(seconds=3e-5)])
    (state,) = found.states
    assert (state.kind, state.run) == ("not reproduced", "here")
    assert state.ratio == pytest.approx(1.5)
    (state,) = levels([HERE, THERE._replace(seconds=4e-5)]).states
    assert state.ratio == pytest.approx(2)
    assert "measured on one" in state.reason


def test_a_run_that_can_t_be_made_here_is_told_with_its_device():
    found = levels([CLAIM, Observed("n", "incompatible", False, device="NVIDIA H200")])
    assert (found.numerics, found.timing) == ("claimed", "reported")
    assert [(s.kind, s.reason) for s in found.states] == [("incompatible here", "NVIDIA H200")]
    assert found.next_timing.facts == ("a run here that passes, with its samples, on another device than NVIDIA H200",)


def test_refusals_are_the_findings_that_end_a_run():
    findings = [{"class": "cached output", "severity": "refuse"}, {"class": "thread", "severity": "flag"}]
    assert refusals(findings) == ("cached output",)


@pytest.mark.parametrize(
    ("observed", "level", "words"),
    [
        ([], "compiled", "a compile"),
        ([Observed("c", "compiled", False)], "reported", "a time"),
        ([CLAIM], "measured", "a run here"),
        ([HERE], "reproduced", "another machine with NVIDIA B200"),
        ([HERE._replace(host=None)], "reproduced", "the host of the run"),
        ([HERE, THERE._replace(seconds=4e-5)], "reproduced", "the ratio is 2.00"),
    ],
)
def test_the_next_level_of_timing_names_what_is_missing(observed, level, words):
    gap = levels(observed).next_timing
    assert gap.level == level
    assert words in "; ".join(gap.facts)


def test_the_next_level_of_numerics_names_what_is_missing():
    assert levels([]).next_numerics.level == "claimed"
    assert levels([CLAIM]).next_numerics.level == "checked"
    assert "a run here" in levels([CLAIM]).next_numerics.facts[0]
    assert "the error of the run here" in levels([CLAIM, HERE]).next_numerics.facts[0]
    assert levels([HERE._replace(error=0.0)]).next_numerics.level == "checked-hardened"
    best = levels([HERE._replace(error=0.0, hardened=True), THERE])
    assert (best.next_numerics, best.next_timing) == (None, None)


observations = st.builds(
    Observed,
    run=st.uuids().map(str),
    status=st.sampled_from(["passed", "wrong", "refused", "incompatible", "compiled", "timeout"]),
    claimed=st.booleans(),
    workload=st.sampled_from([None, "w", "v"]),
    device=st.sampled_from([None, "NVIDIA B200", "cpu"]),
    threads=st.sampled_from([None, 1]),
    host=st.sampled_from([None, "one", "two"]),
    seconds=st.none() | st.floats(1e-9, 1.0),
    samples=st.integers(0, 3),
    error=st.none() | st.floats(),
    hardened=st.booleans(),
)


@given(st.lists(observations, max_size=6), st.randoms())
def test_levels_don_t_depend_on_order(observed, random):
    shuffled = random.sample(observed, len(observed))
    a, b = levels(observed), levels(shuffled)
    assert (a.numerics, a.timing) == (b.numerics, b.timing)
    for level, ladder, gap in ((a.numerics, NUMERICS, a.next_numerics), (a.timing, TIMING, a.next_timing)):
        place = ladder.index(level)
        assert gap is None if place == len(ladder) - 1 else gap.level == ladder[place + 1]


@given(st.lists(observations, max_size=5))
def test_somebody_s_word_is_never_more_than_that(observed):
    numerics, timing = known(*(o._replace(claimed=True) for o in observed))
    assert numerics in ("none", "claimed")
    assert timing in ("none", "compiled", "reported")


def test_agree_needs_times():
    with pytest.raises(ValueError, match="time"):
        agree(HERE, HERE._replace(seconds=None))


def entrant(run, seconds, half=None, **more):
    low, high = (None, None) if half is None else (seconds - half, seconds + half)
    return Entrant(run, more.pop("implementation", run), "passed", seconds, low, high, **more)


def places(*entrants):
    return [(place.run, place.rank, place.tied) for place in rank(entrants)[0]]


def test_ranks_are_dense_and_equal_times_share_one():
    assert places(entrant("a", 2.0), entrant("b", 1.0), entrant("c", 2.0), entrant("d", 3.0)) == [
        ("b", 1, False),
        ("a", 2, True),
        ("c", 2, True),
        ("d", 3, False),
    ]


def test_ties_need_a_time_that_all_allow():
    # a overlaps b and b overlaps c, but a and c are apart: c stands behind.
    assert places(entrant("a", 1.0, 0.2), entrant("b", 1.3, 0.2), entrant("c", 1.6, 0.2)) == [
        ("a", 1, True),
        ("b", 1, True),
        ("c", 2, False),
    ]
    assert places(entrant("a", 1.0), entrant("b", 1.1, 0.2)) == [("a", 1, True), ("b", 1, True)]


def test_an_implementation_stands_once_by_its_latest_run():
    old = entrant("old", 1.0, implementation="x", observed_at="2026-01-01")
    new = entrant("new", 2.0, implementation="x", observed_at="2026-02-01")
    found, excluded = rank([new, old])
    assert [place.run for place in found] == ["new"]
    assert [(e.run, e.reasons) for e in excluded] == [("old", ("a later run of the same implementation counts",))]
    # A later run that doesn't count takes no place.
    failed = new._replace(status="wrong")
    assert [place.run for place in rank([old, failed])[0]] == ["old"]


def test_every_reason_for_an_exclusion_is_given():
    bad = Entrant("r", "x", "wrong", None, current=False, void="retracted: a stale buffer")
    found, (excluded,) = rank([bad])
    assert found == []
    assert excluded.reasons == (
        "its status is wrong",
        "it has no time",
        "a later revision supersedes it",
        "retracted: a stale buffer",
    )


@given(
    st.lists(
        st.tuples(st.floats(1e-6, 1.0), st.none() | st.floats(0, 0.5), st.sampled_from("abcde"), st.booleans()),
        max_size=12,
    )
)
def test_every_run_is_ranked_or_excluded(drawn):
    entrants = [
        entrant(str(i), seconds, half, implementation=of, current=current)
        for i, (seconds, half, of, current) in enumerate(drawn)
    ]
    found, excluded = rank(entrants)
    assert sorted([place.run for place in found] + [e.run for e in excluded]) == sorted(e.run for e in entrants)
    assert all(e.reasons for e in excluded)
    times = {e.run: e for e in entrants}
    for one, next_one in pairwise(found):
        assert next_one.rank - one.rank in (0, 1)
        assert times[one.run].seconds <= times[next_one.run].seconds
    numbers = [place.rank for place in found]
    assert [place.tied for place in found] == [numbers.count(n) > 1 for n in numbers]


def test_a_cohort_s_key_is_of_all_that_makes_times_comparable():
    one = Cohort("gemv", "w", "p", "NVIDIA B200", None, True)
    others = [
        Cohort("gemm", "w", "p", "NVIDIA B200", None, True),
        Cohort("gemv", None, "p", "NVIDIA B200", None, True),
        Cohort("gemv", "w", "q", "NVIDIA B200", None, True),
        Cohort("gemv", "w", "p", "NVIDIA H200", None, True),
        Cohort("gemv", "w", "p", "NVIDIA B200", 1, True),
        Cohort("gemv", "w", "p", "NVIDIA B200", None, False),
        Cohort("gemv", "w", "p", "NVIDIA B200", None, True, settings({"mig": "1g.18gb", "host": "x"})),
    ]
    assert len({cohort.key for cohort in (one, *others)}) == 8
    assert Cohort("gemv", "w", "p", "NVIDIA B200", None, True, settings({"host": "x"})).key == one.key
