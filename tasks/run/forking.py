"""Beginning a run at a step of another one: RUN@STEP to an origin, under settings that may differ."""

from __future__ import annotations

import math

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from storage.objects.store import Store
from storage.prompts.datasets import first_place, open_source
from storage.runs.commit_log import read_commit
from storage.runs.forks import NoSuchOrigin, begin_at
from storage.runs.run_store import Origin, RunStore, committer, origin_of, parent_of
from tasks.run.recorded_flow import check_same_flow, settings_of


def split(fork: str) -> tuple[str, int | None]:
    """RUN@STEP as name and step; the step is None for RUN alone, which means its last."""
    name, at, step = fork.partition("@")
    if not name or (at and not step.isdigit()):
        raise ConfigError(
            f"--fork {fork} names no step. Write RUN@STEP, such as {name or 'RUN'}@20."
        )
    return name, int(step) if at else None


def origin_of_fork(config: GRPOConfig, fork: str, flow: str) -> Origin:
    """The origin of a run that `flow` begins at RUN@STEP with `config`; ConfigError if it cannot."""
    name, step = split(fork)
    parent = RunStore(Store(config.store.uri, config.store.options), name)
    if parent.read_run() is None:
        raise ConfigError(
            f"There is no run {name} in {parent.store.uri}. A fork shares its parent's objects, so "
            "it needs the same store: set store.uri."
        )
    check_same_flow(parent, flow, config.store, fork)
    try:
        origin = begin_at(parent, step, fork=True)
    except NoSuchOrigin as error:
        raise ConfigError(str(error)) from error
    before = parent_config(parent, origin)
    if before.model != config.model:
        raise ConfigError(
            f"{origin} was trained from another model, whose weights and optimizer state do not fit "
            "the one given. A fork keeps its parent's model; start a new run to change it."
        )
    check_state_fits(config, before, str(origin))
    if config.steps <= origin.at:
        raise ConfigError(
            f"steps = {config.steps}, and a fork of {origin} begins after step {origin.at}. "
            f"Set steps to {origin.at + 1} or more."
        )
    goes_on = data_go_on(config, before)
    if goes_on and config.rollout.sampling_mask and not before.rollout.sampling_mask:
        _check_no_answer_is_begun(parent, origin)
    update = {
        "cursor": goes_on,
        "first_group": first_group(config, parent, origin),
    }
    return origin.model_copy(update=update)


def _check_no_answer_is_begun(parent: RunStore, origin: Origin) -> None:
    """ConfigError where a step hands answers on of whose tokens the words were not kept."""
    owner, step = committer(parent, origin.step)
    if any(group.begun for group in read_commit(owner, step).carried):
        raise ConfigError(
            f"rollout.sampling_mask = true, and {origin} hands on answers that were begun without "
            "it. Set it to false, or fork a step that hands on none."
        )


def check_state_fits(config: GRPOConfig, before: GRPOConfig, origin: str) -> None:
    """ConfigError where a trainer's state is to be taken over by what has another kind of it."""
    anew = (
        f"or begin with the weights alone: continue_from = {origin} with continue_state = weights."
    )
    was, is_ = (
        "null" if one is None else str(one.model_dump(mode="json", exclude={"serving"}))
        for one in (before.lora, config.lora)
    )
    if was != is_:
        raise ConfigError(
            f"The trainer state of {origin} is of lora = {was}, and lora = {is_} does not fit it. "
            f"Set lora to the former, {anew}"
        )
    formats = [one.train.optimizer_dtype for one in (before, config)]
    if formats[0] != formats[1] and "8bit" in formats:
        raise ConfigError(
            f"The trainer state of {origin} is of train.optimizer_dtype = {formats[0]}, and "
            f"train.optimizer_dtype = {formats[1]} has other moments. Set it to the former, {anew}"
        )


def first_group(config: GRPOConfig, parent: RunStore, origin: Origin) -> int:
    """The first group such that neither group nor sample numbers come twice."""
    groups = groups_before(parent, origin)
    before = parent_config(parent, origin).samples_per_prompt
    return max(groups, math.ceil(groups * before / config.samples_per_prompt))


def groups_before(parent: RunStore, origin: Origin) -> int:
    """Groups that the parent numbered through the origin's step."""
    owner, step = committer(parent, origin.step)
    above = origin_of(owner)
    start, first = (0, 0) if above is None else (above.at, above.first_group)
    return first + (step - start) * settings_of(owner).groups_numbered


def data_go_on(config: GRPOConfig, before: GRPOConfig) -> bool:
    """Whether both settings draw the same rows in the same order."""
    orders = [
        first_place(settings.data, open_source(settings.data.source))
        for settings in (config, before)
    ]
    return orders[0] == orders[1]


def parent_config(child: RunStore, origin: Origin) -> GRPOConfig:
    """The settings under which the origin's step was made."""
    return settings_of(parent_of(child, origin))
