"""Whether an engine holds the weights that it was given: it is checked, not believed.

What it reports of a load must be what was to be loaded, and its log-probs on a few sequences must be
the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engines.failures import WeightMismatch
from engines.rollout.contract import SyncReport
from storage.runs.weights import WeightsRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A few sequences with the trainer's log-probs under the version to be loaded.

    Example, one sequence of a prompt of two tokens and a response of two:
    Probe(tokens=[[5, 6, 7, 8]], prompt_lengths=[2], expected=lambda: [[-1.2, -0.3]])
    """

    tokens: list[list[int]]  # [S][T] prompt and response of each sequence
    prompt_lengths: list[int]  # [S] tokens
    # [S][T - prompt length] of the response tokens, nats. The trainer may be making them while
    # engines load: then this waits, and raises its failure.
    expected: Callable[[], list[list[float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedLoad:
    """One engine's checked load of a policy version."""

    report: SyncReport
    logprob_error: float  # see `mean_absolute_error`, on the probe; NaN: there was none


def check_report(worker: str, report: SyncReport, weights: WeightsRef) -> None:
    """WeightMismatch unless an engine reports the version and digest that it was given."""
    if report.version != weights.version or report.digest != weights.digest:
        raise WeightMismatch(
            f"{worker} reports version {report.version} with digest {report.digest} after a sync "
            f"to version {weights.version} with digest {weights.digest}."
        )


def check_scores(
    worker: str,
    version: int,
    scores: Sequence[Sequence[float]],
    probe: Probe,
    tolerance: float,
) -> float:
    """The engine's error on the probe; WeightMismatch when it is above the tolerance, or NaN.

    Args:
        scores: [S][T - prompt length] the engine's log-probs of the probe's response tokens, nats.
        tolerance: nats per token, rollout.probe_tolerance.
    """
    expected = probe.expected()
    error = mean_absolute_error(scores, expected)
    if not error <= tolerance:
        rows = zip(probe.tokens, scores, expected, strict=True)
        apart = sorted(
            (len(tokens), mean_absolute_error([row], [expected_row]))
            for tokens, row, expected_row in rows
        )
        raise WeightMismatch(
            f"After the sync to version {version}, {worker}'s log-probs differ from the trainer's "
            f"by {error:.4f} nats a token on average, more than rollout.probe_tolerance = "
            f"{tolerance}: by sequence, {', '.join(f'{e:.2g} of {n} tokens' for n, e in apart)}. "
            "Where longer ones differ more, look at the model's window and positions; where all do, "
            "at rollout.dtype beside train.compute_dtype, and at whether both engines compute the "
            "model's output head, experts and adapters and have loaded all of their tensors."
        )
    return error


def mean_absolute_error(
    scores: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]
) -> float:
    """mean |score - expected| over all tokens of all sequences, in nats per token.

    Args:
        scores: [S][T] log-probs.
        expected: [S][T] log-probs of the same tokens; at least one token in all.
    """
    differences = [
        abs(value - theirs)
        for row, row_expected in zip(scores, expected, strict=True)
        for value, theirs in zip(row, row_expected, strict=True)
    ]
    return sum(differences) / len(differences)
