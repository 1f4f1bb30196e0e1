"""Licences: what a file's comments say of them, whose code it names, what follows, and whether source may be shown.

What is declared, what is found and what is concluded stay apart. A conclusion is drawn only where nothing speaks
against it, and what is unknown never becomes a permission. The words that tell a licence are data: licences.toml.
"""

import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

from nibblas.index import languages
from nibblas.index.positions import Lines

DATA = Path(__file__).with_name("licences.toml")
Method = Literal["spdx-tag", "header", "full-text", "copyright"]
# How sure a finding is, by how it was found: a tag is made for machines, a sentence may speak of something else.
CONFIDENCE: dict[Method, float] = {"spdx-tag": 1.0, "full-text": 0.95, "header": 0.9, "copyright": 1.0}
_LONGEST_SNIPPET = 200
_LONGEST_LINE = 10_000  # characters that are read of one

# A file without any of these holds neither a licence nor a copyright.
_HINTS = (
    *("licens", "licenc", "copyright", "spdx", "©", "public domain", "redistribution", "permission", "cc0"),
    *("(c) 1", "(c) 2", "(c)1", "(c)2"),
    *("commercial", "use only", "purposes only", "confidential", "unauthori"),
)
_C_TOKEN = re.compile(
    r"""(?P<raw>\bR"(?P<fence>[^()\\\s"]{0,16})\(.*?(?:\)(?P=fence)"|\Z))
    |(?P<string>"(?:[^"\\\n]|\\.)*+"?|'(?:\\.[^'\n]{0,8}|[^'\\\n])')
    |(?P<line>(?<!:)//(?:\\\r?\n|[^\n])*+)
    |(?P<block>/\*.*?(?:\*/|\Z))""",
    re.VERBOSE | re.DOTALL,
)
_PYTHON_TOKEN = re.compile(
    r"""(?P<line>\#[^\n]*+)
    |(?P<long>\"{3}(?:[^\\"]++|\\.|"(?!""))*+(?:\"{3}|\\?\Z)|'{3}(?:[^\\']++|\\.|'(?!''))*+(?:'{3}|\\?\Z))
    |(?P<short>"(?:[^"\\\n]|\\.)*+"?|'(?:[^'\\\n]|\\.)*+'?)""",
    re.VERBOSE | re.DOTALL,
)
# A comment of code that is put together from strings, one a line.
_COMMENT_IN_STRING = re.compile(r"[ \t]*(?://|/\*)")
_MARKER = re.compile(r"^[ \t]*(?:[rRbBuUfF]{0,2}[\"']+)?[ \t]*(?:/\*+!?|//+!?|\#+!?|\*+/?|;+|--)?[ \t]*")

_TAG = re.compile(r"SPDX-License-Identifier:[ \t]*([^\r\n]{1,300})", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z][\w.-]*")
_TAG_END = re.compile(r"\s*(?:\*/|-->|\"\"\"|''').*$")
_COPYRIGHT = re.compile(
    r"SPDX-FileCopyrightText:\s*\S|copyright\s*(?:\(c\)|©|:)?\s*\d{4}|(?:\(c\)|©)\s*(?:copyright\s*)?\d{4}"
    r"|copyright\s*(?:\(c\)|©)\s*\w",
    re.IGNORECASE,
)
_URL = re.compile(
    r"https?://[^\s<>\"'`\\{}|^]+"
    r"|(?<![\w./@-])(?:www\.)?(?:github|gitlab)\.com/[\w.-]+/[\w.-]+[^\s<>\"'`\\{}|^]*",
    re.IGNORECASE,
)
_TAKEN = re.compile(
    r"\b(taken|adapted|copied|borrowed|derived|ported|modified|lifted|based)\b"
    r"(?:\s+\w+ly)?(?:\s+(?:the\s+)?(?:code|version|implementation|in part))?\s+(?:from|on|upon|after)\b",
    re.IGNORECASE,
)
# Phrases that only say where an idea is from. All others say that lines of code came along.
_IDEAS = frozenset(("based",))
_CODE_HOST = re.compile(
    r"(?:github\.com/[^/]+/[^/]+/(?:blob|tree|raw|blame)/|raw\.githubusercontent\.com/|gist\.github(?:usercontent)?\.com/"
    r"|gitlab\.[^/]+/.+?/-/(?:blob|tree|raw)/|bitbucket\.org/[^/]+/[^/]+/(?:src|raw)/"
    r"|huggingface\.co/.+?/(?:blob|tree|raw|resolve)/)",
    re.IGNORECASE,
)
_LICENCE_REF = re.compile(r"(?:DocumentRef-[\w.-]+:)?LicenseRef-[\w.-]+")


