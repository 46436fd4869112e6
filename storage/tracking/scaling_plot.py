"""Reward over compute of several runs, with the fitted curves, as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage.tracking.plots import GRID, INK, MUTED, STAGE_COLOURS
from storage.tracking.scaling_law import Fit, Floats

AHEAD = 10.0  # how far the curves are drawn beyond the last point, as a factor


@dataclass(frozen=True, kw_only=True, slots=True)
class PlottedRun:
    """A run in the picture."""

    name: str
    compute: Floats  # [N]
    reward: Floats  # [N]
    fit: Fit | None  # None: the points did not say


def scaling_png(runs: Sequence[PlottedRun], unit: str, what: str) -> bytes:
    """A PNG: points, curves to AHEAD times the last compute, their 95 % region, asymptotes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, run in enumerate(runs):
        colour = STAGE_COLOURS[number % len(STAGE_COLOURS)]
        axes.plot(run.compute, run.reward, ".", color=colour, alpha=0.45, markersize=4)
        label = run.name
        if run.fit is not None:
            label += f": A = {run.fit.curve.asymptote:.3g}"
            at = np.geomspace(run.compute.min(), run.compute.max() * AHEAD, 160)
            bounds = [run.fit.forecast(float(bound))[1] for bound in at]
            axes.fill_between(
                at, [bound.low for bound in bounds], [bound.high for bound in bounds],
                color=colour, alpha=0.13, linewidth=0,
            )  # fmt: skip
            axes.axhline(run.fit.curve.asymptote, color=colour, linewidth=0.8, linestyle=":")
            axes.plot(at, run.fit.curve.at(at), color=colour, linewidth=1.6, label=label)
        else:
            axes.plot([], [], ".", color=colour, label=f"{label}: not identified")
        axes.axvline(run.compute.max(), color=GRID, linewidth=1.0)
    axes.set_xscale("log")
    axes.set_xlabel(f"{unit}; beyond the grey line a forecast", color=MUTED)
    axes.set_title(what, loc="left", fontsize=10, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right", labelcolor=MUTED)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
