"""The index over HTTP, read only: /api/v1, and the pages beside it.

The reads that KernelIndex's public API has too answer in its shapes (kernelindex.py), with what this index says beside
under "nibblas"; the others answer with their document. ETags are digests of the answer. Errors have one shape.
"""

from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import anyio.to_thread
from fastapi import Body, FastAPI, Request
from fastapi import Path as InPath
from fastapi import Query as InQuery
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response, StreamingResponse

from nibblas import __version__
from nibblas.index import jsonl, kept, kernelindex, read
from nibblas.index import kernelindex_shapes as shapes
from nibblas.index.catalog import Catalog
from nibblas.index.documents import (
    Answer,
    CohortTable,
    Comparison,
    HardwarePage,
    Include,
    NotFoundError,
    NotShownError,
    Query,
    QueryError,
    Results,
    RunFilter,
    RunsPage,
    TechniqueLine,
    TechniquePage,
    WorkloadLine,
    to_json,
)
from nibblas.index.evidence_levels import Numerics, Timing
from nibblas.index.guard import LOOPBACK, Guard, problem, refuse_unknown
from nibblas.index.model import Origin, RunStatus
from nibblas.index.store import StoreError
from nibblas.index.web import mount_pages

API = "/api/v1"
LISTED = 100  # results of a search in KernelIndex's shape
# So many threads of a process work at a time: more would only wait for each other.
THREADS = 2

Name = Annotated[str, InPath(max_length=200)]
Text = Annotated[str | None, InQuery(max_length=200)]
Limit = Annotated[int, InQuery(ge=1, le=read.MOST_LIMIT)]
Cursor = Annotated[str | None, InQuery(max_length=500)]
Word = Annotated[str | None, Field(max_length=200)]
Status = Literal[RunStatus, shapes.Status]


class Asked(BaseModel):
    """A search: the fields of Query, with the words as q."""

    q: Annotated[str, Field(max_length=read.MOST_TEXT)] = ""
    operation: Word = None
    language: Word = None
    framework: Word = None
    uses: Annotated[tuple[str, ...], Field(max_length=read.MOST_TECHNIQUES)] = ()
    mentions: Annotated[tuple[str, ...], Field(max_length=read.MOST_TECHNIQUES)] = ()
    hardware: Word = None
    answer: Answer = "yes"
    licence: Word = None
    numerics: Numerics | None = None
    timing: Timing | None = None
    author: Word = None
    source: Word = None
    origin: Origin | None = None
    sort: Literal["evidence", "newest", "name"] = "evidence"
    cursor: Annotated[str | None, Field(max_length=500)] = None
    limit: Annotated[int, Field(ge=1, le=read.MOST_LIMIT)] = 20

    @classmethod
    def of(cls, given: QueryParams) -> "Asked":
        """What an address asks for. FastAPI's own reading of so many parameters takes longer than the search."""
        several = ("uses", "mentions")
        try:
            return cls.model_validate({name: given.getlist(name) if name in several else given[name] for name in given})
        except ValidationError as error:
            raise RequestValidationError([{**one, "loc": ("query", *one["loc"])} for one in error.errors()]) from None

    @classmethod
    def parameters(cls) -> list[dict[str, Any]]:
        """The fields as OpenAPI describes parameters."""
        fields = cls.model_json_schema()["properties"]
        return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()]

    def query(self) -> Query:
        """The same as a Query."""
        return Query(text=self.q, **{name: value for name, value in self if name != "q"})


class Runs(BaseModel):
    """The runs to compare."""

    runs: Annotated[list[Annotated[str, Field(max_length=200)]], Field(min_length=2, max_length=8)]


class _Read(APIRoute):
    """A route that takes the parameters that its OpenAPI description names, and no others."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        described = (self.openapi_extra or {}).get("parameters", ())
        known = (*(one["name"] for one in described), *(one.alias for one in self.dependant.query_params))

        async def checked(request: Request) -> Response:
            if self.include_in_schema:
                refuse_unknown(request.query_params, known)
            return await handle(request)

        return checked


def create_app(path: str | Path, hosts: Collection[str] = LOOPBACK) -> FastAPI:
    """The application that serves the index in a file.

    hosts: names by which it may be called; a request for another is refused. Raises StoreError where there is no index.
    """
    catalog = Catalog(path)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        yield
        catalog.close()

    app = FastAPI(
        title="nibblas index",
        version=__version__,
        summary="Which kernel is there for this, does it run on my card, who measured it, may I use it.",
        openapi_url=f"{API}/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.router.route_class = _Read
    app.state.catalog = catalog
    _add_errors(app)
    answers = kept.Kept(catalog)
    _add_reads(app, catalog, answers)
    mount_pages(app, catalog, answers)
    app.add_middleware(kept.Recall, answers=answers)
    app.add_middleware(Guard, router=app.router, hosts=hosts)
    return app


def _add_errors(app: FastAPI) -> None:
    known: dict[type[Exception], tuple[int, str]] = {
        QueryError: (400, "BAD_QUERY"),
        NotShownError: (403, "SOURCE_NOT_SHOWN"),
        NotFoundError: (404, "NOT_FOUND"),
        StoreError: (503, "INDEX_UNREADABLE"),
    }

    def by_kind(status: int, code: str) -> Callable[[Request, Exception], Response]:
        return lambda request, error: problem(status, code, str(error))

    for kind, (status, code) in known.items():
        app.add_exception_handler(kind, by_kind(status, code))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return problem(422, "INVALID_REQUEST", "; ".join(found))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        status = HTTPStatus(error.status_code)
        detail = f"{request.method} {request.url.path}: {error.detail}"
        return problem(status, status.name, detail, _allowed(error.headers))


def _allowed(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of a refusal; what takes GET takes HEAD and OPTIONS too."""
    found = dict(headers or {})
    if "GET" in found.get("Allow", ""):
        found["Allow"] += ", HEAD, OPTIONS"
    return found