@dataclass(frozen=True)
class LicenceFinding:
    """A licence or a copyright that a file states, and its first and last line.

    expression : in SPDX's words; None for a copyright, and for a tag that SPDX can't read.
    """

    expression: str | None
    method: Method
    line: int
    end_line: int
    snippet: str
    confidence: float


@dataclass(frozen=True)
class ThirdParty:
    """An address that a comment names. Lines and columns count from 1.

    hint : what the comment says of it ("taken from", "based on" ...), "code" for an address inside a repository of
        which it says nothing, "link" for any other.
    licence_hint : SPDX expression of the licence that is named beside it.
    """

    url: str
    line: int
    column: int
    hint: str
    snippet: str
    licence_hint: str | None = None

    @property
    def is_copy(self) -> bool:
        """Whether the comment says that code came from there."""
        return self.hint not in ("link", "code") and self.hint.split()[0] not in _IDEAS


@dataclass(frozen=True)
class Conclusion:
    """The licence of an implementation, or None where it isn't known; `reason` is a sentence.

    terms_count : whether the terms of its collection may speak for it, because nothing that it says of itself is
        unreadable, contradicts itself, or keeps others from handing it on.
    """

    expression: str | None
    reason: str
    terms_count: bool = False


class _Licence(NamedTuple):
    id: str
    names: tuple[str, ...] = ()
    header: re.Pattern[str] | None = None
    text: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


class _Block(NamedTuple):
    """Comments of lines that follow each other; lines hold (number, column of its first character, text)."""

    lines: tuple[tuple[int, int, str], ...]
    prose: bool = False  # a whole file that is text


def findings(path: str, text: str) -> list[LicenceFinding]:
    """The licences and copyrights that a file states in its comments, or anywhere if it is no source, by line."""
    if not _hinted(text):
        return []
    found: list[LicenceFinding] = []
    for block in _blocks(path, text):
        if any(_hinted(line) for _, _, line in block.lines):
            found += _stated(block)
    return sorted(found, key=lambda one: (one.line, one.end_line))


def third_party(path: str, text: str) -> list[ThirdParty]:
    """The addresses that a source's comments name, by line; a text that is no source has none."""
    if "://" not in text and "github.com/" not in text and "gitlab.com/" not in text:
        return []
    found = [one for block in _blocks(path, text) if not block.prose for one in _named(block.lines)]
    return sorted(found, key=lambda one: (one.line, one.column))


