"""The sandbox: what a program in it sees, may do and takes along, tried with programs that want too much."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from nibblas.arena import launcher, sandbox
from nibblas.arena.sandbox import ExcessError, Sandbox

ALL = launcher.KINDS


class Program:
    """Python code in a sandbox. The end of the channel is `fd`, and `say(text)` writes a line to it."""

    HEAD = """
import os, sys, socket, time, signal
fd = int(sys.argv[-1])
def say(value): os.write(fd, (str(value) + "\\n").encode())
"""

    def __init__(self, code: str, **options):
        files = {"program.py": (self.HEAD + code).encode(), "data/notes.txt": b"hello"}
        self.sandbox = Sandbox([sys.executable, "-I", "-S", "program.py", "{fd}"], files, **options)
        self.lines = self.sandbox.end.makefile()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.close()
        self.sandbox.end_all()

    def line(self) -> str:
        self.sandbox.end.settimeout(20)
        return self.lines.readline().strip()


def isolation(allow=ALL) -> dict:
    with Program("say('here')", allow=allow) as program:
        assert program.line() == "here"
        return program.sandbox.isolation


@pytest.fixture(scope="module")
def needs():
    """needs("files", ...) skips a test where this system grants no such isolation."""
    state = isolation()

    def check(*kinds: str) -> None:
        for kind in kinds:
            if state[kind] is not True:
                pytest.skip(f"{kind}: {state[kind]}")

    return check


def test_the_standard_input_is_empty():
    with Program("say([os.read(0, 9), os.path.samestat(os.fstat(0), os.stat(os.devnull))])") as program:
        assert program.line() == "[b'', True]"


def test_isolation_tells_what_is_in_force_and_why_the_rest_is_not():
    state = isolation()
    assert set(state) >= {"user", "processes", "files", "network", "ipc", "privileges", "limits"}
    assert all(value is True or (isinstance(value, str) and value) for value in state.values())
    assert state["privileges"] is True
    assert state["limits"] is True
    bare = isolation(allow=())
    assert all("not asked for" in str(bare[kind]) for kind in ALL)


def test_a_program_sees_its_folder_and_no_problem_home_or_scratch(needs, tmp_path):
    needs("files", "processes")
    (tmp_path / "reference.py").write_text("secret")
    code = f"""
say(sorted(os.listdir(".")))
say(open("data/notes.txt").read())
say(os.path.exists({str(tmp_path / "reference.py")!r}))
say([name for name in os.listdir("/tmp") if not os.getcwd().startswith("/tmp/" + name)])
say([p for p in os.listdir("/proc") if p.isdigit() and p not in ("1", str(os.getpid()))])
say(sorted(os.environ))
"""
    with Program(code, hide=[tmp_path]) as program:
        assert program.line() == "['data', 'program.py']"
        assert program.line() == "hello"
        assert program.line() == "False"
        shown = {path.split("/")[2] for path in sandbox.needed_paths() if path.startswith("/tmp/")}
        assert set(eval(program.line())) <= shown
        assert program.line() == "[]"
        assert "POPCORN_SEED" not in program.line()


def test_a_program_writes_nowhere_but_in_its_folder_and_scratch(needs, tmp_path):
    needs("files")
    tmp_path.chmod(0o777)
    code = f"""
