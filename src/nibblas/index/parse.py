"""A source file as items with exact places: Python, CUDA and HIP, and CUDA and assembler inside their strings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from nibblas.index import languages, parse_assembly, parse_cuda, parse_python
from nibblas.index.items import Item, Language, Parsed
from nibblas.index.positions import Lines, Mapped
from nibblas.index.rule import wanted

# The function that a submission to a kernel competition defines: nothing else of the file is called from outside.
ENTRY = "custom_kernel"
_DEEPEST = 4  # strings of code inside strings of code
_CALLED_BY_PYTHON = re.compile(r"__\w+__|forward|backward|setup_context")
_CALLED_BY_CPP = re.compile(r"~.*|operator\b.*")


@dataclass(frozen=True)
class Region:
    """A part of a file that is in one language; start and end are offsets, `text` what it says once it is unescaped."""

    language: Language
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Source:
    """A file as rules see it. `dead` are functions that nothing calls, as far as the file tells."""

    path: str
    language: Language
    lines: Lines
    regions: tuple[Region, ...]
    items: tuple[Item, ...]
    dead: frozenset[str]


@lru_cache(maxsize=8)
def read(path: str, text: str) -> Source:
    """Read a file, whatever it holds: what isn't understood gives no items."""
    whole = Mapped.whole(text)
    language = languages.of_file(path, text) or languages.of_code(text + "\n;") or "text"
    if language in ("c", "c++"):
        language = languages.dialect(text)
    parts = [(part, place) for part, place in _parts(whole, language, "", 0)]
    regions = tuple(
        Region(part_language, *place.span(0, len(place.text)), place.text) for (part_language, _), place in parts
    )
    items = sorted({item for (_, parsed), _ in parts for item in parsed.items}, key=lambda item: (item.start, item.end))
    dead = _dead([parsed for (_, parsed), _ in parts], language)
    return Source(path, language, Lines(text), regions, tuple(items), frozenset(dead))


def _parts(
    source: Mapped, language: Language, function: str, depth: int
) -> Iterator[tuple[tuple[Language, Parsed], Mapped]]:
    """What the parser of its language makes of a text, then of the code in its strings."""
    if language == "python":
        parsed = parse_python.parse(source, wanted)
    elif language in ("ptx", "gcn"):
        parsed = Parsed(parse_assembly.parse(source, function, source.offset(0)))
    elif language == "text":
        return
    else:
        parsed = parse_cuda.parse(source, language, wanted)
    yield (language, parsed), source
    if depth < _DEEPEST:
        for entry in parsed.embedded:
            if entry is not None:
                inner, where = entry
                yield from _parts(inner, languages.of_code(inner.text) or "c++", where, depth + 1)


def _dead(parts: list[Parsed], language: Language) -> set[str]:
    """Functions that can't be reached from an entry point or from the top level, by name.

    Where the file defines ENTRY, that is the only entry point. Other files may be called by others: in Python every
    function that is decorated or whose name isn't private, in C++ every kernel and every function of the host.
    """
    defined = set().union(*(parsed.defined for parsed in parts))
    names: dict[str, set[str]] = {}
    for parsed in parts:
        for function, found in parsed.names.items():
            names.setdefault(function, set()).update(found & defined)
    if ENTRY in defined:
        reached = {ENTRY}
    elif language == "python":
        reached = {name for name in parts[0].defined if not name.startswith("_")}
        reached |= set().union(*(parsed.entries for parsed in parts))
    else:
        reached = set().union(*(parsed.entries for parsed in parts))
    reached |= {name for name in defined if _CALLED_BY_PYTHON.fullmatch(name) or _CALLED_BY_CPP.fullmatch(name)}
    reached |= names.get("", set())
    waiting = list(reached)
    while waiting:
        new = names.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return defined - reached
