"""What every answer of the server has in common: headers, methods, limits, and one shape of errors (RFC 9457)."""

import json
import logging
import uuid
from collections.abc import Collection, Iterable, Mapping
from http import HTTPStatus

from fastapi import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nibblas.index.documents import QueryError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
MOST_PATH = 2048  # bytes
MOST_QUERY = 8192
MOST_BODY = 65536
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self' data:; form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
_log = logging.getLogger("nibblas.index")


def problem(status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the one shape that all of them have."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": detail,
        "requestId": uuid.uuid4().hex,
    }
    content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, status, media_type="application/problem+json", headers=dict(headers or {}))


def refuse_unknown(given: Iterable[str], known: Collection[str]) -> None:
    """QueryError for a parameter that an address doesn't take: answered without it, it would be another question."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        there_are = f"there are {', '.join(known)}" if known else "it takes none"
        raise QueryError(f"there is no parameter {unknown[:50]!r} at this address; {there_are}")


class Guard:
    """Around an application, for those hosts by which it is meant to be called: a page of another name reads nothing.

    HEAD is GET without the body. OPTIONS tells the methods. Nothing allows other origins to read.
    """

    def __init__(self, app: ASGIApp, router: Router, hosts: Collection[str]):
        self.app, self.router = app, router
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"]
        answered = _Answer(send, without_body=method == "HEAD")
        refused = self._refuse(scope) or (self._options(scope) if method == "OPTIONS" else None)
        if refused is not None:
            await refused(scope, receive, answered)
            return
        if method == "HEAD":
            scope = {**scope, "method": "GET", "nibblas.head": True}
        try:
            await self.app(scope, _limited(receive), answered)
        except Exception:
            _log.exception("%s %s", method, scope["path"])
            if answered.started:
                raise
            await problem(500, "INTERNAL", "a fault of nibblas: its log tells more")(scope, receive, answered)

    def _refuse(self, scope: Scope) -> Response | None:
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if _name(host).lower() not in self.hosts:
            return problem(421, "UNKNOWN_HOST", f"this server is not called {host!r}: --name gives it a name")
        if len(scope.get("raw_path") or b"") > MOST_PATH or len(scope["query_string"]) > MOST_QUERY:
            return problem(414, "ADDRESS_TOO_LONG", f"at most {MOST_PATH} bytes of path and {MOST_QUERY} of query")
        return None

    def _options(self, scope: Scope) -> Response:
        methods = {
            method
            for method in ("GET", "POST")
            for route in self.router.routes
            if route.matches({**scope, "method": method})[0] == Match.FULL
        }
        if not methods:
            return problem(404, "NOT_FOUND", f"nothing lies at {scope['path']}")
        allowed = ["HEAD"] * ("GET" in methods) + ["OPTIONS"]
        return Response(status_code=204, headers={"Allow": ", ".join(sorted(methods) + allowed)})


class _Answer:
    """Sends an answer with the common headers; of a HEAD without its body."""

    def __init__(self, send: Send, without_body: bool):
        self._send, self._without_body = send, without_body
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            given = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(pair for pair in _HEADERS if pair[0] not in given)]
        elif message["type"] == "http.response.body" and self._without_body:
            message = {**message, "body": b""}
        await self._send(message)


def _limited(receive: Receive) -> Receive:
    """The same, but for a body that goes on beyond what is taken."""
    taken = 0

    async def limited() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body") or b"")
        if taken > MOST_BODY:
            raise HTTPException(413, f"a body holds at most {MOST_BODY} bytes")
        return message

    return limited


def _name(host: str) -> str:
    """A Host header without its port."""
    name, bracket, _ = host.partition("]")
    return name + bracket if bracket else host.partition(":")[0]
