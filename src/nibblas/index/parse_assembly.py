"""Assembler as items: PTX and GCN instructions, alone or from the text of an inline statement."""

import re
from collections.abc import Iterator

from nibblas.index import languages
from nibblas.index.items import Item, Language
from nibblas.index.positions import Mapped

_COMMENT = re.compile(r"//[^\n]*|/\*(?:[^*]|\*(?!/))*+(?:\*/)?|^[ \t]*\#[^\n]*", re.MULTILINE)
# What may stand before an instruction: blank space, the braces of a block, labels, a predicate.
_LEAD = re.compile(r"(?:[\s{}]++|[$%\w]+:(?!:)|@!?[%$]?\w+\s)*+")
_OPCODE = re.compile(r"[a-z]\w*+(?:(?:\.|::)\w++)*+")
_REGISTER = re.compile(r"\.reg\s*+(\.\w++)")
_QUALIFIER = re.compile(r"\.[^.]++")
_LONGEST = 400


def parse(source: Mapped, function: str = "", group: int = -1) -> list[Item]:
    """The items of assembler text; `group` is the offset of the statement that it is part of."""
    text = _COMMENT.sub(lambda comment: " " * len(comment[0]), source.text)
    language = languages.of_assembler(text)
    items = []
    for start, end in _statements(text, language):
        lead = _LEAD.match(text, start, end)
        start = lead.end() if lead else start
        if register := _REGISTER.match(text, start, end):
            items.append(_item("register", register[1], source, start, end, language, function, group))
            continue
        opcode = _OPCODE.match(text, start, end)
        if opcode is None or not ("." in opcode[0] or (language == "gcn" and "_" in opcode[0])):
            continue
        words = " ".join(text[start : min(end, start + _LONGEST)].split())
        items.append(_item("instruction", words, source, start, end, language, function, group))
        for qualifier in _QUALIFIER.finditer(opcode[0]):
            first, last = start + qualifier.start(), start + qualifier.end()
            items.append(_item("qualifier", qualifier[0], source, first, last, language, function, group))
    return items


def _statements(text: str, language: Language) -> Iterator[tuple[int, int]]:
    ends = re.compile(r"[;\n]" if language == "gcn" else ";")
    start = 0
    for end in ends.finditer(text):
        yield start, end.start()
        start = end.end()
    yield start, len(text)


def _item(kind, text: str, source: Mapped, start: int, end: int, language: Language, function: str, group: int) -> Item:
    first, last = source.span(start, start + len(source.text[start:end].rstrip()))
    return Item(kind, text, first, last, language, function, "", group)
