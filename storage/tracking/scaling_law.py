"""ScaleRL's sigmoid of reward over compute (arXiv:2510.13786), fitted, with intervals. Pure maths.

R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B): reward R0 without compute, A with all of it, half of the
gain at Cmid; B says how steeply. For given Cmid and B it is linear in R0 and A, so all fits on a grid
of (Cmid, B) are made at once, and the grid is what intervals and forecasts are read from.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.tracking.plots import GRID, INK, MUTED, STAGE_COLOURS

Floats = NDArray[np.float64]

PARAMETERS = 4
FEWEST_POINTS = 10
LEVEL = 0.95
MOST_STEEP, LEAST_STEEP = 8.0, 0.15  # B on the grid
MIDS, STEEPNESSES = 81, 61  # points of the grid
BEYOND = 30.0  # the grid of Cmid reaches this factor below the first and above the last compute
REFINED = 2  # times that the grid is made anew around the region
WIDEST = 1.0  # of A's interval, in ranges of the rewards that were seen: wider says nothing

AHEAD = 10.0  # how far the curves are drawn beyond the last point, as a factor


class NotIdentified(ValueError):
    """The points do not say which curve they are of; the message is one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Low and high end."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value lies within."""
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The parameters of the law."""

    start: float  # R0, reward without compute
    asymptote: float  # A, reward with any amount
    midpoint: float  # Cmid, in the unit of the compute
    exponent: float  # B

    def at(self, compute: Floats) -> Floats:
        """R(C) of compute [N] > 0."""
        return self.start + (self.asymptote - self.start) * sigmoid(
            compute, self.midpoint, self.exponent
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A fitted law. The intervals hold for all four parameters together, at 95 %."""

    curve: Curve
    start: Interval
    asymptote: Interval
    midpoint: Interval
    exponent: Interval
    residual: float  # standard deviation of a point from the curve
    points: int
    region: Region

    def forecast(self, compute: float) -> tuple[float, Interval]:
        """R(C) and its interval: what all curves of the 95 % region say of it."""
        value = float(self.curve.at(np.array([compute]))[0])
        return value, self.region.of(1.0 - (s := self.region.sigmoid(compute)), s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Every (Cmid, B) of the grid that the points allow, and how far R0 and A may go there."""

    midpoints: Floats  # [G]
    exponents: Floats  # [G]
    start: Floats  # [G] best R0 there
    asymptote: Floats  # [G] best A
    slack: Floats  # [G] by how much the sum of squares may still grow
    inverse: tuple[Floats, Floats, Floats]  # [G] each, of (X^T X)^-1: R0 R0, R0 A, A A

    def sigmoid(self, compute: float) -> Floats:
        """[G]: the share of the gain that each curve has at some compute."""
        return sigmoid(np.array([compute]), self.midpoints, self.exponents)

    def of(self, of_start: Floats | float, of_asymptote: Floats | float) -> Interval:
        """Least and greatest value of of_start * R0 + of_asymptote * A in the region."""
        centre = of_start * self.start + of_asymptote * self.asymptote
        rr, ra, aa = self.inverse
        variance = of_start**2 * rr + 2.0 * of_start * of_asymptote * ra + of_asymptote**2 * aa
        half = np.sqrt(np.maximum(self.slack * variance, 0.0))
        return Interval(low=float((centre - half).min()), high=float((centre + half).max()))


def sigmoid(compute: Floats, midpoint: Floats | float, exponent: Floats | float) -> Floats:
    """1 / (1 + (Cmid / C)^B), without overflow."""
    return 1.0 / (1.0 + np.exp(np.clip(exponent * np.log(midpoint / compute), -700.0, 700.0)))


def fit(compute: Floats, reward: Floats) -> Fit:
    """The law through N points, by least squares.

    The region is where the sum of squares is at most S (1 + p / (N - p) F), S its least value, F the
    95 % quantile of F(p, N - p), p = 4 (Bates and Watts, Nonlinear Regression, 1988, section 6); for
    independent normal errors of a linear model it is exact.

    Args:
        compute: [N] > 0, such as device-hours.
        reward: [N].

    Raises NotIdentified where there are too few points, where a constant is as good, or where the
    region has no end: the curve's upper part or its middle was not seen, as of a straight line.
    """
    _check(compute, reward)
    low, high = math.log(compute.min() / BEYOND), math.log(compute.max() * BEYOND)
    mids = np.linspace(low, high, MIDS)
    steeps = np.linspace(math.log(LEAST_STEEP), math.log(MOST_STEEP), STEEPNESSES)
    squares, fitted = _on_grid(compute, reward, mids, steeps)
    best = float(squares.min())
    _check_better(compute, reward, best)
    degrees = len(compute) - PARAMETERS
    limit = best * (1.0 + PARAMETERS / degrees * f_quantile(degrees))
    _check_ends(squares <= limit)
    for _ in range(REFINED):
        mids, steeps = (
            _around(mids, squares.min(axis=1) <= limit),
            _around(steeps, squares.min(axis=0) <= limit),
        )
        squares, fitted = _on_grid(compute, reward, mids, steeps)
        best = min(best, float(squares.min()))
        limit = best * (1.0 + PARAMETERS / degrees * f_quantile(degrees))
    return _read(compute, reward, mids, steeps, squares, fitted, limit)


def _check(compute: Floats, reward: Floats) -> None:
    assert compute.shape == reward.shape and (compute > 0).all()
    if len(np.unique(compute)) < FEWEST_POINTS:
        raise NotIdentified(
            f"{len(np.unique(compute))} points are too few for a curve of {PARAMETERS} parameters. "
            f"Give it {FEWEST_POINTS} or more."
        )
    if not np.ptp(reward) > 0:
        raise NotIdentified("Every point has the same reward: there is no gain to fit.")


def _check_better(compute: Floats, reward: Floats, best: float) -> None:
    """Raise NotIdentified where the curve is not clearly better than no gain at all."""
    degrees = len(compute) - PARAMETERS
    flat = float(((reward - reward.mean()) ** 2).sum())
    if (flat - best) / 3.0 <= best / degrees * f_quantile(degrees):
        raise NotIdentified("The rewards do not grow beyond their noise: there is no gain to fit.")


def _check_ends(allowed: NDArray[np.bool_]) -> None:
    """Raise NotIdentified where the region reaches the grid's edge. allowed: [Cmid, B]."""
    if allowed[-1].any():
        raise NotIdentified(
            f"The points allow a Cmid beyond {BEYOND:.0f} times the last compute: the rewards have "
            "not begun to level off, so the asymptote is not known. Train on."
        )
    if allowed[0].any():
        raise NotIdentified(
            "The points allow a Cmid far below the first compute: the beginning of the gain was not "
            "seen, so Cmid is not known. Take points of a smaller compute."
        )
    if allowed[:, 0].any():
        raise NotIdentified(
            f"The points allow an exponent B below {LEAST_STEEP}: the gain is too slow to tell where "
            "it ends. Train on, or take more points."
        )
    if allowed[:, -1].any():
        raise NotIdentified(
            f"The points allow an exponent B above {MOST_STEEP:.0f}: the gain is a step between two "
            "points. Take more points there."
        )


def _extent(logs: Floats, inside: NDArray[np.bool_]) -> Interval:
    """From the last point of the grid below the region to the first above it."""
    around = _around(logs, inside)
    return Interval(low=float(np.exp(around[0])), high=float(np.exp(around[-1])))


def _around(values: Floats, allowed: NDArray[np.bool_]) -> Floats:
    """As many values, from just below the first that is allowed to just above the last."""
    where = np.flatnonzero(allowed)
    low, high = max(where[0] - 1, 0), min(where[-1] + 1, len(values) - 1)
    return np.linspace(values[low], values[high], len(values))


@dataclass(frozen=True, slots=True)
class _Linear:
    """The fits of R0 and A at each (Cmid, B): [Cmid, B] each."""

    start: Floats
    asymptote: Floats
    inverse: tuple[Floats, Floats, Floats]


def _on_grid(
    compute: Floats, reward: Floats, mids: Floats, steeps: Floats
) -> tuple[Floats, _Linear]:
    """The least sum of squares at each (log Cmid, log B), [Cmid, B], and the fits.

    With x = sigmoid, R = R0 (1 - x) + A x: two unknowns, so the normal equations are solved by hand.
    """
    exponent = np.exp(steeps)[None, :, None]
    ratio = mids[:, None, None] - np.log(compute)[None, None, :]
    x = 1.0 / (1.0 + np.exp(np.clip(exponent * ratio, -700.0, 700.0)))
    y = 1.0 - x
    yy, xy, xx = (y * y).sum(-1), (x * y).sum(-1), (x * x).sum(-1)
    yr, xr = (y * reward).sum(-1), (x * reward).sum(-1)
    determinant = np.maximum(yy * xx - xy * xy, 1e-12)
    inverse = (xx / determinant, -xy / determinant, yy / determinant)
    start = inverse[0] * yr + inverse[1] * xr
    asymptote = inverse[1] * yr + inverse[2] * xr
    residual = reward - start[..., None] * y - asymptote[..., None] * x
    return (residual**2).sum(-1), _Linear(start, asymptote, inverse)


def _read(
    compute: Floats,
    reward: Floats,
    mids: Floats,
    steeps: Floats,
    squares: Floats,
    fitted: _Linear,
    limit: float,
) -> Fit:
    """The best curve and the region's extent."""
    row, column = np.unravel_index(int(squares.argmin()), squares.shape)
    inside = squares <= limit
    grid_mid, grid_steep = np.meshgrid(np.exp(mids), np.exp(steeps), indexing="ij")
    region = Region(
        midpoints=grid_mid[inside],
        exponents=grid_steep[inside],
        start=fitted.start[inside],
        asymptote=fitted.asymptote[inside],
        slack=(limit - squares)[inside],
        inverse=tuple(part[inside] for part in fitted.inverse),  # type: ignore[arg-type]
    )
    fit = Fit(
        curve=Curve(
            start=float(fitted.start[row, column]),
            asymptote=float(fitted.asymptote[row, column]),
            midpoint=float(np.exp(mids[row])),
            exponent=float(np.exp(steeps[column])),
        ),
        start=region.of(1.0, 0.0),
        asymptote=region.of(0.0, 1.0),
        midpoint=_extent(mids, np.asarray(inside.any(axis=1))),
        exponent=_extent(steeps, np.asarray(inside.any(axis=0))),
        residual=math.sqrt(float(squares.min()) / (len(compute) - PARAMETERS)),
        points=len(compute),
        region=region,
    )
    width = fit.asymptote.high - fit.asymptote.low
    if width > WIDEST * float(np.ptp(reward)):
        raise NotIdentified(
            f"The asymptote may lie anywhere from {fit.asymptote.low:.3g} to "
            f"{fit.asymptote.high:.3g}, further apart than the rewards that were seen. Train on."
        )
    return fit


def f_quantile(degrees: int, level: float = LEVEL) -> float:
    """The quantile of Fisher's F with 4 and `degrees` degrees of freedom.

    P(F > f) = x^(d/2) (1 + d/2 (1 - x)) with x = d / (d + 4 f): the incomplete beta function, whose
    second argument is 2. By bisection.
    """
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2.0
        x = degrees / (degrees + PARAMETERS * middle)
        beyond = x ** (degrees / 2.0) * (1.0 + degrees / 2.0 * (1.0 - x))
        low, high = (middle, high) if beyond > 1.0 - level else (low, middle)
    return (low + high) / 2.0


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
