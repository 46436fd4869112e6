"""Samples as traces of MLflow: who was asked what, who wrote what, and what it was worth."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo

LONGEST_TEXT = 16_000  # characters of a prompt or an answer in a trace; the store has them whole
PREVIEW = 1000  # MLflow's limit for what its list shows


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedSample:
    """A sample of a committed step."""

    sample: str  # its id
    step: int
    at: float  # when the step was committed, in seconds since 1970
    prompt: str
    response: str
    reward: float | None  # None: scoring failed
    tokens: int
    ending: str
    # Who wrote what of an episode, in order: policy, environment; of others nothing.
    parts: Sequence[tuple[str, str]] = ()
    more: Mapping[str, str] = field(default_factory=dict)  # shown as tags


def trace_of(one: TracedSample, run_id: str, experiment: str) -> tuple[TraceInfo, list[Span]]:
    """A sample's trace. The same sample of the same run has the same ids, so that MLflow keeps one.

    run_id: MLflow's.
    """
    from mlflow.entities import (
        AssessmentSource,
        Feedback,
        TraceInfo,
        TraceLocation,
        TraceState,
    )

    number = _hex(f"{run_id} {one.step} {one.sample}", 32)
    trace_id, nanoseconds = f"tr-{number}", int(one.at * 1e9)
    prompt, response = _short(one.prompt), _short(one.response)
    failed = one.reward is None

    def span(name: str, kind: str, place: int, given: object, out: object) -> Span:
        attributes = {
            "mlflow.traceRequestId": trace_id,
            "mlflow.spanType": kind,
            "mlflow.spanInputs": given,
            "mlflow.spanOutputs": out,
        }
        return _span(number, name, place, nanoseconds, attributes, failed)

    spans = [span("sample", "LLM", 0, {"prompt": prompt}, {"response": response})]
    for place, (who, text) in enumerate(one.parts, start=1):
        kind = "LLM" if who == "policy" else "TOOL"
        spans.append(span(who, kind, place, None, {"text": _short(text)}))
    reward = Feedback(
        name="reward",
        value=one.reward,
        error=None if one.reward is not None else "scoring failed",
        source=AssessmentSource(source_type="CODE", source_id="refrain"),
        create_time_ms=nanoseconds // 1_000_000,
        last_update_time_ms=nanoseconds // 1_000_000,
        trace_id=trace_id,
    )
    reward.assessment_id = f"a-{number}"
    info = TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment),
        request_time=nanoseconds // 1_000_000,
        execution_duration=0,
        state=TraceState.ERROR if failed else TraceState.OK,
        request_preview=prompt[:PREVIEW],
        response_preview=response[:PREVIEW],
        client_request_id=one.sample,
        trace_metadata={"mlflow.sourceRun": run_id, "mlflow.trace_schema.version": "3"},
        tags={
            "mlflow.traceName": f"step {one.step}",
            "refrain.step": str(one.step),
            "refrain.tokens": str(one.tokens),
            "refrain.ending": one.ending,
            **one.more,
        },
        assessments=[reward],
    )
    return info, spans


def _span(
    number: str, name: str, place: int, at: int, attributes: Mapping[str, object], failed: bool
) -> Span:
    """A span by its place in the trace; all but the first are below it. at: nanoseconds since 1970.

    As MLflow reads one that it has stored: its other ways to make one choose ids themselves.
    """
    from mlflow.entities import Span

    root = _hex(f"{number} 0", 16)
    return Span.from_dict(
        {
            "name": name,
            "trace_id": f"tr-{number}",
            "span_id": _hex(f"{number} {place}", 16),
            "parent_span_id": root if place else None,
            "start_time_unix_nano": at,
            "end_time_unix_nano": at,
            "status": {"code": "ERROR" if failed else "OK", "message": ""},
            "attributes": {key: json.dumps(value) for key, value in attributes.items()},
            "events": [],
        }
    )


def _short(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def _hex(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
