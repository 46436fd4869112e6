"""Spans of OpenTelemetry, and how they get to a collector; imported where a run makes traces alone.

They are sent in the background. What a collector does not take is dropped: nothing waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PATH = "/v1/traces"  # of a collector's address
EVERY = 1000  # milliseconds between sendings: a worker may be ended soon after its last call
QUEUE = 16_384  # spans that wait to be sent; more of them are dropped
SEND_TIMEOUT = 5.0  # seconds
HEADER = "traceparent"
# They log each batch that is lost, with a traceback; `Exporter` tells it once.
LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")


class Exporter(SpanExporter):
    """Sends spans to a collector, and says once where it does not take them."""

    def __init__(self, endpoint: str, failed: Callable[[], object]) -> None:
        """`failed`: called at the first batch that is lost."""
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._otlp = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + PATH, timeout=SEND_TIMEOUT)
        self._failed, self._said = failed, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """As SpanExporter.export."""
        result = self._otlp.export(spans)
        if result is not SpanExportResult.SUCCESS and not self._said:
            self._said = True
            self._failed()
        return result

    def shutdown(self) -> None:
        """Send no more; ends a sending that is tried again."""
        self._otlp.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return True


def provider_to(endpoint: str, failed: Callable[[], object]) -> TracerProvider:
    """What makes spans that are sent to a collector; `failed` as in Exporter."""
    provider = TracerProvider(
        resource=Resource.create(
            {
                "service.name": "refrain",
                "host.name": socket.gethostname(),
                "process.pid": os.getpid(),
            }
        ),
        shutdown_on_exit=False,  # a collector that is away would hold the end of this process
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            Exporter(endpoint, failed), max_queue_size=QUEUE, schedule_delay_millis=EVERY
        )
    )
    return provider


def close_within(provider: TracerProvider, seconds: float) -> None:
    """Send what is left, if it can be done in time."""
    closing = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
    closing.start()
    closing.join(seconds)


def traceparent(span: Span) -> str:
    """A span as it is named to a worker."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
    return carrier[HEADER]


@functools.cache
def _tracer_of_worker(endpoint: str) -> Tracer:
    """This worker's; a user's own spans, made by the API's global tracer, go the same way."""
    provider = provider_to(endpoint, lambda: None)  # the flow says it, which sends there too
    trace.set_tracer_provider(provider)
    return provider.get_tracer("refrain")


@contextlib.contextmanager
def call_span(
    endpoint: str, parent: str, name: str, attributes: Mapping[str, str | int]
) -> Iterator[None]:
    """The body is a span of a worker's, below one of the flow's; an error that it raises is in it.

    `endpoint`, `parent` as in engines.workers.engine.TraceContext.
    """
    context = TraceContextTextMapPropagator().extract({HEADER: parent}, Context())
    with _tracer_of_worker(endpoint).start_as_current_span(
        name, context, SpanKind.SERVER, attributes
    ):
        yield
