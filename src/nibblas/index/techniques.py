"""Techniques read from a source by rule, each with its place, and whether it is used there or only mentioned.

A finding is a *use* where code does it: an instruction, a call, a launch, an allocation, in a function that can be
reached. It is a *declaration* where code only names it: the definition of a wrapper, a parameter, an alias, an import,
a register's type, and everything inside of a function that nothing calls. Comments and docstrings give a *comment*,
other strings a *string*. A wrapper that is called thus gives a declaration where it is defined, a use at the
instruction inside, and a use at each call, if its name names the technique.

On one line a technique is found once, by the strongest of these. All of a technique in one inline assembler statement
is one finding, from its first line to its last.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, cast

from nibblas.index.items import Item
from nibblas.index.parse import Source, read
from nibblas.index.rule import Rule, matching, techniques

FindingKind = Literal["use", "declaration", "string", "comment"]
KINDS: tuple[FindingKind, ...] = ("use", "declaration", "string", "comment")
_DECLARING = frozenset(["import", "definition", "binding", "alias", "type", "register", "container"])
_LONGEST_SNIPPET = 200
_LONGEST_LINE = 500  # of a comment, in which mentions are looked for


@dataclass(frozen=True)
class TechniqueFinding:
    """One place of one technique; line and column count from 1."""

    rule: str
    version: int
    technique: str
    line: int
    column: int
    end_line: int
    kind: FindingKind
    snippet: str
    detail: str = ""


def find(path: str, text: str) -> list[TechniqueFinding]:
    """Every finding in a file, by line; the path's suffix tells its language."""
    source = read(path, text)
    found: dict[tuple, tuple[Item, Rule, FindingKind, str, int]] = {}
    for item in source.items:
        for rule in matching("rule", item):
            kind, detail = _kind(item, rule, source), rule.described(item)
            key = (rule.data["technique"], kind, item.group if item.group >= 0 else item)
            first, *_, count = found.get(key, (item, 0))
            if not count:
                found[key] = (item, rule, kind, detail, 1)
            else:
                found[key] = (first._replace(end=max(first.end, item.end)), *found[key][1:4], count + 1)
    findings = [_finding(source, *entry) for entry in found.values()]
    return _strongest([*findings, *_mentions(source)])


def _kind(item: Item, rule: Rule, source: Source) -> FindingKind:
    if item.function in source.dead or (item.kind in _DECLARING and not rule.finding):
        return "declaration"
    return cast(FindingKind, rule.finding or "use")


def _finding(source: Source, item: Item, rule: Rule, kind: FindingKind, detail: str, count: int) -> TechniqueFinding:
    line, column = source.lines.position(item.start)
    end_line, _ = source.lines.position(max(item.end - 1, item.start))
    if count > 1:
        detail = f"{detail} and {count - 1} more".strip()
    if item.function in source.dead and item.kind not in _DECLARING:
        detail = f"{detail}, in {item.function}, which nothing calls".strip(", ")
    snippet = source.lines.line(line).strip()[:_LONGEST_SNIPPET]
    return TechniqueFinding(
        rule.id, rule.version, rule.data["technique"], line, column, end_line, kind, snippet, detail
    )


def _mentions(source: Source) -> Iterator[TechniqueFinding]:
    """What comments and strings name."""
    items = [item for item in source.items if item.kind in ("comment", "string")]
    lines = [item.text[:_LONGEST_LINE].lower() for item in items]
    text = "\n".join(lines)
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    for technique in techniques().values():
        for at in _lines_with(technique.words, text, starts):
            for phrase in technique.phrases:
                if found := phrase.search(lines[at]):
                    line, column = source.lines.position(items[at].start + found.start())
                    snippet = source.lines.line(line).strip()[:_LONGEST_SNIPPET]
                    kind: FindingKind = "comment" if items[at].kind == "comment" else "string"
                    yield TechniqueFinding("prose", 1, technique.id, line, column, line, kind, snippet, found[0])
                    break


def _lines_with(words: Iterable[str], text: str, starts: list[int]) -> list[int]:
    """The lines of a text in which one of the words stands; `starts` ends with the text's length or more."""
    found = set()
    for word in words:
        at = text.find(word)
        while at >= 0:
            line = bisect_right(starts, at) - 1
            found.add(line)
            at = text.find(word, starts[line + 1])
    return sorted(found)


def _strongest(findings: Iterable[TechniqueFinding]) -> list[TechniqueFinding]:
    best: dict[tuple[str, int], TechniqueFinding] = {}
    for finding in sorted(findings, key=lambda f: (KINDS.index(f.kind), f.line, f.column)):
        best.setdefault((finding.technique, finding.line), finding)
    return sorted(best.values(), key=lambda finding: (finding.line, finding.column, finding.technique))
