"""The fit of ScaleRL's law: planted parameters lie in their intervals, and what says nothing is refused."""

from __future__ import annotations

import numpy as np
import pytest

from storage.tracking.scaling_law import (
    Curve,
    Fit,
    Floats,
    NotIdentified,
    PlottedRun,
    f_quantile,
    fit,
    scaling_png,
)

COMPUTE = np.linspace(0.2, 40.0, 80)
PLANTED = Curve(start=0.1, asymptote=0.7, midpoint=4.0, exponent=1.6)


def noisy(curve: Curve, seed: int, deviation: float = 0.02, compute: Floats = COMPUTE) -> Floats:
    return curve.at(compute) + np.random.default_rng(seed).normal(0.0, deviation, len(compute))


def holds(found: Fit, curve: Curve) -> bool:
    """Whether all four parameters lie in their intervals."""
    return (
        found.start.holds(curve.start)
        and found.asymptote.holds(curve.asymptote)
        and found.midpoint.holds(curve.midpoint)
        and found.exponent.holds(curve.exponent)
    )


def test_the_law_by_hand() -> None:
    at = Curve(start=0.1, asymptote=0.7, midpoint=4.0, exponent=2.0).at(np.array([2.0, 4.0, 8.0]))
    assert at == pytest.approx([0.1 + 0.6 / 5, 0.4, 0.1 + 0.6 * 4 / 5])


@pytest.mark.parametrize(
    ("degrees", "printed"), [(6, 4.53), (10, 3.48), (20, 2.87), (60, 2.53), (120, 2.45)]
)
def test_quantiles_of_f_are_those_of_the_tables(degrees: int, printed: float) -> None:
    assert f_quantile(degrees) == pytest.approx(printed, abs=0.005)


def test_without_noise_the_parameters_are_found() -> None:
    found = fit(COMPUTE, noisy(PLANTED, 0, deviation=1e-6)).curve
    assert found.start == pytest.approx(0.1, abs=1e-3)
    assert found.asymptote == pytest.approx(0.7, abs=1e-3)
    assert found.midpoint == pytest.approx(4.0, rel=0.01)
    assert found.exponent == pytest.approx(1.6, rel=0.01)


def test_planted_parameters_lie_in_their_intervals() -> None:
    fits = [fit(COMPUTE, noisy(PLANTED, seed)) for seed in range(5)]
    assert all(holds(found, PLANTED) for found in fits)
    assert all(found.asymptote.high - found.asymptote.low < 0.2 for found in fits), (
        "they say something"
    )
    assert all(0.015 < found.residual < 0.025 for found in fits)


@pytest.mark.slow
def test_planted_parameters_lie_in_their_intervals_in_95_percent_of_200_runs() -> None:
    draw = np.random.default_rng(0)
    held = identified = 0
    for seed in range(200):
        curve = Curve(
            start=draw.uniform(0.0, 0.2),
            asymptote=draw.uniform(0.5, 0.9),
            midpoint=10 ** draw.uniform(0.4, 0.9),
            exponent=draw.uniform(1.2, 2.5),
        )
        try:
            found = fit(COMPUTE, noisy(curve, seed))
        except NotIdentified:
            continue
        identified += 1
        held += holds(found, curve)
    assert identified >= 190, "few of these are refused"
    assert held / identified >= 0.95


def test_a_forecast_holds_what_comes() -> None:
    for seed in range(5):
        value, bounds = fit(COMPUTE, noisy(PLANTED, seed)).forecast(400.0)
        assert bounds.low < value < bounds.high
        assert bounds.holds(float(PLANTED.at(np.array([400.0]))[0]))


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (0.3 + 0.0 * COMPUTE, "same reward"),
        (
            noisy(Curve(start=0.3, asymptote=0.3, midpoint=4.0, exponent=1.0), 3),
            "beyond their noise",
        ),
        (
            0.1 + 0.01 * COMPUTE + noisy(Curve(start=0, asymptote=0, midpoint=1, exponent=1), 1),
            "level",
        ),
        (noisy(Curve(start=0.1, asymptote=0.7, midpoint=300.0, exponent=1.0), 2), "level off"),
    ],
    ids=["constant", "flat", "linear", "far from the end"],
)
def test_points_that_do_not_say_are_refused(reward: Floats, says: str) -> None:
    with pytest.raises(NotIdentified, match=says):
        fit(COMPUTE, reward)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(NotIdentified, match="9 points are too few"):
        fit(COMPUTE[:9], PLANTED.at(COMPUTE[:9]))


def test_the_picture_has_fits_and_refusals() -> None:
    reward = noisy(PLANTED, 0)
    runs = [
        PlottedRun(name="a", compute=COMPUTE, reward=reward, fit=fit(COMPUTE, reward)),
        PlottedRun(name="b", compute=COMPUTE, reward=0.0 * COMPUTE, fit=None),
    ]
    assert scaling_png(runs, "GPU-hours", "reward").startswith(b"\x89PNG")
