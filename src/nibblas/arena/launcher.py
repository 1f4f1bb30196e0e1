"""Isolates a program from everything else, as far as this system allows, starts it, and ends all that it left.

This is a script of its own, `python -I -S launcher.py FD`, which takes its Settings as a line of JSON from stdin. It
tells on FD, a line of JSON each, what isolation is in force before any of the program has run, and how the program
ended. When its stdin closes it ends the program and all that the program started. It imports the standard library
alone: a process can't change its user namespace once a library has started threads.

- user: where root runs the arena a user that no other program has, else the only user of a namespace.
- privileges: none, and none to be had.
- processes: a PID namespace; when its first process goes, the kernel ends every process in it.
- files: a mount namespace: everything read-only but a working folder and empty temporary folders; hidden folders are
  empty but for what is shown of them.
- devices: null, zero, full, random and GPUs; no disks, no terminals.
- network, ipc: namespaces of their own.
- limits: on the size of files, processes and, where given, memory; what holds memory is also ended first by the system.

Each that can't be had is told with the reason, and the program runs without it.
"""

import ctypes
import errno
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

KINDS = ("user", "processes", "files", "network", "ipc")  # of isolation, that can be asked for
NOBODY = 65534
OWN_USERS = range(61184, 65520)  # numbers that systems leave to those who need a user for a while
MAX_FILE = 8 << 30  # bytes of a file that the program writes
MAX_PROCESSES = 4096  # processes and threads
DEVICES = ("null", "zero", "full", "random", "urandom", "kfd", "dri", "dxg")  # and all that begins with "nvidia"
SCRATCH = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # these get empty


@dataclass(frozen=True)
class Settings:
    """What a launcher needs. Paths are absolute; `hide` and `show` are folders and files, `folder` may be written."""

    command: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    passed: tuple[int, ...]  # file descriptors for the program
    hide: tuple[str, ...] = ()
    show: tuple[str, ...] = ()
    memory: int | None = None  # bytes of address space
    allow: tuple[str, ...] = KINDS

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Settings":
        """The settings of plain JSON."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**given)


@dataclass(frozen=True)
class Ended:
    """How a program ended: by a signal, or with a status."""

    signal: int | None = None
    status: int | None = None

    def __str__(self) -> str:
        if self.signal is None:
            return f"it ended with status {self.status}"
        try:
            return f"it was ended by {signal.Signals(self.signal).name}"
        except ValueError:
            return f"it was ended by signal {self.signal}"


@dataclass(frozen=True)
class Process:
    """What /proc tells of a process: bytes of its own memory, threads, seconds of CPU time."""

    pid: int
    parent: int
    memory: int
    threads: int
    seconds: float
    is_launcher: bool


def descendants(root: int) -> Iterator[Process]:
    """The living processes below a process."""
    found: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := _process(int(entry))) is not None:
            found.setdefault(process.parent, []).append(process)
    waiting = [root]
    while waiting:
        for process in found.pop(waiting.pop(), ()):
            yield process
            waiting.append(process.pid)


def _process(pid: int) -> Process | None:
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if fields[0] in b"ZX":
            return None
        is_launcher = os.fsencode(__file__) in _read(f"/proc/{pid}/cmdline").split(b"\0")
        _, resident, shared, *_ = _read(f"/proc/{pid}/statm").split()
    except OSError:
        return None
    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    ran = (int(fields[11]) + int(fields[12])) / tick
    own = (int(resident) - int(shared)) * page
    return Process(pid, int(fields[1]), own, int(fields[17]), ran, is_launcher)


def _read(path: str) -> bytes:
    """The beginning of a file. A Ctrl-C may come at any time, and leaves no file object that would be warned of."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


_libc = ctypes.CDLL(None, use_errno=True)
_CLONE = {"files": 0x00020000, "ipc": 0x08000000, "network": 0x40000000, "processes": 0x20000000}
_CLONE_NEWUSER = 0x10000000
_MNT_DETACH = 2
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_SYS_MOUNT_SETATTR = 442


def hide_from_other_processes() -> None:
    """Close this process's memory, environment and file descriptors to others of the same user."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _unshare(flag: int) -> None:
    _call("unshare", ctypes.c_int(flag))


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _call("mount", *encoded, ctypes.c_ulong(flags), None if data is None else data.encode())


def launch(settings: Settings, told: int) -> None:
    """Isolate, start the program, and wait for its end or for that of stdin. Never returns."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    state = _new_namespaces(settings.allow)
    own_user = OWN_USERS[os.getpid() % len(OWN_USERS)]
    hide_from_other_processes()
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _first(settings, state, told, writing, own_user)
    os.close(told)
    os.close(writing)
    # The first process lives as long as the program; stdin as long as the one who asked.
    select.select([0, reading], [], [])
    _sweep(first, has_namespace=state["processes"] is True)
    os._exit(0)


