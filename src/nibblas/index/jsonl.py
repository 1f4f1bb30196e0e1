"""Every record as JSON lines, without the text of sources, and lines of it where they may not be shown."""

from collections.abc import Iterator

from nibblas.index.catalog import Catalog
from nibblas.index.documents import to_json
from nibblas.index.lines import shown_claims
from nibblas.index.model import Operation, Workload
from nibblas.index.store import Store, made


def lines(catalog: Catalog) -> Iterator[str]:
    """One object a line, each with its kind, of one state of the index: operations, workloads, implementations with

    their runs, facts and claims in the order in which they came, then events.
    """
    with Store.open(catalog.path, read_only=True) as store:
        connection = store.connection
        connection.execute("BEGIN")
        operations = {}
        for row in connection.execute("SELECT * FROM operation ORDER BY id"):
            operations[row["id"]] = made(Operation, row)
            yield _line("operation", row["digest"], operations[row["id"]])
        for row in connection.execute("SELECT * FROM workload ORDER BY id"):
            yield _line("workload", row["digest"], made(Workload, row, operation=operations[row["operation"]]))
        for digest, may_show in connection.execute("SELECT digest, may_show FROM implementation ORDER BY id"):
            claims = shown_claims(store.claims(digest), may_show)
            parts = {"runs": store.runs(digest), "facts": store.facts(digest), "claims": claims}
            yield _line("implementation", digest, store.implementation(digest), **parts)
        for event in store.events():
            yield _line("event", None, event)


def _line(kind: str, digest: str | None, record: object, **parts: object) -> str:
    return to_json({"kind": kind, "digest": digest, "record": record, **parts}) + "\n"
