"""A run: cases are made, called, checked and timed one call after the other, and all that happened goes into a record.

The process that runs this owns the secret seed, the clock that counts, the statistics and the verdicts. It imports no
code of the problem and none of the submission.
"""

import hashlib
import math
import os
import platform
import random
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from nibblas import __version__, roofline
from nibblas.arena import correctness, coverage, record, standins, submission, timing
from nibblas.arena.clocks import Clocks
from nibblas.arena.launcher import Process, hide_from_other_processes
from nibblas.arena.native import BuildError, Native
from nibblas.arena.parties import KEPT_TEXT, Contestant, FaultError, JudgeError, JudgeProcess, Made, start_together
from nibblas.arena.problem import ArenaError, Case, Dialect, Task
from nibblas.arena.record import (
    CaseResult,
    CaseVerdict,
    Comparison,
    Coverage,
    Environment,
    Errors,
    Finding,
    Mode,
    PairedRatio,
    Protocol,
    Record,
    RunVerdict,
    Sample,
    Seed,
    SubmissionFacts,
    TaskFacts,
    Traced,
)
from nibblas.arena.submission import Submission
from nibblas.memory import cold_bytes, free_memory
from nibblas.problem import arch_of

STAGES: dict[Mode, tuple[Mode, ...]] = {
    "test": ("test",),
    "benchmark": ("benchmark",),
    "leaderboard": ("test", "benchmark", "leaderboard"),
    "profile": ("profile",),
}
_LISTS: dict[Mode, str] = dict.fromkeys(STAGES, "benchmarks") | {"test": "tests"}  # of task.yml
BUDGET = 30.0  # seconds for one benchmark case
ACCEPTABLE = 0.5  # of the answer's RMS: a check that lets an element be further off accepts nearly anything
INSPECTED = 8  # one call in so many has its data looked at again and its processes counted
IDLE_SHARE, IDLE_SECONDS = 0.3, 0.1  # of CPU time, that a worker may use while nothing is asked of it
PROBING: dict[Mode, float] = {"test": 1.0, "benchmark": 3.0, "leaderboard": 3.0, "profile": 0.0}  # seconds, for floors
SECRET_BITS = 31  # of the seed of one call; combined with a public seed it stays within 64 bits
# From the gravest: what the worst of its cases makes of a run.
GRAVITY: tuple[tuple[CaseVerdict, RunVerdict], ...] = (
    ("refused", "refused"),
    ("wrong", "wrong"),
    ("crashed", "crashed"),
    ("timeout", "timeout"),
    ("incompatible", "incompatible here"),
    ("not run", "unfinished"),
    ("correct", "correct here"),
)


@dataclass(frozen=True)
class Options:
    """How a run is done. `seed` replaces the public seeds of the cases, to look into one; `budget` is per case."""

    mode: Mode = "test"
    device: str = "cpu"
    threads: int | None = None
    seed: int | None = None
    budget: float = BUDGET
    hardened: bool = False
    dialect: Dialect = "nibblas"
    stand_ins: Literal["auto", "none"] = "auto"
    command: str = ""


Progress = Callable[[str], None]


def run(
    task: Task,
    entry: Submission,
    options: Options,
    output: Path,
    *,
    against: Submission | None = None,
    resumed: Record | None = None,
    progress: Progress = lambda text: None,
) -> Record:
    """Run a submission on a problem, and return the record, which is also kept in a file all along.

    Parameters
    ----------
    output : the record's file; it is written whole after each case.
    against : another submission to compare times with, or the same one for the noise alone.
    resumed : the record of an interrupted run, whose finished cases are kept; ArenaError where that was of something
        else, or was run in another way.
    progress : told what is going on.

    Raises ArenaError where the problem has no cases of the mode, and KeyboardInterrupt after the record was written, so
    that it can be resumed.
    """
    if not task.cases(options.mode):
        raise ArenaError(f"{task.name} has no {_LISTS[options.mode]}, which mode {options.mode} runs")
    hide_from_other_processes()
    return _Run(task, entry, options, output, against, resumed, progress).run()


