"""The settings of a GRPO run: those of any run, and the rules that span several parts of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Self

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from configs.cluster import ClusterConfig
from configs.form import FORM, without
from configs.resolving import (
    ANY_MACHINE,
    Decider,
    driving,
    gpu_sampling,
    number_formats,
    own_process,
    resolve,
    shards,
    slots,
)
from configs.rollout import cut_by
from configs.rules.coding import CODING
from configs.rules.elastic import ELASTIC
from configs.rules.episodes import EPISODES
from configs.rules.evaluation import EVALUATION
from configs.rules.every_run import (
    BATCHES,
    CLUSTERS,
    CREDENTIALS,
    EXPERTS,
    LOGPROBS,
    MASK,
    RETRAINING,
    REWARDS,
    SAMPLING,
    SAMPLING_MASK,
    SHARING,
    STALE_SAMPLES,
    STORAGE,
    THINKING,
    WHOLE,
    has_agents,
)
from configs.rules.guards import GUARDS
from configs.rules.images import IMAGES
from configs.rules.lora import LORA
from configs.rules.over_sampling import OVER_SAMPLING
from configs.rules.promotion import PROMOTION
from configs.rules.quarantine import QUARANTINE
from configs.rules.rule import Rule, check_rules, where
from configs.rules.tasks import ONE_TASK, TASKS
from configs.rules.weight_transfer import WEIGHT_TRANSFER
from configs.run import RunConfig

ESTIMATOR: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not config.algorithm.needs_critic,
        says=lambda config: (
            f"algorithm.advantage.kind = {config.algorithm.advantage.kind} needs a critic, which "
            "this flow does not train. Run it with refrain ppo, or set "
            "algorithm.advantage.kind = grpo or another estimator without a critic."
        ),
    ),
    Rule(
        needs=lambda config: not config.algorithm.compares_subtrees,
        says=lambda config: (
            f"algorithm.advantage.kind = {config.algorithm.advantage.kind} compares completions "
            "within subtrees, and this flow samples none. Run it with refrain tree, or "
            "set algorithm.advantage.kind = dr_grpo, which it would be here."
        ),
    ),
)

# Without the estimator's, of which a flow that trains or samples otherwise has its own.
OF_EVERY_FLOW: tuple[Rule[RunConfig], ...] = (
    *CREDENTIALS,
    *CLUSTERS,
    *STALE_SAMPLES,
    *OVER_SAMPLING,
    *SAMPLING,
    *EPISODES,
    *CODING,
    *LOGPROBS,
    *SAMPLING_MASK,
    *THINKING,
    *EXPERTS,
    *where(lambda config: bool(config.guards), *GUARDS),
    *where(lambda config: config.data.quarantine is not None, *QUARANTINE),
    *TASKS,
    *ONE_TASK,
    *where(lambda config: config.evaluation is not None, *EVALUATION),
    *where(lambda config: config.promotion is not None, *PROMOTION),
    *where(lambda config: config.sees_frames, *IMAGES),
    *ELASTIC,
    *SHARING,
    *WEIGHT_TRANSFER,
    *where(lambda config: config.lora is not None, *LORA),
    *REWARDS,
    *STORAGE,
    *RETRAINING,
)

_LARGEST = 2**63 - 1  # of a column of whole numbers


class GRPOConfig(RunConfig):
    """Group relative policy optimisation (arXiv:2402.03300) and its relatives."""

    # Kinds of algorithm.advantage that need what other flows make; the form does not offer them.
    unfit: ClassVar[tuple[str, ...]] = ("gae", "tree", "tree_segment", "tree_sibling")
    # What has to hold between the parts, in the order in which it is asked.
    rules: ClassVar[tuple[Rule[Any], ...]] = (*BATCHES, *ESTIMATOR, *OF_EVERY_FLOW)
    deciders: ClassVar[tuple[Decider, ...]] = (
        number_formats,
        gpu_sampling,
        own_process,
        shards,
        driving,
        slots,
    )
    # Settings of a flow's own that a resumed run may have otherwise; * is any name.
    may_change: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        if not FORM.get():
            return schema
        algorithm = handler.resolve_ref_schema(schema["properties"]["algorithm"])
        choices = algorithm["properties"]
        choices["advantage"] = without(choices["advantage"], cls.unfit)
        return schema

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        """Of the settings that they will be, so that no rule has to know what is still open."""
        check_rules(resolve(self, ANY_MACHINE).settings)
        return self


def check_new_run(config: GRPOConfig) -> None:
    """ValueError, one sentence, where no run may begin with these settings."""
    check_rules(config, new_run=True)


def warnings_of(config: GRPOConfig) -> list[str]:
    """What a person should know of settings that are allowed, or with which a stored run goes on."""
    warnings = []
    cut = cut_by(config.rollout)
    if cut and not config.rollout.sampling_mask:
        warnings.append(
            f"{cut} draws from a part of the policy's distribution, and the policy is trained as if "
            "from the whole: the gradient is biased, and more so as the part gets smaller. Set "
            f"{MASK} = true, or {WHOLE}, unless that is wanted."
        )
    there_anyway = ClusterConfig().pools.keys()
    for pool in sorted(config.cluster.pools.keys() - config.used_pools - there_anyway):
        warnings.append(
            f"cluster.pools.{pool} has no role, so its workers are not started. Set a role of "
            f"cluster.roles to {pool}, or leave the pool out."
        )
    if has_agents(config) and config.rewards.on_failure == "drop" and config.group_size > 1:
        warnings.append(
            "an agent that raises fails its episode, and rewards.on_failure = drop leaves out the "
            "whole group; a step without a whole group ends the run. Set rewards.on_failure = "
            "complete to train on the other episodes of a group."
        )
    if config.train.recompute != "all" and not config.train.gradient_checkpointing:
        warnings.append(
            f"train.recompute = {config.train.recompute} is about layers that "
            "train.gradient_checkpointing names, and that is 0: nothing is computed again. Set "
            "train.gradient_checkpointing = true."
        )
    return warnings


def check_finite(config: GRPOConfig) -> None:
    """ValueError where a number of the settings is NaN or infinite, or too large for the stores."""
    for name, number in _numbers(config.model_dump(), ""):
        if isinstance(number, int):
            if abs(number) > _LARGEST:
                raise ValueError(
                    f"{name} = {number} is beyond {_LARGEST}, the largest number that can be stored. "
                    "Set a smaller one."
                )
            continue
        if not math.isfinite(number):
            raise ValueError(f"{name} = {number}, which is no finite number. Set it to one.")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """All numbers of plain settings, by their dotted names."""
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _numbers(inner, f"{name}.{number}")
