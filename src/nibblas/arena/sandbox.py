"""A program that nobody trusts, started by the launcher, as the one who started it sees it.

What isolates it is told by `isolation`. Limits on memory, output, processes are watched from outside as well, since not
every system can set them.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nibblas.arena import launcher
from nibblas.arena.launcher import KINDS, MAX_PROCESSES, Ended, Process, Settings, descendants
from nibblas.paths import cache_dir

MAX_OUTPUT = 16 << 20  # bytes that a program may print
KEPT_OUTPUT = 64 << 10  # of these, the last are kept
PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "ROCM_HOME", "ROCM_PATH", "HIP_PATH", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH", "CUTLASS_PATH", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH",
    "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS",
)  # fmt: skip

PACKAGE = Path(__file__).parents[1]
# Folders that a program can't do without, so that they are not hidden whole.
SYSTEM = {
    "/", "/bin", "/dev", "/etc", "/home", "/lib", "/lib64", "/opt", "/proc", "/sbin", "/sys", "/usr", "/usr/local",
    "/var",
}  # fmt: skip


def python_path() -> str:
    """PYTHONPATH of the arena's processes: this package, and what this process was given."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(PACKAGE.parent), *(os.path.abspath(path) for path in given if path)])


class ExcessError(Exception):
    """A program took more than it may; the message says what."""


