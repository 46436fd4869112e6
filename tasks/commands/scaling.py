"""The law of reward over compute of some runs, as an answer on the command line."""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from storage.audit.comparison import first_step, outline_of
from storage.evaluations.results import newest_evaluations
from storage.runs.commit_log import Outline, head
from storage.runs.run_store import RunStore
from storage.tracking.cost import DEVICE_HOURS_SO_FAR, HOUR, Pool, counted
from storage.tracking.scaling_law import (
    Fit,
    Floats,
    Interval,
    NotIdentified,
    PlottedRun,
    fit,
    scaling_png,
)
from tasks.commands.command import Answer, Request, find_run, heading, table, text
from tasks.run.run_record import settings_of

if TYPE_CHECKING:
    from rich.console import RenderableType

REWARD = "reward"  # --of: the training reward
EVALUATION = "eval/"  # --of eval/SUITE/METRIC
AHEAD = (2.0, 4.0, 10.0)  # factors of the compute so far that are forecast


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """A run's points, and the law through them."""

    run: str
    unit: str  # of the compute
    compute: Floats  # [N]
    reward: Floats  # [N]
    fit: Fit | None
    refused: str | None  # why there is none


def answer(request: Request) -> Answer:
    """Fit the law for each run that was named."""
    arguments = request.arguments
    runs = [request.files, *(find_run(request.files.store, name) for name in arguments.others)]
    laws = [law_of(run, arguments.of, arguments.skip) for run in runs]
    if len({law.unit for law in laws}) > 1:
        raise ConfigError(
            "Some of the runs have GPUs and others have none, so their device-hours are not of one "
            "kind. Name runs of one kind."
        )
    if arguments.picture is not None:
        series = [
            PlottedRun(name=x.run, compute=x.compute, reward=x.reward, fit=x.fit) for x in laws
        ]
        Path(arguments.picture).expanduser().write_bytes(
            scaling_png(series, laws[0].unit, arguments.of)
        )
    lines: list[RenderableType] = [
        heading(f"{arguments.of} over {laws[0].unit}, intervals at 95 %")
    ]
    lines += [part for law in laws for part in told(law)]
    if arguments.picture is not None:
        lines.append(text(f"picture  {arguments.picture}"))
    return Answer(
        record={"of": arguments.of, "unit": laws[0].unit, "runs": [record(law) for law in laws]},
        shown=lines,
        good=all(law.fit is not None for law in laws),
    )


def law_of(run: RunStore, what: str, skip: int) -> Law:
    """The points of a run, without the first `skip` steps, and the law through them."""
    last = head(run)
    if last is None:
        raise ConfigError(f"Run {run.run} has no committed step.")
    outlines = [outline_of(run, step) for step in range(first_step(run), last + 1)]
    unit, compute = compute_of(settings_of(run), outlines)
    steps = [outline.step for outline in outlines]
    rewards = rewards_of(run, what, outlines)
    points = [
        (hours, rewards[step])
        for step, hours in zip(steps, compute, strict=True)
        if step in rewards and step >= steps[0] + skip and math.isfinite(hours) and hours > 0
    ]
    x = np.array([hours for hours, _ in points], np.float64)
    y = np.array([reward for _, reward in points], np.float64)
    law, refused = None, None
    try:
        law = fit(x, y)
    except NotIdentified as error:
        refused = str(error)
    return Law(run=run.run, unit=unit, compute=x, reward=y, fit=law, refused=refused)


