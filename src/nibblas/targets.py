"""Targets, as compilers name them, and the architectures that code for them runs on."""

import re
from typing import NamedTuple

# Of at most four digits: int takes no thousands of them.
_TARGET = re.compile(r"(sm|compute)_(\d{1,4})([af+]?)")


class Target(NamedTuple):
    """The parts of a target's name: of "sm_90a", kind "sm", number 90 and suffix "a"."""

    kind: str
    number: int
    suffix: str


def parsed(target: str) -> Target | None:
    """The parts of a target of NVIDIA; None for any other name."""
    found = _TARGET.fullmatch(target)
    return Target(found[1], int(found[2]), found[3]) if found else None


def runs(target: str, arch: str) -> bool:
    """Whether code for a target runs on a device of an architecture, "sm_90" or "gfx950".

    Machine code runs on its own architecture and on later ones of its family (sm_80 on sm_86), PTX ("compute_80") on
    all later ones. Of both, "a" is for one architecture alone and "f" for its family. "sm_90+" is sm_90 or later.
    """
    wanted, has = parsed(target), parsed(arch)
    if wanted is None or has is None:
        return target == arch
    if wanted.suffix == "a":
        return has.number == wanted.number
    is_for_all_later = wanted.suffix == "+" or (wanted.kind == "compute" and not wanted.suffix)
    return has.number >= wanted.number and (is_for_all_later or has.number // 10 == wanted.number // 10)
