"""Devices, their cohorts, and what runs on them."""

import json
from dataclasses import asdict, replace

from nibblas.index import compat
from nibblas.index.catalog import Catalog
from nibblas.index.compatibility import device_of
from nibblas.index.documents import HardwareLine, HardwarePage, NotFoundError, Query
from nibblas.index.read.operations import MOST_COHORTS, cohort_tables
from nibblas.index.read.search import search

SHOWN_RUNS = 10  # of each cohort


def hardware(catalog: Catalog) -> tuple[HardwareLine, ...]:
    """Every device of the hardware table or of a run, those with most runs first."""
    return tuple(catalog.prepared.hardware_lines.values())


def device(catalog: Catalog, slug: str, query: Query | None = None) -> HardwarePage:
    """A device with its cohorts, and one page of the implementations that run on it; the query says which answer."""
    prepared = catalog.prepared
    found = device_of(prepared.devices, slug)
    if found is None:
        raise NotFoundError(f"no device has the slug or name {slug!r}")
    rows = catalog.all(
        "SELECT DISTINCT o.id, o.slug FROM json_each(?) wanted JOIN run r ON r.device = wanted.value"
        " JOIN operation o ON o.id = r.operation",
        json.dumps(found.names),
    )
    cohorts = [
        ranked
        for key, operation in rows
        for ranked in prepared.cohorts(key, operation).values()
        if ranked.cohort.device in found.names
    ]
    cohorts.sort(key=lambda ranked: (-len(ranked.places), ranked.key))
    tables = cohort_tables(catalog, cohorts[:MOST_COHORTS], SHOWN_RUNS)
    architecture = compat.architectures().get(found.hardware.arch)
    facts = {
        "listed": found.listed,
        "names": found.names,
        "source": found.hardware.source,
        "architecture": asdict(architecture) if architecture else None,
    }
    results = search(catalog, replace(query or Query(), hardware=found.slug))
    return HardwarePage(prepared.hardware_lines[found.slug], facts, tables, len(cohorts) - len(tables), results)
