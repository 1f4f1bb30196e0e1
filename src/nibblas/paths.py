"""Where nibblas keeps what it makes on this machine: compiled libraries, device facts, local evidence."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$NIBBLAS_CACHE, else nibblas under $XDG_CACHE_HOME, else ~/.cache/nibblas. Made when something is written."""
    if own := os.environ.get("NIBBLAS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nibblas"


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old or the new text, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    os.replace(partial, path)
