"""A key before anything else: what stands before an HTTP application, whatever its routes are.

A request that does not show the key is answered before its body is read. With the key the body is
read up to a size and within a time, and given to the application whole. Pure ASGI, of the standard
library, since vLLM's server takes it too (its own key guards some of its routes alone).
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from http import HTTPStatus
from typing import Any

from configs.environment import given

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SHORTEST_KEY = 16  # characters
MOST_BODY = 2**25  # bytes of a request's body
BODY_SECONDS = 30.0  # in which a body has to be there
SERVED_KEY = "REFRAIN_SERVED_KEY"  # environment variable by which a served version's server gets it


class KeyGuard:
    """An application to which only requests with the key get."""

    def __init__(
        self, app: App, key: str, *, most_body: int = MOST_BODY, open_paths: Collection[str] = ()
    ) -> None:
        """`most_body`: bytes. `open_paths`: those for which no key is asked, such as /health."""
        self._app = app
        self._key = key.encode()
        self._most_body = most_body
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no application here takes a WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = dict(scope["headers"])  # names in lower case; of one that is there twice the last
        if scope["path"] not in self._open_paths and not self._shown(headers):
            await _refuse(send, HTTPStatus.UNAUTHORIZED, "the key is not the service's")
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 20:
            await _refuse(send, HTTPStatus.BAD_REQUEST, "Content-Length is no number of bytes")
            return
        try:
            if int(length) > self._most_body:
                raise OverflowError
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._body(receive)
        except OverflowError:
            await _refuse(
                send,
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a body may have {self._most_body} bytes",
            )
            return
        except TimeoutError:
            await _refuse(
                send, HTTPStatus.REQUEST_TIMEOUT, f"no whole body came in {BODY_SECONDS:g} s"
            )
            return
        if body is not None:
            await self._app(scope, _again(body, receive), send)

    def _shown(self, headers: MutableMapping[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)

    async def _body(self, receive: Receive) -> bytes | None:
        """All of it; None where the client has left. OverflowError where it is too large."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._most_body:
                raise OverflowError
            if not message.get("more_body", False):
                return bytes(body)


class ServedKey(KeyGuard):
    """As vLLM's server makes it, which gives a middleware the application alone."""

    def __init__(self, app: App) -> None:
        key = given([SERVED_KEY]).get(SERVED_KEY, "")
        assert len(key) >= SHORTEST_KEY, "the server is started with a key"
        super().__init__(app, key, open_paths=("/health",))


def _again(body: bytes, receive: Receive) -> Receive:
    """The body once more, and then what comes after it: that the client leaves."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return next_message


async def _refuse(send: Send, status: HTTPStatus, text: str) -> None:
    """Answer, and close the connection: what else is on it is not read."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    body = json.dumps({"detail": text}).encode()
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})
