"""Words for numbers, and data as JSON."""

import json
import math
from typing import Any

TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}  # units, the shortest first


def counted(n: int, one: str, several: str | None = None) -> str:
    """A number with what it counts.

    >>> counted(1, "row"), counted(1000, "matrix", "matrices")
    ('1 row', '1,000 matrices')
    """
    return f"{n:,} {one if n == 1 else several or one + 's'}"


def time_text(seconds: float, digits: int = 3) -> str:
    """A time rounded to three digits or more, with its unit.

    >>> time_text(9.9996e-4), time_text(1.2346e-5, digits=4), time_text(1234.5)
    ('1.00 ms', '12.35 us', '1230 s')
    """
    seconds = float(f"{seconds:.{digits}g}")
    unit = time_unit(seconds)
    value = seconds / TIMES[unit]
    return f"{f'{value:#.{digits}g}'.rstrip('.') if 0 < value < 1000 else f'{value:.0f}'} {unit}"


def time_unit(seconds: float) -> str:
    """The longest unit that the time reaches; ns for what is shorter."""
    return next((unit for unit, size in reversed(TIMES.items()) if seconds >= size), "ns")


def json_text(data: Any) -> str:
    """JSON text. NaN and infinities, which JSON has no numbers for, are strings."""
    return json.dumps(_plain(data), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