def compute_of(config: GRPOConfig, outlines: list[Outline]) -> tuple[str, list[float]]:
    """Device-hours up to each step, and what a device is.

    Commits of an older Refrain do not tell; then it is the seconds of its steps times the devices
    that the settings name.
    """
    pools = {
        name: Pool(workers=config.cluster.pools[name].workers, gpus=config.cluster.pools[name].gpus)
        for name in config.used_pools
    }
    names = counted(pools)
    devices = sum(pools[name].workers * pools[name].per_worker for name in names)
    unit = "GPU-hours" if any(pools[name].gpus for name in names) else "worker-hours"
    hours, so_far = [], 0.0
    for outline in outlines:
        recorded_hours = outline.metrics.get(DEVICE_HOURS_SO_FAR)
        seconds = outline.metrics.get("time/step") or 0.0
        so_far = (
            so_far + seconds * devices / HOUR
            if recorded_hours is None
            else max(recorded_hours, so_far)
        )
        hours.append(so_far)
    return unit, hours


def rewards_of(run: RunStore, what: str, outlines: list[Outline]) -> dict[int, float]:
    """Step -> what is fitted. ConfigError where there is nothing of the name."""
    if what.startswith(EVALUATION):
        suite, _, metric = what.removeprefix(EVALUATION).rpartition("/")
        measured = newest_evaluations(run).values()
        points = {
            evaluation.version: evaluation.metrics[metric]
            for evaluation in measured
            if evaluation.suite == suite and metric in evaluation.metrics
        }
        there = {
            f"eval/{evaluation.suite}/{name}"
            for evaluation in measured
            for name in evaluation.metrics
        }
    else:
        name = "reward/mean" if what == REWARD else what
        points = {o.step: v for o in outlines if (v := o.metrics.get(name)) is not None}
        there = {REWARD, *(name for outline in outlines[-1:] for name in outline.metrics)}
    if not points:
        near = difflib.get_close_matches(what, there, n=3, cutoff=0.4) or sorted(there)[:3]
        hint = f" Did you mean {' or '.join(near)}?" if near else " It has no evaluations."
        raise ConfigError(f"--of {what}: run {run.run} has nothing of that name.{hint}")
    return points


def told(law: Law) -> list[RenderableType]:
    """A run's law for people."""
    lines: list[RenderableType] = [heading(f"{law.run}, {len(law.compute)} points")]
    if law.fit is None:
        return [*lines, text(f"Not identified. {law.refused}", "bold red")]
    rows = table("parameter", "value", "from", "to", right=("value", "from", "to"))
    for name, value, bounds in parameters(law.fit):
        rows.add_row(name, *(f"{number:.4g}" for number in (value, bounds.low, bounds.high)))
    ahead = table(
        law.unit, "times so far", "forecast", "from", "to",
        right=(law.unit, "times so far", "forecast", "from", "to"),
    )  # fmt: skip
    for factor in AHEAD:
        hours = float(law.compute.max()) * factor
        value, bounds = law.fit.forecast(hours)
        numbers = (value, bounds.low, bounds.high)
        ahead.add_row(f"{hours:.4g}", f"{factor:g}", *(f"{number:.4g}" for number in numbers))
    return [*lines, rows, ahead, text(f"A point lies {law.fit.residual:.3g} from the curve (SD).")]


def parameters(fit: Fit) -> list[tuple[str, float, Interval]]:
    """Name, value and interval of each."""
    curve = fit.curve
    return [
        ("R0", curve.start, fit.start),
        ("A", curve.asymptote, fit.asymptote),
        ("Cmid", curve.midpoint, fit.midpoint),
        ("B", curve.exponent, fit.exponent),
    ]


def record(law: Law) -> dict[str, object]:
    """A run's law for programs."""
    common: dict[str, object] = {"run": law.run, "points": len(law.compute)}
    if law.fit is None:
        return {**common, "refused": law.refused}
    last = float(law.compute.max())
    return {
        **common,
        "compute": last,
        "parameters": {
            name: {"value": value, **asdict(bounds)} for name, value, bounds in parameters(law.fit)
        },
        "residual": law.fit.residual,
        "forecast": [
            {"compute": last * factor, "value": value, **asdict(bounds)}
            for factor in AHEAD
            for value, bounds in [law.fit.forecast(last * factor)]
        ],
    }