class Sandbox:
    """A program in a sandbox: its channel, what isolates it, what it printed, and how it ended."""

    def __init__(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes],
        *,
        environment: Mapping[str, str] | None = None,
        hide: Sequence[Path] = (),
        memory: int | None = None,
        limit_address_space: bool = True,
        allow: Sequence[str] = KINDS,
    ):
        """Start a program.

        Parameters
        ----------
        command : its path and arguments. "{fd}" becomes the number of the file descriptor at the other end of `end`,
            here and in the environment.
        files : what its working folder holds, by relative path; they may be executed.
        environment : variables beside those that every program gets.
        hide : folders that it must not see.
        memory : bytes that it may hold, with all that it starts.
        limit_address_space : also as a limit of the kernel's; a program that uses a GPU reserves far more than it uses.
        allow : kinds of isolation to try.
        """
        self.memory = memory
        self.folder = Path(tempfile.mkdtemp(prefix="arena-"))
        self._write(files)
        self.end, theirs = socket.socketpair()
        reading, writing = os.pipe()
        number = str(theirs.fileno())
        hidden = {str(path.resolve()) for path in (*hide, Path.home())} - SYSTEM
        settings = Settings(
            tuple(word.replace("{fd}", number) for word in command),
            str(self.folder),
            self._environment() | {name: text.replace("{fd}", number) for name, text in (environment or {}).items()},
            (theirs.fileno(),),
            tuple(sorted(hidden)),
            tuple(sorted(needed_paths() - hidden)),
            memory if limit_address_space else None,
            tuple(allow),
        )
        try:
            self.launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", launcher.__file__, str(writing)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), writing),
                env={},
                cwd="/",
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(writing)
        self._told = open(reading)  # noqa: SIM115 - it lives as long as the launcher
        self._printed, self._count = bytearray(), 0
        self._clock: int | None = None
        self._ended: Ended | None = None
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()
        with suppress(BrokenPipeError):
            self.launcher.stdin.write(json.dumps(asdict(settings)).encode() + b"\n")  # type: ignore[union-attr]
            self.launcher.stdin.flush()  # type: ignore[union-attr]
        isolation = self._tell()
        if isolation is None:
            self.end_all()
            raise RuntimeError(f"the sandbox could not be started: {self.printed[-500:].strip()}")
        self.isolation: dict[str, bool | str] = isolation

    def _write(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o755)

    def _environment(self) -> dict[str, str]:
        folder = str(self.folder)
        own = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        # Tools that are installed beside this Python, such as ninja, though no virtual environment was activated.
        own["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), own.get("PATH", os.defpath)])
        return own | {
            "HOME": folder,
            "TMPDIR": folder,
            "XDG_CACHE_HOME": f"{folder}/.cache",
            "USER": "nobody",
            "LOGNAME": "nobody",
            "PYTHONPATH": python_path(),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of processes would stay between the calls
            "NIBBLAS_CACHE": str(cache_dir()),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def _drain(self) -> None:
        while part := self.launcher.stdout.read1(1 << 16):  # type: ignore[union-attr]
            self._count += len(part)
            self._printed += part
            del self._printed[:-KEPT_OUTPUT]

    def _tell(self) -> Any:
        line = self._told.readline()
        return json.loads(line) if line else None

    @property
    def printed(self) -> str:
        """The last of what the program printed."""
        return self._printed.decode(errors="replace")

    def look(self) -> None:
        """Raise ExcessError where the program holds more memory, runs more processes or prints more than it may."""
        if self._count > MAX_OUTPUT:
            raise ExcessError(f"it printed more than {MAX_OUTPUT >> 20} MiB")
        processes = list(self.processes())
        held = sum(process.memory for process in processes)
        if self.memory is not None and held > self.memory:
            raise ExcessError(f"it held {held / 2**30:.1f} GiB of memory, {self.memory / 2**30:.1f} GiB are allowed")
        if sum(process.threads for process in processes) > MAX_PROCESSES:
            raise ExcessError(f"it ran more than {MAX_PROCESSES} processes and threads")

    def processes(self) -> Iterator[Process]:
        """All processes of the program but the launcher's own two."""
        below = descendants(self.launcher.pid)
        return (p for p in below if not (p.is_launcher and p.parent == self.launcher.pid))

    def cpu_ns(self) -> int:
        """CPU time that the program's own process has used; 0 where it is gone."""
        if self._clock is None:
            found = list(self.processes())
            pids = {process.pid for process in found}
            first = next((process.pid for process in found if process.parent not in pids), None)
            # The clock of another process: clock_getcpuclockid(3).
            self._clock = None if first is None else (~first << 3) | 2
        try:
            return 0 if self._clock is None else time.clock_gettime_ns(self._clock)
        except OSError:
            return 0

    def let_end(self) -> None:
        """Have the launcher end the program and all that it started, without waiting for it."""
        with suppress(BrokenPipeError):
            self.launcher.stdin.close()  # type: ignore[union-attr]

    def end_all(self) -> Ended | None:
        """End the program and all that it started, and say how it had ended by itself; None where it had not."""
        if self._told.closed:
            return self._ended
        if not self.launcher.stdin.closed:  # type: ignore[union-attr]
            with suppress(ExcessError):
                self.wait(0.2)
            self.let_end()
        try:
            self.launcher.wait(10)
        except subprocess.TimeoutExpired:
            for process in list(descendants(self.launcher.pid)):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            self.launcher.kill()
            self.launcher.wait()
        self._reader.join(2)
        self.launcher.stdout.close()  # type: ignore[union-attr]
        self.end.close()
        self._told.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return self._ended

    def wait(self, seconds: float) -> Ended | None:
        """How the program ended by itself, waiting so long for it; None where it has not. ExcessError as `look`."""
        deadline = time.monotonic() + seconds
        while self._ended is None and time.monotonic() < deadline:
            if select.select([self._told], [], [], min(0.1, seconds))[0]:
                told = self._tell()
                self._ended = Ended(**told) if told else Ended(status=self.launcher.poll())
            else:
                self.look()
        return self._ended


def needed_paths() -> set[str]:
    """Folders and files outside the system's own that Python, nibblas and compilers need here."""
    found = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *sys.path}
    found |= {str(path) for link in _links(Path(sys.executable)) for path in (link, link.parent)}
    found |= {str(PACKAGE), str(PACKAGE.parents[1] / "evidence"), str(cache_dir())}
    for name in ("PATH", "LD_LIBRARY_PATH"):
        found |= set(os.environ.get(name, "").split(os.pathsep))
    found |= {os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH", "ROCM_HOME", "ROCM_PATH")}
    found |= {"/run/opengl-driver", "/run/nvidia-persistenced"}
    found = {os.path.abspath(path) for path in found if path}
    return {path for path in found if os.path.exists(path) and path != "/"}


def _links(path: Path) -> Iterator[Path]:
    """Every path on the way through symbolic links."""
    while path.is_symlink():
        yield path
        path = path.parent / path.readlink()
    yield path
