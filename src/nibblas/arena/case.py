"""One case of a run: its calls, each of them made, checked and timed before the next, and what they show."""

import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from nibblas.arena import correctness, coverage, timing
from nibblas.arena.clocks import Clocks, ClockState
from nibblas.arena.harden import NO_ZEROS
from nibblas.arena.launcher import Process
from nibblas.arena.options import Options
from nibblas.arena.parties import Contestant, FaultError, JudgeProcess, Made
from nibblas.arena.problem import Case
from nibblas.arena.record import (
    TIMED,
    CaseResult,
    CaseVerdict,
    Coverage,
    Errors,
    Finding,
    Mode,
    PairedRatio,
    Record,
    Sample,
    claimed,
)
from nibblas.arena.submission import Submission

ACCEPTABLE = 0.5  # of the answer's RMS: a check that lets an element be further off accepts nearly anything
INSPECTED = 8  # one call in so many has its data looked at again and its processes counted
IDLE_SHARE, IDLE_SECONDS = 0.3, 0.1  # of CPU time, that a worker may use while nothing is asked of it
NEGLIGIBLE = 0.01  # of the data, that a floor may leave out untried
PROBING: dict[Mode, float] = {"test": 1.0, "benchmark": 3.0, "leaderboard": 3.0, "profile": 0.0}  # seconds, for floors


class Setting(Protocol):
    """The run as its cases see it."""

    entry: Submission
    options: Options
    device: torch.device
    threads: int
    judge: JudgeProcess
    contestants: list[Contestant]
    clocks: Clocks
    shuffled: random.Random
    record: Record
    start: int  # index into the record's seeds

    def secret_of(self, kind: Mode, case: Case, index: int) -> int:
        """The secret seed of one call of a case."""


