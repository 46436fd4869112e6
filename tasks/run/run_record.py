"""What run.json says of a run: the flow that made it, its settings, and what they fixed for good.

A resumed run reads its settings by this before anything else: Prefect is imported where it is used.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from configs.flows import fork_command, resume_command
from configs.grpo import GRPOConfig
from configs.imports import imported
from configs.overrides import ConfigError, validate
from configs.storage import StoreConfig
from engines.train.batching.packing import LoneRankPlans
from storage.runs.commit_log import head, read_outline
from storage.runs.run_store import Origin, RunStore, parent_of

if TYPE_CHECKING:
    from prefect import Flow


LOADED_FROM_FILE = "__prefect_loader_"  # what Prefect calls a module that it loads by its file


def path_of(flow: Flow[..., Any]) -> str:
    """`package.module:function`, by which the flow is imported from the working folder."""
    return f"{_module_of(flow.fn)}:{flow.fn.__qualname__}"


def _module_of(function: Callable[..., Any]) -> str:
    """The module's name, also where it was started as a program or loaded by its file."""
    name = function.__module__
    if name == "__main__":
        return _program()
    return _name_of(inspect.getfile(function)) if name.startswith(LOADED_FROM_FILE) else name


def _program() -> str:
    """The name of the module that was started: `python -m NAME`, or `python FOLDER/NAME.py`."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name
    file = vars(main).get("__file__")  # none in a notebook
    return _name_of(file) if file else "__main__"


def _name_of(file: str) -> str:
    path = Path(file).resolve()
    inside = path.is_relative_to(Path.cwd())
    return ".".join(path.relative_to(Path.cwd()).with_suffix("").parts) if inside else path.stem


def load_flow(path: str) -> Flow[..., Any]:
    """The flow at `package.module:function`; a word alone is one of ours, such as grpo.

    Raises ConfigError if there is none.
    """
    from prefect import Flow

    if ":" not in path:
        path = f"flows.{path}:{path}"
    module, _, name = path.partition(":")
    started = vars(sys.modules["__main__"])
    if module == _program() and name in started:  # not imported a second time
        flow = started[name]
    else:
        try:
            flow = imported(path)
        except ValueError as error:
            raise ConfigError(f"The flow {path} cannot be imported: {error}") from error
    if not isinstance(flow, Flow):
        raise ConfigError(f"{path} is no flow. Name a function with Prefect's @flow.")
    return flow


def settings_class(flow: Flow[..., Any]) -> type[GRPOConfig]:
    """The type of the flow's parameter `config`."""
    settings = typing.get_type_hints(flow.fn).get("config")
    if not (isinstance(settings, type) and issubclass(settings, GRPOConfig)):
        raise ConfigError(
            f"The flow {path_of(flow)} takes no settings of a run. Its parameter config must be a "
            "GRPOConfig, or a class made from it."
        )
    return settings


def flow_of(files: RunStore) -> str:
    """`package.module:function` of the flow that made a run; ConfigError if there is no such run."""
    return cast(str, _record(files)["flow"])


def settings_of(files: RunStore) -> GRPOConfig:
    """The settings in a run's run.json, as its own flow takes them."""
    return validate(settings_class(load_flow(flow_of(files))), stored_settings(files))


def stored_settings(files: RunStore) -> dict[str, Any]:
    """The same as plain values; ConfigError if there is no such run."""
    return cast("dict[str, Any]", _record(files)["config"])


def check_same_flow(
    files: RunStore, flow: str, store: StoreConfig, fork: str | None = None
) -> None:
    """ConfigError unless `flow` made the run; it says by which command to go on, or to fork."""
    made_by = flow_of(files)
    if made_by == flow:
        return
    if fork is None:
        remedy = f"Go on with it by: {resume_command(made_by, store, files.run)}"
    else:
        remedy = f"Fork it by: {fork_command(made_by, store, fork)}"
    raise ConfigError(
        f"Run {files.run} was made by the flow {made_by}, and this is {flow}. {remedy}"
    )


def _record(files: RunStore) -> dict[str, object]:
    record = files.read_run()
    if record is None:
        raise ConfigError(
            f"There is no run {files.run} in {files.store.uri}. Name a run of that store, or add "
            "store.uri=… of another."
        )
    return record


def parent_config(child: RunStore, origin: Origin) -> GRPOConfig:
    """The settings under which the origin's step was made."""
    return settings_of(parent_of(child, origin))


VERSION_NAMES = "version_names"  # of run.json; an older Refrain's has none

VersionNames = Literal["model", "checkpoint", "files"]  # as TrainSpec has them


def version_names(files: RunStore) -> VersionNames:
    """Of a run that is on record."""
    recorded = files.constant(VERSION_NAMES)
    return next((name for name in get_args(VersionNames) if name == recorded), "model")


def names_to_begin_with(files: RunStore, origin: Origin | None) -> VersionNames:
    """Of a new run: as its parent's, whose last version it has as its own first."""
    return "files" if origin is None else version_names(parent_of(files, origin))


LONE_RANK_PLANS = "lone_rank_plans"  # of run.json; an older Refrain's has none


def lone_rank_plans(files: RunStore) -> LoneRankPlans:
    """How a run on record has one rank's rows cut into micro-batches."""
    recorded = files.constant(LONE_RANK_PLANS)
    return next((plans for plans in get_args(LoneRankPlans) if plans == recorded), "balanced")


def plans_to_begin_with(files: RunStore, origin: Origin | None) -> LoneRankPlans:
    """Of a new run: of a fork its parent's, with which it has steps in common."""
    if origin is None or not origin.fork:
        return "whole_groups"
    return lone_rank_plans(parent_of(files, origin))


def decay_steps(config: GRPOConfig, files: RunStore) -> int:
    """The RL step after which train.schedule has a learning rate of 0; `steps` where it has none.

    It is that of the run's last commit or, before the first, of the settings with which it began. An
    update that is made again has then the learning rate that it had.
    """
    if config.train.schedule == "constant":
        return config.steps
    last, record = head(files), files.read_run()
    if last is not None:
        steps = read_outline(files, last).update.get("steps")
        if isinstance(steps, int):
            return steps
    recorded = {} if record is None else record["config"]
    assert isinstance(recorded, dict)
    return int(recorded.get("steps", config.steps))


def check_decay(config: GRPOConfig, files: RunStore) -> None:
    """ConfigError where a run that goes on is asked for steps that would train with a rate of 0."""
    ends = decay_steps(config, files)
    if config.steps > ends:
        raise ConfigError(
            f"steps = {config.steps}, but train.schedule = {config.train.schedule} of run "
            f"{files.run} ends at a learning rate of 0 after step {ends}, so later steps would train "
            f"nothing. Set steps = {ends}, or go on in a fork (--fork {files.run}), whose schedule "
            "ends at its own steps."
        )
