"""The runner's side of the two processes that it asks: the judge, whom it trusts, and a contestant, whom it doesn't."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from nibblas.arena.launcher import KINDS, Process
from nibblas.arena.problem import Task
from nibblas.arena.record import CaseVerdict, Errors, Finding
from nibblas.arena.sandbox import ExcessError, Sandbox, python_path
from nibblas.arena.submission import Submission, incompatibility
from nibblas.arena.wire import MAX_REPLY, Channel, ProtocolError, Returned, UnsendableError, checked

WITHHELD = ("reference.py", "eval.py")  # files of a problem that a submission doesn't get
EMPTY_CALLS, EMPTY_PAUSE = 20, 0.005  # and seconds before each
NS_PER_BYTE = 2.0  # of CPU time, that moving data into a worker and out of it may take
PATIENCE = 3600.0  # seconds that the judge may take, whose work is no contestant's fault
STARTING = 300.0  # seconds for a process to start and to import torch
KEPT_TEXT = 2000  # characters of an error that the record keeps


class FaultError(Exception):
    """What ends a case for a contestant: a verdict, its message, and perhaps a finding."""

    def __init__(self, verdict: CaseVerdict, message: str, finding: Finding | None = None):
        super().__init__(message)
        self.verdict, self.message, self.finding = verdict, message, finding


class JudgeError(Exception):
    """The problem's own code failed, so that nothing can be said of the submission; the message says where."""


# --- the judge -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """The data of one call: where it lies in shared memory, and what the judge found out about it."""

    fd: int
    parcel: dict
    names: list[str]  # of the storages
    facts: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Of the data's storages."""
        return sum(nbytes for _, nbytes, _ in self.parcel["storages"])

    def close(self) -> None:
        """Let go of the shared memory."""
        os.close(self.fd)


class JudgeProcess:
    """The judge, started with the problem's files in a folder that only this user can read; `load` comes first."""

    def __init__(self, task: Task, device: str, threads: int, stand_ins: Sequence[str]):
        self.folder = Path(tempfile.mkdtemp(prefix="arena-judge-"))
        self.stand_ins: set[str] = set()
        for file in task.files:
            path = self.folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.output = open(self.folder / "printed", "w+b")  # noqa: SIM115 - it lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nibblas.arena.judge", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        theirs.close()
        self.settings = {"task": task.name, "device": device, "threads": threads, "stand_ins": list(stand_ins)}

    def load(self) -> None:
        """Wait until it has loaded the problem's reference.py; JudgeError where it can't."""
        self._ask("load", **self.settings)

    def make(
        self, values: Mapping[str, Any], seed: int, *, first: bool, hardened: bool = False, probing: float = 0.0
    ) -> Made:
        """New data for a call; JudgeError where the problem can't make it.

        `first` is the first call of a case, at which so many seconds may be spent on finding out what must be read.
        """
        reply = self._ask("make", values=dict(values), seed=seed, first=first, hardened=hardened, probing=probing)
        (fd,) = reply.pop("fds")
        return Made(fd, reply.pop("parcel"), reply.pop("names"), reply)

    def room(self, nbytes: int) -> int:
        """The file descriptor of shared memory for an output; to be closed by the caller."""
        return self._ask("room", nbytes=nbytes)["fds"][0]

    def check(
        self, returned: Returned, *, measure: bool, again: bool = False, self_test: bool = False
    ) -> tuple[bool, str, tuple[Errors, ...], list[str]]:
        """Whether an output is right, what the problem says of it, how large its errors are, and, with `self_test`,
        which faulty answers the problem takes for right.
        """
        reply = self._ask("check", output=returned.to_json(), measure=measure, again=again, self_test=self_test)
        errors = [Errors(**{**e, "worst_index": tuple(e["worst_index"])}) for e in reply.get("errors", ())]
        return reply["good"], reply["message"], tuple(errors), reply.get("takes", [])

    def _ask(self, do: str, **values: Any) -> dict:
        try:
            reply = self.channel.ask(do, PATIENCE, **values)
        except (EOFError, ProtocolError) as gone:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
            self.output.seek(0)
            printed = self.output.read()[-KEPT_TEXT:].decode(errors="replace")
            raise JudgeError(f"the judge ended in {do} ({self.process.returncode}): {gone}{printed}") from None
        if "error" in reply:
            error = reply["error"]
            where = {
                "load": "reference.py can't be loaded",
                "make": "the problem can't make its data",
            }
            raise JudgeError(f"{where.get(do, do)}: {error['message']}"[:KEPT_TEXT])
        self.stand_ins |= set(reply.get("stand_ins", ()))
        return reply

    def let_end(self) -> None:
        """Have the process end, without waiting for it."""
        self.channel.close()

    def close(self) -> None:
        """End the process."""
        self.let_end()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


