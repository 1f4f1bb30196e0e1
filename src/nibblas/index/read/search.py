"""Search: implementations by words and facts, and what each facet would leave."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from nibblas.index.catalog import Catalog
from nibblas.index.compatibility import Device, device_of
from nibblas.index.documents import Facet, FacetValue, Query, QueryError, Results
from nibblas.index.evidence_levels import NUMERICS, TIMING
from nibblas.index.lines import cards
from nibblas.index.names import technique_ref
from nibblas.index.prepared import Prepared
from nibblas.index.read.limits import check_limit
from nibblas.index.selection import size

FACETS = ("operation", "language", "framework", "uses", "timing", "numerics", "licence", "origin", "source")
MOST_VALUES = 12  # of a facet
KEPT_SEARCHES = 5000
MOST_WORDS = 32  # of a text
MOST_TEXT = 500  # characters
MOST_TECHNIQUES = 16


def search(catalog: Catalog, query: Query, facets: bool = True) -> Results:
    """One page of the implementations that a query selects, with what each facet would leave."""
    _check(query)
    prepared = catalog.prepared
    filters = prepared.selection.filters(query)
    if query.hardware is not None:
        filters["hardware"] = prepared.answers[known_device(prepared, query.hardware).slug][query.answer]
    found = prepared.selection.both(filters.values())
    ids, following = prepared.selection.page(found, query)
    counted = _facets(prepared, query, filters, found) if facets else ()
    return Results(query, int(size(found)), cards(catalog, ids), following, counted)


def known_device(prepared: Prepared, name: str) -> Device:
    """A device by its slug or a name; QueryError where it is neither in the hardware table nor in any run."""
    found = device_of(prepared.devices, name)
    if found is None:
        raise QueryError(f"hardware: {name!r} is neither in the hardware table nor in any run")
    return found


def _check(query: Query) -> None:
    check_limit(query.limit)
    rules = {
        f"sort: {query.sort!r}, need evidence, newest or name": query.sort in ("evidence", "newest", "name"),
        f"numerics: {query.numerics!r}, need one of {', '.join(NUMERICS)}": query.numerics in (None, *NUMERICS),
        f"timing: {query.timing!r}, need one of {', '.join(TIMING)}": query.timing in (None, *TIMING),
        f"answer: {query.answer!r}, need yes, no or unknown": query.answer in ("yes", "no", "unknown"),
        f"text: more than {MOST_TEXT} characters": len(query.text) <= MOST_TEXT,
        f"text: more than {MOST_WORDS} words": len(query.text.split()) <= MOST_WORDS,
        f"techniques: more than {MOST_TECHNIQUES}": len(query.uses) + len(query.mentions) <= MOST_TECHNIQUES,
    }
    for rule, holds in rules.items():
        if not holds:
            raise QueryError(rule)


def _facets(
    prepared: Prepared, query: Query, filters: Mapping[str, np.ndarray], found: np.ndarray
) -> tuple[Facet, ...]:
    """The facets of a search, which are the same on each of its pages."""
    any_page = replace(query, sort="evidence", cursor=None, limit=1)
    if any_page not in prepared.facets:
        if len(prepared.facets) > KEPT_SEARCHES:
            prepared.facets.clear()
        prepared.facets[any_page] = tuple(_facet(prepared, name, query, filters, found) for name in FACETS)
    return prepared.facets[any_page]


def _facet(prepared: Prepared, name: str, query: Query, filters: Mapping[str, np.ndarray], found: np.ndarray) -> Facet:
    """A facet with one value at a time is counted as if it were not chosen; `uses` adds to what is chosen."""
    selection = prepared.selection
    if name in filters and name != "uses":
        found = selection.both(others for filter_name, others in filters.items() if filter_name != name)
    chosen = getattr(query, name)
    kept = chosen if isinstance(chosen, tuple) else () if chosen is None else (chosen,)
    counts, more = selection.count(name, found, kept, MOST_VALUES)
    values = tuple(FacetValue(value, _label(prepared, name, value), count, value in kept) for value, count in counts)
    return Facet(name, values, more)


def _label(prepared: Prepared, facet: str, value: str) -> str:
    if facet == "operation":
        return prepared.operation_names.get(value, value)
    return technique_ref(value).name if facet == "uses" else value
