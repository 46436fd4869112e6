"""Traces of a run by OpenTelemetry: a step is a trace, its stages' tries are spans, workers' calls
spans below them.

Imported where tracking.otlp_endpoint is set alone. Workers send their own spans
(engines/workers/spans.py); which one they are a part of travels with the call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from engines.workers.engine import TraceContext, set_trace
from engines.workers.spans import close_within, provider_to, traceparent
from tasks.run.attempts import Attempt
from tasks.run.events import (
    AttemptBegan,
    AttemptEnded,
    Event,
    Listeners,
    Note,
    RunEnded,
    StepBegan,
    StepCommitted,
)
from tasks.run.facts import RunFacts

ENDING = 5.0  # seconds that the last spans of a run may take to be sent


class StepTraces:
    """Spans of one run. Safe to use from several threads."""

    def __init__(self, facts: RunFacts, endpoint: str, tell: Callable[[Event], object]) -> None:
        """`tell`: that the collector does not take spans, once."""

        def failed() -> None:
            tell(
                Note(
                    text=f"tracking.otlp_endpoint = {endpoint} does not take spans; the run goes on "
                    "without those.",
                    warning=True,
                )
            )

        self._endpoint = endpoint
        self._run = {
            "refrain.run": facts.name,
            "refrain.flow": facts.flow.rpartition(":")[2],
            "refrain.recipe": facts.config.name,
        }
        self._provider = provider_to(endpoint, failed)
        self._tracer = self._provider.get_tracer("refrain")
        self._lock = threading.Lock()
        self._steps: dict[int, Span] = {}  # those that are not committed
        # By id of an attempt that is under way: its span, and what its thread had before.
        self._attempts: dict[int, tuple[Span, TraceContext | None]] = {}

    def listen(self, listeners: Listeners) -> None:
        """Hear what the run says."""
        listeners.on(StepBegan, self.step_began)
        listeners.on(AttemptBegan, lambda event: self.attempt_began(event.attempt))
        listeners.on(AttemptEnded, lambda event: self.attempt_ended(event.attempt))
        listeners.on(StepCommitted, self.step_committed)
        listeners.on(RunEnded, lambda event: self.run_ended())

    def step_began(self, event: StepBegan) -> None:
        """A trace begins."""
        attributes: dict[str, str | int] = {**self._run, "refrain.step": event.step}
        span = self._tracer.start_span("step", Context(), attributes=attributes)
        with self._lock:
            self._steps[event.step] = span

    def attempt_began(self, attempt: Attempt) -> None:
        """A span begins, of the step's trace; what is before any step is a trace of its own."""
        with self._lock:
            step = self._steps.get(attempt.step)
        context = Context() if step is None else set_span_in_context(step, Context())
        attributes: dict[str, str | int] = {
            **self._run,
            "refrain.step": attempt.step,
            "refrain.attempt": attempt.number,
        }
        if attempt.shard is not None:
            attributes["refrain.shard"] = attempt.shard
        span = self._tracer.start_span(attempt.stage, context, attributes=attributes)
        before = set_trace(TraceContext(endpoint=self._endpoint, parent=traceparent(span)))
        with self._lock:
            self._attempts[id(attempt)] = span, before

    def attempt_ended(self, attempt: Attempt) -> None:
        """Its span ends."""
        with self._lock:
            span, before = self._attempts.pop(id(attempt))
        set_trace(before)
        if attempt.assignment.worker:
            span.set_attribute("refrain.worker", attempt.assignment.worker)
        if attempt.error:
            span.set_status(Status(StatusCode.ERROR, attempt.error))
        span.end()

    def step_committed(self, event: StepCommitted) -> None:
        """Its trace is whole."""
        with self._lock:
            span = self._steps.pop(event.record.step, None)
        if span is None:
            return
        for name in ("reward/mean", "time/step", "retries"):
            with contextlib.suppress(KeyError):
                span.set_attribute(f"refrain.{name.replace('/', '_')}", event.metrics[name])
        span.set_status(Status(StatusCode.OK))
        span.end()

    def run_ended(self) -> None:
        """What is left of steps is no committed step."""
        with self._lock:
            spans, self._steps = list(self._steps.values()), {}
        for span in spans:
            span.set_status(Status(StatusCode.ERROR, "the run ended before it was committed"))
            span.end()
        close_within(self._provider, ENDING)
