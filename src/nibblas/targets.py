"""Targets, as compilers name them, and the architectures that code for them runs on."""

import re

_TARGET = re.compile(r"(?P<kind>sm|compute)_(?P<number>\d+)(?P<suffix>[af+]?)")


def runs(target: str, arch: str) -> bool:
    """Whether code for a target runs on a device of an architecture, "sm_90" or "gfx950".

    Machine code runs on its own architecture and on later ones of its family (sm_80 on sm_86), PTX ("compute_80") on
    all later ones. Of both, "a" is for one architecture alone and "f" for its family. "sm_90+" is sm_90 or later.
    """
    wanted, has = _TARGET.fullmatch(target), _TARGET.fullmatch(arch)
    if wanted is None or has is None:
        return target == arch
    least, number = int(wanted["number"]), int(has["number"])
    if wanted["suffix"] == "a":
        return number == least
    is_for_all_later = wanted["suffix"] == "+" or (wanted["kind"] == "compute" and not wanted["suffix"])
    return number >= least and (is_for_all_later or number // 10 == least // 10)
