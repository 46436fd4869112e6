"""The curves of a run, taken to other software at any time, from its commits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.environment import pip_install
from configs.overrides import ConfigError
from configs.storage import TrackingConfig
from storage.audit.all_curves import Point, as_csv, points_of
from storage.runs.live import is_done
from storage.runs.run_store import RunStore, origin_of
from storage.tracking.connection import TrackingError
from storage.tracking.curve_trackers import TRACKERS, stored_run
from tasks.commands.command import Answer, Request, text
from tasks.run.run_record import stored_settings


def answer(request: Request) -> Answer:
    """Write the curves where they were asked for."""
    files, arguments = request.files, request.arguments
    points = points_of(files)
    if arguments.to == "csv":
        place = Path(arguments.file or f"{files.run}.csv").expanduser().absolute()
        place.write_text(as_csv(points), encoding="utf-8")
        where = str(place)
    elif arguments.file is not None:
        raise ConfigError(f"--file goes with --to csv, not with --to {arguments.to}. Leave it out.")
    else:
        where = to_tracker(arguments.to, files, arguments.project, points)
    count = len({name for point in points for name in point.metrics})
    return Answer(
        record={"run": files.run, "to": arguments.to, "steps": len(points), "where": where},
        shown=[text(f"{len(points)} steps of {files.run}, {count} metrics: {where}")],
    )


def to_tracker(kind: str, files: RunStore, project: str, points: Sequence[Point]) -> str:
    """The steps that a tracker does not have, with their evaluations; where a person sees the run.

    The run there is the one of tracking.also. Trackio's is written anew, with older steps' newest
    evaluations.
    """
    settings, origin = stored_settings(files), origin_of(files)
    tracking = TrackingConfig().model_dump() | settings.get("tracking", {})
    live = kind in tracking["also"] and project == tracking["experiment"]
    if live and not is_done(files, points[-1].step):
        raise ConfigError(
            f"{files.run} has not ended, and writes to {kind} itself (tracking.also). Wait for its "
            "end, or give --project another name."
        )
    try:
        tracker = TRACKERS[kind](tracking["tensorboard_folder"])
    except ImportError as error:
        raise ConfigError(
            f"--to {kind} needs the package {kind}. Install it: {pip_install(kind)}."
        ) from error
    if kind == "trackio":
        _forget_in_trackio(files.run, project)
    parent = None if origin is None else origin.run
    try:
        tracker.start(stored_run(files.run, project, settings, parent))
    except TrackingError as error:
        raise ConfigError(str(error)) from error
    newest = -1 if tracker.last_step is None else tracker.last_step
    try:
        for point in points:
            if point.step > newest:
                measured = {
                    name: v for name, v in point.metrics.items() if name.startswith("eval/")
                }
                metrics = {name: v for name, v in point.metrics.items() if name not in measured}
                tracker.log(point.step, {**metrics, "committed_at": point.at}, point.at)
                if measured:
                    tracker.log_evaluation(point.step, measured, point.at)
    finally:
        tracker.finish("FINISHED")
    return tracker.link


def _forget_in_trackio(run: str, project: str) -> None:
    import trackio

    try:
        earlier: list[Any] = [page for page in trackio.Api().runs(project) if page.name == run]
    except ValueError:  # there is no such project yet
        earlier = []
    for old in earlier:
        old.delete()
