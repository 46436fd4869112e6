"""Trackers that get a run's curves beside MLflow: Weights & Biases, Trackio and TensorBoard.

Each goes on with what it has of a run, and says with which step that ends. Metrics have the names of
MLflow's, settings those of the recipe. A package is imported when its tracker is made.
"""

from __future__ import annotations

import json
import math
import re
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from storage.objects.documents import JsonValue
from storage.tracking.connection import TrackerUnusable, TrackingError
from storage.tracking.tracker import LONGEST_PARAM, shown_name

HEADER, BLOCK = 7, 32768  # bytes
_PART = struct.Struct("<IHB")  # head of a part: checksum, size, kind
WHOLE, LAST = 1, 4  # kinds of parts that end a record

MARK = "refrain.last_step"  # file beside TensorBoard's, which would have to be read whole
INIT_SECONDS = 60.0  # for which Weights & Biases tries to reach its server


def last_logged_step(folder: Path, run: str, project: str) -> int | None:
    """The last step of a run, by its id, among the offline runs in a folder; None of none."""
    last: int | None = None
    for file in folder.glob(f"offline-run-*-{run}/run-{run}.wandb"):
        records = [*records_of(file)]
        if not any(record.HasField("run") and record.run.project == project for record in records):
            continue
        for record in records:
            for item in record.history.item:
                if (item.key or "/".join(item.nested_key)) == "step":
                    last = max(last or 0, json.loads(item.value_json))
    return last


