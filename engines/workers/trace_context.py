"""Which trace a call belongs to, as it travels to a worker. OpenTelemetry is not imported here.

Without tracking.otlp_endpoint no call has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceContext:
    """The span that a call is a part of."""

    endpoint: str  # address of the collector, OTLP over HTTP
    parent: str  # the span, as W3C's header traceparent has it


_CURRENT: ContextVar[TraceContext | None] = ContextVar("trace", default=None)


def current_trace() -> TraceContext | None:
    """That of the calls which this thread makes now."""
    return _CURRENT.get()


def set_trace(trace: TraceContext | None) -> TraceContext | None:
    """Have this thread's calls belong to a span, or to none; returns to which they did before."""
    before = _CURRENT.get()
    _CURRENT.set(trace)
    return before


@contextlib.contextmanager
def span_of(
    trace: TraceContext | None, name: str, attributes: Mapping[str, str | int]
) -> Iterator[None]:
    """The body is a span of a call's trace, if it has one and OpenTelemetry is installed here."""
    if trace is None:
        yield
        return
    try:
        from engines.workers.spans import call_span
    except ImportError:  # it is missing on this machine: the call matters, its span does not
        yield
        return
    with call_span(trace.endpoint, trace.parent, name, attributes):
        yield