def conclude(
    declared: str | None, findings: Sequence[LicenceFinding], terms: str | None, parts: Sequence[ThirdParty] = ()
) -> Conclusion:
    """The licence that follows for an implementation.

    Parameters
    ----------
    declared : by its source, as that writes it.
    findings : of all its files.
    terms : under which it was handed on. They are of the collection and make no licence of what is in it.
    parts : what its comments name. Code that is taken from elsewhere brings its own licence, known or not.
    """
    stated = [one for one in findings if one.expression]
    closed = next((one for one in stated if not _allows(one.expression)), None)
    if closed:
        return Conclusion(closed.expression, f"Line {closed.line} states {closed.expression}.")
    unread = next((one for one in findings if one.method == "spdx-tag" and not one.expression), None)
    if unread:
        return Conclusion(None, f"The tag in line {unread.line} is no SPDX expression.")
    declared = (declared or "").strip()
    chosen = normalised(declared)
    reason = f"{chosen} is declared"
    if declared and not chosen:
        return Conclusion(
            None, f"The declared licence {declared!r} is no SPDX expression, so what it allows is unknown."
        )
    if chosen:
        other = next((one for one in stated if not _families(one.expression) <= _families(chosen)), None)
        if other:
            return Conclusion(None, f"{declared} is declared, but line {other.line} states {other.expression}.")
    elif stated:
        first = min(stated, key=lambda one: ("spdx-tag", "header", "full-text").index(one.method))
        other = next((one for one in stated if not _families(one.expression) <= _families(first.expression)), None)
        if other:
            return Conclusion(
                None,
                f"Line {first.line} states {first.expression} and line {other.line} {other.expression};"
                " which holds for the whole isn't said.",
            )
        chosen, reason = first.expression, f"line {first.line} states {first.expression} ({first.method})"
    if not chosen:
        its = f"; {terms} are the terms of the collection that it came in" if terms else ""
        return Conclusion(None, f"No licence is declared, and none is found in the files{its}.", terms_count=True)
    taken = [part for part in parts if part.is_copy]
    unknown = next((part for part in taken if not part.licence_hint), None)
    if unknown:
        why = f"line {unknown.line} names code {unknown.hint} {unknown.url}, whose licence isn't known"
        return Conclusion(None, f"{reason[0].upper()}{reason[1:]}, but {why}.", terms_count=_allows(chosen))
    if taken:
        together = dict.fromkeys((chosen, *(part.licence_hint for part in taken)))
        joined = normalised(" AND ".join(f"({one})" for one in together))
        reason += f", and {len(taken)} of its comments name code under a licence of its own"
        return Conclusion(joined, f"{reason[0].upper()}{reason[1:]}.")
    return Conclusion(chosen, f"{reason[0].upper()}{reason[1:]}.")


def may_show(conclusion: Conclusion, terms: str | None) -> tuple[bool, str | None]:
    """Whether the source may be shown, and under which licence or terms.

    What an implementation says of itself wins over the terms of the collection that it came in, also where that can't
    be read.
    """
    known = normalised(terms) if conclusion.terms_count else conclusion.expression
    return (True, known) if known and _allows(known) else (False, None)


@lru_cache(maxsize=4096)
def normalised(stated: str | None) -> str | None:
    """A licence as SPDX writes it: an expression of listed licences and LicenseRefs; None for anything else."""
    tree = _tree(stated or "")
    return None if tree is None else str(tree.render())


@lru_cache(maxsize=4096)
def _tree(stated: str) -> Any:
    """The parsed expression, or None where it is none or names what is neither in SPDX's list nor a LicenseRef."""
    from license_expression import ExpressionError, ParseError

    stated = stated.strip()
    if not stated or len(stated) > 1000:
        return None
    try:
        tree = _licensing().parse(_names().get(stated.lower(), stated))
    except (ExpressionError, ParseError, RecursionError):
        return None
    if tree is None or not all(_LICENCE_REF.fullmatch(key) for key in _licensing().unknown_license_keys(tree)):
        return None
    return tree


@cache
def _licensing() -> Any:
    from license_expression import get_spdx_licensing

    return get_spdx_licensing()


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


@cache
def _licences() -> tuple[_Licence, ...]:
    return tuple(
        _Licence(
            entry["id"],
            tuple(entry.get("names", ())),
            re.compile("|".join(f"(?:{one})" for one in entry["header"])) if "header" in entry else None,
            tuple(entry.get("text", ())),
            tuple(entry.get("unless", ())),
        )
        for entry in _data()["licence"]
    )


@cache
def _names() -> dict[str, str]:
    return {name: licence.id for licence in _licences() for name in licence.names}


@cache
def _naming() -> re.Pattern[str]:
    """Licences named beside an address: in full, or an identifier; "MIT" alone is a university too."""
    words = [*_names(), *(licence.id.lower() for licence in _licences() if "-" in licence.id)]
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.compile(rf"(?<![\w/.-])(?:({longest_first})(?![\w/-]|\.\w)|\((mit)\))")