class _Run:
    def __init__(
        self,
        task: Task,
        entry: Submission,
        options: Options,
        output: Path,
        against: Submission | None,
        resumed: Record | None,
        progress: Progress,
    ):
        self.task, self.entry, self.options, self.output = task, entry, options, output
        self.against, self.progress = against, progress
        self.device = torch.device(options.device)
        self.threads = (options.threads or torch.get_num_threads()) if self.device.type == "cpu" else 0
        self.secret, self.salt = secrets.randbits(64), secrets.token_hex(16)
        self.shuffled = random.Random(secrets.randbits(64))
        self.record = self._first_record() if resumed is None else self._continued(resumed)
        self.start = len(self.record.protocol.seeds) - 1
        self.clocks = Clocks(self.device)

    # --- the record

    def _first_record(self) -> Record:
        now = datetime.now(UTC)
        line = roofline.roofline(self.device, self.threads)
        is_known = line.source != "assumed"
        rule = timing.Stopping(self.options.budget)
        return Record(
            id=f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}",
            when=now.isoformat(timespec="seconds"),
            command=self.options.command,
            mode=self.options.mode,
            task=TaskFacts(self.task.name, self.task.digests, self.task.lang, self.task.ranking_by),
            submission=self.entry.facts,
            environment=_environment(self.device, self.threads),
            isolation={},
            protocol=Protocol(
                self.options.mode,
                (self._seed(),),
                self.options.dialect,
                self.options.hardened,
                self.options.seed,
                self.options.stand_ins,
                self.options.budget,
                flush_bytes=cold_bytes(self.device),
                warmup=timing.WARMUP,
                stopping_rule=str(rule),
                confidence=timing.CONFIDENCE,
                bandwidth=line.read_bandwidth if is_known else None,
                bandwidth_source=line.source if is_known else "",
                timeouts={stage: self.task.timeout(stage) for stage in STAGES[self.options.mode]},
            ),
            findings=tuple(submission.static_findings(self.entry)),
            comparison=None if self.against is None else Comparison(self.against.facts),
        )

    def _continued(self, old: Record) -> Record:
        new = self._first_record()
        theirs, ours = _decisive(old), _decisive(new)
        for name in ours:
            if theirs[name] != ours[name]:
                was, now = _in_words(theirs[name]), _in_words(ours[name])
                raise ArenaError(f"a run goes on only as it began: {name} was {was} in the record, and is {now} now")
        done = tuple(case for case in old.cases if case.verdict != "not run")
        protocol = replace(old.protocol, seeds=old.protocol.seeds + new.protocol.seeds)
        kept = {"id": old.id, "when": old.when, "isolation": old.isolation, "stand_ins": old.stand_ins}
        return replace(new, **kept, cases=done, protocol=protocol, comparison=old.comparison)  # type: ignore[arg-type]

    def _seed(self, told: bool = False) -> Seed:
        commitment = record.commit(self.secret, self.salt)
        return Seed(commitment, self.secret, self.salt) if told else Seed(commitment)

    def _keep(self, **changes: object) -> None:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        record.write(self.record, self.output)

    def _add(self, case: CaseResult) -> None:
        self._keep(cases=(*self.record.cases, case), stand_ins=self._stand_ins())

    # --- the run

    def run(self) -> Record:
        why_not = self._why_not()
        if why_not is not None:
            cases = [self._empty(kind, case, "incompatible", why_not) for kind, case in self._planned()]
            return self._end(cases, why_not)
        self._keep()
        try:
            if self.task.lang == "cu":
                self._native()
                return self._end(self._left_out(), "")
            with ExitStack() as stack:
                names = standins.ALL if self.options.stand_ins == "auto" else ()
                self.progress("starting")
                self.judge = JudgeProcess(self.task, self.options.device, self.threads, names)
                stack.callback(self.judge.close)
                self.contestants = [self._contestant(entry, names) for entry in self._entries()]
                for contestant in self.contestants:
                    stack.callback(contestant.stop)
                stack.callback(self.judge.let_end)  # all of them are let end before the end of one is waited for
                for contestant in self.contestants:
                    stack.callback(contestant.let_end)
                start_together(self.judge, self.contestants)
                self._stages()
                self._trace()
        except (JudgeError, BuildError) as error:
            verdict = error.verdict if isinstance(error, BuildError) else "incompatible"
            rest = [self._empty(kind, case, verdict, str(error)) for kind, case in self._planned()]
            return self._end(rest, str(error))
        except KeyboardInterrupt:
            self._keep(reason="interrupted", protocol=self._protocol_with_seed())
            raise
        return self._end(self._left_out(), "")

    def _left_out(self) -> list[CaseResult]:
        return [self._empty(kind, case, "not run", "an earlier stage did not pass") for kind, case in self._planned()]

    def _native(self) -> None:
        self.progress("compiling")
        program = Native(self.task, self.entry, arch_of(self.device), self._hidden(self.entry))
        program.build()
        for stage in STAGES[self.options.mode]:
            cases = [case for kind, case in self._planned() if kind == stage]
            if not cases:
                continue
            self.progress(stage)
            seed = self.secret % 2**SECRET_BITS if stage == "leaderboard" else None
            results = program.run(stage, cases, seed, self.task.timeout(stage))
            self._keep(
                isolation=program.isolation,
                cases=(*self.record.cases, *(replace(result, start=self.start) for result in results)),
            )
            if any(result.verdict != "correct" for result in results):
                return

    def _why_not(self) -> str | None:
        devices = torch.cuda.device_count() if self.device.type == "cuda" else 0
        found = self.task.why_not(devices)
        if found is None and self.task.multi_gpu:
            found = "its cases are run by several processes, one on each GPU, and the arena judges one"
        if found is None:
            stands_in = standins.provides if self.options.stand_ins == "auto" else (lambda module, name: False)
            found = submission.why_not(self.entry, self.task, arch_of(self.device), stands_in)
        return found

    def _entries(self) -> list[Submission]:
        """Whose calls are timed: the submission; in a comparison also the other one, then the submission again."""
        if self.against is None:
            return [self.entry]
        return [self.entry, self.against, self.entry]

    def _contestant(self, entry: Submission, names: Sequence[str]) -> Contestant:
        return Contestant(
            entry,
            self.task,
            self.options.device,
            self.threads,
            names,
            self._hidden(entry),
            free_memory() // (1 + len(self._entries())),
        )

    def _hidden(self, entry: Submission) -> list[Path]:
        """Folders that a submission must not see: the problem's, the record's, and its own where others may lie."""
        return [self.task.directory, self.output.parent, entry.path if entry.path.is_dir() else entry.path.parent]

    def _planned(self) -> Iterator[tuple[Mode, Case]]:
        """Stages and cases that the record does not have yet."""
        done = {(case.kind, case.text) for case in self.record.cases}
        for stage in STAGES[self.options.mode]:
            for case in self.task.cases(stage):
                if (stage, case.text) not in done:
                    yield stage, case

    def _stages(self) -> None:
        for stage in STAGES[self.options.mode]:
            for contestant in self.contestants:
                contestant.seconds = self.task.timeout(stage)
            for kind, case in list(self._planned()):
                if kind != stage:
                    continue
                self.progress(f"{stage} {case.text}")
                result = self._case(stage, case)
                self._add(result)
                if stage == "leaderboard" and result.verdict != "correct":
                    return
            if any(case.kind == stage and case.verdict != "correct" for case in self.record.cases):
                return

    def _trace(self) -> None:
        """One more call of each timed case under a profiler, after all samples, since it slows a process down."""
        if not self._is_traceable():
            return
        for place, result in enumerate(self.record.cases):
            is_last = result.kind == STAGES[self.options.mode][-1]
            if not is_last or result.statistics is None or result.verdict != "correct" or result.traced is not None:
                continue
            self.progress(f"tracing {result.text}")
            case = next(case for case in self.task.cases(result.kind) if case.text == result.text)
            try:
                traced = _Case(self, result.kind, case, self.contestants[0]).trace(result)
            except FaultError as fault:  # of the profiler, for all that is known, and then in the other cases as well
                traced = replace(result, traced=Traced(why_not=fault.message[:KEPT_TEXT]))
            self._keep(cases=(*self.record.cases[:place], traced, *self.record.cases[place + 1 :]))
            if traced.traced is not None and not traced.traced.kernels:
                return

    def _is_traceable(self) -> bool:
        """Whether there is a profiler of the device's own work."""
        return self.device.type == "cuda"

    def _end(self, rest: Sequence[CaseResult], reason: str) -> Record:
        cases = (*self.record.cases, *rest)
        verdicts: set[CaseVerdict] = {case.verdict for case in cases if case.verdict != "not run"} or {"not run"}
        verdict = next(run for case, run in GRAVITY if case in verdicts)
        if not reason:
            worst = next((case for case in cases if _run_verdict(case.verdict) == verdict != "correct here"), None)
            reason = f"{worst.kind} {worst.text}: {worst.message}".removesuffix(": ") if worst else ""
        ranked = [case.statistics for case in cases if case.kind == STAGES[self.options.mode][-1]]
        medians = [found.median_ns * 1e-9 for found in ranked if found is not None]
        is_ranked = verdict == "correct here" and medians and len(medians) == len(ranked)
        self._keep(
            cases=cases,
            verdict=verdict,
            reason=reason,
            score=self.task.score(medians) if is_ranked else None,
            stand_ins=self._stand_ins(),
            protocol=self._protocol_with_seed(),
            complete=True,
        )
        return self.record

    def _stand_ins(self) -> tuple[str, ...]:
        used = {*self.record.stand_ins, *(self.judge.stand_ins if hasattr(self, "judge") else ())}
        for contestant in getattr(self, "contestants", ()):
            used |= contestant.used
        return tuple(sorted(used))

    def _protocol_with_seed(self) -> Protocol:
        seeds = (*self.record.protocol.seeds[: self.start], self._seed(told=True))
        return replace(self.record.protocol, seeds=seeds)

    def _empty(self, kind: Mode, case: Case, verdict: CaseVerdict, message: str) -> CaseResult:
        return CaseResult(kind, case.text, dict(case.values), verdict, message, start=self.start)

    # --- one case

    def _case(self, kind: Mode, case: Case) -> CaseResult:
        if self.options.seed is not None and "seed" in case.values:
            case = replace(case, values={**case.values, "seed": self.options.seed})
        done = _Case(self, kind, case, self.contestants[0])
        try:
            done.contestant.start()
            self._keep(isolation=self.contestants[0].isolation, protocol=self._protocol_as_seen())
            if kind == "test":
                done.test()
            elif kind == "profile":
                done.profile()
            elif self.against is not None and kind == "benchmark":
                done.compare()
                self._compared(done)
            else:
                done.benchmark()
        except FaultError as fault:
            done.fail(fault)
        return done.result()

    def _protocol_as_seen(self) -> Protocol:
        first = self.contestants[0]
        return replace(
            self.record.protocol,
            timer=first.timers[0],
            timers=first.timers,
            flush_bytes=first.flush_bytes,
            empty_call_ns=first.empty_ns,
        )

    def _compared(self, done: "_Case") -> None:
        found = self.record.comparison
        if found is not None and done.ratio is not None:
            self._keep(comparison=replace(found, ratios=(*found.ratios, done.ratio)))

    def secret_of(self, kind: Mode, case: Case, index: int) -> int:
        """The secret seed of one call of a case."""
        digest = hashlib.sha256(f"{self.secret}/{kind}/{case.text}/{index}".encode()).digest()
        return int.from_bytes(digest[:8]) % 2**SECRET_BITS


