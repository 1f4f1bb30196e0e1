"""Pictures as inline SVG: the samples of a run beside its floor, an interval in a table's row, a roofline.

Positions are percentages of the picture's box and colours come from the stylesheet by class, so that text keeps its
size at every width, dark mode works, and a content security policy without inline styles is kept.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from nibblas.words import TIMES, time_text, time_unit

MOST_DOTS = 1000
LARGE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def rate_text(value: float, unit: str) -> str:
    """A large quantity with its decimal prefix: rate_text(4.4e12, "B/s") is 4.4 TB/s."""
    value = float(f"{value:.3g}")
    prefix = next((prefix for prefix, size in reversed(LARGE.items()) if abs(value) >= size), "")
    return f"{digits(value / LARGE[prefix])} {prefix}{unit}"


def digits(value: float) -> str:
    """Three significant digits, never in powers of ten; a whole number keeps all of its digits."""
    rounded = float(f"{value:.3g}")
    if rounded == 0 or abs(rounded) >= 100:
        return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"{rounded:.{2 - math.floor(math.log10(abs(rounded)))}f}"


def samples(times: Sequence[float], floor: float | None = None, interval: tuple[float, float] | None = None) -> Markup:
    """The samples (seconds) as dots, time from zero to the right, in the order they were taken downwards.

    A line at the median, a band over the interval where there is one, a dashed line at the floor where it is known.
    Above MOST_DOTS samples, one in so many is drawn, and the description says so. Raises ValueError without samples.
    """
    if not times:
        raise ValueError("a picture of samples needs a sample")
    step = math.ceil(len(times) / MOST_DOTS)
    drawn = times[::step]
    median = statistics.median(times)
    ticks = _ticks(max(*times, floor or 0.0))
    end, unit = ticks[-1], time_unit(ticks[-1])
    height = min(220, max(72, 5 * len(drawn)))

    def x(seconds: float) -> str:
        return f"{100 * seconds / end:.2f}%"

    parts = []
    if interval:
        low, high = interval
        width = f"{max(100 * (high - low) / end, 0.3):.2f}%"
        parts.append(_tag("rect", cls="band", x=x(low), y="0", width=width, height="100%"))
    for tick in ticks:
        label = f"{tick / TIMES[unit]:g}" + (f" {unit}" if tick == end else "")
        parts.append(_tag("line", cls="grid", x1=x(tick), x2=x(tick), y1="0", y2="100%"))
        parts.append(_text(label, x=x(tick), y="100%", dy="18", anchor="middle"))
    parts.append(_tag("line", cls="axis", x1="0", x2="100%", y1="100%", y2="100%"))
    for i, seconds in enumerate(drawn):
        parts.append(_tag("circle", cls="dot", cx=x(seconds), cy=f"{100 * (i + 0.5) / len(drawn):.2f}%", r="3"))
    marks = [("middle", "median", median, "-6")] + ([("floor", "floor", floor, "-21")] if floor is not None else [])
    for cls, name, seconds, dy in marks:
        share = seconds / end
        anchor = "start" if share < 0.15 else "end" if share > 0.85 else "middle"
        parts.append(_tag("line", cls=cls, x1=x(seconds), x2=x(seconds), y1=f"{float(dy) + 2:g}", y2="100%"))
        label = f"{name} {time_text(seconds)}"
        parts.append(_text(label, x=x(seconds), y="0", dy=dy, anchor=anchor, cls=f"{cls}-label"))
    said = [f"{len(times)} samples from {time_text(min(times))} to {time_text(max(times))}, median {time_text(median)}"]
    said += [f"floor {time_text(floor)}"] if floor is not None else ["no floor is known"]
    said += [f"one in {step} is drawn"] if step > 1 else []
    return _picture("samples", "; ".join(said), parts, height)


def interval(low: float, middle: float, high: float, end: float, floor: float | None = None) -> Markup:
    """One row's interval and middle (seconds) on the scale from zero to `end`, with a tick at the floor."""
    span = max(end, high)

    def x(seconds: float) -> str:
        return f"{100 * seconds / span:.2f}%"

    parts = [
        _tag("line", cls="track", x1="0", x2="100%", y1="50%", y2="50%"),
        _tag("line", cls="range", x1=x(low), x2=x(high), y1="50%", y2="50%"),
        _tag("line", cls="middle", x1=x(middle), x2=x(middle), y1="15%", y2="85%"),
    ]
    if floor is not None:
        parts.append(_tag("line", cls="floor", x1=x(floor), x2=x(floor), y1="0", y2="100%"))
    return Markup(f'<svg class="interval" aria-hidden="true" focusable="false">{"".join(parts)}</svg>')