def _new_namespaces(allow: tuple[str, ...]) -> dict[str, bool | str]:
    """Unshare what can be: directly where this process may, else inside a user namespace; and what is in force."""
    state: dict[str, bool | str] = {kind: "not asked for" for kind in _CLONE if kind not in allow}
    if _why_not(lambda: _unshare(_CLONE["files"])) is not None:
        why = _why_not(_new_user) if "user" in allow else "not asked for"
        if why is not None:
            return dict.fromkeys(_CLONE, f"no user namespace: {why}")
        _new_user()
    for kind in _CLONE:
        if kind not in state:
            state[kind] = _tried(partial(_unshare, _CLONE[kind]))
    return state


def _why_not(action: Callable[[], None]) -> str | None:
    """Why an action fails, tried in a process of its own; None where it works."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        why = _tried(action)
        os.write(writing, b"" if why is True else str(why).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        why = pipe.read().decode()
    os.waitpid(child, 0)
    return why or None


def _tried(action: Callable[[], None]) -> bool | str:
    try:
        action()
    except OSError as error:
        return str(error.strerror or error)
    return True


def _new_user() -> None:
    """A user namespace in which this user is the only one, and not root, so that running a program drops all."""
    user, group = os.geteuid(), os.getegid()
    _unshare(_CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user or NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group or NOBODY} {group} 1")


def _sweep(first: int, has_namespace: bool) -> None:
    """End the first process, with which its namespace goes, and without one whatever else stands below this process."""
    os.kill(first, signal.SIGKILL)  # it was not waited for yet, so that the number is still its own
    for _ in range(500):
        # The list of processes that is mounted beside a namespace has numbers that mean others here.
        for process in [] if has_namespace else list(descendants(os.getpid())):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _first(settings: Settings, state: dict[str, bool | str], told: int, alive: int, own_user: int) -> None:
    """The first process of the namespaces: arranges files, starts the program, waits for it. Never returns."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    if state["files"] is True:
        state["files"] = _tried(lambda: _arrange(settings, state))
    user = None
    if "user" not in settings.allow:
        state["user"] = "not asked for"
    elif os.geteuid() == 0:
        whys = {one: _why_not(partial(_become, one, settings)) for one in (own_user, NOBODY)}
        user = next((one for one, why in whys.items() if why is None), None)
        state["user"] = True if user is not None else f"still root: {whys[own_user]}"
    else:
        state["user"] = True if state["processes"] is True else "the same user, who may end processes of the arena"
    if user is not None:
        for folder, folders, names in os.walk(settings.folder):
            for path in (folder, *(os.path.join(folder, name) for name in folders + names)):
                os.chown(path, user, user)
    program = os.fork()
    if program == 0:
        os.close(alive)
        try:
            _run(settings, user, told, state)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(127)
    for fd in settings.passed:
        os.close(fd)
    # What is orphaned in a PID namespace comes to its first process.
    while True:
        pid, status = os.wait()
        if pid == program:
            break
    ended = Ended(signal=os.WTERMSIG(status)) if os.WIFSIGNALED(status) else Ended(status=os.WEXITSTATUS(status))
    with suppress(BrokenPipeError):
        os.write(told, json.dumps(asdict(ended)).encode() + b"\n")
    os._exit(0)


def _run(settings: Settings, user: int | None, told: int, state: dict[str, bool | str]) -> None:
    """Become the program."""
    os.setsid()
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # or this process could not write its own files in /proc
    state["limits"] = _tried(lambda: _limit(settings.memory))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    _drop_capabilities()
    if user is not None:
        _become(user, settings)
    state["privileges"] = _tried(lambda: _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    os.chdir(settings.folder)
    os.write(told, json.dumps(state).encode() + b"\n")
    os.close(told)
    for fd in settings.passed:
        os.set_inheritable(fd, True)
    os.execve(settings.command[0], settings.command, settings.environment)


def _limit(memory: int | None) -> None:
    wanted = {
        resource.RLIMIT_FSIZE: MAX_FILE,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: MAX_PROCESSES,
        resource.RLIMIT_AS: resource.RLIM_INFINITY if memory is None else memory,
    }
    for kind, limit in wanted.items():
        hard = resource.getrlimit(kind)[1]
        limits = [n for n in (limit, hard) if n != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(limits),) * 2 if limits else (resource.RLIM_INFINITY,) * 2)


