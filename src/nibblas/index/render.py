"""How a page is shown: its template, the words for values, and where other pages lie."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nibblas import __version__
from nibblas.index import pictures
from nibblas.index.documents import FacetValue, Query, RunFilter, RunLine, plain
from nibblas.index.model import Figure
from nibblas.words import time_text

Pairs = Sequence[tuple[str, str]]
Crumbs = tuple[tuple[str, str], ...]
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
MENU = (
    ("Search", "/search"),
    ("Operations", "/operations"),
    ("Techniques", "/techniques"),
    ("Hardware", "/hardware"),
    ("Runs", "/runs"),
    ("Compare", "/compare"),
    ("Sources", "/sources"),
    ("Methodology", "/methodology"),
    ("About", "/about"),
)
DEFAULTS = {kind: tuple((f.name, f.default) for f in fields(kind)) for kind in (Query, RunFilter)}


@dataclass(frozen=True)
class Page:
    """A page before it is shown.

    Parameters
    ----------
    path, query : its address; the path is not quoted yet.
    name : its heading, and the last of its breadcrumbs.
    document : what its JSON twin holds; None where it has no twin.
    values : what else its template shows.
    title : of the window, where the name alone doesn't say enough.
    indexed : whether a search engine should keep it.
    """

    template: str
    path: str
    name: str
    description: str
    document: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    query: Pairs = ()
    crumbs: Crumbs = ()
    indexed: bool = True


class Links:
    """Where pages lie on a server: at their own address."""

    live = True  # whether something answers queries
    menu: Pairs = MENU
    implementations = "/search"  # the entry of the menu that leads to them

    def section(self, path: str) -> str:
        """The entry of the menu that a page belongs to."""
        first = "/" + path.split("/")[1]
        return self.implementations if first == "/implementations" else first

    def url(self, path: str, query: Pairs = ()) -> str:
        """The address of a page; the parts of its path are quoted here."""
        return _quoted(path) + (f"?{urlencode(query)}" if query else "")

    def twin(self, path: str, query: Pairs = ()) -> str:
        """The address of a page's JSON twin."""
        return self.url("/index.json" if path == "/" else f"{path}.json", query)

    def static(self, name: str) -> str:
        """The address of a file in static/."""
        return f"/static/{name}"

    def browse(self, name: str | None = None, value: str = "") -> str:
        """The address of a list of all implementations, or of those with one value of a facet."""
        return self.url("/search", [(name, value)] if name else ())

    def raw(self, implementation: str, path: str) -> str:
        """The address of the bytes of a source file."""
        return self.url(f"/api/v1/implementations/{implementation}/files/{path}")


def html(page: Page, links: Links) -> str:
    """The page as HTML."""
    return _environment().get_template(page.template).render(
        page=page,
        doc=page.document,
        twin=links.twin(page.path, page.query),
        live=links.live,
        section=links.section(page.path),
        menu=links.menu,
        url=links.url,
        static=links.static,
        browse=links.browse,
        raw=links.raw,
        version=__version__,
        **page.values,
    )  # fmt: skip


_quoted = lru_cache(maxsize=4096)(quote)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("nibblas.index"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "time": time_text,
        "rate": pictures.rate_text,
        "digits": pictures.digits,
        "interval": interval,
        "longest": longest,
        "bytes": size,
        "count": count,
        "number": number,
        "percent": percent,
        "ratio": ratio,
        "relative": relative,
        "date": date,
        "moment": moment,
        "figure": figure,
        "pairs": pairs,
        "plainly": plainly,
        "words": words,
        "params": params,
        "toggled": toggled,
    }
    return environment


# Words for values


def count(n: int, one: str, several: str | None = None) -> str:
    """A number with what it counts: count(2, "run") is "2 runs"."""
    return f"{number(n)}{NO_BREAK_SPACE}{one if n == 1 else several or one + 's'}"


