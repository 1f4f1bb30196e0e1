"""Problems in CUDA C++ (lang: cu), whose evaluation is a program of the problem that the submission is compiled into.

That program makes its inputs, checks and times by itself, in the process of the submission: nothing of it can be seen
from outside. It is run in the sandbox by KernelBot's process protocol, what it says is kept, and each run says so.
"""

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nibblas.arena.problem import Case, Task
from nibblas.arena.record import CaseResult, CaseVerdict, Finding, Mode
from nibblas.arena.sandbox import ExcessError, Sandbox
from nibblas.arena.submission import Submission, incompatibility

PROGRAM = "evaluation"
COMPILING = 300.0  # seconds
MAX_RESULT = 1 << 20  # bytes
USUAL_FLAGS = ("--std=c++17", "-O3")
CUDA_FAILED = 110  # the exit status for a CUDA call that failed
OWN = Finding(
    "own-evaluation",
    "flag",
    "the problem's own program made inputs, checked and timed in the submission's process, unseen from outside",
)


class BuildError(Exception):
    """The program can't be made: by the submission's fault ("crashed"), or for lack of something ("incompatible")."""

    def __init__(self, verdict: CaseVerdict, message: str):
        super().__init__(message)
        self.verdict = verdict


@dataclass
class Native:
    """The program of a problem with a submission compiled into it."""

    task: Task
    entry: Submission
    arch: str  # "sm_90", or "cpu" for none
    hide: Sequence[Path]
    isolation: dict[str, bool | str] = field(default_factory=dict)
    _program: bytes = b""

    def build(self) -> None:
        """Compile and link by the problem's config; BuildError."""
        compiler = shutil.which("nvcc")
        if compiler is None:
            raise BuildError("incompatible", "the problem is in CUDA C++, and nvcc is not here")
        config = self.task.config
        target = [f"-arch={self.arch}"] if self.arch.startswith("sm_") else []
        command = [
            compiler,
            *config.get("compile_flags", USUAL_FLAGS),
            *target,
            *(f"-I{folder}" for folder in config.get("include_dirs", ())),
            *(f"-D{name}={value}" for name, value in config.get("defines", {}).items()),
            *config["sources"],
            *(f"-l{library}" for library in self.task.libraries),
            "-o",
            PROGRAM,
        ]
        files = {file.name: file.content for file in self.task.files} | self.entry.files
        sandbox = Sandbox(command, files, hide=self.hide)
        try:
            ended = sandbox.wait(COMPILING)
            made = sandbox.folder / PROGRAM
            if ended is None or ended.status != 0 or made.is_symlink() or not made.is_file():
                how = ended or f"it took longer than {COMPILING:g} s"
                lacks = incompatibility("", sandbox.printed, self.entry, self.task)
                told = lacks or f"{how}\n{sandbox.printed[-4000:]}".strip()
                raise BuildError("incompatible" if lacks else "crashed", f"nvcc failed: {told}")
            self._program = made.read_bytes()
        except ExcessError as error:
            raise BuildError("crashed", f"nvcc failed: {error}") from None
        finally:
            sandbox.end_all()

    def run(self, mode: Mode, cases: Sequence[Case], seed: int | None, seconds: float) -> list[CaseResult]:
        """What the program says of the cases, run in a mode for at most so many seconds."""
        lines = "".join(f"{case.text}\n" for case in cases).encode()
        environment = {"POPCORN_FD": "{fd}"} | ({} if seed is None else {"POPCORN_SEED": str(seed)})
        sandbox = Sandbox(
            [f"./{PROGRAM}", mode, "cases.txt"],
            {PROGRAM: self._program, "cases.txt": lines},
            environment=environment,
            hide=self.hide,
            limit_address_space=False,
        )
        self.isolation = sandbox.isolation
        try:
            ended, text = self._finished(sandbox, seconds)
        finally:
            sandbox.end_all()
        values, twice = read_lines(text)
        results = [_result(mode, index, case, values, ended, sandbox.printed) for index, case in enumerate(cases)]
        if twice:
            finding = Finding("result-channel", "refuse", f"the results name {twice[0][:80]!r} twice")
            results = [
                replace(result, verdict="refused", message=finding.what, findings=(finding,)) for result in results
            ]
        return results

    def _finished(self, sandbox: Sandbox, seconds: float) -> tuple[str, str]:
        """How the program ended ("" is well), and what it wrote to its channel."""
        sandbox.end.setblocking(False)
        written, deadline = bytearray(), time.monotonic() + seconds
        try:
            while True:
                ended = sandbox.wait(0.05)
                try:
                    while part := sandbox.end.recv(1 << 16):
                        written += part
                except (BlockingIOError, ConnectionError):
                    pass
                if len(written) > MAX_RESULT:
                    raise ExcessError("its results are longer than 1 MiB")
                if ended is not None:
                    text = written.decode(errors="replace")
                    if ended.status == CUDA_FAILED:
                        return "a CUDA call failed", text
                    return ("" if ended.status in (0, 112) else str(ended)), text
                if time.monotonic() > deadline:
                    return f"it took longer than {seconds:g} s", written.decode(errors="replace")
        except ExcessError as error:
            return str(error), ""


def read_lines(text: str) -> tuple[dict[str, str], list[str]]:
    """The values of `key: value` lines, and the keys that are there more than once.

    >>> read_lines("check: pass\\ncheck: fail\\n")
    ({'check': 'pass'}, ['check'])
    """
    values: dict[str, str] = {}
    twice: list[str] = []
    for line in text.splitlines():
        if match := re.fullmatch(r"([a-z][\w.-]*): ?(.*)", line):
            if match[1] in values:
                twice.append(match[1])
            values.setdefault(match[1], match[2])
    return values, twice


def _result(mode: Mode, index: int, case: Case, values: dict[str, str], ended: str, printed: str) -> CaseResult:
    name = f"{'test' if mode == 'test' else 'benchmark'}.{index}"
    own = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
    passed = own.get("status") == "pass" or (mode != "test" and "mean" in own and own.get("status") != "fail")
    verdict: CaseVerdict = "correct" if passed and not ended else "wrong"
    message = own.get("error", own.get("message", ""))
    if ended:
        verdict = "incompatible" if "CUDA" in ended else "timeout" if "longer than" in ended else "crashed"
        message = f"{ended}\n{printed[-2000:]}".strip()
    elif not passed and not message:
        message = "the program does not say that it passed"
    report = "\n".join(f"{key}: {value}" for key, value in own.items() if key not in ("spec", "status", "error"))
    return CaseResult(mode, case.text, dict(case.values), verdict, message, 1, findings=(OWN,), report=report)
