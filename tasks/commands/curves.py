"""The curves of a run, taken to other software at any time, from its commits."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.optional_packages import pip_install
from configs.overrides import ConfigError
from storage.audit.all_curves import Point, as_csv, points_of
from tasks.commands.command import Answer, Request, text
from tasks.run.recorded_flow import stored_settings


def answer(request: Request) -> Answer:
    """Write the curves where they were asked for."""
    files, asked = request.files, request.arguments
    points, settings = points_of(files), stored_settings(files)
    if asked.to == "csv":
        place = Path(asked.file or f"{files.run}.csv").expanduser().absolute()
        place.write_text(as_csv(points), encoding="utf-8")
        where = str(place)
    elif asked.file is not None:
        raise ConfigError(f"--file goes with --to csv, not with --to {asked.to}. Leave it out.")
    else:
        send = {"wandb": to_wandb, "trackio": to_trackio}[asked.to]
        where = send(files.run, asked.project, settings, points)
    count = len({name for point in points for name in point.metrics})
    return Answer(
        record={"run": files.run, "to": asked.to, "steps": len(points), "where": where},
        shown=[text(f"{len(points)} steps of {files.run}, {count} metrics: {where}")],
    )


def to_wandb(run: str, project: str, settings: dict[str, Any], points: Sequence[Point]) -> str:
    """Weights & Biases: a run with the id of ours. It keeps what it has; later steps are added.

    Offline or online is its own affair (WANDB_MODE, wandb login).
    """
    wandb = _imported("wandb")
    page = wandb.init(
        project=project, id=run, name=run, config=settings, resume="allow", reinit="finish_previous"
    )
    try:
        for point in points:
            page.log({**point.metrics, "committed_at": point.at}, step=point.step)
        return str(page.url or page.dir)
    finally:
        page.finish()


def to_trackio(run: str, project: str, settings: dict[str, Any], points: Sequence[Point]) -> str:
    """Trackio: a run with the name of ours, in place of an earlier export of it."""
    trackio = _imported("trackio")
    try:
        earlier = [one for one in trackio.Api().runs(project) if one.name == run]
    except ValueError:  # there is no such project yet
        earlier = []
    for one in earlier:
        one.delete()
    trackio.init(
        project=project,
        name=run,
        config=settings,
        auto_log_gpu=False,
        auto_log_cpu=False,
        embed=False,
    )
    try:
        for point in points:
            trackio.log({**point.metrics, "committed_at": point.at}, step=point.step)
    finally:
        trackio.finish()
    return f"trackio show --project {project}"


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--to {name} needs the package {name}. Install it: {pip_install(name)}."
        ) from error
