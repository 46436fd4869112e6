"""A small collector of OpenTelemetry's traces, by OTLP over HTTP."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span as it was sent."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes  # empty: it has none
    failed: str  # what its error says; empty: it has none
    seconds: float
    pid: int  # of the process that made it
    facts: dict[str, Any]


@dataclass
class Collector:
    """Its address, and what it has got."""

    address: str = ""
    spans: list[Received] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def named(self, name: str) -> list[Received]:
        return [one for one in self.spans if one.name == name]


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def _received(body: bytes) -> list[Received]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Received(
            name=span.name,
            trace=span.trace_id,
            id=span.span_id,
            parent=span.parent_span_id,
            failed=span.status.message if span.status.code == 2 else "",
            seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            pid={a.key: _value(a.value) for a in group.resource.attributes}["process.pid"],
            facts={a.key: _value(a.value) for a in span.attributes},
        )
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


@contextmanager
def collector(status: int = 200, answers: threading.Event | None = None) -> Iterator[Collector]:
    """One that answers with a status, once the event is set if there is one."""
    made = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if answers is not None:
                answers.wait(120)
            assert self.path == "/v1/traces"
            made.headers.append(dict(self.headers))
            if status == 200:
                made.spans += _received(body)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
