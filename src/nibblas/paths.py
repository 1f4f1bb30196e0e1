"""Where nibblas keeps what it makes on this machine: compiled libraries, device facts, local evidence."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def cache_dir() -> Path:
    """$NIBBLAS_CACHE, else nibblas under $XDG_CACHE_HOME, else ~/.cache/nibblas. Made when something is written."""
    if own := os.environ.get("NIBBLAS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nibblas"


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old or the new text, never a part; OSError names `path`."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def writing_cache() -> Iterator[None]:
    """For what is kept to save work later: where the cache can't be written, a warning and no error."""
    try:
        yield
    except OSError as error:
        # Always the same text: Python shows it once a process.
        why = error.strerror or error
        warnings.warn(f"nothing is kept in {cache_dir()}: {why} (NIBBLAS_CACHE names another folder)", stacklevel=3)
