"""A run's progress as one picture: reward, KL to the reference, time by stage."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARD_MEAN = "reward/mean"
REWARD_STD = "reward/std"
KL = "train/kl_ref"
STAGE_SECONDS = "time/"  # prefix; the stage's name follows
# Prefix, in the first step under another meaning of a scorer, whose name follows: its version.
MEANING_CHANGED = "meaning_changed/"
WHOLE_STEP = "time/step"  # the stages together

_DENSE = 150  # steps from which points and bars would only blur

INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
_REWARD, _KL_COLOUR = "#0b6e99", "#b5541c"
STAGE_COLOURS = (
    "#0b6e99",
    "#e0a43b",
    "#5c8a3a",
    "#b5541c",
    "#7b5ea7",
    "#3aa6a0",
    "#9aa5b1",
    "#c25b8a",
)

MOST_ROWS = 64  # engines in a picture


def progress_png(
    steps: Sequence[int], metrics: Sequence[Mapping[str, float]], title: str = ""
) -> bytes:
    """A PNG of the metrics of each step, read under the names at the top of this file.

    `metrics` has one record per step; what a record lacks leaves a gap. Any number of steps will
    do, none too.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 7.5), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    reward, kl, time = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.6, 2))
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    _draw_reward(reward, steps, metrics)
    _draw_kl(kl, steps, metrics)
    _draw_stages(time, steps, metrics)
    time.set_xlabel("step", color=MUTED)
    time.xaxis.set_major_locator(MaxNLocator(integer=True))
    first = min(steps, default=0)
    time.set_xlim(first - 0.6, max(max(steps, default=0), first + 9) + 0.6)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _draw_reward(axes: Axes, steps: Sequence[int], metrics: Sequence[Mapping[str, float]]) -> None:
    _style(axes, "reward")
    at, mean = _series(steps, metrics, REWARD_MEAN)
    with_spread = [
        (step, record[REWARD_MEAN], record[REWARD_STD])
        for step, record in zip(steps, metrics, strict=True)
        if REWARD_MEAN in record and REWARD_STD in record
    ]
    if with_spread:
        x, middle, spread = zip(*with_spread, strict=True)
        low = [m - s for m, s in zip(middle, spread, strict=True)]
        high = [m + s for m, s in zip(middle, spread, strict=True)]
        axes.fill_between(
            x, low, high, color=_REWARD, alpha=0.13, linewidth=0, label="± 1 standard deviation"
        )
    _mark_meanings(axes, steps, metrics)
    axes.plot(at, mean, color=_REWARD, marker=_marker(at), linewidth=1.6, label="mean")
    if at:
        axes.legend(frameon=False, fontsize=8, loc="upper left", labelcolor=MUTED)


def _mark_meanings(
    axes: Axes, steps: Sequence[int], metrics: Sequence[Mapping[str, float]]
) -> None:
    """A line before each step from which a scorer means something else: rewards do not compare."""
    for step, record in zip(steps, metrics, strict=True):
        names = [name for name in record if name.startswith(MEANING_CHANGED)]
        if names:
            scorers = ", ".join(name.removeprefix(MEANING_CHANGED) for name in sorted(names))
            axes.axvline(
                step - 0.5, color=MUTED, linestyle="--", linewidth=1,
                label=f"another meaning from step {step}: {scorers}",
            )  # fmt: skip


def _draw_kl(axes: Axes, steps: Sequence[int], metrics: Sequence[Mapping[str, float]]) -> None:
    _style(axes, "KL to the reference (nats per token)")
    at, values = _series(steps, metrics, KL)
    axes.plot(at, values, color=_KL_COLOUR, marker=_marker(at), linewidth=1.6)
    if not at:
        axes.set_yticks([])
        axes.text(
            0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center",
            color=MUTED, fontsize=9,
        )  # fmt: skip


def _draw_stages(axes: Axes, steps: Sequence[int], metrics: Sequence[Mapping[str, float]]) -> None:
    _style(axes, "time by stage (seconds)")
    stages = dict.fromkeys(
        name
        for record in metrics
        for name in record
        if name.startswith(STAGE_SECONDS) and name != WHOLE_STEP
    )
    seconds = [[record.get(stage, 0.0) for record in metrics] for stage in stages]
    colours = [STAGE_COLOURS[number % len(STAGE_COLOURS)] for number in range(len(stages))]
    labels = [stage.removeprefix(STAGE_SECONDS) for stage in stages]
    if len(steps) > _DENSE:
        axes.stackplot(steps, seconds, colors=colours, labels=labels)
    else:
        bottom = [0.0] * len(steps)
        for heights, colour, label in zip(seconds, colours, labels, strict=True):
            axes.bar(steps, heights, bottom=bottom, width=0.8, color=colour, label=label)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    if stages:
        axes.set_ylim(bottom=0)
        axes.legend(
            frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5),
            labelcolor=MUTED, reverse=True,
        )  # fmt: skip