class CaseRun:
    """One case in the making, for one contestant: its calls so far, and what they showed."""

    def __init__(self, run: Setting, kind: Mode, case: Case, contestant: Contestant):
        self.run, self.kind, self.case, self.contestant = run, kind, case, contestant
        self.verdict: CaseVerdict = "correct"
        self.message, self.report = "", ""
        self.calls = 0
        self.samples: list[Sample] = []
        self.clocks: list[ClockState] = []  # after each call but those of warm-up
        self.inside: list[float] = []  # CPU time of each call, and around it
        self.outside: list[float] = []
        self.places: list[bool] = []  # of the next calls' data: elsewhere or not
        self.first_call_ns: float | None = None
        self.errors: tuple[Errors, ...] = ()
        self.coverage: tuple[Coverage, ...] = ()
        self.findings: dict[str, Finding] = {}
        self.stand_ins: set[str] = set()
        self.redrawn: set[str] = set()  # inputs that were hardened
        self.has_zeros = True  # among them, with any scale
        self.floor: float | None = None
        self.ratio: PairedRatio | None = None
        self.started = math.inf  # with the calls that count

    # --- kinds of cases

    def test(self) -> None:
        """The public seed, as KernelBot has it, then a secret one; where asked for, hardened inputs by two seeds."""
        hardenings = (False, False, True, True) if self.run.options.hardened else (False, False)
        for index, hardened in enumerate(hardenings):
            if not self._one(index, secret=index > 0, hardened=hardened):
                return
        if self.run.options.hardened and not self.redrawn:
            self._find(Finding("hardened", "info", "no inputs were hardened: none of them are FP4 or block scales"))
        if not self.has_zeros:
            self._find(Finding("hardened", "info", NO_ZEROS))

    def benchmark(self, first: int = 0) -> None:
        """Calls on fresh inputs until the stopping rule is satisfied; in ranked cases all seeds are secret."""
        rule = timing.Stopping(self.run.options.budget)
        for index in range(first, 1 << 30):
            self._at(index)
            if not self._one(index, secret=index > 0 or self.kind == "leaderboard"):
                return
            valid = claimed(self.samples, self.run.record.protocol.timer)
            if rule.is_reached(valid, len(self.samples) - timing.WARMUP, self._seconds()):
                break
        self._judge_times()

    def compare(self) -> None:
        """Rounds in which all contestants get the same inputs, in shuffled order.

        The other submission is judged as this one is. Where it fails, this one goes on alone.
        """
        run, rule = self.run, timing.Stopping(self.run.options.budget)
        timer = run.record.protocol.timer
        sides = [self, *(CaseRun(run, self.kind, self.case, contestant) for contestant in run.contestants[1:])]
        rounds: list[list[float]] = []
        for index in range(1 << 30):
            self._at(index)
            if not self._round(index, sides):
                break
            if index >= timing.WARMUP:
                rounds.append([side.samples[-1].claimed_ns[timer] or 0.0 for side in sides])
            ratios = [this / other for this, other, _ in rounds]
            if rule.is_reached(ratios, len(rounds), self._seconds()):
                break
        for side in sides:
            side._judge_times()
        failed = next((side for side in sides if side.verdict != "correct" or side._refusal()), None)
        if failed is None:
            self.ratio = timing.compared(
                self.case.text, [(a, b) for a, b, _ in rounds], [(a, again) for a, _, again in rounds], timer
            )
        elif failed.contestant.submission == run.entry:
            self.verdict, self.message = failed.verdict, failed.message
            self.findings |= failed.findings
        else:
            end = failed.result()
            what = f"{failed.contestant.submission.path.name} was not compared: it is {end.verdict}: {end.message}"
            self._find(Finding("comparison", "flag", " ".join(what.split())[:500]))
            self.benchmark(len(self.samples))

    def _round(self, index: int, sides: Sequence["CaseRun"]) -> bool:
        """A call of each side on the same inputs; whether all may go on."""
        order = list(sides)
        self.run.shuffled.shuffle(order)
        with self._made(index, secret=index > 0, hardened=False) as made:
            for place, side in enumerate(order):
                side.floor = self.floor
                try:
                    side.contestant.start()
                    goes_on = side._sampled(index, made, again=place < len(order) - 1)
                except FaultError as fault:
                    side.fail(fault)
                    goes_on = False
                if not goes_on:
                    return False
        return True

    def trace(self, result: CaseResult) -> CaseResult:
        """That result with what a profiler sees of one more call; or FaultError.

        A call like others comes before it, since the worker may be new, and what a first call sets up is not wanted.
        Both are checked as all are.
        """
        run, contestant = self.run, self.contestant
        timer = run.record.protocol.timer
        contestant.start()
        for traced in (False, True):
            index = result.calls
            with self._made(index, secret=True, hardened=False, anew=not traced) as made:
                call = contestant.call(
                    made, run.judge.room, run.device.type, elsewhere=False, inspect=False, traced=traced
                )
                good, message, *_ = run.judge.check(call.returned, measure=False)
            result = replace(result, calls=index + 1)
            if traced:
                found = timing.traced(call.work, timing.nanoseconds(call.spans, contestant.timers)[timer])
                seen = timing.early_work(found), timing.untraced_work(found, result.samples, timer)
                findings = (*result.findings, *(finding for finding in seen if finding is not None))
                result = replace(result, traced=found, findings=findings)
            if not good:
                message = f"call {index}, with a secret seed: {message}"
                return replace(result, verdict="wrong", message=message, statistics=None)
        return result

    def profile(self) -> None:
        """One call, checked like others, then one under torch's profiler and, on a GPU, one under ncu if it is here."""
        contestant = self.contestant
        if not self._one(0, secret=False):
            return
        with self._made(1, secret=False, hardened=False) as made:
            self.report = contestant.profile(made)
            counters = shutil.which("ncu") if self.run.device.type == "cuda" else None
            if counters is not None:
                runner = (
                    counters,
                    "--clock-control",
                    "none",
                    "--profile-from-start",
                    "off",
                    "--target-processes",
                    "all",
                    "--details-all",
                )
                counted = replace(contestant, runner=runner, sandbox=None)
                try:
                    counted.start()
                    self.report += f"\n{counted.profile(made)}"
                except FaultError as fault:
                    self.report += f"\nncu: {fault.message}"
                finally:
                    counted.stop()

    # --- one call

    def _one(self, index: int, *, secret: bool, hardened: bool = False) -> bool:
        """A call by the submission alone; whether the case goes on."""
        with self._made(index, secret=secret, hardened=hardened) as made:
            return self._sampled(index, made, again=False)

    def _sampled(self, index: int, made: Made, *, again: bool) -> bool:
        sample = self._called(index, made, again=again)
        if sample is not None:
            self.samples.append(sample)
        return sample is not None and self._refusal() is None

    @contextmanager
    def _made(self, index: int, *, secret: bool, hardened: bool, anew: bool = False) -> Iterator[Made]:
        """Data of a call; `anew` where the judge has turned to another case since."""
        run = self.run
        own = run.secret_of(self.kind, self.case, index) if secret else None
        values = self.case.seeded(own)
        seed = values["seed"] if isinstance(values.get("seed"), int) else own or 42
        if hardened:
            seed = (seed & ~1) + index % 2  # odd and even seeds have the widest scales in different operands
        # What must be read is of use where the bandwidth is known.
        probing = PROBING[self.kind] if run.record.protocol.bandwidth is not None and not anew else 0.0
        made = run.judge.make(values, seed, first=anew or index == 0, hardened=hardened, probing=probing)
        try:
            self.redrawn |= set(made.facts.get("redrawn", ()))
            self.has_zeros &= made.facts.get("has_zeros", True)
            self.coverage += tuple(_coverage(found) for found in made.facts.get("coverage", ()))
            if index == 0:
                self.floor = self._floor(made)
            yield made
        finally:
            made.close()

    def _floor(self, made: Made) -> float | None:
        protocol, facts = self.run.record.protocol, made.facts
        read, written = facts.get("read_bytes"), facts.get("written_bytes", 0)
        if self.kind in TIMED and protocol.bandwidth is not None:  # the run tells where that is what lacks
            if read is None:
                self._find(Finding("no-floor", "info", f"no floor: {facts.get('unprobed', '')}"))
            elif (tried := facts["tried_bytes"]) < (1 - NEGLIGIBLE) * (total := facts["data_bytes"]):
                what = f"the floor is from {tried / 1e6:.3g} of {total / 1e6:.3g} MB tried: there was no time for more"
                self._find(Finding("partial-floor", "info", what))
        return timing.floor_ns(read, written, protocol.flush_bytes, protocol.bandwidth)

    def _called(self, index: int, made: Made, *, again: bool) -> Sample | None:
        """A call and its check; None, with the verdict set, where the case ends with it."""
        run, contestant = self.run, self.contestant
        inspect = index < 3 or index % INSPECTED == 0
        elsewhere = self._elsewhere()
        call = contestant.call(made, run.judge.room, run.device.type, elsewhere=elsewhere, inspect=inspect)
        clocks = run.clocks.now()
        if clocks is not None and index >= timing.WARMUP:
            self.clocks.append(clocks)
        self.calls += 1
        before, since = contestant.processes() if inspect else [], time.monotonic()
        measure = index == 0 and contestant is run.contestants[0]
        self_test = measure and self.kind == "test"
        good, message, errors, takes = run.judge.check(call.returned, measure=measure, again=again, self_test=self_test)
        if inspect:
            self._look_at(before, contestant.processes(), time.monotonic() - since, f"call {index}")
        self.inside.append(call.inside_ns)
        self.outside.append(call.outside_ns)
        self.errors = correctness.largest([*self.errors, *errors])
        self.stand_ins |= set(call.stand_ins)
        for name in call.changed:
            self._find(Finding("input-mutation", "flag", f"the submission wrote to {name}", f"call {index}"))
        if index == 0:
            self.first_call_ns = float(call.observed_ns)
        if not good:
            self.verdict = "wrong"
            seed = "the public seed" if index == 0 and self.kind != "leaderboard" else "a secret seed"
            self.message = f"call {index}, with {seed}: {message}"
            return None
        if message:
            self.message = message
        for found in errors:
            if (found.max_relative_rms or 0.0) > ACCEPTABLE:
                what = f"the check accepts {found.output}, which is off by {found.max_relative_rms:.0%} of the RMS"
                self._find(Finding("weak-check", "info", f"{what} of the {found.against} answer", f"call {index}"))
        if takes:
            what = f"the check takes wrong answers for right: {', '.join(takes)}"
            self._find(Finding("weak-check", "info", what, f"call {index}"))
        claims = timing.nanoseconds(call.spans, contestant.timers)
        throttled = clocks is not None and clocks.is_held_back
        sample = Sample(claims, float(call.observed_ns), True, "", throttled, elsewhere)
        return self._validated(index, sample)

    def _elsewhere(self) -> bool:
        """Whether the data of a call lies elsewhere than that of the call before: two of each four, in random order.

        So a few calls are enough to have new data at old addresses and at new ones.
        """
        if not self.places:
            self.places = self.run.shuffled.sample([False, False, True, True], 4)
        return self.places.pop()

    def _validated(self, index: int, sample: Sample) -> Sample:
        """The sample, invalid where it is a warm-up or claims what can't be."""
        ns = sample.claimed_ns[self.run.record.protocol.timer]
        if ns is None:
            self._find(Finding("timer", "refuse", "a timer gave a time that is no positive number", f"call {index}"))
            return replace(sample, valid=False, reason="no time")
        if timing.below_floor(ns, self.floor):
            self._find(
                Finding(
                    "below-floor",
                    "refuse",
                    f"a call took {ns / 1e3:.1f} us, and this device needs {(self.floor or 0) / 1e3:.1f} us to move "
                    "the bytes that must move",
                    f"call {index}",
                    {"claimed_ns": ns, "floor_ns": self.floor},
                )
            )
            return replace(sample, valid=False, reason="below the floor")
        if index < timing.WARMUP:
            return replace(sample, valid=False, reason="warm-up")
        if sample.throttled:
            return replace(sample, valid=False, reason="the clocks were throttled")
        return sample

    def _look_at(self, before: Sequence[Process], after: Sequence[Process], seconds: float, where: str) -> None:
        """Find processes that a call left behind, and work while nothing is asked of the worker."""
        if len(after) > 1:
            what = "the submission leaves processes running between its calls"
            self._find(Finding("left-processes", "flag", what, where, {"processes": len(after) - 1}))
        busy = sum(process.seconds for process in after) - sum(process.seconds for process in before)
        if busy > IDLE_SECONDS + IDLE_SHARE * seconds:
            self._find(
                Finding(
                    "background-work",
                    "flag",
                    f"the worker used {busy:.2f} s of CPU time in {seconds:.2f} s in which nothing was asked of it",
                    where,
                    evidence={"busy_s": busy, "seconds": seconds},
                )
            )

    def _judge_times(self) -> None:
        protocol = self.run.record.protocol
        for finding in (
            timing.unseen_time(self.samples, self.contestant.empty_ns, protocol.timer, self.contestant.empty_lead_ns),
            timing.unseen_cpu_time(self.samples, self.inside, protocol.timer, len(os.sched_getaffinity(0))),
            timing.other_streams(self.samples),
            timing.outside_work(
                self.samples, self.outside, protocol.timer, self.run.threads, self.contestant.empty_outside_ns
            ),
            timing.slowed(timing.clocks_seen(self.clocks)),
        ):
            if finding is not None:
                self._find(finding)
        held_back = [sample for sample in self.samples if sample.throttled]
        if held_back and not claimed(self.samples, protocol.timer):
            self._find(Finding("throttled", "flag", "the clocks were throttled in every call, so none is counted"))

    # --- what it comes to

    def _find(self, finding: Finding) -> None:
        """Keep the first finding of each kind and subject."""
        self.findings.setdefault(finding.class_id + finding.what[:40], finding)

    def _refusal(self) -> Finding | None:
        return next((finding for finding in self.findings.values() if finding.severity == "refuse"), None)

    def fail(self, fault: FaultError) -> None:
        """End the case with a fault of the submission."""
        self.verdict, self.message = fault.verdict, fault.message
        if fault.finding is not None:
            self._find(fault.finding)

    def _at(self, index: int) -> None:
        """A call is to be made: the budget is used from the end of warm-up, whose calls may compile for minutes."""
        if index >= timing.WARMUP:
            self.started = min(self.started, time.monotonic())

    def _seconds(self) -> float:
        """Used of the budget."""
        return time.monotonic() - self.started

    def result(self) -> CaseResult:
        """The case as the record keeps it."""
        refused = self._refusal()
        if refused is not None and self.verdict == "correct":
            self.verdict, self.message = "refused", refused.what
        is_timed = self.kind in TIMED
        return CaseResult(
            self.kind,
            self.case.text,
            dict(self.case.values),
            self.verdict,
            self.message,
            self.calls,
            self.errors,
            coverage.combined(self.coverage),
            self.first_call_ns,
            tuple(self.samples),
            timing.statistics_of(self.samples, self.run.record.protocol.timer) if is_timed else None,
            self.floor,
            tuple(self.findings.values()),
            tuple(sorted(self.stand_ins)),
            self.run.start,
            self.report,
            clocks=timing.clocks_seen(self.clocks) if is_timed else None,
        )


def _coverage(values: dict) -> Coverage:
    return Coverage(**{**values, "shape": tuple(values["shape"])})