@cache
def _may_show() -> frozenset[str]:
    return frozenset(_data()["may_show"])


@lru_cache(maxsize=4096)
def _allows(expression: str | None) -> bool:
    """Whether the licence lets everyone hand the source on: one side of an OR is enough, an AND needs both."""
    tree = _tree(expression or "")
    return tree is not None and _branch_allows(tree)


def _branch_allows(node: Any) -> bool:
    from license_expression import LicenseWithExceptionSymbol

    if isinstance(node, LicenseWithExceptionSymbol):  # an exception only adds permissions
        return node.license_symbol.key in _may_show()
    if getattr(node, "args", ()):
        together = any if node.operator.strip() == "OR" else all
        return together(_branch_allows(one) for one in node.args)
    return node.key in _may_show()


@lru_cache(maxsize=4096)
def _families(expression: str | None) -> frozenset[str]:
    """The licences of an expression. Whether later versions may be chosen is left out, which a full text can't tell."""
    tree = _tree(expression or "")
    keys = _licensing().license_keys(tree) if tree is not None else (expression or "",)
    return frozenset(re.sub(r"-(?:only|or-later)$", "", key) for key in keys)


def _hinted(text: str) -> bool:
    # Much faster than a pattern that ignores case.
    lower = text.lower()
    return any(hint in lower for hint in _HINTS)


def _stated(block: _Block) -> Iterator[LicenceFinding]:
    for number, _, line in block.lines:
        if tag := _TAG.search(line):
            value = _TAG_END.sub("", tag[1]).rstrip(" \t,;")
            expression = normalised(value)
            if not expression and _WORD.fullmatch(value):
                expression = f"LicenseRef-{value}"  # a word of its own, such as Proprietary: known to be none of SPDX's
            yield _finding(expression, "spdx-tag", number, number, line)
        if not block.prose and _COPYRIGHT.search(line):
            yield _finding(None, "copyright", number, number, line)
    words, starts = _joined(block)
    whole: set[str] = set()
    for licence in _licences():
        places = [words.find(mark) for mark in licence.text]
        if places and min(places) >= 0 and not any(mark in words for mark in licence.unless):
            whole |= _families(licence.id)
            last = max(place + len(mark) for place, mark in zip(places, licence.text, strict=True)) - 1
            yield _spanning(block, starts, licence.id, "full-text", min(places), last)
    for licence in _licences():
        # A licence's text tells at its end how to apply it.
        found = licence.header.search(words) if licence.header else None
        if found and not words[: found.start()].endswith("not ") and not _families(licence.id) <= whole:
            yield _spanning(block, starts, licence.id, "header", found.start(), found.end() - 1)


def _joined(block: _Block) -> tuple[str, list[int]]:
    """The block's words in lower case with single spaces between, and where each of its lines starts in them."""
    pieces, starts, length = [], [], 0
    for _, _, line in block.lines:
        starts.append(length)
        words = " ".join(_without_marks(line).lower().split())
        if words:
            pieces.append(words)
            length += len(words) + 1
    return " ".join(pieces), starts


def _without_marks(line: str) -> str:
    return _MARKER.sub("", line, count=1).rstrip(" \t\r\"'").removesuffix("\\n").rstrip("*/ \t\r\"'")


def _spanning(
    block: _Block, starts: list[int], expression: str, method: Method, first: int, last: int
) -> LicenceFinding:
    begin, end = (block.lines[bisect_right(starts, place) - 1] for place in (first, last))
    return _finding(expression, method, begin[0], end[0], begin[2])


def _finding(expression: str | None, method: Method, line: int, end_line: int, snippet: str) -> LicenceFinding:
    return LicenceFinding(expression, method, line, end_line, snippet.strip()[:_LONGEST_SNIPPET], CONFIDENCE[method])


