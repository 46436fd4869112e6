"""The service over HTTP: every request shows the key first, every answer is JSON.

There are so many connections, and none that is silent for long.
"""

from __future__ import annotations

import asyncio

import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from engines.processes.key_guard import App, KeyGuard
from engines.teachers.messages import (
    Facts,
    PlaceLease,
    Question,
    ServiceProbe,
    ServiceRefused,
    Status,
    Taught,
    Tokens,
)
from engines.teachers.service import TeacherService

POLL = 2.0  # seconds that a request waits for its answer before it is told to ask again
STILL_WAITING = 202
NO_MESSAGE = 422
CONNECTIONS = 512  # at once; further ones are closed
SILENT_SECONDS = 20.0  # in which a connection has to have asked something, whole headers included
ENDING_SECONDS = 5  # for answers under way when the service ends


def app(service: TeacherService, key: str) -> App:
    """The application; requests that do not show the key are answered 401, their bodies unread."""
    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @api.exception_handler(ServiceRefused)
    async def refused(request: Request, error: ServiceRefused) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=error.status)

    @api.exception_handler(RequestValidationError)
    async def no_message(request: Request, error: RequestValidationError) -> JSONResponse:
        """By name and reason: what was sent is not sent back."""
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if part != "body")
        text = f"{name or 'the body'} is not as it has to be: {first['msg'][:200]}"
        return JSONResponse({"detail": text}, status_code=NO_MESSAGE)

    @api.post("/v1/probe")
    def probe(probe: ServiceProbe) -> Facts:
        return service.probe(probe)

    @api.get("/v1/tokens")
    def tokens() -> Tokens:
        tokens = service.tokens
        return Tokens(words=dict(tokens.words), special=dict(tokens.special), rows=tokens.rows)

    @api.get("/v1/status")
    def status() -> Status:
        return service.status()

    @api.put("/v1/lease")
    def renew(lease: PlaceLease) -> None:
        service.renew(lease)

    @api.delete("/v1/lease")
    def release(lease: PlaceLease) -> None:
        service.release(lease)

    @api.post("/v1/teach", response_model=Taught)
    async def teach(question: Question) -> Taught | JSONResponse:
        answer = asyncio.wrap_future(await run_in_threadpool(service.ask, question))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at
        try:
            taught = await asyncio.wait_for(asyncio.shield(answer), POLL)
        except TimeoutError:
            return JSONResponse({}, status_code=STILL_WAITING)
        except ServiceRefused:
            service.forget(question)
            raise
        service.forget(question)
        return taught

    return KeyGuard(api, key)


class BoundedConnections(H11Protocol):
    """A connection that ends where it asks nothing. Uvicorn waits for a first request for ever."""

    _looking: asyncio.TimerHandle | None = None
    _answered = 0
    _seen = 0  # what was answered at the last look

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
            return
        self._looking = self.loop.call_later(SILENT_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._answered += 1
        super().on_response_complete()

    def _look(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        if not busy and self._answered == self._seen:
            self.transport.abort()
            return
        self._seen = self._answered
        self._looking = self.loop.call_later(SILENT_SECONDS, self._look)


def settings_of(app: App, host: str, port: int) -> uvicorn.Config:
    """Uvicorn's settings for a service."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=BoundedConnections,
        ws="none",
        log_level="error",  # of what strangers send each line would be a warning
        access_log=False,
        timeout_graceful_shutdown=ENDING_SECONDS,
    )
