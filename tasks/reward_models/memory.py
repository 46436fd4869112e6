"""What reward models, and judges that the run starts itself, hold in memory."""

from __future__ import annotations

from collections.abc import Iterator

from configs.grpo import GRPOConfig
from engines.models.traced_shape import Shape, TracedShape
from engines.rollout.memory_plan import BYTES, engine_bytes
from tasks.memory.holders import Holder, Vllm, WorkerEngine, sizes_of


def holders(config: GRPOConfig, policy: Shape) -> Iterator[Holder]:
    """Each that is on the workers of the pool cluster.roles.reward_model."""
    pool = config.cluster.roles.pool_of("reward_model")
    on_gpu = config.cluster.pools[pool].gpus > 0 if pool in config.cluster.pools else False
    line: str | None = "reward_model, each worker"
    if sizes := reward_model_bytes(config):
        yield WorkerEngine(
            role="reward_model",
            whose="reward models",
            sizes=sizes,
            line=line,
            by_name=False,
            libraries=True,
            remedy=_smaller_reward_models,
        )
        line = None
    for judge in config.rewards.judges:
        remedy = (
            "Set kv_cache_gib of the judge (rewards.functions[]), on a GPU "
            "gpu_memory_utilization, lower."
        )
        shape = sizes_of(judge.checkpoint, judge.max_length)
        if on_gpu and judge.engine == "vllm":
            yield Vllm(
                role="reward_model",
                whose=judge.label,
                pool=pool,
                settings=judge.rollout,
                named="rewards.functions[]",
                shape=shape,
                longest=judge.max_length,
                remedy=remedy,
            )
        elif shape is not None:
            taken = engine_bytes(judge.rollout, shape, judge.max_sequences, judge.max_length)
            yield WorkerEngine(
                role="reward_model",
                whose=judge.label,
                sizes={f"{judge.label}'s {what}": size for what, size in taken.items()},
                line=line,
                by_name=False,
                remedy=lambda what, said=remedy: said,  # type: ignore[misc]
            )
            line = None


def _smaller_reward_models(what: str) -> str:
    if what == "reward models' batch":
        return "Set batch_tokens of the reward model (rewards.functions[]) lower."
    return "Set cluster.roles.reward_model to a larger pool, or take a smaller model."


def reward_model_bytes(config: GRPOConfig) -> dict[str, int]:
    """What the reward models hold, and a batch of the largest needs; {} where no files are here.

    A batch goes through one layer after the other, and keeps nothing: the widest is the feed-forward
    part, with its two inputs, their product, and the residual stream on the way; of a shape that was
    traced half of what the layer would keep, as of a frozen rank.
    """
    weights, batches = 0, [0]
    for reward in config.rewards.models:
        shape, size = sizes_of(reward.checkpoint, reward.max_length + 1), BYTES[reward.dtype]
        if shape is None:
            continue
        weights += size * (shape.inside + (shape.vocabulary + 2) * shape.hidden)
        tokens = min(reward.batch_tokens, config.samples_per_step * reward.max_length)
        if isinstance(shape, TracedShape):
            longest = min(tokens, reward.max_length)
            widest = max(one.kept.of(tokens, tokens, longest, size) for one in shape.stack)
            batches.append(widest // 2)
        else:
            batches.append(size * tokens * (3 * shape.intermediate + 2 * shape.hidden))
    if not weights:
        return {}
    return {"reward models' weights": weights, "reward models' batch": max(batches)}
