"""A run: cases are made, called, checked and timed one call after the other, and all that happened goes into a record.

The process that runs this owns the secret seed, the clock that counts, the statistics and the verdicts. It imports no
code of the problem and none of the submission.
"""

import hashlib
import platform
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from nibblas import __version__, roofline
from nibblas.arena import record, standins, submission, timing
from nibblas.arena.case import CaseRun
from nibblas.arena.clocks import Clocks
from nibblas.arena.launcher import hide_from_other_processes
from nibblas.arena.native import BuildError, Native
from nibblas.arena.options import Options
from nibblas.arena.parties import KEPT_TEXT, Contestant, FaultError, JudgeError, JudgeProcess, start_together
from nibblas.arena.problem import ArenaError, Case, Task
from nibblas.arena.record import (
    CaseResult,
    CaseVerdict,
    Comparison,
    Environment,
    Finding,
    Mode,
    Protocol,
    Record,
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
SECRET_BITS = 31  # of the seed of one call; combined with a public seed it stays within 64 bits
NO_BANDWIDTH = Finding(
    "no-floor", "info", "no floor: this device's bandwidth is not known (`nibblas doctor` measures it)"
)


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
    output : the record's file; it is written whole after each case. Where others may write it too, the caller holds
        record.only_writer.
    against : another submission to compare times with, or the same one for the noise alone.
    resumed : the record of an interrupted run, whose finished cases are kept; ArenaError where that was of something
        else, or was run in another way.
    progress : told what is going on.

    Raises ArenaError where the problem has no cases of the mode, and KeyboardInterrupt after the record was written, so
    that it can be resumed.
    """
    if options.hardened and "test" not in STAGES[options.mode]:
        raise ArenaError(f"--hardened adds inputs to tests, of which mode {options.mode} runs none")
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
        self.judge: JudgeProcess  # once it is started
        self.contestants: list[Contestant] = []

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
        done = Counter(case.kind for case in self.record.cases)  # the first ones of each stage
        for stage in STAGES[self.options.mode]:
            for case in self.task.cases(stage)[done[stage] :]:
                yield stage, case

    def _stages(self) -> None:
        for stage in STAGES[self.options.mode]:
            findings = self.record.findings
            if stage in record.TIMED and self.record.protocol.bandwidth is None and NO_BANDWIDTH not in findings:
                self._keep(findings=(*findings, NO_BANDWIDTH))
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
            before = sum(one.kind == result.kind for one in self.record.cases[:place])
            case = self.task.cases(result.kind)[before]
            try:
                traced = CaseRun(self, result.kind, case, self.contestants[0]).trace(result)
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
        verdict = record.verdict_of(cases)
        if not reason:
            worst = next((case for case in cases if record.verdict_of([case]) == verdict != "correct here"), None)
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
        for contestant in self.contestants:
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
        done = CaseRun(self, kind, case, self.contestants[0])
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

    def _compared(self, done: CaseRun) -> None:
        found = self.record.comparison
        if found is not None and done.ratio is not None:
            self._keep(comparison=replace(found, ratios=(*found.ratios, done.ratio)))

    def secret_of(self, kind: Mode, case: Case, index: int) -> int:
        """The secret seed of one call of a case."""
        digest = hashlib.sha256(f"{self.secret}/{kind}/{case.text}/{index}".encode()).digest()
        return int.from_bytes(digest[:8]) % 2**SECRET_BITS


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
        {"host": roofline.host_digest()} | clocks.facts,
    )