# --- a contestant --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of a submission as both sides saw it.

    Nanoseconds. `inside_ns` is CPU time that the worker used for the call, beyond that for a call of nothing;
    `outside_ns` what it used before and after, for taking data and handing over output, beyond what that takes.
    """

    spans: dict
    observed_ns: int
    inside_ns: int
    outside_ns: int
    returned: Returned
    stand_ins: tuple[str, ...]
    changed: tuple[str, ...] = ()  # data that the submission wrote to and did not return
    work: object = None  # on the device, where the call was traced


@dataclass
class Contestant:
    """A submission with the worker that runs it, which is started when needed and again after it failed."""

    submission: Submission
    task: Task
    device: str
    threads: int
    stand_ins: Sequence[str]
    hide: Sequence[Path]
    memory: int | None
    seconds: float = 180.0  # for one request
    allow: Sequence[str] = KINDS
    runner: Sequence[str] = ()  # a program that runs the worker: a profiler
    sandbox: Sandbox | None = None
    unloadable: FaultError | None = None
    isolation: dict[str, bool | str] = field(default_factory=dict)
    empty_ns: float = 0.0
    empty_lead_ns: float = 0.0
    empty_inside_ns: float = 0.0
    empty_outside_ns: float = 0.0
    timers: tuple[str, ...] = ()
    flush_bytes: int = 0
    used: set[str] = field(default_factory=set)

    def launch(self) -> None:
        """Start the worker's process, if there is none, without waiting for its device."""
        if self.sandbox is None:
            self._steps = self._starting()
            self.proceed()

    def proceed(self) -> None:
        """One step further in starting; `start` tells of a submission that fails in it."""
        with suppress(FaultError):
            next(self._steps, None)

    def start(self) -> None:
        """Launch, time calls of a function that does nothing, and load the submission; FaultError where it fails.

        A submission that could not be loaded once is not tried again.
        """
        if self.unloadable is None:
            self.launch()
            for _ in self._steps:
                pass
        if self.unloadable is not None:
            raise self.unloadable

    def _starting(self) -> Iterator[None]:
        """The steps of a start, each of which several contestants can take before one of them takes the next."""
        try:
            self._open()
            yield
            told = self._reply()
            self.timers, self.flush_bytes = tuple(told["timers"]), told["flush_bytes"]
            yield
            self._time_empty_calls()
            yield
        except FaultError as fault:  # none of the submission has run yet
            raise RuntimeError(f"the arena's worker can't be started: {fault.message}") from None
        try:
            self._request("load", self.seconds, main=self.submission.main)
            yield
            loaded = self._reply()
            self._raise_if_failed(loaded, "the submission can't be loaded")
        except FaultError as fault:
            self.unloadable = fault
            raise
        self.used |= set(_words(loaded.get("stand_ins")))

    def _open(self) -> None:
        files = {file.name: file.content for file in self.task.files if file.name not in WITHHELD}
        on_cpu = self.device == "cpu"
        self.sandbox = Sandbox(
            (*self.runner, sys.executable, "-P", "-m", "nibblas.arena.worker", "{fd}"),
            files | self.submission.files,
            hide=self.hide,
            memory=self.memory,
            limit_address_space=on_cpu,
            allow=self.allow,
        )
        self.isolation = self.sandbox.isolation
        self.channel = Channel(self.sandbox.end, MAX_REPLY)
        self._request("start", STARTING, device=self.device, threads=self.threads, stand_ins=list(self.stand_ins))

    def _time_empty_calls(self) -> None:
        """What the runner sees of a call of nothing beyond its claim, and the CPU time that is used around it.

        Before each the worker sleeps, as it does before other calls while the judge makes their data.
        """
        beyond, leads, inside, outside = [], [], [], []
        for _ in range(EMPTY_CALLS):
            time.sleep(EMPTY_PAUSE)
            used = self._cpu_ns()
            self._ask("prepare", STARTING)
            prepared = self._cpu_ns()
            started = time.perf_counter_ns()
            spans = self._ask("call", STARTING)["spans"]
            beyond.append(time.perf_counter_ns() - started - spans[self.timers[0]] - spans.get("lead", 0))
            leads.append(spans.get("lead", 0))
            called = self._cpu_ns()
            self._ask("describe", STARTING)
            inside.append(called - prepared)
            outside.append(prepared - used + self._cpu_ns() - called)
        self.empty_ns, self.empty_lead_ns = median(beyond), median(leads)
        self.empty_inside_ns, self.empty_outside_ns = median(inside), median(outside)

    def call(
        self,
        made: Made,
        room: Callable[[int], int],
        device_type: str,
        *,
        elsewhere: bool,
        inspect: bool,
        traced: bool = False,
    ) -> Call:
        """Hand over the data, call the submission, and fetch what it returned.

        `room` gives shared memory for so many bytes; `elsewhere` puts the data at new addresses; with `inspect` it is
        looked at again; `traced` calls under a profiler. FaultError for any failure of the submission.
        """
        used = self._cpu_ns()
        self._prepare(made, elsewhere)
        prepared = self._cpu_ns()
        started = time.perf_counter_ns()
        reply = self._ask("call", self.seconds, traced=traced)
        observed = time.perf_counter_ns() - started
        called = self._cpu_ns()
        self._raise_if_failed(reply, "")
        told = self._ask("describe", self.seconds)
        try:
            returned = checked(told.get("output"), device_type)
        except UnsendableError as error:
            raise FaultError("refused", str(error), Finding("output-type", "refuse", str(error))) from None
        except ProtocolError as error:
            raise self._forged(str(error)) from None
        if self.memory is not None and returned.nbytes > self.memory:
            size, limit = (n / 2**30 for n in (returned.nbytes, self.memory))
            raise FaultError("crashed", f"the output has {size:.1f} GiB, {limit:.1f} GiB of memory are allowed")
        fds = [room(returned.nbytes), *([os.dup(made.fd)] if inspect else [])]
        try:
            fetched = self._ask("fetch", self.seconds, fds, offsets=returned.offsets, parcel=made.parcel)
        finally:
            for fd in fds:
                os.close(fd)
        outside = prepared - used + self._cpu_ns() - called - self.empty_outside_ns
        moved = made.nbytes * (2 if inspect else 1) + 2 * returned.nbytes
        changed = tuple(name for number, name in enumerate(made.names) if number in _numbers(fetched.get("changed")))
        stand_ins = _words(told.get("stand_ins"))
        self.used |= set(stand_ins)
        return Call(
            reply.get("spans", {}),
            observed,
            round(called - prepared - self.empty_inside_ns),
            round(outside - moved * NS_PER_BYTE),
            returned,
            stand_ins,
            changed,
            reply.get("work"),
        )

    def _prepare(self, made: Made, elsewhere: bool) -> None:
        reply = self._ask("prepare", self.seconds, [made.fd], parcel=made.parcel, elsewhere=elsewhere)
        if "not_taken" in reply:
            why = f"the data takes {made.nbytes / 2**30:.1f} GiB of memory, once or twice"
            if self.device == "cpu" and self.memory is not None:
                why += f", of which a submission may have {self.memory / 2**30:.1f} GiB here"
            raise FaultError("incompatible", f"{why}: {str(reply['not_taken'])[:KEPT_TEXT]}")

    def _cpu_ns(self) -> int:
        return self.sandbox.cpu_ns() if self.sandbox else 0

    def profile(self, made: Made) -> str:
        """What a profiler tells of one call: the table of torch's; of a profiler that runs the worker, its output."""
        self._prepare(made, elsewhere=True)
        reply = self._ask("profile", self.seconds, by_runner=bool(self.runner))
        self._raise_if_failed(reply, "")
        if self.runner and self.sandbox is not None:
            sandbox, self.sandbox = self.sandbox, None
            self.channel.close()  # the worker ends by itself, and the profiler then reports
            sandbox.wait(self.seconds)
            sandbox.end_all()
            return sandbox.printed
        return str(reply.get("report", ""))

    def processes(self) -> list[Process]:
        """The worker's process and all that it started and that still run."""
        return list(self.sandbox.processes()) if self.sandbox else []

    def _ask(self, do: str, seconds: float, fds: Sequence[int] = (), **values: Any) -> dict:
        self._request(do, seconds, fds, **values)
        return self._reply()

    def _request(self, do: str, seconds: float, fds: Sequence[int] = (), **values: Any) -> None:
        with self._faults(do, seconds):
            self._asked = do, seconds, self.channel.send_request(do, fds, **values)

    def _reply(self) -> dict:
        """The reply to the last request."""
        assert self.sandbox is not None
        do, seconds, nonce = self._asked
        with self._faults(do, seconds):
            reply = self.channel.take_reply(nonce, seconds, self.sandbox.look)
            if sent := reply.pop("fds"):
                for fd in sent:
                    os.close(fd)
                raise ProtocolError("files that nobody asked for")
            return reply

    @contextmanager
    def _faults(self, do: str, seconds: float) -> Iterator[None]:
        """What goes wrong with the worker's channel, as a FaultError."""
        assert self.sandbox is not None
        try:
            yield
        except TimeoutError:
            self.stop()
            raise FaultError("timeout", f"{_DOING[do]} took longer than {seconds:g} s") from None
        except ExcessError as error:
            self.stop()
            raise FaultError("crashed", f"{_DOING[do]}: {error}") from None
        except ProtocolError as error:
            raise self._forged(str(error)) from None
        except EOFError:
            ended, printed = self.sandbox.end_all(), self.sandbox.printed.strip()
            self.stop()
            how = str(ended) if ended else "it closed its channel"
            raise FaultError("crashed", f"{_DOING[do]}: {how}\n{printed[-KEPT_TEXT:]}".strip()) from None

    def _forged(self, how: str) -> FaultError:
        self.stop()
        what = f"the worker's channel carried {how}"
        return FaultError("refused", what, Finding("result-channel", "refuse", what))

    def _raise_if_failed(self, reply: dict, what: str) -> None:
        """FaultError for an exception that the worker tells of."""
        error = reply.get("error")
        if error is None:
            return
        if not isinstance(error, dict):
            raise self._forged("an error that is none")
        kind, message = str(error.get("type")), str(error.get("message"))[:KEPT_TEXT]
        prefix = f"{what}: " if what else ""
        reason = incompatibility(kind, message, self.submission, self.task)
        if self.device != "cpu":
            self.stop()  # an error of a GPU stays with the process
        if reason is not None:
            raise FaultError("incompatible", f"{prefix}{reason}")
        trace = str(error.get("traceback", ""))[-KEPT_TEXT:].strip()
        raise FaultError("crashed", f"{prefix}{trace or f'{kind}: {message}'}")

    def let_end(self) -> None:
        """Have the worker and all that it started end, without waiting for it."""
        if self.sandbox is not None:
            self.sandbox.let_end()

    def stop(self) -> None:
        """End the worker and all that it started."""
        if self.sandbox is not None:
            self.sandbox.end_all()
            self.sandbox = None


def start_together(judge: JudgeProcess, contestants: Sequence[Contestant]) -> None:
    """Start all as far as can be done side by side: `start` has little left to wait for.

    Calls of nothing are timed when all processes are up, one worker after the other.
    """
    for contestant in contestants:
        contestant.launch()
    judge.load()
    for _ in ("its device", "calls of nothing", "its submission"):
        for contestant in contestants:
            contestant.proceed()


_DOING = {
    "start": "starting the worker",
    "load": "importing the submission",
    "prepare": "taking the data",
    "call": "a call",
    "describe": "describing the output",
    "fetch": "fetching the output",
    "profile": "a profiled call",
}


def _numbers(value: Any) -> set[int]:
    return {number for number in value if type(number) is int} if isinstance(value, list) else set()


def _words(value: Any) -> tuple[str, ...]:
    return tuple(sorted({str(word)[:80] for word in value})) if isinstance(value, list) else ()
