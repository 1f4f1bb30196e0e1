"""An import that is killed at any moment and called again ends like one that was never disturbed."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_ingest import PAGE, PYTHON, write

from nibblas.index import ingest, synthetic
from nibblas.index import store as store_module
from nibblas.index.ingest.reading import Options
from nibblas.index.store import Store

KILLS = 20
ROWS = 110
FILES = 10


def run_import(database: Path, sources: Path, started) -> None:
    """What a killed process does. Times are the same in all of them, and batches small, so that there are many."""
    store_module.now = lambda: "2026-01-01T00:00:00+00:00"
    ingest.BATCH = 7
    started.set()
    with Store.open(database, wait=10) as store:
        ingest.add(store, [sources], Options(terms="MIT"))


@pytest.fixture(scope="module")
def forkserver():
    """Starts processes that need not import everything again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nibblas.index.ingest", "nibblas.index.techniques", "pyarrow.parquet"])
    return context


@pytest.fixture
def sources(tmp_path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    synthetic.write(folder / "toy.parquet", ROWS)
    write(folder / "page.txt", PAGE)
    for number in range(FILES):
        write(folder / f"kernel_{number}.py", f"{PYTHON}\nNUMBER = {number}\n")
    return folder


def content(database: Path) -> list[str]:
    """Every row of every table, but for how the text index lies in its own."""
    with Store.open(database) as store:
        assert store.check() == []
        return [line for line in store.connection.iterdump() if not line.startswith('INSERT INTO "search_')]


def stored(database: Path) -> int:
    if not database.exists():
        return 0
    with Store.open(database, wait=10) as store:
        return len(store.digests())


def test_killed_at_random_moments(forkserver, sources, tmp_path):
    whole, broken = tmp_path / "whole.sqlite", tmp_path / "broken.sqlite"

    def start(database: Path) -> multiprocessing.Process:
        started = forkserver.Event()
        process = forkserver.Process(target=run_import, args=(database, sources, started))
        process.start()
        assert started.wait(120)
        return process

    start_time = time.monotonic()
    undisturbed = start(whole)
    undisturbed.join(120)
    assert undisturbed.exitcode == 0
    duration = time.monotonic() - start_time
    everything = content(whole)
    total = stored(whole)
    assert total == ROWS + FILES + 1

    draw = random.Random(0)
    reach, before, middles = duration / 40, 0, 0
    for _ in range(KILLS):
        process = start(broken)
        time.sleep(draw.uniform(0, reach))
        process.kill()
        process.join()
        count = stored(broken)
        assert before <= count <= total
        middles += 0 < count < total
        if count == total:
            assert content(broken) == everything
            broken, before = tmp_path / f"{broken.stem} again.sqlite", 0
            continue
        if count == before:  # on a busy machine an attempt may need longer to get anywhere
            reach = min(reach * 1.5, duration)
        before = count
    assert middles >= 3, "hardly a kill came in the middle"
    last = start(broken)
    last.join(120)
    assert last.exitcode == 0
    assert content(broken) == everything


def test_helpers_end_with_a_killed_import(sources, tmp_path):
    code = (
        "import sys, os\n"
        "from nibblas.index import scan\n"
        "scan.WORTH_A_PROCESS = 1\n"
        "if __name__ == '__main__':\n"
        "    scanner = scan.Scanner(1)\n"
        "    waiting = scanner.start({n: ('a.py', b'x = 1') for n in range(100)})\n"
        "    print(waiting[99]().problem, *scanner._pool._processes, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    script = write(tmp_path / "script.py", code)
    parent = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    problem, *helpers = parent.stdout.readline().split()
    assert problem == "None"
    assert helpers
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    until = time.monotonic() + 30
    while any(is_running(int(helper)) for helper in helpers):
        assert time.monotonic() < until, "helpers outlive the import"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that ended and that nobody has waited for is still there.
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z")