def _include(value: str | None) -> set[Include]:
    """The parts that a comma-separated text asks for; KernelIndex's clients know "source" alone."""
    found = {part.strip() for part in (value or "").split(",")} - {""}
    if unknown := sorted(found - set(get_args(Include))):
        raise QueryError(f"include: {', '.join(unknown)}; need {', '.join(get_args(Include))}")
    return found  # type: ignore[return-value]


def _add_reads(app: FastAPI, catalog: Catalog, answers: kept.Kept) -> None:
    def at() -> str:
        return catalog.prepared.updated_at

    def answer(request: Request, make: Callable[[], Any]) -> Response:
        return answers.answer(request, lambda: to_json(make()))

    @app.get(
        f"{API}/implementations",
        response_model=Results,
        tags=["implementations"],
        openapi_extra={"parameters": Asked.parameters()},
    )
    def implementations(request: Request) -> Response:
        """Search by words and facts; each facet says how many results each of its values would leave."""
        query = Asked.of(request.query_params).query()
        return answer(request, lambda: read.search(catalog, query))

    @app.get(f"{API}/implementations/{{name}}", response_model=shapes.ImplementationDossier, tags=["implementations"])
    def implementation(
        request: Request,
        name: Name,
        include: Annotated[str | None, InQuery(max_length=100, description="source, samples, findings")] = None,
    ) -> Response:
        """All that is known of an implementation, by slug, or of one revision, by digest."""
        wanted = _include(include)

        def make() -> shapes.ImplementationDossier:
            found = read.implementation(catalog, name, wanted)
            address = None
            if found.licence.shown and found.files:
                address = app.url_path_for("source", name=found.digest, path=found.files[0].path)
            return kernelindex.implementation(found, address, "source" in wanted)

        return answer(request, make)

    @app.get(f"{API}/implementations/{{name}}/files/{{path:path}}", tags=["implementations"])
    def source(request: Request, name: Name, path: Annotated[str, InPath(max_length=1000)]) -> Response:
        """The bytes of a source file: the ETag holds their sha256. 403 where its terms don't allow that."""
        found, raw = read.file(catalog, name, path)
        return kept.conditional(request, kept.Body(raw, "text/plain", f'"sha256:{found.sha256}"'))

    @app.get(f"{API}/search", response_model=shapes.Search, tags=["KernelIndex"])
    def search(
        request: Request, q: Annotated[str, InQuery(max_length=read.MOST_TEXT)] = "", cohort: Text = None
    ) -> Response:
        """Search by words: the ranks of the operation that all results belong to, or the operations to choose from."""

        def make() -> shapes.Search:
            found = read.search(catalog, Query(text=q, limit=LISTED))
            lines = catalog.prepared.operation_lines
            facet = next(facet for facet in found.facets if facet.name == "operation")
            operations = [(value, lines[value.value]) for value in facet.values if value.value in lines]
            tables: tuple[CohortTable, ...] = ()
            chosen = None
            if len(operations) == 1:
                tables, chosen = read.cohorts(catalog, operations[0][0].value, None, cohort, LISTED)
            return kernelindex.search(q, found, operations, tables, chosen, at())

        return answer(request, make)

    @app.get(f"{API}/operations", response_model=shapes.Operations, tags=["operations"])
    def operations(request: Request, family: Text = None, tag: Text = None) -> Response:
        """Every operation, or those of a family. No operation has a tag."""
        return answer(request, lambda: kernelindex.operations(() if tag else read.operations(catalog, family), at()))

    @app.get(f"{API}/operations/{{name}}", response_model=shapes.OperationDossier, tags=["operations"])
    def operation(
        request: Request, name: Name, workload: Text = None, cohort: Text = None, limit: Limit = 50
    ) -> Response:
        """An operation with its cohorts, and the ranks of one."""

        def make() -> shapes.OperationDossier:
            found = read.operation(catalog, name, workload, cohort, limit)
            tables, chosen = read.cohorts(catalog, found.operation.slug, workload, cohort, limit)
            selected = chosen.workload.slug if chosen and chosen.workload else workload
            return kernelindex.operation(found, selected, tables, chosen)

        return answer(request, make)

    @app.get(f"{API}/workloads", response_model=list[WorkloadLine], tags=["operations"])
    def workloads(request: Request, operation: Text = None) -> Response:
        """Every workload, or those of an operation."""
        return answer(request, lambda: read.workloads(catalog, operation))

    @app.get(f"{API}/runs", response_model=shapes.Runs, tags=["runs"])
    def runs(
        request: Request,
        operation: Text = None,
        hardware: Text = None,
        source: Text = None,
        status: Status | None = None,
        since: Annotated[str | None, InQuery(max_length=50)] = None,
        cursor: Cursor = None,
        limit: Limit = 50,
    ) -> Response:
        """Runs, newest first; those that passed unless a status is named."""
        ours = kernelindex.OURS.get(status, status) if status else None
        wanted = RunFilter(operation, hardware, source, ours, since, cursor, limit)

        def make() -> shapes.Runs:
            known = ours is None or ours in read.STATUSES
            return kernelindex.runs(read.runs(catalog, wanted) if known else RunsPage(wanted, (), None), at())

        return answer(request, make)

    @app.get(f"{API}/runs/{{digest}}", response_model=shapes.RunDossier, tags=["runs"])
    def run(request: Request, digest: Name) -> Response:
        """All that is known of a run."""
        return answer(request, lambda: kernelindex.run(read.run(catalog, digest)))

    @app.get(f"{API}/compare", response_model=Comparison, tags=["compare"])
    def compare(
        request: Request,
        a: Annotated[str, InQuery(max_length=200)],
        b: Annotated[str, InQuery(max_length=200)],
        include: Annotated[str | None, InQuery(max_length=100, description="source")] = None,
    ) -> Response:
        """Two implementations side by side: times of the same cohorts, or why there are none; facts that differ."""
        wanted = _include(include)
        return answer(request, lambda: read.compare(catalog, a, b, wanted))

    @app.post(f"{API}/compare", response_model=shapes.RunComparison, tags=["KernelIndex"])
    def compare_runs(wanted: Annotated[Runs, Body()]) -> Response:
        """Two to eight runs side by side. Nothing is stored."""
        pages, missing = [], []
        for digest in dict.fromkeys(wanted.runs):
            try:
                pages.append(read.run(catalog, digest))
            except NotFoundError:
                missing.append(digest)
        return Response(to_json(kernelindex.compare(pages, missing)), media_type="application/json")

    @app.get(f"{API}/techniques", response_model=list[TechniqueLine], tags=["techniques"])
    def techniques(request: Request) -> Response:
        """Every technique."""
        return answer(request, lambda: read.techniques(catalog))

    @app.get(f"{API}/techniques/{{slug}}", response_model=TechniquePage, tags=["techniques"])
    def technique(request: Request, slug: Name, cursor: Cursor = None, limit: Limit = 20) -> Response:
        """A technique, what uses it, and lines that show it."""
        return answer(request, lambda: read.technique(catalog, slug, Query(cursor=cursor, limit=limit)))

    @app.get(f"{API}/hardware", response_model=shapes.HardwareList, tags=["hardware"])
    def hardware(request: Request) -> Response:
        """Every device."""
        return answer(request, lambda: kernelindex.hardware(read.hardware(catalog), at()))

    @app.get(f"{API}/hardware/{{slug}}", response_model=HardwarePage, tags=["hardware"])
    def device(
        request: Request,
        slug: Name,
        answered: Annotated[Answer, InQuery(alias="answer")] = "yes",
        cursor: Cursor = None,
        limit: Limit = 20,
    ) -> Response:
        """A device, its cohorts, and what runs on it."""
        query = Query(answer=answered, cursor=cursor, limit=limit)
        return answer(request, lambda: read.device(catalog, slug, query))

    @app.get(f"{API}/sources", response_model=shapes.Sources, tags=["sources"])
    def sources(request: Request) -> Response:
        """Every source and its terms."""
        return answer(request, lambda: kernelindex.sources(read.sources(catalog), at()))

    @app.get(f"{API}/coverage", response_model=shapes.CoverageFacts, tags=["sources"])
    def coverage(request: Request) -> Response:
        """How much there is."""
        return answer(request, lambda: kernelindex.coverage(read.coverage(catalog)))

    @app.get(f"{API}/exports/catalog.jsonl", tags=["export"])
    def export(request: Request) -> Response:
        """Every record, without the text of sources, one object a line, streamed."""
        lines = () if request.scope.get("nibblas.head") else jsonl.lines(catalog)
        return StreamingResponse(lines, media_type="application/jsonl")

    @app.get(f"{API}/exports/catalog.jsonl.zst", status_code=302, tags=["KernelIndex"])
    def exported(request: Request) -> Response:
        """Where the export lies; it is not compressed."""
        return RedirectResponse(request.url_for("export"), 302)

    @app.get("/api/{path:path}", include_in_schema=False)
    def nowhere(path: str) -> Response:
        """Anything else under /api."""
        raise NotFoundError(f"nothing lies at /api/{path}")