def _named(lines: Sequence[tuple[int, int, str]]) -> Iterator[ThirdParty]:
    before, before_has_url = "", False
    for i, (number, column, line) in enumerate(lines):
        places = list(_URL.finditer(line))
        if places:
            said = _TAKEN.search(line) or (None if before_has_url else _TAKEN.search(before))
            hint = " ".join((said[1], said[0].split()[-1])).lower() if said else None
            around = " ".join(_URL.sub(" ", part) for _, _, part in lines[max(i - 1, 0) : i + 2]).lower()
            named = _naming().search(around)
            licence = normalised(named[1] or named[2]) if named else None
            for found in places:
                url = _trimmed(found[0])
                what = hint or ("code" if _CODE_HOST.search(url[:1000]) else "link")
                snippet = line.strip()[:_LONGEST_SNIPPET]
                yield ThirdParty(
                    url, number, column + found.start(), what, snippet, None if what == "link" else licence
                )
        before, before_has_url = line, bool(places)


def _trimmed(url: str) -> str:
    """Without what ends the sentence, or the bracket, that the address stands in."""
    url = re.sub(r"\*+/$", "", url).rstrip(".,;:!?*")
    while url[-1:] in (")", "]") and url.count(url[-1]) > url.count("(" if url[-1] == ")" else "["):
        url = url[:-1].rstrip(".,;:!?")
    return url


@lru_cache(maxsize=1)  # read for licences and for third parties one after the other
def _blocks(path: str, text: str) -> tuple[_Block, ...]:
    """The comments of a source, or the whole of another text."""
    language = languages.of_path(path)
    if language is None:
        file = PurePath(path.lower())
        if file.suffix not in ("", ".txt", ".md", ".rst") and not file.name.startswith(("licen", "copying", "notice")):
            return ()
        prose = tuple((number, 1, line[:_LONGEST_LINE]) for number, line in enumerate(text.split("\n"), 1))
        return (_Block(prose, prose=True),)
    places = Lines(text)
    spans = _python_comments(text) if language == "python" else _c_comments(text, 0, len(text))
    blocks: list[list[tuple[int, int, str]]] = []
    joins = False  # whether the comment before goes on in the next line
    for start, end, whole in spans:
        number, column = places.position(start)
        lines = [(number, column, text[start : min(end, start + _LONGEST_LINE)])]
        if "\n" in lines[0][2] or end - start > _LONGEST_LINE:
            parts = text[start:end].split("\n")
            lines = [(number + n, 1 if n else column, part[:_LONGEST_LINE]) for n, part in enumerate(parts)]
        # A comment after code belongs to that line alone.
        goes_on = not whole and not text[start - column + 1 : start].strip(" \t\"'")
        if joins and goes_on and blocks[-1][-1][0] + 1 == number:
            blocks[-1] += lines
        else:
            blocks.append(lines)
        joins = goes_on
    return tuple(_Block(tuple(block)) for block in blocks)


def _c_comments(text: str, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether it stands alone) of each comment."""
    for found in _C_TOKEN.finditer(text, start, stop):
        if found["line"] is not None:
            yield found.start(), found.end(), False
        elif found["block"] is not None:
            yield found.start(), found.end(), True


def _python_comments(text: str) -> Iterator[tuple[int, int, bool]]:
    """As _c_comments: comments, strings that stand as statements, and the comments in strings that hold C or CUDA."""
    for found in _PYTHON_TOKEN.finditer(text):
        start, end = found.span()
        if found["line"] is not None:
            yield start, end, False
        elif found["long"] is not None:
            if _is_statement(text, start):
                yield start, end, True
            elif languages.of_code(text[start + 3 : end - 3]) in ("cuda", "hip", "c++"):
                yield from _c_comments(text, start + 3, max(end - 3, start + 3))
        elif _COMMENT_IN_STRING.match(text, start + 1, end):
            yield start + 1, end - 1 if text[end - 1] == text[start] and end - start > 1 else end, False


def _is_statement(text: str, start: int) -> bool:
    """Whether a string stands first in its line and nothing before it asks for a value."""
    line = text.rfind("\n", 0, start) + 1
    if text[line:start].strip(" \t\ufeffrRuU"):
        return False
    before = text[max(line - 200, 0) : line].rstrip()
    return not before.endswith(("(", "[", "{", ",", "=", "+", "\\", "return"))
