"""A read-only index: connections, one a thread, and what is computed once for each state of the file."""

import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from nibblas.index.prepared import Prepared
from nibblas.index.store import Store

# Preparing anew may take this share of the time while another process writes.
PREPARING_SHARE = 0.05
LOOK_EVERY = 0.02  # seconds between two looks at the file in the course of one read


class Catalog:
    """An index that is read. Any thread may use it; as a context manager it closes itself.

    Raises StoreError where there is no index, or none of this nibblas.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._threads = threading.local()
        self._stores: list[Store] = []
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None
        self._state: tuple = ()
        self._generation = 0
        self._made = self._looked = 0.0
        _ = self.store  # a file that can't be read is told at once

    @property
    def store(self) -> Store:
        """This thread's own Store."""
        found: Store | None = getattr(self._threads, "store", None)
        if found is None:
            found = self._threads.store = Store.open(self.path, read_only=True)
            with self._lock:
                self._stores.append(found)
        return found

    def close(self) -> None:
        """Close the connections of all threads."""
        with self._lock:
            for store in self._stores:
                store.close()
            self._stores.clear()

    def __enter__(self) -> "Catalog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """The rows of a query. A text that is no Unicode (a lone surrogate) equals no stored one."""
        return self.store.connection.execute(query, [_storable(value) for value in values]).fetchall()

    def one(self, query: str, *values: Any) -> sqlite3.Row | None:
        """The first row of a query, or None."""
        return self.store.connection.execute(query, [_storable(value) for value in values]).fetchone()

    @property
    def prepared(self) -> Prepared:
        """What is computed of the file as it is, or as it was a little while ago if it is being written."""
        found = self._prepared
        if found is not None and time.monotonic() - self._looked < LOOK_EVERY:
            return found
        return self._look()[0]

    def state(self) -> tuple:
        """What changes whenever a document may have changed."""
        _, state = self._look()
        return self._generation, *state

    def _look(self) -> tuple[Prepared, tuple]:
        """Look at the file: what is prepared of it, anew if it changed and that is due, and its state."""
        state, found, self._looked = self._file_state(), self._prepared, time.monotonic()
        if found is not None and (state == self._state or not self._due(found)):
            return found, state
        with self._lock:
            if self._prepared is found or self._prepared is None:
                self._prepared, self._state, self._made = Prepared(self), state, time.monotonic()
                self._generation += 1
            return self._prepared, state

    def _due(self, prepared: Prepared) -> bool:
        return time.monotonic() - self._made > prepared.seconds / PREPARING_SHARE

    def _file_state(self) -> tuple:
        found = []
        for path in (self.path, f"{self.path}-wal"):
            try:
                status = os.stat(path)
                found.append((status.st_mtime_ns, status.st_size))
            except FileNotFoundError:
                found.append((0, 0))
        return tuple(found)


def _storable(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