@dataclass(frozen=True)
class Point:
    """A run on a roofline: operations a byte, operations a second attained and at most possible, and what names it."""

    intensity: float
    attained: float
    roof: float
    label: str
    name: str


def roofline(points: Iterable[Point]) -> Markup:
    """Attained operations a second over operations a byte, both logarithmic, below the roof that the floors make.

    The roof is drawn through the points' own: nothing is known of it between and beyond them. Raises ValueError without
    points.
    """
    points = sorted(points, key=lambda p: p.intensity)
    if not points:
        raise ValueError("a roofline needs a point")
    left, right = _decades(p.intensity for p in points)
    bottom, top = _decades(value for p in points for value in (p.attained, p.roof))

    def x(intensity: float) -> str:
        return f"{100 * (math.log10(intensity) - left) / (right - left):.2f}%"

    def y(rate: float) -> str:
        return f"{100 * (top - math.log10(rate)) / (top - bottom):.2f}%"

    parts = []
    for power in range(left, right + 1):
        parts.append(_tag("line", cls="grid", x1=x(10.0**power), x2=x(10.0**power), y1="0", y2="100%"))
        parts.append(_text(f"{10.0**power:g}", x=x(10.0**power), y="100%", dy="18", anchor="middle"))
    for power in range(bottom, top + 1):
        parts.append(_tag("line", cls="grid", x1="0", x2="100%", y1=y(10.0**power), y2=y(10.0**power)))
        parts.append(_text(rate_text(10.0**power, "op/s"), x="0", y=y(10.0**power), dx="-8", dy="4", anchor="end"))
    parts.append(_text("operations a byte", x="50%", y="100%", dy="36", anchor="middle"))
    for p, following in pairwise(points):
        ends = {"x1": x(p.intensity), "y1": y(p.roof), "x2": x(following.intensity), "y2": y(following.roof)}
        parts.append(_tag("line", cls="roof", **ends))
    for p in points:
        parts.append(_text("▬", x=x(p.intensity), y=y(p.roof), dy="4", anchor="middle", cls="roof-mark"))
        dot = _tag("circle", cls="dot", cx=x(p.intensity), cy=y(p.attained), r="4.5")
        label = _text(p.label, x=x(p.intensity), y=y(p.attained), dx="8", dy="4", cls="strong")
        parts.append(f"<g><title>{escape(p.name)}</title>{dot}{label}</g>")
    best = max(p.attained / p.roof for p in points)
    said = (
        f"{len(points)} runs by operations a byte and operations a second, the best at {best:.0%} of its floor's rate"
    )
    return _picture("roofline", said, parts, None)


def _picture(kind: str, said: str, parts: Iterable[str], height: int | None) -> Markup:
    size = f' height="{height}"' if height else ""
    inside = "".join(parts)
    return Markup(f'<svg class="picture {kind}" role="img" aria-label="{escape(said)}"{size}>{inside}</svg>')


def _tag(name: str, cls: str, **attributes: str) -> str:
    """An element; the names and the attributes, which are numbers, are this file's own."""
    pairs = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f'<{name} class="{cls}"{pairs}/>'


def _text(text: str, x: str, y: str, dx: str = "0", dy: str = "0", anchor: str = "start", cls: str = "label") -> str:
    place = f'x="{x}" y="{y}" dx="{dx}" dy="{dy}" text-anchor="{anchor}"'
    return f'<text class="{cls}" {place}>{escape(text)}</text>'


def _ticks(end: float) -> list[float]:
    """Round values from zero past `end`, 1, 2 or 5 times a power of ten apart, three to seven of them."""
    raw = end / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= raw)
    return [step * i for i in range(math.ceil(end / step) + 1)]


def _decades(values: Iterable[float]) -> tuple[int, int]:
    """The powers of ten that enclose all values, at least one apart."""
    logs = [math.log10(value) for value in values]
    low = math.floor(min(logs))
    return low, max(math.ceil(max(logs)), low + 1)
