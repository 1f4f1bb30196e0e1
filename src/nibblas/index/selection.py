"""Selecting among all current implementations, and counting what each facet would leave, in a millisecond or less.

An implementation has a position: its place in the order by evidence. A set of them is an array of 64-bit words with one
bit a position, so that a filter is one `&` and a count one pass over a few kilobytes. The sets of a facet are read from
the index when it is first asked for, those of a word from its full-text index.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nibblas.index import cursor
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
LADDERS = {"numerics": NUMERICS, "timing": TIMING}
KEPT_TERMS = 512  # each takes a bit an implementation
SHORTEST_PREFIX = 3
ID_BITS = 40
STRETCH = 8192  # positions that are looked at for a page at a time
STRETCH_OF_VALUES = 16


@dataclass(frozen=True)
class Sets:
    """The values of a facet, those with most implementations first, and the set of each: a row of `words`."""

    places: dict[str, int]
    sizes: Sequence[int]
    words: np.ndarray

    def __getitem__(self, value: str) -> np.ndarray:
        """The set of a value; of an unknown one it is empty."""
        place = self.places.get(value)
        return self.words[place] if place is not None else np.zeros(self.words.shape[1], np.uint64)

    def size(self, value: str) -> int:
        """How many implementations have a value."""
        return self.sizes[self.places[value]] if value in self.places else 0

    def counts(self, within: np.ndarray, start: int, stop: int) -> list[int]:
        """How many of a set have each of the values in these places."""
        return size(self.words[start:stop] & within).tolist()


def size(words: np.ndarray) -> np.ndarray:
    """How many are in a set, or in each of several."""
    return np.bitwise_count(words).sum(axis=-1, dtype=np.uint32)


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
        self.all = self._of(np.arange(len(ids)))
        self._facets: dict[str, Sets] = {}
        self._orders: dict[str, Order] = {}
        self.term = lru_cache(KEPT_TERMS)(self._term)
        self.author = lru_cache(KEPT_TERMS)(self._author)

    def _of(self, positions: np.ndarray) -> np.ndarray:
        flags = np.zeros(-len(self.ids) % 64 + len(self.ids), bool)
        flags[positions] = True
        return np.packbits(flags).view(np.uint64)

    def _set(self, ids: str | None) -> np.ndarray:
        """Row ids, as SQLite's group_concat gives them, as a set; those that are not current are left out."""
        found = np.fromstring(ids or "", np.int64, sep=",")
        positions = self._position[found[found < len(self._position)]]
        return self._of(positions[positions >= 0])

    def sets(self, ids: Mapping[str, Sequence[int]]) -> Sets:
        """Sets of row ids by value, in the order of the values."""
        return self._sets({value: self._set(",".join(map(str, of))) for value, of in ids.items()})

    def _sets(self, found: Mapping[str, np.ndarray]) -> Sets:
        words = np.array(list(found.values()), np.uint64).reshape(len(found), len(self.all))
        return Sets({value: place for place, value in enumerate(found)}, size(words).tolist(), words)

    def facet(self, name: str) -> Sets:
        """The values of a facet. A level's set holds those of a higher level, a mention's those that use it."""
        if name not in self._facets:
            found = self._read(name)
            if name not in LADDERS:
                sizes = {value: int(size(words)) for value, words in found.items()}
                found = dict(sorted(found.items(), key=lambda item: (-sizes[item[0]], item[0])))
            self._facets[name] = self._sets(found)
        return self._facets[name]

    def _read(self, name: str) -> dict[str, np.ndarray]:
        if name in LADDERS:
            reached = self._numerics if name == "numerics" else self._timing
            return {level: self._of(np.flatnonzero(reached >= place)) for place, level in enumerate(LADDERS[name])}
        if name in COLUMNS:
            rows = self._catalog.all(
                f"SELECT {COLUMNS[name]}, group_concat(i.id) FROM implementation i"
                " LEFT JOIN operation o ON o.id = i.operation JOIN source s ON s.id = i.source"
                " WHERE i.current GROUP BY 1"
            )
        else:
            used = "WHERE uses" if name == "uses" else ""
            rows = self._catalog.all(
                f"SELECT technique, group_concat(implementation) FROM implementation_technique {used} GROUP BY 1"
            )
        return {UNKNOWN if value is None else value: self._set(ids) for value, ids in rows}

    def _author(self, name: str) -> np.ndarray:
        row = self._catalog.one(
            "SELECT group_concat(ia.implementation) FROM author a"
            " JOIN implementation_author ia ON ia.author = a.id WHERE a.name = ?",
            name,
        )
        return self._set(row[0] if row else None)

    def _term(self, word: str, prefix: bool) -> np.ndarray:
        quoted = '"{}"'.format(word.replace('"', '""'))
        row = self._catalog.one("SELECT group_concat(rowid) FROM search WHERE search MATCH ?", quoted + "*" * prefix)
        return self._set(row[0] if row else None)

    def _text(self, text: str) -> np.ndarray:
        """The set of those in which every word stands; the last may be the start of one."""
        *whole, last = words(text) or [""]
        found = self.all
        for word in whole:
            found = found & self.term(word, False)
        return found & self.term(last, len(last) >= SHORTEST_PREFIX) if last else found

    def filters(self, query: Query) -> dict[str, np.ndarray]:
        """The set that each filter of a query leaves, by the filter's name."""
        found = {}
        for name in (*COLUMNS, *LADDERS):
            if (value := getattr(query, name)) is not None:
                found[name] = self.facet(name)[value]
        for name in ("uses", "mentions"):
            if techniques := getattr(query, name):
                found[name] = reduce(and_, (self.facet(name)[technique] for technique in techniques))
        if query.author is not None:
            found["author"] = self.author(query.author)
        if query.text:
            found["text"] = self._text(query.text)
        return found

    def both(self, sets: Iterable[np.ndarray]) -> np.ndarray:
        """What is in all of some sets."""
        return reduce(and_, sets, self.all)

    def count(
        self, facet: str, within: np.ndarray, keep: Iterable[str], most: int
    ) -> tuple[list[tuple[str, int]], int]:
        """How many of a set have each value of a facet, and how many values were left out.

        The `most` frequent values are given, levels in their order, and those to keep however rare.
        """
        sets = self.facet(facet)
        values = list(sets.places)
        if facet in LADDERS:
            return list(zip(values, sets.counts(within, 0, len(values)), strict=True))[1:], 0
        found: list[tuple[str, int]] = []
        start = 0
        # Sizes descend, so what follows can't be more frequent than its own size.
        while start < len(values) and (len(found) < most or sets.sizes[start] > found[-1][1]):
            counts = sets.counts(within, start, start + STRETCH_OF_VALUES)
            found += zip(values[start:], counts, strict=False)
            found = sorted(found, key=lambda counted: -counted[1])[:most]
            start += STRETCH_OF_VALUES
        shown = {value: count for value, count in found if count}
        shown |= {value: int(size(sets[value] & within)) for value in keep if value in sets.places}
        return list(shown.items()), len(values) - len(shown)

    def page(self, found: np.ndarray, query: Query) -> tuple[list[int], str | None]:
        """Row ids of one page of a set in the order that the query asks for, and where it ended if more follow."""
        order = self._order(query.sort)
        start = _after(order, query.sort, query.cursor) if query.cursor else 0
        flags = np.unpackbits(found.view(np.uint8), count=len(self.ids))
        places: list[int] = []
        while start < len(order.keys) and len(places) <= query.limit:
            stretch = order.positions[start : start + STRETCH]
            places += (np.flatnonzero(flags[stretch]) + start).tolist()
            start += STRETCH
        shown = places[: query.limit]
        ids = self.ids[order.positions[shown]].tolist()
        return ids, cursor.encode(query.sort, order.keys[shown[-1]]) if len(places) > query.limit else None

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


def _after(order: Order, sort: str, text: str) -> int:
    """The first place after the one that a cursor names."""
    of, key = cursor.decode(text, 2)
    if of != sort or type(key) is not (str if sort == "name" else int):
        raise QueryError(f"cursor: {text!r} is none of a search sorted by {sort}")
    return bisect_right(order.keys, key)