def number(n: int) -> str:
    """A whole number, its thousands apart."""
    return f"{n:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def size(n: int) -> str:
    """Bytes: 512 B, 25.9 kB."""
    return f"{n} B" if n < 1000 else pictures.rate_text(n, "B")


def percent(share: float) -> str:
    """54 %; a share below one percent keeps a digit that says something."""
    return f"{100 * share:.0f}{NO_BREAK_SPACE}%" if share >= 0.01 else f"{100 * share:.2g}{NO_BREAK_SPACE}%"


def ratio(value: float) -> str:
    """One time over another."""
    return f"{value:.2f}" if 0.1 <= value < 100 else pictures.digits(value)


def relative(error: float) -> str:
    """A relative error."""
    return f"{error:.2g}"


def date(at: str | None) -> Markup | None:
    """The day of a time (ISO 8601); None stays None, what is no time is shown as it stands."""
    return _moment(at, "%Y-%m-%d")


def moment(at: str | None) -> Markup | None:
    """The same to the minute."""
    return _moment(at, "%Y-%m-%d %H:%M UTC")


def _moment(at: str | None, form: str) -> Markup | None:
    if at is None:
        return None
    try:
        known = datetime.fromisoformat(at)
    except ValueError:
        return Markup.escape(at)
    shown = (known.astimezone(UTC) if known.tzinfo else known).strftime(form if len(at) > 10 else "%Y-%m-%d")
    return Markup('<time datetime="{}">{}</time>').format(at, shown)


def figure(found: Figure) -> str:
    """A figure with its unit, interval and number of samples."""
    if found.metric not in ("latency", "score"):
        return f"{found.value:g}, of an unknown unit"
    text = time_text(found.value)
    if found.low is not None and found.high is not None:
        text += f", 95 % interval {time_text(found.low)} – {time_text(found.high)}"
    return f"{text}, of {count(found.n, 'sample')}" if found.n is not None else text


def pairs(values: Mapping[str, Any]) -> Markup:
    """Names and values of a small mapping, in one line; "unknown" where it is empty."""
    if not values:
        return Markup('<span class="unknown">unknown</span>')
    shown = (Markup('<span class="note">{}</span> {}').format(name, plainly(value)) for name, value in values.items())
    return Markup('<span class="comma">, </span>').join(shown)


def plainly(value: Any) -> str | None:
    """A stored value in words; None stays None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(str(item) for item in value)
    return json.dumps(plain(value), ensure_ascii=False)


def words(name: str) -> str:
    """A field's name as a heading."""
    return name.replace("_", " ").capitalize()


def longest(runs: Iterable[RunLine]) -> float:
    """The end of a scale on which every run has room."""
    return max((run.figure.high or run.figure.value for run in runs if run.figure), default=0.0)


def interval(run: RunLine, end: float) -> Markup:
    """A run's time on a scale from zero to `end`."""
    if run.figure is None or not end:
        return Markup("")
    value = run.figure.value
    low = value if run.figure.low is None else run.figure.low
    high = value if run.figure.high is None else run.figure.high
    return pictures.interval(low, value, high, end, run.floor)


# Queries in addresses


def params(query: Query | RunFilter, **changes: Any) -> list[tuple[str, str]]:
    """The fields of a query that differ from their default, as an address holds them; the words of a text are "q"."""
    found = []
    for name, default in DEFAULTS[type(query)]:
        value = changes[name] if name in changes else getattr(query, name)
        if value != default and value:
            shown = "q" if name == "text" else name
            found += [(shown, str(item)) for item in (value if isinstance(value, tuple) else (value,))]
    return found


def toggled(query: Query, name: str, value: FacetValue) -> list[tuple[str, str]]:
    """The query with one value of a facet set, or removed where it is set already; it starts at the first page."""
    before = getattr(query, name)
    if isinstance(before, tuple):
        kept = tuple(item for item in before if item != value.value)
        return params(query, cursor=None, **{name: kept if value.selected else (*kept, value.value)})
    return params(query, cursor=None, **{name: None if value.selected else value.value})