def can_write(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False
say([can_write(os.path.join(folder, "x")) for folder in (".", "/tmp", "/dev/shm")])
say([can_write(folder + "/x") for folder in ({str(Path(__file__).parent)!r}, {str(tmp_path)!r}, "/usr", "")])
"""
    with Program(code) as program:
        assert program.line() == "[True, True, True]"
        assert program.line() == "[False, False, False, False]"
    assert not (tmp_path / "x").exists()


def test_a_program_has_no_network(needs):
    needs("network")
    listener = socket.create_server(("127.0.0.1", 0))
    code = f"""
try:
    socket.create_connection(("127.0.0.1", {listener.getsockname()[1]}), 5)
    say("connected")
except OSError as error:
    say("refused")
"""
    with listener, Program(code) as program:
        assert program.line() == "refused"


def test_a_program_cannot_signal_or_look_into_the_one_who_started_it(needs):
    needs("processes")
    code = f"""
def fails(action):
    try:
        action()
        return False
    except OSError:
        return True
say([fails(lambda: os.kill({os.getpid()}, signal.SIGCONT)), fails(lambda: os.listdir("/proc/{os.getpid()}/fd"))])
os.killpg(0, signal.SIGKILL)
"""
    with Program(code) as program:
        assert program.line() == "[True, True]"
        assert program.line() == ""
        assert program.sandbox.end_all() == launcher.Ended(signal=signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("os._exit(7)", launcher.Ended(status=7)),
        ("os.kill(os.getpid(), signal.SIGSEGV)", launcher.Ended(signal=signal.SIGSEGV)),
        ("raise SystemExit(0)", launcher.Ended(status=0)),
    ],
)
def test_how_a_program_ended_is_told(code, ended):
    with Program(code) as program:
        assert program.line() == ""
        assert program.sandbox.end_all() == ended


def test_what_it_printed_last_is_kept():
    with Program("print('a' * 200_000 + 'the end', flush=True); say('done')") as program:
        assert program.line() == "done"
        program.sandbox.end_all()
        assert program.sandbox.printed.rstrip().endswith("athe end")
        assert len(program.sandbox.printed) <= sandbox.KEPT_OUTPUT


def looked_at(program: Program) -> None:
    for _ in range(400):
        program.sandbox.look()
        time.sleep(0.05)


def test_printing_without_end_is_an_excess():
    with Program("while True: print('x' * 100_000)") as program, pytest.raises(ExcessError, match="printed more than"):
        looked_at(program)


def test_holding_too_much_memory_is_an_excess():
    code = "held = []\nwhile True: held.append(b'x' * (1 << 22)); time.sleep(0.001)"
    limits = {"memory": 200 << 20, "limit_address_space": False}
    with Program(code, **limits) as program, pytest.raises(ExcessError, match=r"held 0\.\d GiB"):
        looked_at(program)


def test_the_address_space_is_limited():
    code = "try: bytearray(1 << 30)\nexcept MemoryError: say('no memory')"
    with Program(code, memory=500 << 20) as program:
        assert program.line() == "no memory"


@pytest.mark.parametrize("allow", [ALL, ("user",), ()], ids=["namespaces", "user alone", "nothing"])
def test_nothing_that_a_program_started_outlives_it(allow, tmp_path):
    code = """
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        os._exit(0)
time.sleep(0.3)
say("started")
"""
    with Program(code + "time.sleep(60)", allow=allow) as program:
        assert program.line() == "started"
        left = [process.pid for process in program.sandbox.processes()]
        assert len(left) == 4
        started = time.monotonic()
        program.sandbox.let_end()
        assert program.sandbox.end_all() is None
        assert time.monotonic() - started < 4, "the launcher gives up after 5 s where it can't find what is left"
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)
    assert not program.sandbox.folder.exists()


def test_a_program_does_not_hide_by_the_launchers_name(needs):
    needs("processes")
    code = f"""
if os.fork() == 0:
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", {launcher.__file__!r}])
time.sleep(0.5)
say("started")
time.sleep(60)
"""
    with Program(code) as program:
        assert program.line() == "started"
        assert len(list(program.sandbox.processes())) == 2


def test_the_clock_of_a_program_ticks_only_while_it_computes():
    code = """
os.read(fd, 1)
end = time.process_time() + 0.2
while time.process_time() < end: pass
say("computed")
time.sleep(60)
"""
    with Program(code) as program:
        time.sleep(0.2)
        before = program.sandbox.cpu_ns()
        program.sandbox.end.sendall(b"x")
        assert program.line() == "computed"
        computed = program.sandbox.cpu_ns() - before
        assert 0.19e9 < computed < 0.3e9
        time.sleep(0.2)
        assert program.sandbox.cpu_ns() - before < computed + 0.1e9
