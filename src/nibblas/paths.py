"""Where nibblas keeps what it makes on this machine (compiled libraries, device facts, evidence), and whole files."""

import errno
import os
import stat
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def cache_dir() -> Path:
    """$NIBBLAS_CACHE, else nibblas under $XDG_CACHE_HOME, else ~/.cache/nibblas. Made when something is written."""
    if own := os.environ.get("NIBBLAS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nibblas"


def why_not_replaced(path: Path) -> str | None:
    """Why a new file can't take this name; None if nothing has it, or a regular file.

    A rename would succeed for root even where the name is a device's, such as /dev/null, or a link's.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return "would lie in a file as in a folder"
    if path.is_dir():
        return "is a folder, need a file's name"
    if stat.S_ISLNK(mode):
        return "is a link; name the file that it leads to, or remove it"
    return None if stat.S_ISREG(mode) else "is a device, pipe or socket, need a regular file"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name when the block ends, synced to disk, and vanishes if the block raises.

    Raises OSError, which names `path`, where it can't be written or `why_not_replaced` has a reason.
    """
    if reason := why_not_replaced(path):
        raise OSError(errno.EINVAL, reason, str(path))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            yield file
            sync(file)
        rename(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def sync(file: BinaryIO) -> None:
    """Have all that was written on disk."""
    file.flush()
    os.fsync(file.fileno())


def rename(temporary: Path, path: Path) -> None:
    """Give a file its name, replacing another at once, on disk too."""
    os.replace(temporary, path)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file, and its folder, so that a reader sees the old or the new text, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(text.encode())


@contextmanager
def writing_cache() -> Iterator[None]:
    """For what is kept to save work later: where the cache can't be written, a warning and no error."""
    try:
        yield
    except OSError as error:
        # Always the same text: Python shows it once a process.
        why = error.strerror or error
        warnings.warn(f"nothing is kept in {cache_dir()}: {why} (NIBBLAS_CACHE names another folder)", stacklevel=3)
