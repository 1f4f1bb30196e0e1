"""What the rules read from files: computed in other processes where there is much of it, kept by the store.

A scan says by which rules and readers it was made, so that newer ones find what is left to do.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

PACKAGE = Path(__file__).parent
# Whose text decides on what is found.
READERS = (
    "rules/*.toml",
    "rule.py",
    "items.py",
    "positions.py",
    "languages.py",
    "parse*.py",
    "techniques.py",
    "compat.py",
    "licences.toml",
    "licence.py",
)
# Starting another process costs more than reading so many files.
WORTH_A_PROCESS = 400
# Files that another process gets at a time: handing them over costs as much as reading a small one.
TOGETHER = 20

Key = TypeVar("Key")
Topic = Literal["technique", "requirement", "licence", "third party"]


class Found(NamedTuple):
    """A finding as the store keeps it: `body` is its JSON."""

    topic: Topic
    line: int | None
    body: str


class Scan(NamedTuple):
    """What was found in one file; `problem` says why a reader failed on it."""

    versions: str
    found: tuple[Found, ...]
    problem: str | None = None


@cache
def versions() -> str:
    """A digest of all rules and of the code that reads by them."""
    digest = hashlib.sha256()
    for pattern in READERS:
        for path in sorted(PACKAGE.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def scan(path: str, raw: bytes) -> Scan:
    """Everything that the rules find in a file; its path's suffix tells the language."""
    from nibblas.index import compat, licence, techniques

    text = raw.decode(errors="replace")
    found: list[Found] = []
    problems = []
    readers: dict[Topic, Any] = {
        "technique": techniques.find,
        "requirement": compat.required,
        "licence": licence.findings,
        "third party": licence.third_party,
    }
    for topic, read in readers.items():
        try:
            found += [_found(topic, finding) for finding in read(path, text)]
        except Exception as error:  # a source on which a reader fails is stored all the same
            problems.append(f"{topic}: {type(error).__name__}: {error}")
    return Scan(versions(), tuple(found), "; ".join(problems) or None)


def _found(topic: Topic, finding: Any) -> Found:
    # Findings are flat, so that this need not be asdict, which takes as long as a rule.
    values = {name: value for name, value in vars(finding).items() if value not in (None, "", ())}
    return Found(topic, values.get("line"), json.dumps(values, separators=(",", ":"), ensure_ascii=False))


class Scanner:
    """Scans files, here or in processes of its own once there are many."""

    def __init__(self, expected: int):
        self._pool = _pool() if expected >= WORTH_A_PROCESS and (os.cpu_count() or 1) > 1 else None

    def start(self, files: Mapping[Key, tuple[str, bytes]]) -> dict[Key, Callable[[], Scan]]:
        """Begin to scan files, given as path and content; each key's function waits for its scan."""
        if not self._pool:
            scans = dict(zip(files, _scan_all(list(files.values())), strict=True))
            return {key: partial(scans.__getitem__, key) for key in files}
        waiting: dict[Key, Callable[[], Scan]] = {}
        for start in range(0, len(files), TOGETHER):
            keys = list(files)[start : start + TOGETHER]
            future = self._pool.submit(_scan_all, [files[key] for key in keys])
            waiting |= {key: partial(_one_of, future, place) for place, key in enumerate(keys)}
        return waiting

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def scanner(expected: int) -> Iterator[Scanner]:
    """A Scanner for about so many files."""
    opened = Scanner(expected)
    try:
        yield opened
    finally:
        opened.close()


def _scan_all(files: Sequence[tuple[str, bytes]]) -> list[Scan]:
    return [scan(path, raw) for path, raw in files]


def _one_of(future: "Future[list[Scan]]", place: int) -> Scan:
    return future.result()[place]


def _pool() -> ProcessPoolExecutor:
    # Not forked: this process may have threads, of torch or of a progress bar.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "nibblas.index.compat", "nibblas.index.techniques"])
    return ProcessPoolExecutor(os.cpu_count(), context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Let a worker end when the process that it works for is killed, which nobody else would tell it."""
    parent = parent_process()

    def watch() -> None:
        if parent:
            connection.wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def identifiers(raws: Iterable[bytes]) -> str:
    """Each identifier of some sources once, in order, for the text index."""
    words: dict[str, None] = {}
    for raw in raws:
        words |= dict.fromkeys(re.findall(r"[A-Za-z_]\w{1,60}", raw.decode(errors="replace")))
    return " ".join(words)
