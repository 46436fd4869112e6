"""Rules for the settings of a run that begins. A stored run is read, and goes on, without them.

They are newer than some stored runs, or no fault of a run that has made steps. `tasks.run.preflight`
asks them before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from configs.algorithm.algorithm import AlgorithmConfig
from configs.credentials import credential_sentence
from configs.grpo import GRPOConfig
from configs.rollout import RolloutConfig

_LARGEST = 2**63 - 1  # of a column of whole numbers
WHOLE = "rollout.top_p = 1 and rollout.top_k = 0"


def check_new_run(config: GRPOConfig) -> None:
    """ValueError, one sentence, where no run may begin with these settings."""
    if said := credential_sentence(config):
        raise ValueError(said)
    if any(not stop for stop in config.rollout.stop):
        raise ValueError(
            f"rollout.stop = {list(config.rollout.stop)} has an empty string, which every text "
            "has, so each completion would end at its first token. Remove it."
        )
    if (wrong := _speculative(config)) is not None:
        raise ValueError(wrong)
    cut, user = cut_by(config.rollout), _user_of_rollout_logprobs(config.algorithm)
    if cut and user is not None:
        setting, instead = user
        raise ValueError(
            f"{cut} draws from a part of the policy's distribution, and {setting} compares the "
            "log-probs of that part with the trainer's, which are of the whole: weights would be "
            f"wrong for every token. Set {WHOLE}, or {instead}."
        )


def warnings_of(config: GRPOConfig) -> list[str]:
    """What a person should know of settings that are allowed, or with which a stored run goes on."""
    speculative = _speculative(config)
    wrong = [speculative] if speculative else []
    return [*wrong, *_bias(config.rollout), *_early_end(config), *_idle(config)]


def _speculative(config: GRPOConfig) -> str | None:
    """Speculative decoding by vLLM's build for CPUs, which was seen to draw wrong tokens."""
    if config.rollout.engine_args.get("speculative_config") is None:
        return None
    for role in config.sampling_roles:
        pool = config.cluster.roles.pool_of(role)
        if not config.cluster.pools[pool].gpus:
            return (
                f"rollout.engine_args.speculative_config with cluster.pools.{pool}.gpus = 0: on a "
                "CPU vLLM 0.32 draws other tokens with it than without. Remove it."
            )
    return None


def _bias(rollout: RolloutConfig) -> list[str]:
    cut = cut_by(rollout)
    if not cut:
        return []
    return [
        f"{cut} draws from a part of the policy's distribution, and the policy is trained as if from "
        "the whole: the gradient is biased, and more so as the part gets smaller. Set "
        f"{WHOLE}, unless that is wanted."
    ]


def _idle(config: GRPOConfig) -> list[str]:
    if config.train.recompute == "all" or config.train.gradient_checkpointing:
        return []
    return [
        f"train.recompute = {config.train.recompute} is about layers that "
        "train.gradient_checkpointing names, and that is 0: nothing is computed again. Set "
        "train.gradient_checkpointing = true."
    ]


def _early_end(config: GRPOConfig) -> list[str]:
    played = config.episodes
    if played is None or played.environment.kind != "agent":
        return []
    if config.rewards.on_failure != "drop" or config.group_size == 1:
        return []
    return [
        "an agent that raises fails its episode, and rewards.on_failure = drop leaves out the whole "
        "group; a step without a whole group ends the run. Set rewards.on_failure = complete to "
        "train on the other episodes of a group."
    ]


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


def cut_by(rollout: RolloutConfig) -> str:
    """The settings by which tokens are drawn from a part of the distribution; empty: none."""
    cuts = [f"rollout.top_p = {rollout.top_p:g}"] if rollout.top_p < 1 else []
    cuts += [f"rollout.top_k = {rollout.top_k}"] if rollout.top_k else []
    return " and ".join(cuts)


def _user_of_rollout_logprobs(algorithm: AlgorithmConfig) -> tuple[str, str] | None:
    """The setting by which the update uses the rollout engine's log-probs, and one that does not."""
    if algorithm.correction:
        return "algorithm.correction", "algorithm.correction = []"
    if algorithm.ratio_against == "rollout_logprobs":
        return "algorithm.ratio_against = rollout_logprobs", "ratio_against = old_logprobs"
    if algorithm.loss.kind == "decoupled":
        return "algorithm.loss.kind = decoupled", "algorithm.loss.kind = clipped"
    if algorithm.proximal == "loglinear":
        return "algorithm.proximal = loglinear", "algorithm.proximal = recompute"
    return None


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
