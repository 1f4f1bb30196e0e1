"""The server's processes and sockets."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
import shelf

from nibblas.index import server


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return shelf.fill(tmp_path_factory.mktemp("index") / "index.sqlite")


def test_small_answers_are_sent_at_once(path, monkeypatch):
    def run(app, fd, **options):
        with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as listening:
            port = listening.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)), listening.accept()[0] as accepted:
                kept.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    kept: list[int] = []
    monkeypatch.setattr("uvicorn.run", run)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    server.run_server(path, "127.0.0.1", 0, (), 1)
    assert kept[0]


def test_a_port_that_is_taken_is_not_shared(path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with server._listen("127.0.0.1", 0, shared=True) as taken, pytest.raises(OSError, match="in use"):
        server.run_server(path, "127.0.0.1", taken.getsockname()[1], (), 2)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("sent", "status"), [("SIGTERM", 0), ("SIGKILL", -signal.SIGKILL)])
def test_all_processes_end_together(path, sent, status):
    command = [sys.executable, "-m", "nibblas", "index", "serve", "--db", path, "--port", str(free_port())]
    with subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.PIPE, text=True) as running:
        address = running.stderr.readline().split()[0]
        assert eventually(lambda: answers(address))
        others = beside(running.pid)
        assert len(others) == 1
        assert eventually(lambda: listening(address) == 2)
        running.send_signal(getattr(signal, sent))
        assert running.wait(30) == status
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def eventually(happens) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if happens():
            return True
        time.sleep(0.05)
    return False


def answers(address: str) -> bool:
    try:
        with urlopen(f"{address}api/v1/sources") as answer:
            return answer.status == 200
    except OSError:
        return False


def listening(address: str) -> int:
    """Sockets that listen on an address, of all processes."""
    port = f":{int(address.strip('/').rpartition(':')[2]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(port) and line.split()[3] == "0A" for line in lines)


def beside(pid: int) -> list[int]:
    """Processes that a server started to answer beside it."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
