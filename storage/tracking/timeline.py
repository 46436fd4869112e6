"""Which engine did what and when, and how long it had nothing to do: as a picture and in numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from storage.tracking.plots import GRID, INK, MUTED, STAGE_COLOURS


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
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


def idle_shares(work: Sequence[Work]) -> dict[str, float]:
    """Engine -> share of the time, from the first call of any engine to the last, without a call.

    Two calls at once count once: of rollout-0 with calls at 0 to 6 s and 4 to 8 s, and train with
    one at 6 to 10 s, idle are 0.2 and 0.6.
    """
    if not work:
        return {}
    begin, end = min(one.start for one in work), max(one.end for one in work)
    shares = {}
    for engine in sorted({one.engine for one in work}):
        busy, until = 0.0, begin
        for one in sorted((w for w in work if w.engine == engine), key=lambda w: w.start):
            busy += max(0.0, one.end - max(until, one.start))
            until = max(until, one.end)
        shares[engine] = 1.0 - busy / max(end - begin, 1e-9)
    return shares


def timeline_png(work: Sequence[Work], title: str = "") -> bytes:
    """A PNG with a row for each engine and a bar for each call, coloured by stage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shares = idle_shares(work)
    engines = list(shares)
    figure = Figure(
        figsize=(11, 1.6 + 0.32 * len(engines)), dpi=110, layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    stages = list(dict.fromkeys(one.stage for one in work))
    colours = {s: STAGE_COLOURS[n % len(STAGE_COLOURS)] for n, s in enumerate(stages)}
    begin = min((one.start for one in work), default=0.0)
    for one in work:
        axes.barh(
            engines.index(one.engine),
            one.seconds,
            left=one.start - begin,
            height=0.72,
            color=colours[one.stage],
            alpha=0.95 if one.step % 2 else 0.55,
            edgecolor="white",
            linewidth=0.4,
        )
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
