"""The board's server, on loopback: three files of a page, and records of a run for who has the key.

The key is in the link's fragment, which a browser sends to no server; the page's script sends it with
each request. So another page, another user of the machine and a form elsewhere get nothing.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from pydantic_core import to_jsonable_python
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.terminal_text import print_text
from engines.processes.key_guard import KeyGuard
from storage.objects.errors import ObjectMissing, StoreError
from tasks.board.run_view import RunView, Wanted
from tasks.commands.command import Answer, Request, text

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost")  # the second is a browser's word where the port is forwarded
PAGE = Path(__file__).parent / "page"
FILES = {"/": "board.html", "/board.js": "board.js", "/board.css": "board.css"}
MOST_BODY = 1024  # bytes; no request has a body
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def answer(request: Request) -> Answer:
    """Serve the run that was named until the command is interrupted."""
    key = secrets.token_urlsafe(24)
    with _listening(request.arguments.port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}"
        print_text(f"{request.files.run}: {address}/#key={key}", error=True)
        print_text("Whoever has the link may read the run. Ctrl-C ends it.", error=True)
        settings = uvicorn.Config(
            application(RunView(request.files), key),
            log_level="error",
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listener])
    return Answer(record={"address": address}, shown=[text("The board has ended.")])


def _listening(port: int) -> socket.socket:
    """A socket on loopback that listens. ValueError where the port is taken, or none."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen()  # who opens the link at once waits
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(
            f"--port {port} cannot be had: {error}. Leave it out for one that is free."
        ) from None
    return listener


def application(view: RunView, key: str) -> ASGIApp:
    """The page and its records. Requests for another host, or of another page, are refused."""
    answers: dict[str, Callable[[HttpRequest], object]] = {
        "run": lambda request: view.run(),
        "curves": lambda request: view.curves(request.query_params.getlist("name")),
        "samples": lambda request: view.samples(_wanted(request)),
        "groups": lambda request: view.groups(_of(request), _number(request, "page")),
        "sample": lambda request: view.sample(_of(request), _number(request, "row")),
        "find": lambda request: view.find(_of(request), _number(request, "sample")),
        "data_row": lambda request: view.data_row(_number(request, "row")),
    }
    routes = [
        *(Route(path, partial(_file, PAGE / name)) for path, name in FILES.items()),
        *(Route(f"/api/{name}", partial(_record, get)) for name, get in answers.items()),
        Route("/api/picture", partial(_picture, view)),
    ]
    refusals = {ValueError: _refusal, StoreError: _refusal, HTTPException: _refusal}
    app: ASGIApp = Starlette(routes=routes, exception_handlers=refusals)
    app = KeyGuard(app, key, most_body=MOST_BODY, open_paths=FILES)
    return SafeHeaders(SameOrigin(TrustedHostMiddleware(app, allowed_hosts=HOSTS)))


class SameOrigin:
    """Refuses what the script of another page asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", []))
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin).netloc != headers.get(b"host"):
            refusal = PlainTextResponse("This page is not the board's.", 403)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


class SafeHeaders:
    """Has each answer forbid the browser whatever the page does not need."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


def _file(path: Path, request: HttpRequest) -> Response:
    return FileResponse(path)


def _record(get: Callable[[HttpRequest], object], request: HttpRequest) -> Response:
    return _json(get(request))


def _json(record: object, status: int = 200) -> Response:
    plain = to_jsonable_python(record, inf_nan_mode="null")  # the browser's JSON has no NaN
    return Response(json.dumps(plain), status, media_type="application/json")


def _picture(view: RunView, request: HttpRequest) -> Response:
    row, number = _number(request, "row"), _number(request, "number")
    return Response(view.picture(_of(request), row, number), media_type="image/png")


def _refusal(request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _json({"error": error.detail}, error.status_code)
    status = 404 if isinstance(error, ValueError | ObjectMissing) else 500
    return _json({"error": " ".join(str(error).split())}, status)


def _wanted(request: HttpRequest) -> Wanted:
    words = request.query_params
    names = ("order", "status", "reward", "search", "group")
    query = {name: words[name] for name in names if words.get(name)}
    return Wanted(of=_of(request), page=_number(request, "page"), **query)


def _of(request: HttpRequest) -> str:
    return request.query_params.get("of", "")


def _number(request: HttpRequest, name: str) -> int:
    """A number of the query, 0 where there is none. ValueError."""
    text = request.query_params.get(name, "0")
    if not text.isdecimal() or len(text) > 18:
        raise ValueError(f"{name}={text} is no number.")
    return int(text)
