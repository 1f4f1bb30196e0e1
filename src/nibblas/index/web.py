"""The pages on a server: their addresses, their JSON twins, and answers that say what went wrong."""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from http import HTTPStatus
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from nibblas.index import pages, read, render
from nibblas.index.catalog import Catalog
from nibblas.index.documents import NotFoundError, NotShownError, QueryError
from nibblas.index.render import Links, Page

Builder = Callable[[Catalog, Mapping[str, str], pages.Params], Page]

# Addresses that hold a name come after those that don't.
ROUTES: tuple[tuple[str, Builder], ...] = (
    ("/", lambda catalog, of, given: pages.home(catalog)),
    ("/search", lambda catalog, of, given: pages.search(catalog, given)),
    ("/implementations/{name}", lambda catalog, of, given: pages.implementation(catalog, of["name"])),
    ("/implementations/{name}/changes", lambda catalog, of, given: pages.changes(catalog, of["name"])),
    (
        "/implementations/{name}/files/{path:path}",
        lambda catalog, of, given: pages.source_file(catalog, of["name"], of["path"]),
    ),
    ("/operations", lambda catalog, of, given: pages.operations(catalog)),
    ("/operations/{slug}", lambda catalog, of, given: pages.operation(catalog, of["slug"], given)),
    ("/techniques", lambda catalog, of, given: pages.techniques(catalog)),
    ("/techniques/{slug}", lambda catalog, of, given: pages.technique(catalog, of["slug"])),
    ("/hardware", lambda catalog, of, given: pages.hardware(catalog)),
    ("/hardware/{slug}", lambda catalog, of, given: pages.device(catalog, of["slug"])),
    ("/runs", lambda catalog, of, given: pages.runs(catalog, given)),
    ("/runs/{digest}", lambda catalog, of, given: pages.run(catalog, of["digest"])),
    ("/compare", lambda catalog, of, given: pages.compare(catalog, given)),
    ("/sources", lambda catalog, of, given: pages.sources(catalog)),
    ("/methodology", lambda catalog, of, given: pages.methodology(catalog)),
    ("/about", lambda catalog, of, given: pages.about(catalog)),
)
MEDIA_TYPES = {"css": "text/css", "svg": "image/svg+xml"}
WRONG: dict[type[Exception], tuple[int, str]] = {
    QueryError: (400, "That can't be searched for"),
    NotShownError: (403, "Not shown"),
    NotFoundError: (404, "Not found"),
}
KEPT_BYTES = 32 << 20  # of pages that were shown before


def mount_pages(app: FastAPI, catalog: Catalog) -> None:
    """Add every page, its JSON twin and the stylesheet to an application; other addresses get a page that says so.

    To be called after all else was added to the application: what nothing else takes ends here.
    """
    shown = _Shown(catalog)
    for address, build in ROUTES:
        twin = "/index.json" if address == "/" else f"{address}.json"
        app.add_route(twin, _twin(build, shown), include_in_schema=False)
        app.add_route(address, _html(build, shown), include_in_schema=False)
    app.add_route("/implementations/{name}/raw/{path:path}", _raw(catalog), include_in_schema=False)
    app.add_route("/static/{name}", _static, include_in_schema=False)
    app.add_route("/{path:path}", _nowhere, include_in_schema=False)


class _Shown:
    """Pages as they were last shown, as long as the index has not changed."""

    def __init__(self, catalog: Catalog):
        self._catalog = catalog
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Response] = OrderedDict()
        self._state: tuple = ()
        self._bytes = 0

    def page(self, request: Request, build: Builder) -> Page:
        given = {name: request.query_params.getlist(name) for name in request.query_params}
        return build(self._catalog, request.path_params, given)

    def answer(self, request: Request, make: Callable[[Page], Response], build: Builder) -> Response:
        """The response to a request, made anew where it isn't kept; without a body if the reader has it already."""
        state = self._catalog.state()
        key = (request.url.path, request.url.query)
        with self._lock:
            if state != self._state:
                self._kept.clear()
                self._state, self._bytes = state, 0
            found = self._kept.get(key)
            if found:
                self._kept.move_to_end(key)
        if found is None:
            found = make(self.page(request, build))
            found.headers["ETag"] = f'"{hashlib.sha256(found.body).hexdigest()[:32]}"'
            found.headers["Cache-Control"] = "no-cache"
            self._keep(key, state, found)
        if found.headers["ETag"] in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers={"ETag": found.headers["ETag"]})
        return found

    def _keep(self, key: tuple[str, str], state: tuple, response: Response) -> None:
        with self._lock:
            if state != self._state or key in self._kept:
                return
            self._kept[key] = response
            self._bytes += len(response.body)
            while self._bytes > KEPT_BYTES:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= len(dropped.body)


def _html(build: Builder, shown: _Shown) -> Callable[[Request], Response]:
    def handler(request: Request) -> Response:
        try:
            return shown.answer(request, _as_html, build)
        except (NotFoundError, QueryError) as error:
            return _went_wrong(request, error)

    return handler


def _twin(build: Builder, shown: _Shown) -> Callable[[Request], Response]:
    def handler(request: Request) -> Response:
        try:
            return shown.answer(request, _as_json, build)
        except (NotFoundError, QueryError) as error:
            return _problem(_status(error), str(error))

    return handler


def _as_html(page: Page) -> Response:
    return Response(render.html(page, Links()), media_type="text/html")


def _as_json(page: Page) -> Response:
    return Response(render.twin(page), media_type="application/json")


def _raw(catalog: Catalog) -> Callable[[Request], Response]:
    def handler(request: Request) -> Response:
        name, path = request.path_params["name"], request.path_params["path"]
        try:
            raw = read.file(catalog, name, path)
        except (NotFoundError, NotShownError) as error:
            return _went_wrong(request, error)
        return Response(raw, media_type="text/plain")

    return handler


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    found = files("nibblas.index") / "static" / name
    media_type = MEDIA_TYPES.get(name.rpartition(".")[2])
    if media_type is None or not found.is_file():
        return _nowhere(request)
    return Response(found.read_bytes(), media_type=media_type, headers={"Cache-Control": "max-age=3600"})


def _nowhere(request: Request) -> Response:
    return _went_wrong(request, NotFoundError(f"Nothing lies at {request.url.path}."))


def _status(error: Exception) -> int:
    return WRONG[type(error)][0]


def _went_wrong(request: Request, error: Exception) -> Response:
    status = _status(error)
    page = pages.problem(request.url.path, WRONG[type(error)][1], str(error))
    return Response(render.html(page, Links()), status_code=status, media_type="text/html")


def _problem(status: int, detail: str) -> Response:
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return Response(json.dumps(body), status_code=status, media_type="application/problem+json")
