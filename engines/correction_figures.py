"""Diagnostics of a recipe's corrections over a whole batch (the figures: correction_metrics.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from configs.corrections import CorrectionStep, RejectCorrection, WeightCorrection
from engines.correction_metrics import (
    kept_metrics,
    mismatch_metrics,
    rejection_metrics,
    weight_metrics,
)
from engines.corrections import CORRECTIONS, Mismatch, correct
from engines.imports import imported


def figures_of_gap(mismatch: Mismatch, steps: Sequence[CorrectionStep]) -> dict[str, float]:
    """The gap of the two policies, and of each step its own figures: weights, rejections, shares.

    Of two steps of one kind the later one's figures stand.
    """
    figures = mismatch_metrics(mismatch)
    if not figures or not steps:
        return figures
    functions = []
    for step in steps:
        function = imported(step.path) if step.kind == "function" else CORRECTIONS[step.kind]
        functions.append((function, step.arguments()))
        if isinstance(step, WeightCorrection):
            bounds = (step.lower, math.inf if step.upper is None else step.upper)
            plain = function(mismatch, **{**step.arguments(), "normalize": False})
            figures |= weight_metrics(mismatch, plain, step.level, *bounds)
        elif isinstance(step, RejectCorrection):
            kept = function(mismatch, **step.arguments())
            low, high = _scale(step)
            figures |= rejection_metrics(mismatch, kept, step.statistic, low, high)
    _, kept = correct(mismatch, functions)
    return figures | kept_metrics(mismatch, kept)


def _scale(step: RejectCorrection) -> tuple[float | None, float]:
    """The bounds of a rejection on its statistic's own scale."""
    if not step.statistic.endswith("k1"):
        return None, step.upper
    low = -math.log(step.upper) if step.lower is None else math.log(step.lower)
    return low, math.log(step.upper)