class _Case:
    """One case in the making, for one contestant: its calls so far, and what they showed."""

    def __init__(self, run: _Run, kind: Mode, case: Case, contestant: Contestant):
        self.run, self.kind, self.case, self.contestant = run, kind, case, contestant
        self.verdict: CaseVerdict = "correct"
        self.message, self.report = "", ""
        self.calls = 0
        self.samples: list[Sample] = []
        self.inside: list[float] = []  # CPU time of each call, and around it
        self.outside: list[float] = []
        self.places: list[bool] = []  # of the next calls' data: elsewhere or not
        self.first_call_ns: float | None = None
        self.errors: tuple[Errors, ...] = ()
        self.coverage: tuple[Coverage, ...] = ()
        self.findings: dict[str, Finding] = {}
        self.stand_ins: set[str] = set()
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

    def benchmark(self, first: int = 0) -> None:
        """Calls on fresh inputs until the stopping rule is satisfied; in ranked cases all seeds are secret."""
        rule = timing.Stopping(self.run.options.budget)
        for index in range(first, 1 << 30):
            self._at(index)
            if not self._one(index, secret=index > 0 or self.kind == "leaderboard"):
                return
            valid = timing.claimed(self.samples, self.run.record.protocol.timer)
            if rule.is_reached(valid, len(self.samples) - timing.WARMUP, self._seconds()):
                break
        self._judge_times()

    def compare(self) -> None:
        """Rounds in which all contestants get the same inputs, in shuffled order.

        The other submission is judged as this one is. Where it fails, this one goes on alone.
        """
        run, rule = self.run, timing.Stopping(self.run.options.budget)
        timer = run.record.protocol.timer
        sides = [self, *(_Case(run, self.kind, self.case, contestant) for contestant in run.contestants[1:])]
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

    def _round(self, index: int, sides: Sequence["_Case"]) -> bool:
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
        """That result with what a profiler sees of one more call, which is checked as all others are; or FaultError."""
        run, contestant, index = self.run, self.contestant, result.calls
        timer = run.record.protocol.timer
        contestant.start()
        with self._made(index, secret=True, hardened=False, anew=True) as made:
            call = contestant.call(made, run.judge.room, run.device.type, elsewhere=False, inspect=False, traced=True)
            good, message, _ = run.judge.check(call.returned, measure=False)
        event = timing.nanoseconds(call.spans, contestant.timers)[timer]
        found = timing.traced(call.work, event)
        finding = timing.untraced_work(found, result.samples, timer)
        findings = result.findings if finding is None else (*result.findings, finding)
        result = replace(result, traced=found, findings=findings, calls=result.calls + 1)
        if good:
            return result
        return replace(result, verdict="wrong", message=f"call {index}, with a secret seed: {message}", statistics=None)

    def profile(self) -> None:
        """One call, checked like others, then one under torch's profiler and, on a GPU, one under ncu if it is here."""
        contestant = self.contestant
        if not self._one(0, secret=False):
            return
        with self._made(1, secret=False, hardened=False) as made:
            self.report = contestant.profile(made)
            counters = shutil.which("ncu") if self.run.device.type == "cuda" else None
            if counters is not None:
                runner = (counters, "--profile-from-start", "off", "--target-processes", "all", "--details-all")
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
            self.coverage += tuple(_coverage(found) for found in made.facts.get("coverage", ()))
            if index == 0:
                self.floor = self._floor(made)
            yield made
        finally:
            made.close()

    def _floor(self, made: Made) -> float | None:
        protocol = self.run.record.protocol
        return timing.floor_ns(
            made.facts.get("read_bytes"), made.facts.get("written_bytes", 0), protocol.flush_bytes, protocol.bandwidth
        )

    def _called(self, index: int, made: Made, *, again: bool) -> Sample | None:
        """A call and its check; None, with the verdict set, where the case ends with it."""
        run, contestant = self.run, self.contestant
        inspect = index < 3 or index % INSPECTED == 0
        elsewhere = self._elsewhere()
        call = contestant.call(made, run.judge.room, run.device.type, elsewhere=elsewhere, inspect=inspect)
        throttled = run.clocks.throttled()
        self.calls += 1
        before, since = contestant.processes() if inspect else [], time.monotonic()
        measure = index == 0 and contestant is run.contestants[0]
        good, message, errors = run.judge.check(call.returned, measure=measure, again=again)
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
        claims = timing.nanoseconds(call.spans, contestant.timers)
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
            timing.unseen_time(self.samples, self.contestant.empty_ns, protocol.timer, self.contestant.empty_spread_ns),
            timing.unseen_cpu_time(self.samples, self.inside, protocol.timer, len(os.sched_getaffinity(0))),
            timing.other_streams(self.samples, self.contestant.empty_tail_ns),
            timing.outside_work(self.samples, self.outside, protocol.timer, self.run.threads),
        ):
            if finding is not None:
                self._find(finding)
        held_back = [sample for sample in self.samples if sample.throttled]
        if held_back and not timing.claimed(self.samples, protocol.timer):
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
        is_timed = self.kind in ("benchmark", "leaderboard")
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
        )