def _drop_capabilities() -> None:
    """None of the capabilities of now, if there are any, can be had again by running another program."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1


def _become(user: int, settings: Settings) -> None:
    """Change to a user, who keeps the groups of GPU devices; OSError where Python would be out of reach."""
    os.setgroups(sorted(_gpu_groups()))
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    for path in (settings.command[0], __file__):
        if os.path.isabs(path) and not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, f"another user can't read {path}")


def _gpu_groups() -> set[int]:
    nodes = [Path("/dev/kfd"), *Path("/dev/dri").glob("render*"), *Path("/dev").glob("nvidia*")]
    return {group for node in nodes if node.exists() and (group := node.stat().st_gid) != 0}


def _arrange(settings: Settings, state: dict[str, bool | str]) -> None:
    """Rearrange the files that this mount namespace sees."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _read_only_everywhere()
    kept = {path: os.open(path, os.O_PATH) for path in (settings.folder, *settings.show)}
    state["devices"] = _tried(_new_devices)
    # Of folders in folders the outer first: what it covers need not be covered again.
    masks = [path for path in (*SCRATCH, *settings.hide) if os.path.isdir(path) and not os.path.islink(path)]
    for mask in sorted(set(masks), key=len):
        if os.path.isdir(mask):
            _cover(mask, {path: fd for path, fd in kept.items() if Path(mask) in Path(path).parents})
    if not os.path.isdir(settings.folder):
        raise OSError(errno.ENOENT, f"{settings.folder} is out of sight")
    _bind(kept[settings.folder], settings.folder)
    _mount(None, settings.folder, None, _MS_REMOUNT | _MS_BIND | _locked_flags(settings.folder))
    if state["processes"] is True:
        fresh = _tried(lambda: _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC))
        if fresh is not True:
            state["processes"] = f"the list of all processes stays visible: {fresh}"
    for fd in kept.values():
        os.close(fd)


def _read_only_everywhere() -> None:
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # MOUNT_ATTR_RDONLY is set, nothing cleared
    recursive, size = (ctypes.c_long(n) for n in (0x8000, ctypes.sizeof(attributes)))
    done = _libc.syscall(*map(ctypes.c_long, (_SYS_MOUNT_SETATTR, -100)), b"/", recursive, attributes, size)
    if done == 0:
        return
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        target = line.split()[4].encode().decode("unicode_escape")
        with suppress(OSError):
            _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _locked_flags(target))
    if os.access("/", os.W_OK) and not os.statvfs("/").f_flag & os.ST_RDONLY:
        raise OSError(errno.EPERM, "the file system can't be made read-only")


def _locked_flags(path: str) -> int:
    """Flags of a mount that may not be taken from it in a user namespace."""
    flags = os.statvfs(path).f_flag
    pairs = ((os.ST_NOSUID, _MS_NOSUID), (os.ST_NODEV, _MS_NODEV), (os.ST_NOEXEC, _MS_NOEXEC))
    return sum(theirs for ours, theirs in pairs if flags & ours)


def _cover(mask: str, inside: Mapping[str, int]) -> None:
    """An empty folder over a folder, with these paths below it brought back, read-only."""
    mode = stat.S_IMODE(os.stat(mask).st_mode) if mask in SCRATCH else 0o755
    _mount("tmpfs", mask, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode={mode:o}")
    for path, fd in sorted(inside.items()):
        if os.path.lexists(path):
            continue  # inside one that is back already
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT, 0o644))
        _bind(fd, path)
    if mask not in SCRATCH:
        _mount(None, mask, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _bind(fd: int, target: str) -> None:
    _mount(f"/proc/self/fd/{fd}", target, None, _MS_BIND | _MS_REC)


def _new_devices() -> None:
    """A /dev with what a program needs and no disk or terminal."""
    nodes = [node for node in os.listdir("/dev") if node in DEVICES or node.startswith("nvidia")]
    kept = {f"/dev/{node}": os.open(f"/dev/{node}", os.O_PATH) for node in nodes}
    _mount("tmpfs", "/dev", "tmpfs", _MS_NOSUID, "mode=755")
    try:
        _fill_devices(kept)
    except OSError:
        _call("umount2", b"/dev", ctypes.c_int(_MNT_DETACH))  # half of a /dev is worse than the old one
        raise


def _fill_devices(kept: Mapping[str, int]) -> None:
    for path, fd in kept.items():
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT, 0o666))
        _bind(fd, path)
        os.close(fd)
    os.mkdir("/dev/shm", 0o1777)
    os.chmod("/dev/shm", 0o1777)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")


def main() -> None:
    """Read the settings from stdin and launch."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    launch(Settings.of(json.loads(line)), int(sys.argv[1]))


if __name__ == "__main__":
    main()
