"""`nibblas arena new`: a small problem that works, to be changed into another one."""

import re
import tempfile
from pathlib import Path

from nibblas.arena.problem import ArenaError

TEMPLATE = Path(__file__).with_name("template")
PLACEHOLDER = "PROBLEM_NAME"


def new(name: str, parent: Path | str = ".") -> Path:
    """Make the problem directory parent/name from the template, and return it.

    Raises ArenaError where the name is no plain word or something of that name is there; then nothing is written.
    """
    parent = Path(parent)
    if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII):
        raise ArenaError(f"new: {name!r} is no name for a problem, need a letter, then letters, digits, _ or -")
    target = parent / name
    if target.exists():
        raise ArenaError(f"new: {target} is there already")
    if not parent.is_dir():
        raise ArenaError(f"new: {parent} is no folder")
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}.") as scratch:
        unfinished = Path(scratch, name)
        unfinished.mkdir()
        for source in sorted(TEMPLATE.iterdir()):
            if source.is_file():
                (unfinished / source.name).write_text(source.read_text().replace(PLACEHOLDER, name))
        unfinished.rename(target)
    return target
