"""The pages on a server: their addresses, their JSON twins, and pages that say what went wrong."""

from collections.abc import Callable, Collection, Mapping
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from nibblas.index import pages, render
from nibblas.index.catalog import Catalog
from nibblas.index.documents import NotFoundError, QueryError, to_json
from nibblas.index.guard import problem, refuse_unknown
from nibblas.index.kept import Kept
from nibblas.index.render import Links, Page

Builder = Callable[[Catalog, Mapping[str, str], pages.Params], Page]

# Each with the parameters that it takes. Addresses that hold a name come after those that don't.
ROUTES: tuple[tuple[str, Collection[str], Builder], ...] = (
    ("/", (), lambda catalog, of, given: pages.home(catalog)),
    ("/search", pages.SEARCH_PARAMETERS, lambda catalog, of, given: pages.search(catalog, given)),
    ("/implementations/{name}", (), lambda catalog, of, given: pages.implementation(catalog, of["name"])),
    ("/implementations/{name}/changes", (), lambda catalog, of, given: pages.changes(catalog, of["name"])),
    (
        "/implementations/{name}/files/{path:path}",
        (),
        lambda catalog, of, given: pages.source_file(catalog, of["name"], of["path"]),
    ),
    ("/operations", (), lambda catalog, of, given: pages.operations(catalog)),
    (
        "/operations/{slug}",
        ("workload", "cohort"),
        lambda catalog, of, given: pages.operation(catalog, of["slug"], given),
    ),
    ("/techniques", (), lambda catalog, of, given: pages.techniques(catalog)),
    ("/techniques/{slug}", (), lambda catalog, of, given: pages.technique(catalog, of["slug"])),
    ("/hardware", (), lambda catalog, of, given: pages.hardware(catalog)),
    ("/hardware/{slug}", (), lambda catalog, of, given: pages.device(catalog, of["slug"])),
    ("/runs", pages.RUN_PARAMETERS, lambda catalog, of, given: pages.runs(catalog, given)),
    ("/runs/{digest}", (), lambda catalog, of, given: pages.run(catalog, of["digest"])),
    ("/compare", ("a", "b"), lambda catalog, of, given: pages.compare(catalog, given)),
    ("/sources", (), lambda catalog, of, given: pages.sources(catalog)),
    ("/methodology", (), lambda catalog, of, given: pages.methodology(catalog)),
    ("/about", (), lambda catalog, of, given: pages.about(catalog)),
)
MEDIA_TYPES = {"css": "text/css", "svg": "image/svg+xml"}
WRONG: dict[type[Exception], tuple[int, str, str]] = {
    QueryError: (400, "BAD_QUERY", "That can't be searched for"),
    NotFoundError: (404, "NOT_FOUND", "Not found"),
}


def mount_pages(app: FastAPI, catalog: Catalog, answers: Kept) -> None:
    """Add every page, its JSON twin and the stylesheet to an application; other addresses get a page that says so.

    To be called after all else was added: what nothing else takes ends here.
    """
    for address, known, build in ROUTES:
        twin = "/index.json" if address == "/" else f"{address}.json"
        app.add_route(twin, _answer(build, known, catalog, answers, as_json=True), include_in_schema=False)
        app.add_route(address, _answer(build, known, catalog, answers, as_json=False), include_in_schema=False)
    app.add_route("/static/{name}", _static, include_in_schema=False)
    app.add_route("/{path:path}", _nowhere, include_in_schema=False)


def _answer(
    build: Builder, known: Collection[str], catalog: Catalog, answers: Kept, as_json: bool
) -> Callable[[Request], Response]:
    def show(request: Request, of: Mapping[str, str], as_json: bool) -> Response:
        def page() -> Page:
            return build(catalog, of, {name: request.query_params.getlist(name) for name in request.query_params})

        if as_json:
            return answers.answer(request, lambda: to_json(page().document))
        return answers.answer(request, lambda: render.html(page(), Links()), "text/html")

    def answer(request: Request) -> Response:
        of = request.path_params
        try:
            refuse_unknown(request.query_params, known)
            try:
                return show(request, of, as_json)
            except NotFoundError:
                if not (as_json and of):
                    raise
                # No twin: the name itself may end so, as a source file's does.
                *_, last = of
                try:
                    return show(request, {**of, last: f"{of[last]}.json"}, False)
                except NotFoundError:
                    pass
                raise
        except (QueryError, NotFoundError) as error:
            return _went_wrong(request, error, as_json)

    return answer


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    file = files("nibblas.index") / "static" / name
    media_type = MEDIA_TYPES.get(name.rpartition(".")[2])
    if media_type is None or not file.is_file():
        return _nowhere(request)
    return Response(file.read_bytes(), media_type=media_type, headers={"Cache-Control": "max-age=3600"})


def _nowhere(request: Request) -> Response:
    path = request.url.path
    return _went_wrong(request, NotFoundError(f"nothing lies at {path}"), path.endswith(".json"))


def _went_wrong(request: Request, error: QueryError | NotFoundError, as_json: bool) -> Response:
    status, code, name = WRONG[type(error)]
    if as_json:
        return problem(status, code, str(error))
    page = pages.problem(request.url.path, name, f"{str(error)[0].upper()}{str(error)[1:]}.")
    return Response(render.html(page, Links()), status, media_type="text/html")
