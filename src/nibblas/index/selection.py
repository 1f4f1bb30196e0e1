"""Selecting among all current implementations, and counting what each facet would leave, in a millisecond or less.

An implementation has a position: its place in the order by evidence. A set of them is a whole number with one bit a
position, so that filters are `&` and counts are `bit_count`. The bits of a facet are read from the index when it is
first asked for, those of a word from its full-text index.
"""

import base64
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import groupby
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nibblas.index.documents import Query, QueryError
from nibblas.index.evidence_levels import NUMERICS, TIMING, Levels

if TYPE_CHECKING:
    from nibblas.index.catalog import Catalog

UNKNOWN = "unknown"
# Facets with one value an implementation, and the column that holds it.
COLUMNS = {
    "operation": "o.slug",
    "language": "i.language",
    "framework": "i.framework",
    "origin": "i.origin",
    "licence": "i.licence_concluded",
    "source": "s.kind",
}
KEPT_TERMS = 512  # each takes a bit an implementation
SHORTEST_PREFIX = 3
ID_BITS = 40


class Order(NamedTuple):
    """An order of all implementations: ascending keys, and the position that each belongs to."""

    keys: Sequence[Any]
    positions: np.ndarray


class Selection:
    """The current implementations of one state of an index, by row id, with their levels."""

    def __init__(self, catalog: "Catalog", levels: Mapping[int, Levels]):
        self._catalog = catalog
        ids = np.fromiter(levels, np.int64, len(levels))
        timing = np.fromiter((TIMING.index(of.timing) for of in levels.values()), np.int64, len(levels))
        numerics = np.fromiter((NUMERICS.index(of.numerics) for of in levels.values()), np.int64, len(levels))
        order = np.lexsort((-ids, -numerics, -timing))
        self.ids, self._timing, self._numerics = ids[order], timing[order], numerics[order]
        self._position = np.full(int(ids.max(initial=0)) + 1, -1, np.int64)
        self._position[self.ids] = np.arange(len(ids))
        self.all = (1 << len(ids)) - 1
        self._facets: dict[str, dict[str, int]] = {}
        self._orders: dict[str, Order] = {}
        self.term = lru_cache(KEPT_TERMS)(self._term)
        self.author = lru_cache(KEPT_TERMS)(self._author)

    def bits(self, ids: Iterable[int]) -> int:
        """The set of these row ids; those that are not current are left out."""
        found = np.fromiter(ids, np.int64)
        found = self._position[found[found < len(self._position)]]
        return self._of(found[found >= 0])

    def _of(self, positions: np.ndarray) -> int:
        flags = np.zeros(len(self.ids), bool)
        flags[positions] = True
        return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")

    def _positions(self, bits: int) -> np.ndarray:
        packed = np.frombuffer(bits.to_bytes((len(self.ids) + 7) // 8, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(packed, count=len(self.ids), bitorder="little"))

    def facet(self, name: str) -> dict[str, int]:
        """The values of a facet, those with most implementations first, and the set of each.

        A level's set holds those of a higher level too, a mention's those that use the technique.
        """
        if name not in self._facets:
            if name in COLUMNS:
                self._facets |= self._columns()
            elif name in ("uses", "mentions"):
                self._facets |= self._techniques()
            else:
                ladder, reached = (NUMERICS, self._numerics) if name == "numerics" else (TIMING, self._timing)
                self._facets[name] = {
                    level: self._of(np.flatnonzero(reached >= place)) for place, level in enumerate(ladder)
                }
        return self._facets[name]

    def _columns(self) -> dict[str, dict[str, int]]:
        found: dict[str, defaultdict[str, list[int]]] = {name: defaultdict(list) for name in COLUMNS}
        rows = self._catalog.all(
            f"SELECT i.id, {', '.join(COLUMNS.values())} FROM implementation i"
            " LEFT JOIN operation o ON o.id = i.operation JOIN source s ON s.id = i.source WHERE i.current"
        )
        for key, *values in rows:
            for by_value, value in zip(found.values(), values, strict=True):
                by_value[UNKNOWN if value is None else value].append(key)
        return {name: _largest_first({v: self.bits(ids) for v, ids in of.items()}) for name, of in found.items()}

    def _techniques(self) -> dict[str, dict[str, int]]:
        uses, mentions = {}, {}
        rows = self._catalog.all("SELECT technique, implementation, uses FROM implementation_technique ORDER BY 1")
        for technique, group in groupby(rows, key=lambda row: row[0]):
            found = list(group)
            mentions[technique] = self.bits(row[1] for row in found)
            uses[technique] = self.bits(row[1] for row in found if row[2])
        return {"uses": _largest_first(uses), "mentions": _largest_first(mentions)}

    def _author(self, name: str) -> int:
        rows = self._catalog.all(
            "SELECT ia.implementation FROM author a JOIN implementation_author ia ON ia.author = a.id WHERE a.name = ?",
            name,
        )
        return self.bits(row[0] for row in rows)

    def _term(self, word: str, prefix: bool) -> int:
        quoted = '"{}"'.format(word.replace('"', '""'))
        rows = self._catalog.all("SELECT rowid FROM search WHERE search MATCH ?", quoted + "*" * prefix)
        return self.bits(row[0] for row in rows)

    def text(self, text: str) -> int:
        """The set of those in which every word stands; the last may be the start of one."""
        found = self.all
        *whole, last = words(text) or [""]
        for word in whole:
            found &= self.term(word, False)
        return found & self.term(last, len(last) >= SHORTEST_PREFIX) if last else found

    def filters(self, query: Query) -> dict[str, int]:
        """The set that each filter of a query leaves, by the filter's name."""
        found = {
            name: self.facet(name).get(value, 0) for name in COLUMNS if (value := getattr(query, name)) is not None
        }
        for name in ("numerics", "timing"):
            if (level := getattr(query, name)) is not None:
                found[name] = self.facet(name)[level]
        for name in ("uses", "mentions"):
            if techniques := getattr(query, name):
                sets = (self.facet(name).get(technique, 0) for technique in techniques)
                found[name] = reduce(and_, sets)
        if query.author is not None:
            found["author"] = self.author(query.author)
        if query.text:
            found["text"] = self.text(query.text)
        return found

    def count(self, facet: str, within: int, keep: Iterable[str], most: int) -> tuple[list[tuple[str, int]], int]:
        """How many of a set have each value of a facet, and how many values were left out.

        The `most` frequent values are given, levels in their order, and those to keep however rare.
        """
        values = self.facet(facet)
        if facet in ("numerics", "timing"):
            return [(level, (within & bits).bit_count()) for level, bits in values.items() if level != "none"], 0
        found: list[tuple[int, str]] = []
        for value, bits in values.items():
            if len(found) >= most and bits.bit_count() <= found[-1][0]:
                break  # all that follow are rarer still
            found = sorted([*found, ((within & bits).bit_count(), value)], key=lambda counted: -counted[0])[:most]
        shown = {value: count for count, value in found if count}
        shown |= {value: (within & values[value]).bit_count() for value in keep if value in values}
        return list(shown.items()), len(values) - len(shown)

    def page(self, bits: int, query: Query) -> tuple[list[int], str | None]:
        """Row ids of one page of a set in the order that the query asks for, and where it ended if more follow."""
        order = self._order(query.sort)
        start = _after(order, query.sort, query.cursor) if query.cursor else 0
        flags = np.zeros(len(self.ids), bool)
        flags[self._positions(bits)] = True
        found = np.flatnonzero(flags[order.positions[start:]])[: query.limit + 1] + start
        ids = self.ids[order.positions[found[: query.limit]]].tolist()
        if len(found) <= query.limit:
            return ids, None
        return ids, _cursor(query.sort, order.keys[found[query.limit - 1]])

    def _order(self, sort: str) -> Order:
        if sort not in self._orders:
            self._orders[sort] = self._sorted(sort)
        return self._orders[sort]

    def _sorted(self, sort: str) -> Order:
        if sort == "name":
            rows = self._catalog.all("SELECT slug, id FROM implementation WHERE current ORDER BY slug")
            known = [(slug, self._position[key]) for slug, key in rows if key < len(self._position)]
            known = [(slug, position) for slug, position in known if position >= 0]
            return Order([slug for slug, _ in known], np.array([position for _, position in known], np.int64))
        if sort == "newest":
            positions = np.argsort(-self.ids)
            return Order((-self.ids[positions]).tolist(), positions)
        below = (len(TIMING) - self._timing) * len(NUMERICS) + len(NUMERICS) - self._numerics
        return Order(((below << ID_BITS) - self.ids).tolist(), np.arange(len(self.ids)))


def words(text: str) -> list[str]:
    """What a text asks for, without repetitions: pieces between spaces that hold a letter or a digit."""
    found = dict.fromkeys(word.lower() for word in text.replace("\0", " ").split() if any(map(str.isalnum, word)))
    return list(found)


def _largest_first(values: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(values.items(), key=lambda item: (-item[1].bit_count(), item[0])))


def _cursor(sort: str, key: int | str) -> str:
    return base64.urlsafe_b64encode(json.dumps([sort, key]).encode()).decode().rstrip("=")


def _after(order: Order, sort: str, cursor: str) -> int:
    """The first place after the one that a cursor names."""
    try:
        of, key = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError):
        of, key = None, None
    if of != sort or type(key) is not (str if sort == "name" else int):
        raise QueryError(f"cursor: {cursor!r} is none of a search sorted by {sort}")
    return bisect_right(order.keys, key)
