"""Answers that are kept as long as the index has not changed, with their ETags."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nibblas.index.catalog import Catalog

KEPT_BYTES = 128 << 20


class Body(NamedTuple):
    """What an answer holds. The ETag is made of it."""

    content: bytes
    media_type: str
    etag: str


class Kept:
    """Answers by address. Least recently used ones are dropped beyond so many bytes."""

    def __init__(self, catalog: Catalog, most_bytes: int = KEPT_BYTES):
        self._catalog, self._most = catalog, most_bytes
        self._lock = threading.Lock()
        self._bodies: OrderedDict[tuple[str, bytes], Body] = OrderedDict()
        self._state: tuple = ()
        self._bytes = 0

    def answer(self, request: Request, make: Callable[[], str], media_type: str = "application/json") -> Response:
        """The answer to a GET, made anew and kept; 304 without a body where the reader has it already."""
        state = self._catalog.state()
        content = make().encode("utf-8", "replace")
        body = Body(content, media_type, f'"sha256:{hashlib.sha256(content).hexdigest()}"')
        self._keep(_address(request.scope), state, body)
        return conditional(request, body)

    def find(self, scope: Scope) -> Body | None:
        """What is kept for an address, if the index has not changed since."""
        state = self._catalog.state()
        with self._lock:
            if state != self._state:
                self._bodies.clear()
                self._state, self._bytes = state, 0
            found = self._bodies.get(_address(scope))
            if found:
                self._bodies.move_to_end(_address(scope))
            return found

    def _keep(self, key: tuple[str, bytes], state: tuple, body: Body) -> None:
        with self._lock:
            if state != self._state or key in self._bodies:
                return
            self._bodies[key] = body
            self._bytes += len(body.content)
            while self._bytes > self._most:
                _, dropped = self._bodies.popitem(last=False)
                self._bytes -= len(dropped.content)


class Recall:
    """Around an application: gives what is kept without asking it."""

    def __init__(self, app: ASGIApp, answers: Kept):
        self.app, self.answers = app, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        found = self.answers.find(scope) if scope["type"] == "http" and scope["method"] == "GET" else None
        answer = self.app if found is None else conditional(Request(scope), found)
        await answer(scope, receive, send)


def _address(scope: Scope) -> tuple[str, bytes]:
    return scope["path"], scope["query_string"]


def conditional(request: Request, body: Body) -> Response:
    """The body, or 304 where the request's If-None-Match names its ETag."""
    headers = {"ETag": body.etag, "Cache-Control": "no-cache"}
    wanted = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if body.etag in wanted or "*" in wanted:
        return Response(status_code=304, headers=headers)
    return Response(body.content, media_type=body.media_type, headers=headers)
