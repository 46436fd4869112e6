"""Which engine did what and when, and how long it had nothing to do: as a picture and in numbers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.tracking.plots import GRID, INK, MUTED, STAGE_COLOURS

MOST_ROWS = 64  # engines in a picture


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
    begin, end = min(one.start for one in work), max(one.end for one in work)
    busy = dict.fromkeys(sorted({one.engine for one in work}), 0.0)
    until = dict.fromkeys(busy, begin)
    for one in sorted(work, key=lambda one: one.start):
        busy[one.engine] += max(0.0, one.end - max(until[one.engine], one.start))
        until[one.engine] = max(until[one.engine], one.end)
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
    stages = list(dict.fromkeys(one.stage for one in work))
    colours = {s: STAGE_COLOURS[n % len(STAGE_COLOURS)] for n, s in enumerate(stages)}
    begin = min((one.start for one in work), default=0.0)
    rows = {engine: row for row, engine in enumerate(engines)}
    # A collection of rectangles for all calls: a bar each takes matplotlib milliseconds.
    shown = [one for one in work if one.engine in rows]
    axes.add_collection(
        PolyCollection(
            [_rectangle(one, rows[one.engine], begin) for one in shown],
            facecolors=[(colours[one.stage], 0.95 if one.step % 2 else 0.55) for one in shown],
            edgecolors="white",
            linewidths=0.4,
        ),
        autolim=False,
    )
    axes.set_xlim(0, max((one.end - begin for one in work), default=1.0) or 1.0)
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


def _rectangle(one: TimelineCall, row: int, begin: float) -> list[tuple[float, float]]:
    left, right = one.start - begin, one.end - begin
    return [(left, row - 0.36), (right, row - 0.36), (right, row + 0.36), (left, row + 0.36)]
