"""Source as HTML: one piece of markup a line, coloured by Pygments, and the lines that differ between two files."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, lru_cache
from itertools import groupby
from typing import Literal

from markupsafe import Markup, escape
from pygments.lexer import Lexer
from pygments.lexers import CLexer, CppLexer, CudaLexer, PtxLexer, PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String, _TokenType

from nibblas.index.languages import of_code, of_path

LEXERS: dict[str, type[Lexer]] = {
    "python": PythonLexer,
    "cuda": CudaLexer,
    "hip": CudaLexer,
    "c++": CppLexer,
    "c": CLexer,
    "ptx": PtxLexer,
}
# The first that contains a token's type gives its class in the stylesheet; all others are plain.
CLASSES = (
    (Comment.Preproc, "tk"),
    (Comment.PreprocFile, "ts"),
    (Comment, "tc"),
    (String, "ts"),
    (Number, "tn"),
    (Operator.Word, "tk"),
    (Keyword, "tk"),
    (Name.Function, "tf"),
    (Name.Class, "tf"),
    (Name.Decorator, "tf"),
)
STRING = re.compile(r"""([A-Za-z]*(?:\"{3}|'{3}))(.*)(\"{3}|'{3})""", re.DOTALL)
MOST_HIGHLIGHTED = 1_000_000  # characters; a longer file is shown without colours
MOST_COMPARED = 20_000  # lines
# What would reorder, hide or end a line on a screen without standing in the file's lines: shown by its code point.
UNSEEN = {
    code: f"\N{MATHEMATICAL LEFT ANGLE BRACKET}U+{code:04X}\N{MATHEMATICAL RIGHT ANGLE BRACKET}"
    for code in (*range(9), 11, 12, *range(14, 32), 127, *range(0x200B, 0x2010), *range(0x2028, 0x202F),
                 *range(0x2060, 0x2070), 0xFEFF)
}  # fmt: skip


@lru_cache(maxsize=64)
def lines(path: str, text: str) -> tuple[Markup, ...]:
    """Each line of a source file as markup, numbered as `SourceFile.lines` counts them."""
    text = _unix(text)
    rows: list[Markup] = []
    row: list[str] = []
    for cls, run in groupby(_tokens(path, text), key=lambda token: token[0]):
        for i, part in enumerate("".join(value for _, value in run).split("\n")):
            if i:
                rows.append(Markup("".join(row)))
                row = []
            if part:
                shown = part.replace("\r", " ").translate(UNSEEN)
                row.append(f'<span class="{cls}">{escape(shown)}</span>' if cls else escape(shown))
    return (*rows, Markup("".join(row)))


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n").removesuffix("\n")


def _tokens(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Pieces of the text, in order, each with its class ("" for none). Code in a Python string is read as code."""
    language = of_path(path) or ""
    if language not in LEXERS or len(text) > MOST_HIGHLIGHTED:
        yield "", text
        return
    for cls, run in groupby(_lexed(language, text), key=lambda token: token[0]):
        piece = "".join(value for _, value in run)
        code = STRING.fullmatch(piece) if language == "python" and cls == "ts" else None
        inner = of_code(code[2]) if code else None
        if code and inner in LEXERS:
            yield from (("ts", code[1]), *_lexed(inner, code[2]), ("ts", code[3]))
        else:
            yield cls, piece


def _lexed(language: str, text: str) -> Iterator[tuple[str, str]]:
    return ((_class_of(kind), value) for _, kind, value in LEXERS[language]().get_tokens_unprocessed(text))


@cache
def _class_of(kind: _TokenType) -> str:
    return next((cls for group, cls in CLASSES if kind in group), "")


@dataclass(frozen=True)
class Row:
    """One line of a comparison: its number in the old and the new file, None where it isn't there."""

    kind: Literal["same", "added", "removed", "gap"]
    old: int | None
    new: int | None
    text: Markup


def diff(path: str, old: str, new: str, context: int = 3) -> list[Row] | None:
    """The lines that differ, with some around them; a gap between distant places. None where a file is too long."""
    before, after = _unix(old).split("\n"), _unix(new).split("\n")
    if max(len(before), len(after)) > MOST_COMPARED:
        return None
    was, now = lines(path, old), lines(path, new)
    rows: list[Row] = []
    for hunk in SequenceMatcher(None, before, after).get_grouped_opcodes(context):
        if rows or hunk[0][1]:
            rows.append(Row("gap", hunk[0][1] + 1, hunk[0][3] + 1, Markup("")))
        for tag, old_from, old_to, new_from, new_to in hunk:
            if tag == "equal":
                pairs = zip(range(old_from, old_to), range(new_from, new_to), strict=True)
                rows += [Row("same", i + 1, j + 1, now[j]) for i, j in pairs]
            else:
                rows += [Row("removed", i + 1, None, was[i]) for i in range(old_from, old_to)]
                rows += [Row("added", None, j + 1, now[j]) for j in range(new_from, new_to)]
    return rows