def _series(
    steps: Sequence[int], metrics: Sequence[Mapping[str, float]], name: str
) -> tuple[list[int], list[float]]:
    pairs = [(s, record[name]) for s, record in zip(steps, metrics, strict=True) if name in record]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _marker(at: Sequence[int]) -> str:
    return "." if len(at) <= _DENSE else ""


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineCall:
    """A call that an engine carried out, its failed tries too."""

    engine: str  # name of the worker
    stage: str
    step: int
    start: float  # seconds since 1970
    seconds: float

    @property
    def end(self) -> float:
        """When it ended, in seconds since 1970."""
        return self.start + self.seconds


def idle_shares(work: Sequence[TimelineCall]) -> dict[str, float]:
    """Engine -> share of the time, from the first call of any engine to the last, without a call.

    Two calls at once count once: of rollout-0 with calls at 0 to 6 s and 4 to 8 s, and train with
    one at 6 to 10 s, idle are 0.2 and 0.6.
    """
    if not work:
        return {}
    begin, end = min(call.start for call in work), max(call.end for call in work)
    busy = dict.fromkeys(sorted({call.engine for call in work}), 0.0)
    until = dict.fromkeys(busy, begin)
    for call in sorted(work, key=lambda call: call.start):
        busy[call.engine] += max(0.0, call.end - max(until[call.engine], call.start))
        until[call.engine] = max(until[call.engine], call.end)
    return {engine: 1.0 - seconds / max(end - begin, 1e-9) for engine, seconds in busy.items()}


def shown_engines(shares: Mapping[str, float]) -> list[str]:
    """The engines in a picture, in their order: of more than MOST_ROWS the idlest and the busiest."""
    if len(shares) <= MOST_ROWS:
        return list(shares)
    ranked = sorted(shares, key=lambda engine: shares[engine])
    chosen = {*ranked[: MOST_ROWS // 2], *ranked[-MOST_ROWS // 2 :]}
    return [engine for engine in shares if engine in chosen]


def timeline_png(work: Sequence[TimelineCall], title: str = "") -> bytes:
    """A PNG with a row for each engine (see `shown_engines`) and a bar for each call, by stage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shares = idle_shares(work)
    engines = shown_engines(shares)
    figure = Figure(
        figsize=(11, 1.6 + 0.32 * len(engines)), dpi=110, layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if len(engines) < len(shares):
        title += f": the {len(engines)} of {len(shares)} engines that were idle most and least"
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    stages = list(dict.fromkeys(call.stage for call in work))
    colours = {s: STAGE_COLOURS[n % len(STAGE_COLOURS)] for n, s in enumerate(stages)}
    begin = min((call.start for call in work), default=0.0)
    rows = {engine: row for row, engine in enumerate(engines)}
    # A collection of rectangles for all calls: a bar each takes matplotlib milliseconds.
    shown = [call for call in work if call.engine in rows]
    axes.add_collection(
        PolyCollection(
            [_rectangle(call, rows[call.engine], begin) for call in shown],
            facecolors=[(colours[call.stage], 0.95 if call.step % 2 else 0.55) for call in shown],
            edgecolors="white",
            linewidths=0.4,
        ),
        autolim=False,
    )
    axes.set_xlim(0, max((call.end - begin for call in work), default=1.0) or 1.0)
    axes.set_ylim(-0.5, max(len(engines), 1) - 0.5)
    axes.set_yticks(range(len(engines)), [f"{e}  idle {shares[e]:.0%}" for e in engines])
    axes.invert_yaxis()
    axes.set_xlabel("seconds; every second step is paler", color=MUTED, fontsize=8)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(
        handles=[Patch(color=colour, label=stage) for stage, colour in colours.items()],
        frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=MUTED,
    )  # fmt: skip
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _rectangle(call: TimelineCall, row: int, begin: float) -> list[tuple[float, float]]:
    left, right = call.start - begin, call.end - begin
    return [(left, row - 0.36), (right, row - 0.36), (right, row + 0.36), (left, row + 0.36)]
