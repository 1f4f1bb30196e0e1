"""The queries behind every page, its JSON twin, the API and the command line.

Each takes a Catalog and gives a document (documents.py). NotFoundError says that there is no such thing, NotShownError
that terms forbid to show it, QueryError that a filter or a cursor is none.
"""

from nibblas.index.catalog import Catalog
from nibblas.index.documents import Coverage, SourceLine
from nibblas.index.read.comparison import compare
from nibblas.index.read.dossier import file, implementation
from nibblas.index.read.hardware import device, hardware
from nibblas.index.read.limits import MOST_LIMIT
from nibblas.index.read.operations import cohorts, operation, operations, workloads
from nibblas.index.read.runs import STATUSES, run, runs
from nibblas.index.read.search import FACETS, MOST_TECHNIQUES, MOST_TEXT, search
from nibblas.index.read.techniques import technique, techniques

__all__ = [
    "FACETS",
    "MOST_LIMIT",
    "MOST_TECHNIQUES",
    "MOST_TEXT",
    "STATUSES",
    "cohorts",
    "compare",
    "coverage",
    "device",
    "file",
    "hardware",
    "implementation",
    "operation",
    "operations",
    "run",
    "runs",
    "search",
    "sources",
    "technique",
    "techniques",
    "workloads",
]


def sources(catalog: Catalog) -> tuple[SourceLine, ...]:
    """Every source and its terms, those with most implementations first."""
    return catalog.prepared.source_lines


def coverage(catalog: Catalog) -> Coverage:
    """How much there is."""
    return catalog.prepared.coverage
