"""The queries behind every page, its JSON twin, the API and the command line.

Each takes a Catalog and gives a document (documents.py). NotFound says that there is no such thing, BadQuery that a
filter or a cursor is none.
"""

from collections.abc import Collection

from nibblas.index.catalog import Catalog
from nibblas.index.documents import (
    Comparison,
    Coverage,
    Dossier,
    HardwareLine,
    HardwarePage,
    Include,
    OperationLine,
    OperationPage,
    Query,
    Results,
    RunFilter,
    RunPage,
    RunsPage,
    SourceLine,
    TechniqueLine,
    TechniquePage,
    WorkloadLine,
)


class NotFound(LookupError):
    """There is no such thing in the index."""


class BadQuery(ValueError):
    """A filter, a cursor or a limit that can't be meant."""


def search(catalog: Catalog, query: Query, facets: bool = True) -> Results:
    """One page of the implementations that a query selects."""
    raise NotImplementedError


def implementation(catalog: Catalog, name: str, include: Collection[Include] = ()) -> Dossier:
    """All that is known of the current revision of a slug, or of the revision with a digest.

    include: "source" gives texts where they may be shown, "samples" those of each run, "findings" each one of a
    technique, not only the first three.
    """
    raise NotImplementedError


def file(catalog: Catalog, name: str, path: str) -> bytes:
    """The raw bytes of a file of an implementation; NotShown, naming the terms, where they may not be handed on."""
    raise NotImplementedError


def operations(catalog: Catalog, family: str | None = None) -> tuple[OperationLine, ...]:
    """Every operation, those with most runs first."""
    raise NotImplementedError


def operation(
    catalog: Catalog, slug: str, workload: str | None = None, cohort: str | None = None, limit: int = 50
) -> OperationPage:
    """An operation with its cohorts, or those of one workload (a digest), or one alone (a key)."""
    raise NotImplementedError


def workloads(catalog: Catalog, operation: str | None = None) -> tuple[WorkloadLine, ...]:
    """Every workload, or those of an operation."""
    raise NotImplementedError


def runs(catalog: Catalog, wanted: RunFilter) -> RunsPage:
    """One page of the runs that a filter selects, newest first."""
    raise NotImplementedError


def run(catalog: Catalog, digest: str) -> RunPage:
    """All that is known of one run."""
    raise NotImplementedError


def techniques(catalog: Catalog) -> tuple[TechniqueLine, ...]:
    """Every technique that the rules know, those most used first."""
    raise NotImplementedError


def technique(catalog: Catalog, slug: str, query: Query | None = None) -> TechniquePage:
    """A technique, and one page of the implementations that use it."""
    raise NotImplementedError


def hardware(catalog: Catalog) -> tuple[HardwareLine, ...]:
    """Every device of the hardware table or of a run, those with most runs first."""
    raise NotImplementedError


def device(catalog: Catalog, slug: str, query: Query | None = None) -> HardwarePage:
    """A device, and one page of the implementations that run on it."""
    raise NotImplementedError


def compare(catalog: Catalog, a: str, b: str, include: Collection[Include] = ()) -> Comparison:
    """Two implementations side by side: times of the same cohorts, facts that differ."""
    raise NotImplementedError


def sources(catalog: Catalog) -> tuple[SourceLine, ...]:
    """Every source and its terms."""
    raise NotImplementedError


def coverage(catalog: Catalog) -> Coverage:
    """How much there is."""
    raise NotImplementedError
