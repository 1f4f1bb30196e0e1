"""What is made of times: when a case is done, floors, and claims that can't be."""

import random
from dataclasses import replace

import pytest

from nibblas.arena import timing
from nibblas.arena.device import Work, work_of
from nibblas.arena.record import Sample, Traced
from nibblas.statistics import median_interval


def samples(claims, seen=None, timer="host", **more) -> list[Sample]:
    seen = [ns + 200e3 for ns in claims] if seen is None else seen
    return [Sample({timer: ns, **more}, float(s)) for ns, s in zip(claims, seen, strict=True)]


def around(center: float, spread: float, n: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [center + spread * draw.uniform(-1, 1) for _ in range(n)]


def test_the_interval_of_a_median_holds_it_and_narrows_with_samples():
    few, many = median_interval(around(100, 10, 10)), median_interval(around(100, 10, 1000))
    assert few.low <= few.value <= few.high
    assert many.half_width < few.half_width / 3
    assert many.low < 100 < many.high
    assert median_interval([5.0]) == median_interval([5.0, 5.0])
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


@pytest.mark.parametrize("n", [1, 2, 5, 31, 100, 999])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_is_that_of_drawn_medians(n, confidence):
    """An odd number's: a percentile of the medians of 4,000 resamples; an even one's may be wider by a sample."""
    samples, draw = sorted(around(100, 10, n)), random.Random(1)
    medians = sorted(sorted(draw.choices(samples, k=n))[(n - 1) // 2] for _ in range(4000))
    found, tail = median_interval(samples, confidence=confidence), (1 - confidence) / 2
    low, high = medians[int(4000 * tail)], medians[int(4000 * (1 - tail))]
    near = 1 + n // 100  # places among the samples by which drawing may err
    assert abs(samples.index(found.low) - samples.index(low)) <= near
    assert abs(samples.index(found.high) - samples.index(high)) <= near


def test_a_case_is_sampled_until_its_median_is_known_or_its_time_is_over():
    rule = timing.Stopping(budget=10)
    steady, wild = around(100, 0.1, 10), around(100, 60, 40)
    assert rule.is_reached(steady, 10, 1)
    assert not rule.is_reached(steady[:9], 9, 1)
    assert not rule.is_reached(wild, 40, 1)
    assert rule.is_reached(wild, 40, 10)
    assert not rule.is_reached(wild[:2], 2, 100), "a median of two is none"
    assert rule.is_reached([], 10, 10), "a case of which no sample counts ends all the same"
    assert "10 s" in str(rule)
    assert not rule.is_reached(around(100, 0.1, 333), 333, 1), "many samples are not looked at one by one"
    assert rule.is_reached(around(100, 0.1, 336), 336, 1)


def test_statistics_leave_out_invalid_samples_and_other_timers():
    found = [*samples([1, 2, 3]), Sample({"host": 100.0}, 1.0, valid=False), Sample({"event": 7.0}, 1.0)]
    statistics = timing.statistics_of(found, "host")
    assert statistics is not None
    assert (statistics.median_ns, statistics.n) == (2, 3)
    assert timing.statistics_of(found, "cupti") is None


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([20.5e3, 20e3, 20e3, 22e3], 500),
        ([20e3] * 9, timing.EVENT_STEP_NS),
        ([20e3, 21e3, 23e3], 0),
        ([7.0], 0),
        ([3.0, 3.0, 1000.0], 3),
    ],
)
def test_the_step_of_a_timer_is_seen_where_samples_are_the_same(values, step):
    assert timing.step_ns(values, "event") == step


def test_the_interval_of_samples_on_a_grid_holds_the_time_between_two_ticks():
    """20.1 us is told as 20 us nine times of ten: the bootstrap alone gives an interval of no width."""
    told = [20e3] * 45 + [21e3] * 5
    bare = median_interval(told)
    assert bare.low == bare.high == 20e3
    found = timing.statistics_of(samples(told, timer="event"), "event")
    assert (found.low_ns, found.median_ns, found.high_ns) == (19.5e3, 20e3, 20.5e3)
    fine = timing.statistics_of(samples(around(20e3, 10, 50), timer="event"), "event")
    assert fine.high_ns - fine.low_ns < 20, "a timer with steps too fine to be seen"


def test_a_ratio_of_samples_on_a_grid_is_known_no_better_than_their_steps():
    same = [20e3] * 30
    pairs = [(20e3, 40e3 + 1e3 * (i % 7 == 0)) for i in range(30)]
    found = timing.compared("n: 1", pairs, list(zip(same, same, strict=True)), "event")
    of_both = 0.5 * (250 / 20e3 + 500 / 40e3)
    assert (found.low, found.high) == (pytest.approx(0.5 - of_both), pytest.approx(0.5 + of_both))
    assert (found.noise_low, found.noise_high) == (pytest.approx(1 - 0.025), pytest.approx(1 + 0.025))


def test_the_floor_is_what_must_be_read_and_what_no_cache_can_hold_back():
    assert timing.floor_ns(1000, 500, cache_bytes=600, bandwidth=1e9) == pytest.approx(1000)
    assert timing.floor_ns(1000, 500, cache_bytes=100, bandwidth=1e9) == pytest.approx(1400)
    assert timing.floor_ns(1000, 500, cache_bytes=100, bandwidth=None) is None
    assert timing.floor_ns(None, 500, cache_bytes=100, bandwidth=1e9) is None
    assert timing.below_floor(700, 1000)
    assert not timing.below_floor(800, 1000), "bandwidth is not known that well"
    assert not timing.below_floor(1, None)


EMPTY = 200e3


@pytest.mark.parametrize("usual", [20e3, 5e6])
def test_a_timer_that_tells_the_truth_is_believed(usual):
    claims = around(usual, usual / 10, 30)
    late = [ns + EMPTY + extra for ns, extra in zip(claims, around(0, 20e3, 30, 1), strict=True)]
    for timer in ("host", "event"):
        assert timing.unseen_time(samples(claims, late, timer), EMPTY, timer) is None
    used = [ns + extra for ns, extra in zip(claims, around(0, 100e3, 30, 2), strict=True)]
    assert timing.unseen_cpu_time(samples(claims), used, "host", cpus=2) is None


def test_single_calls_that_waited_for_the_machine_are_no_fault():
    claims = around(20e3, 1e3, 30)
    seen = [ns + EMPTY + (50e6 if i % 4 == 0 else 0) for i, ns in enumerate(claims)]
    assert timing.unseen_time(samples(claims, seen), EMPTY, "host") is None


def test_a_timer_that_claims_a_tenth_is_found():
    real = around(400e3, 10e3, 30)
    claims = [ns / 10 for ns in real]
    seen = [ns + EMPTY for ns in real]
    found = timing.unseen_time(samples(claims, seen, "event"), EMPTY, "event")
    assert found is not None
    assert (found.class_id, found.severity) == ("timer", "refuse")
    found = timing.unseen_cpu_time(samples(claims), real, "host", cpus=2)
    assert found is not None
    assert (found.class_id, found.severity) == ("timer", "refuse")
    assert timing.unseen_cpu_time(samples(real), real, "host", cpus=2) is None


def test_work_on_streams_that_the_events_do_not_see_is_found():
    for count in (3, 20):
        assert timing.other_streams(waited_for(count, tail=4e3, late=3e3)) is None
        found = timing.other_streams(waited_for(count, tail=400e3, late=300e3))
        assert found is not None
        assert (found.class_id, found.severity) == ("side-stream", "refuse")
        assert "for 340.0 us or longer" in found.what
    assert timing.other_streams(samples(around(50e3, 1e3, 20))) is None
    assert timing.other_streams(waited_for(2, tail=400e3, late=300e3)) is None


def test_a_wait_that_takes_as_long_later_is_no_work_on_another_stream():
    """Waiting for a device takes tens of microseconds where a process has several streams or graphs."""
    assert timing.other_streams(waited_for(20, tail=42e3, late=40e3)) is None
    assert timing.other_streams(waited_for(20, tail=42e3, late=12e3)) is not None


@pytest.mark.parametrize(
    ("hidden", "more", "share", "least"),
    [(60e3, 100e3, 0.5, 0.85), (60e3, 2e6, 0.85, 0.85), (150e3, 400e3, 1.0, 1.0), (500e3, 5e6, 0.5, 1.0)],
)
def test_work_that_goes_on_for_longer_in_some_calls_is_no_less_found(hidden, more, share, least):
    """Work on another stream, in a share of the calls with up to `more`, each waited for at once or 100 us later."""
    draw, found = random.Random(0), 0
    for count in (10, 12, 30, 100) * 25:
        taken = waited_for(count, 0, 0)
        for i, sample in enumerate(taken):
            goes_on = hidden + (draw.uniform(0, more) if draw.random() < share else 0)
            (wait,) = {"tail", "late"} & set(sample.claimed_ns)
            left = max(goes_on - (100e3 if wait == "late" else 0), 0)
            taken[i] = replace(sample, claimed_ns=sample.claimed_ns | {wait: 8e3 + left})
        found += timing.other_streams(taken) is not None
    assert found >= 100 * least


def test_waits_that_differ_by_chance_are_no_work():
    draw = random.Random(0)
    steady = [waited_for(30, tail=draw.uniform(30e3, 40e3), late=draw.uniform(30e3, 40e3)) for _ in range(20)]
    assert not any(map(timing.other_streams, steady))


def waited_for(count: int, tail: float, late: float) -> list[Sample]:
    """Samples after one in three of which the device was left alone before it was waited for."""
    taken = samples(around(50e3, 1e3, count), timer="event")
    waits = ({"late": late} if i % 3 == 0 else {"tail": tail} for i in range(count))
    return [replace(s, claimed_ns=s.claimed_ns | wait) for s, wait in zip(taken, waits, strict=True)]


def test_what_most_replies_cost_more_is_no_unseen_time():
    claims = around(20e3, 1e3, 30)
    late = [ns + EMPTY + (50e3 if i % 8 == 0 else 400e3) for i, ns in enumerate(claims)]
    assert timing.unseen_time(samples(claims, late, "event"), EMPTY, "event") is None
    late = [ns + EMPTY + 400e3 for ns in claims]
    assert timing.unseen_time(samples(claims, late, "event"), EMPTY, "event") is not None


def test_a_timer_that_lies_in_most_calls_is_found():
    real = around(800e3, 10e3, 32)
    claims = [ns if i % 8 == 0 else ns / 40 for i, ns in enumerate(real)]
    found = timing.unseen_time(samples(claims, [ns + EMPTY for ns in real], "event"), EMPTY, "event")
    assert found is not None
    assert found.severity == "refuse"


@pytest.mark.parametrize("calls", [3, 4, 11, 31])
@pytest.mark.parametrize("varies", [0.0, 1.0])
def test_a_timer_that_lies_in_every_second_call_and_not_in_warmup_is_found(calls, varies):
    real = [5e6 * (1 + varies * (i % 4) / 3) for i in range(2 + calls)]
    claims = [50e3 if i >= 2 and i % 2 == 0 else ns for i, ns in enumerate(real)]
    told = samples(claims, [ns + EMPTY + 30e3 for ns in real], "event")
    told = [replace(sample, valid=i >= 2) for i, sample in enumerate(told)]
    found = timing.unseen_time(told, EMPTY, "event")
    assert found is not None
    assert found.severity == "refuse"


def test_a_single_long_call_that_says_so_is_no_fault():
    claims = [*around(500e3, 5e3, 5), 1.5e9]
    seen = [ns + EMPTY + 60e3 for ns in claims[:-1]] + [claims[-1] + EMPTY - 1e6]
    assert timing.unseen_time(samples(claims, seen, "event"), EMPTY, "event") is None


def test_how_long_the_device_was_kept_busy_is_no_unseen_time():
    claims, leads = around(20e3, 1e3, 30), around(10e6, 1e6, 30, 1)
    seen = [ns + lead + EMPTY for ns, lead in zip(claims, leads, strict=True)]
    told = [
        replace(sample, claimed_ns=sample.claimed_ns | {"lead": lead})
        for sample, lead in zip(samples(claims, seen, "event"), leads, strict=True)
    ]
    assert timing.unseen_time(told, EMPTY, "event", 11e6) is None
    late = [replace(sample, observed_ns=sample.observed_ns + 5e6) for sample in told]
    found = timing.unseen_time(late, EMPTY, "event", 11e6)
    assert found is not None
    assert found.severity == "refuse"
    longer = [replace(sample, claimed_ns=sample.claimed_ns | {"lead": 15e6}) for sample in late]
    found = timing.unseen_time(longer, EMPTY, "event", 11e6)
    assert found is not None
    assert found.severity == "flag", "a slower clock, or a claim"


def test_work_before_the_span_is_found():
    work = {"kernels": 3, "span_ns": 90e3, "busy_ns": 19e3}
    assert timing.early_work(timing.traced(work, 40e3)) is None
    found = timing.early_work(timing.traced(work | {"early_ns": 60e3}, 40e3))
    assert found is not None
    assert (found.class_id, found.severity) == ("side-stream", "flag")


@pytest.mark.parametrize(
    ("runs", "work"),
    [
        ([], Work()),
        ([(5, 9)], Work(1, 4, 4)),
        ([(20, 30), (0, 10)], Work(2, 30, 20)),
        ([(0, 10), (2, 4), (8, 12)], Work(3, 12, 12)),
    ],
)
def test_work_is_from_the_first_start_to_the_last_end_and_counts_what_overlaps_once(runs, work):
    assert work_of(runs) == work


def test_a_profiler_that_saw_more_work_than_events_claim_is_told_of():
    claims = samples(around(20e3, 1e3, 30), timer="event")
    seen = timing.traced({"kernels": 3, "span_ns": 90e3, "busy_ns": 19e3}, 40e3)
    assert seen == Traced(3, 90e3, 19e3, 40e3)
    assert timing.untraced_work(seen, claims, "event") is None, "launches take longer under a profiler"
    hidden = timing.traced({"kernels": 3, "span_ns": 90e3, "busy_ns": 80e3}, 20e3)
    found = timing.untraced_work(hidden, claims, "event")
    assert found is not None
    assert (found.class_id, found.severity) == ("timer", "flag")
    assert timing.untraced_work(hidden, claims, "host") is None, "the host's clock waits for all work"


@pytest.mark.parametrize("work", [None, {}, {"kernels": 0, "span_ns": 0.0, "busy_ns": 0.0}, {"kernels": "3"}, [1]])
def test_a_profiler_that_saw_nothing_is_told_of(work):
    found = timing.traced(work, 5.0)
    assert found == Traced(event_ns=5.0, why_not="the profiler saw no kernels")
    assert timing.untraced_work(found, samples(around(20e3, 1e3, 30), timer="event"), "event") is None


def test_work_outside_the_call_is_found():
    claims = samples(around(1e6, 1e4, 20))
    assert timing.outside_work(claims, around(5e6, 1e6, 20), "host", threads=1, flush_ns=1e6) is None
    assert timing.outside_work(claims, around(50e6, 1e6, 20), "host", threads=1, flush_ns=50e6) is None
    found = timing.outside_work(claims, around(50e6, 1e6, 20), "host", threads=1, flush_ns=1e6)
    assert found is not None
    assert found.severity == "flag"


def test_a_comparison_tells_ratio_and_noise():
    base = around(100, 5, 40)
    pairs = [(b, 2 * b) for b in base]
    noise = [(b, b * n) for b, n in zip(base, around(1, 0.02, 40, 3), strict=True)]
    found = timing.compared("n: 1", pairs, noise, "host")
    assert (found.ratio, found.low, found.high) == (0.5, 0.5, 0.5)
    assert found.noise_low < 1 < found.noise_high
    assert found.samples == tuple(pairs)


@pytest.mark.parametrize("spans", [None, [], {"host": -1}, {"host": 0}, {"host": "1"}, {"host": True}, {"host": 1e400}])
def test_spans_that_are_no_positive_numbers_are_none(spans):
    assert timing.nanoseconds(spans, ["host"]) == {"host": None}
    assert timing.nanoseconds({"host": 5, "mine": 1}, ["host", "event"]) == {"host": 5.0, "event": None}
