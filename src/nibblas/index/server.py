"""The index's application on a port, in one process or several."""

import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from fastapi import FastAPI

from nibblas.index.api import create_app
from nibblas.index.catalog import Catalog
from nibblas.index.guard import LOOPBACK

# How run_server tells its processes what to serve.
DB, HOSTS = "NIBBLAS_INDEX_DB", "NIBBLAS_INDEX_HOSTS"
BACKLOG = 2048  # connections that wait to be taken


def run_server(path: Path, host: str, port: int, names: Collection[str], workers: int) -> None:
    """Serve the index in a file until the process is told to stop.

    names: by which the server may be called, beside those of this machine and the address that it listens on.
    OSError where it can't listen there.
    """
    Catalog(path).close()  # a file that can't be read is told before a process is started
    os.environ[DB], os.environ[HOSTS] = str(path), ",".join((*LOOPBACK, host, *names))
    if workers > 1:
        _listen(host, port, shared=False).close()  # a shared port would be shared with an older server as well
    listening = _listen(host, port, shared=workers > 1)
    port = listening.getsockname()[1]
    print(f"http://{f'[{host}]' if ':' in host else host}:{port}/ (Ctrl-C stops)", file=sys.stderr)
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=_serve_beside, args=(host, port), daemon=True) for _ in range(workers - 1)]
    for other in others:
        other.start()
    # uvicorn raises again what ended it, and by default that would end this process before the others.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _serve(listening)
    finally:
        for other in others:
            other.terminate()
            other.join()
        signal.signal(signal.SIGTERM, previous)


def from_environment() -> FastAPI:
    """The application as each process of a server makes it."""
    app = create_app(os.environ[DB], os.environ[HOSTS].split(","))
    _ = app.state.catalog.prepared  # before the first reader comes
    # What is prepared stays. Looking through it again and again for garbage would keep readers waiting for 0.1 s.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    return app


def _listen(host: str, port: int, shared: bool) -> socket.socket:
    """A socket of one process. Where several share a port the system gives each its part of the connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    # The event loop overlooks that this is TCP: a small answer would wait 40 ms for the reader to acknowledge its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _serve(listening: socket.socket) -> None:
    import uvicorn

    with listening:
        uvicorn.run(
            f"{__name__}:from_environment",
            factory=True,
            fd=listening.fileno(),
            log_level="warning",
            access_log=False,
            server_header=False,
        )


def _serve_beside(host: str, port: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _serve(_listen(host, port, shared=True))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
