"""Rules as data: which items of a source mean what. They lie in rules/, each with examples that a test runs.

A rule's `match` must match all of an item's text, or all that follows its last dot or `::`; `value` must match all of
the item's value, and `unless` must not. Both see blank space as single blanks. An item of one kind is looked up among
the rules `on` that kind.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from nibblas.index.items import Item

FOLDER = Path(__file__).parent / "rules"
_NAMES = frozenset(
    ("call", "keyword", "decorator", "definition", "binding", "alias", "type", "name", "pointer", "specifier")
)
_LONGEST_NAME = 200
_C = frozenset(("cuda", "hip", "c++"))
_GROUP_NAME = re.compile(r"\(\?P<\w+>")


@dataclass(frozen=True)
class Technique:
    """Something that kernels do, as a reader of their source would call it.

    `prose` holds the phrases by which comments and strings name it: regular expressions for lower case text. One of
    `words` stands in whatever they match, so that a text without them need not be searched. `sass` matches the begin of
    the machine instructions of NVIDIA's devices that it comes down to, where there are such.
    """

    id: str
    name: str
    about: str
    words: tuple[str, ...]
    prose: tuple[str, ...]
    sass: str = ""

    @cached_property
    def phrases(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(phrase) for phrase in self.prose)


@dataclass(frozen=True)
class Rule:
    """What makes an item a finding.

    Parameters
    ----------
    id, version : the version rises with every change of what the rule finds.
    languages : of the items it looks at; "c++" stands for CUDA and HIP too.
    on : kinds of item.
    match, value, unless : regular expressions, see above; value and unless may be left out.
    detail : what sets this finding apart, with {text}, {value} and the named groups of match.
    finding : the kind of finding where it isn't the one that the kind of item gives.
    hits, misses : sources in which the rule finds a use, and sources in which it finds none.
    data : what else the rule says, for those who use it.
    """

    id: str
    version: int
    languages: tuple[str, ...]
    on: tuple[str, ...]
    match: re.Pattern[str]
    value: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None
    detail: str = ""
    finding: str = ""
    hits: tuple[str, ...] = ()
    misses: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Rule":
        """A rule from its table in TOML; ValueError where something in it isn't right."""
        rest = dict(table)
        try:
            own = {name: rest.pop(name) for name in cls.__dataclass_fields__ if name in rest}
            for name in ("match", "value", "unless"):
                if name in own:
                    own[name] = re.compile(own[name], re.DOTALL)
            for name in ("languages", "on", "hits", "misses"):
                own[name] = tuple(own.get(name, ()))
            return cls(**own, data=rest)
        except (TypeError, re.error) as error:
            raise ValueError(f"rule {table.get('id', table)}: {error}") from None

    def reads(self, language: str) -> bool:
        return language in self.languages or (language in _C and "c++" in self.languages)

    def matched(self, text: str) -> re.Match[str] | None:
        """The match of an item's text, whole or by its last part."""
        last = last_part(text)
        return self.match.fullmatch(text) or (self.match.fullmatch(last) if last is not text else None)

    def accepts(self, item: Item) -> bool:
        """Whether an item whose text matches has the value that the rule asks for."""
        if self.value is None and self.unless is None:
            return True
        value = " ".join(item.value.split())
        return (self.value is None or self.value.fullmatch(value) is not None) and (
            self.unless is None or self.unless.fullmatch(value) is None
        )

    def described(self, item: Item) -> str:
        """The detail of a finding."""
        found = self.matched(item.text)
        groups = {name: group or "" for name, group in found.groupdict().items()} if found else {}
        return self.detail.format(text=item.text, value=" ".join(item.value.split()), **groups)


def last_part(name: str) -> str:
    """What follows the last dot or `::` of a name."""
    return name.rpartition("::")[2].rpartition(".")[2] or name


@cache
def tables(kind: str) -> tuple[dict[str, Any], ...]:
    """All tables of a name in the files of rules/, in the order of the files' names."""
    found: list[dict[str, Any]] = []
    for path in sorted(FOLDER.glob("*.toml")):
        found += tomllib.loads(path.read_text()).get(kind, [])
    return tuple(found)


@cache
def techniques() -> dict[str, Technique]:
    """Every technique by its id."""
    found = [
        Technique(**{**table, "words": tuple(table["words"]), "prose": tuple(table["prose"])})
        for table in tables("technique")
    ]
    return {technique.id: technique for technique in found}


@cache
def rules(kind: str) -> tuple[Rule, ...]:
    """The rules of a kind: "rule" for techniques, "requirement" for what a source needs."""
    return tuple(Rule.of(table) for table in tables(kind))


@cache
def _by_kind(kind: str) -> dict[str, tuple[Rule, ...]]:
    found = defaultdict(list)
    for rule in rules(kind):
        for on in rule.on:
            found[on].append(rule)
    return {on: tuple(rules) for on, rules in found.items()}


@lru_cache(maxsize=1 << 14)
def _matching(kind: str, on: str, language: str, text: str) -> tuple[Rule, ...]:
    return tuple(rule for rule in _by_kind(kind).get(on, ()) if rule.reads(language) and rule.matched(text))


def matching(kind: str, item: Item) -> list[Rule]:
    """The rules of a kind that an item fulfils."""
    found = _matching(kind, item.kind, item.language, item.text)
    return [rule for rule in found if rule.accepts(item)] if found else []


@cache
def _any_name() -> re.Pattern[str]:
    """What matches every name that some rule matches."""
    patterns = {
        _GROUP_NAME.sub("(?:", rule.match.pattern)
        for kind in ("rule", "requirement")
        for rule in rules(kind)
        if not _NAMES.isdisjoint(rule.on)
    }
    return re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns)))


@cache
def interesting() -> re.Pattern[str]:
    """What is found in every name, in lower case, that some rule matches, and in few others."""
    return re.compile("|".join(tomllib.loads((FOLDER / "names.toml").read_text())["interesting"]))


@lru_cache(maxsize=1 << 16)
def wanted(name: str) -> bool:
    """Whether any rule can have a use for a name."""
    if len(name) > _LONGEST_NAME or not interesting().search(name.lower()):
        return False
    return bool(_any_name().fullmatch(name) or _any_name().fullmatch(last_part(name)))