def _run_verdict(verdict: CaseVerdict) -> RunVerdict:
    return dict(GRAVITY)[verdict]


def _coverage(values: dict) -> Coverage:
    return Coverage(**{**values, "shape": tuple(values["shape"])})


def _decisive(record: Record) -> dict[str, object]:
    """What decides what a run measures, by the option that sets it or by its name."""
    protocol, environment = record.protocol, record.environment
    return {
        "the problem": record.task,
        "the submission": record.submission,
        "--mode": record.mode,
        "--device": environment.device,
        "--threads": environment.threads,
        "--seed": protocol.public_seed,
        "--budget": protocol.budget,
        "--against": record.comparison and record.comparison.against,
        "--hardened": protocol.hardened,
        "--dialect": protocol.dialect,
        "--stand-ins": protocol.stand_ins,
        "the CPU": environment.cpu,
        "Python": environment.python,
        "torch": environment.torch,
        "the software": environment.versions,
    }


def _in_words(value: object) -> str:
    if isinstance(value, TaskFacts | SubmissionFacts):
        return f"{value.name} ({', '.join(f'{path} {digest[:12]}' for path, digest in value.files.items())})"
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _environment(device: torch.device, threads: int) -> Environment:
    versions = {"nibblas": __version__}
    for name in ("triton", "kernelguard"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.version.hip:
        versions["hip"] = torch.version.hip
    clocks = Clocks(device)
    versions |= clocks.versions
    return Environment(
        roofline.device_name(device),
        arch_of(device),
        threads,
        roofline.device_name(torch.device("cpu")),
        f"{platform.system()} {platform.release()}",
        platform.python_version(),
        torch.__version__,
        versions,
        {"host": socket.gethostname()} | clocks.facts,
    )
