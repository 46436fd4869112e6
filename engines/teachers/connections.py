"""How a teacher's service listens: so many connections, and none that is silent for long."""

from __future__ import annotations

import asyncio

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from engines.processes.key_guard import App

CONNECTIONS = 512  # at once; further ones are closed
SILENT_SECONDS = 20.0  # in which a connection has to have asked something, whole headers included
ENDING_SECONDS = 5  # for answers under way when the service ends


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