def records_of(file: Path) -> Iterator[Any]:
    """The whole records of a file, as Weights & Biases' own messages.

    The file is LevelDB's log: a header, then blocks of BLOCK bytes, of parts. A part is a checksum, a
    size, a kind and bytes; a record has one part or more, none of which begins in the last bytes of a
    block, where its head does not fit.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, offset, record = file.read_bytes(), HEADER, b""
    while offset + _PART.size <= len(data):
        left_in_block = BLOCK - offset % BLOCK
        if left_in_block < _PART.size:
            offset += left_in_block
            continue
        _checksum, size, kind = _PART.unpack_from(data, offset)
        offset += _PART.size
        record += data[offset : offset + size]
        offset += size
        if kind in (WHOLE, LAST) and offset <= len(data):
            yield Record.FromString(record)
            record = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvesOf:
    """The run whose curves they are."""

    run: str  # its name, unique in its store
    project: str  # what MLflow calls the experiment
    group: str  # runs of one recipe
    settings: Mapping[str, JsonValue]  # the resolved configuration, which holds no credentials
    tags: Mapping[str, str]  # of its page in MLflow; of a fork they name the parent


def stored_run(
    run: str, project: str, settings: Mapping[str, JsonValue], parent: str | None
) -> CurvesOf:
    """A run of the past, by its settings in the store; `parent`: of a fork."""
    forked = {} if parent is None else {"refrain.forked_from": parent}
    return CurvesOf(
        run=run,
        project=project,
        group=str(settings.get("name", "")),
        settings=settings,
        tags={"refrain.run": run, **forked},
    )


class CurveTracker(ABC):
    """One run. Used by one thread; `start` comes first.

    TrackingError where the tracker does not do what is asked; TrackerUnusable where it never will.
    """

    name: ClassVar[str]  # for people
    package: ClassVar[str]
    link = ""  # where a person sees the run, or the command that shows it
    last_step: int | None = None  # the last one whose metrics it has

    def __init__(self, folder: str) -> None:
        """`folder`: of what TensorBoard reads."""
        self._folder = folder

    @abstractmethod
    def start(self, run: CurvesOf) -> None:
        """Begin the run there, or go on with it."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Record a step's metrics; `at`: when it was committed, in seconds since 1970."""

    @abstractmethod
    def log_evaluation(self, version: int, metrics: Mapping[str, float], at: float) -> None:
        """Record what a suite says of a policy version, at that version's number."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """Write all out, and end the run: FINISHED, FAILED or KILLED, as MLflow calls it."""


class WeightsAndBiases(CurveTracker):
    """Online or not is its own affair (`wandb login`, WANDB_MODE, WANDB_DIR)."""

    name, package = "Weights & Biases", "wandb"

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        import wandb

        self._wandb = wandb

    def start(self, run: CurvesOf) -> None:
        wandb, project = self._wandb, re.sub(r"[/\\#?%:]", "-", run.project)[:128]
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", run.run)[:128]
        settings = wandb.Settings(
            silent=True, console="off", x_disable_stats=True, init_timeout=INIT_SECONDS
        )
        parent = run.tags.get("refrain.forked_from")
        try:
            self._page = page = wandb.init(
                project=project,
                id=name,
                name=run.run,
                group=run.group[:128],
                config=_settings(run),
                notes=None if parent is None else f"Fork of {parent}",
                resume="allow",
                reinit="finish_previous",
                settings=settings,
            )
        except wandb.errors.CommError as error:
            raise TrackingError(f"{self.name} does not answer: {first_line(error)}") from error
        except wandb.errors.Error as error:
            raise TrackerUnusable(f"{self.name} takes no run: {first_line(error)}") from error
        # Evaluations come later than their version's step, which its own count of steps refuses.
        page.define_metric("*", step_metric="step")
        page.define_metric("eval/*", step_metric="version")
        if page.offline:
            place = Path(page.settings.sync_dir)
            self.link = f"wandb sync {place}"
            self.last_step = last_logged_step(place.parent, name, project)
        else:
            self.link = str(page.url)
            last = page.summary.get("step") if page.resumed else None
            self.last_step = None if last is None else int(last)

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._page.log({**_numbers(metrics), "step": step})
        self.last_step = step

    def log_evaluation(self, version: int, metrics: Mapping[str, float], at: float) -> None:
        self._page.log({**_numbers(metrics), "version": version})

    def finish(self, status: str) -> None:
        self._page.finish(exit_code={"FINISHED": 0, "KILLED": 255}.get(status, 1))


class Trackio(CurveTracker):
    """On this machine or elsewhere is its own affair (TRACKIO_DIR, TRACKIO_SPACE_ID)."""

    name, package = "Trackio", "trackio"

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        import trackio

        self._trackio = trackio

    def start(self, run: CurvesOf) -> None:
        self._page = self._trackio.init(
            project=run.project,
            name=run.run,
            group=run.group,
            config=_settings(run),
            resume="allow",
            auto_log_gpu=False,
            auto_log_cpu=False,
            embed=False,
        )
        self.link = f"trackio show --project {run.project}"
        # Nothing public tells the last step wherever a run is kept; its own count goes on from it.
        self.last_step = self._page._next_step - 1 if self._page._next_step else None

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._page.log(_numbers(metrics), step=step)
        self.last_step = step

    def log_evaluation(self, version: int, metrics: Mapping[str, float], at: float) -> None:
        self._page.log(_numbers(metrics), step=version)

    def finish(self, status: str) -> None:
        self._page.finish()


class TensorBoard(CurveTracker):
    """Event files of a run, in the folder tracking.tensorboard_folder/PROJECT/RUN."""

    name, package = "TensorBoard", "tensorboard"

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        # Its own writer: torch's imports torch, and so does tensorboardX.
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries, self._tensors = event_pb2, summary_pb2, tensor_pb2
        self._types, self._text, self._opened = types_pb2, metadata, EventFileWriter

    def start(self, run: CurvesOf) -> None:
        parts = (re.sub(r"[^\w.-]", "_", part).lstrip(".") for part in (run.project, run.run))
        folder = Path(self._folder, *parts).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._mark = folder / MARK
        self.last_step = int(self._mark.read_text()) if self._mark.exists() else None
        self._writer = self._opened(str(folder))
        self.link = f"tensorboard --logdir {folder.parent}"
        after = 0 if self.last_step is None else self.last_step + 1
        # Of what a process wrote that died before it could mark it, TensorBoard shows nothing.
        begun = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(self._events.Event(session_log=begun), after, time.time())
        text = "```yaml\n" + yaml.safe_dump(_settings(run), sort_keys=False) + "```"
        tensor = self._tensors.TensorProto(
            dtype=self._types.DT_STRING, string_val=[text.encode("utf-8", "replace")]
        )
        kind = self._text.create_summary_metadata(None, None)
        value = self._summaries.Summary.Value(tag="settings", tensor=tensor, metadata=kind)
        shown = self._events.Event(summary=self._summaries.Summary(value=[value]))
        self._write(shown, after, time.time())
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self.log_evaluation(step, metrics, at)
        self._mark.write_text(str(step))
        self.last_step = step

    def log_evaluation(self, version: int, metrics: Mapping[str, float], at: float) -> None:
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in _numbers(metrics).items()
        ]
        summary = self._summaries.Summary(value=values)
        self._write(self._events.Event(summary=summary), version, at)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()

    def _write(self, event: Any, step: int, at: float) -> None:
        event.step, event.wall_time = step, at
        self._writer.add_event(event)


TRACKERS: Mapping[str, type[CurveTracker]] = {
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
}


def _settings(run: CurvesOf) -> dict[str, JsonValue]:
    """Settings, and what the run's tags say under `refrain`."""
    tags: dict[str, JsonValue] = {
        name.removeprefix("refrain."): value
        for name, value in run.tags.items()
        if not name.startswith("mlflow.")
    }
    return {**{name: _short(value) for name, value in run.settings.items()}, "refrain": tags}


def _short(value: JsonValue) -> JsonValue:
    """A setting with every text as long as MLflow shows it."""
    if isinstance(value, Mapping):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, str) and len(value) > LONGEST_PARAM:
        return f"{value[: LONGEST_PARAM - 1]}…"
    return value


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics that are finite, by the names that MLflow takes."""
    return {
        shown_name(name): float(value) for name, value in metrics.items() if math.isfinite(value)
    }


def first_line(error: Exception) -> str:
    """The first line of what an error says as a sentence, and of a long one its beginning."""
    line, _, _ = str(error).partition("\n")
    return f"{line.rstrip('. ')[:300]}."
