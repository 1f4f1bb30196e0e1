"""Devices, their cohorts, and what runs on them."""

import json
from dataclasses import replace

from nibblas.index.catalog import Catalog
from nibblas.index.documents import HardwareLine, HardwarePage, NotFoundError, Query
from nibblas.index.names import device_slug
from nibblas.index.read.operations import MOST_COHORTS, cohort_tables
from nibblas.index.read.search import search


def hardware(catalog: Catalog) -> tuple[HardwareLine, ...]:
    """Every device that a run names, those with most runs first."""
    return tuple(catalog.prepared.hardware_lines.values())


def device(catalog: Catalog, slug: str, query: Query | None = None) -> HardwarePage:
    """A device with its cohorts, and one page of the implementations that run on it."""
    line = catalog.prepared.hardware_lines.get(device_slug(slug))
    if line is None:
        raise NotFoundError(f"no device has the slug or name {slug!r}")
    rows = catalog.all(
        "SELECT DISTINCT o.id, o.slug FROM json_each(?) wanted JOIN run r ON r.device = wanted.value"
        " JOIN operation o ON o.id = r.operation",
        json.dumps(catalog.prepared.devices.get(line.slug, ())),
    )
    names = set(catalog.prepared.devices.get(line.slug, ()))
    found = [
        ranked
        for key, operation in rows
        for ranked in catalog.prepared.cohorts(key, operation).values()
        if ranked.cohort.device in names
    ]
    found.sort(key=lambda ranked: (-len(ranked.places), ranked.key))
    tables = cohort_tables(catalog, found[:MOST_COHORTS], 10)
    results = search(catalog, replace(query or Query(), hardware=line.slug))
    return HardwarePage(line, {}, tables, len(found) - len(tables), results)
