"""What to say of a place that cannot hold what the plan puts there: the setting with which it can.

Of several settings the first that is enough is named: those that leave the weights the same to the
bit before others, one before several, and more ranks after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from pydantic import ValidationError

from configs.grpo import GRPOConfig
from configs.lora import LoraConfig
from engines.models.traced_shape import Shape
from engines.workers.out_of_memory import size_of
from tasks.memory.holders import MemoryDemand, Vllm, WorkerEngine, episode_tokens
from tasks.memory.places import Place, places
from tasks.memory.vllm_shares import smaller_share

RANKS = (2, 4, 8, 16, 32, 64)  # times as many
FEW_LOGITS = 256  # tokens, for train.logit_chunk_tokens
Settings: TypeAlias = Mapping[str, object]  # of the train engine, by name


def too_large(demand: MemoryDemand, place: Place) -> str:
    """What such a place has to hold, has, and what to set."""
    assert place.limit is not None
    said = (
        f"By the memory plan {place.what} has to hold {size_of(place.planned)}, and has "
        f"{size_of(place.limit)} ({place.limited_by}); most of it for {place.largest}."
    )
    for holder in demand.holders():
        if isinstance(holder, Vllm) and place.largest == holder.holder:
            return f"{said} {holder.remedy or smaller_share(demand, place)}"
        if isinstance(holder, WorkerEngine) and place.largest in holder.held:
            return f"{said} {holder.remedy(place.largest)}"
    pool_of = demand.config.cluster.roles.pool_of
    for ranks in demand.ranks():
        pool = pool_of(ranks.role)
        own = pool != pool_of("actor") and place.what.endswith(f" of pool {pool}")
        if ranks.remedy is not None and own:
            return f"{said} {ranks.remedy}"
    return f"{said} {_of_train_engine(demand, place)}"


def _of_train_engine(demand: MemoryDemand, place: Place) -> str:
    """The settings of the train engine that are enough, and where those are ranks an adapter too."""
    config, shape = demand.config, demand.shape
    fitting = {one.what for one in places(demand) if one.fits} | {place.what}

    def size_with(changed: GRPOConfig) -> str | None:
        """What the place has to hold then; None where it, or another that could, cannot."""
        found = {one.what: one for one in places(demand.under(changed))}
        enough = all(found[what].fits for what in fitting if what in found)
        return size_of(found[place.what].planned) if enough and _valid(changed) else None

    for words, changed in smaller(config, shape):
        if now := size_with(changed):
            return f"Set {words}: then it is {now}.{_or_adapter(config, shape, words, size_with)}"
    none = "No setting of the train engine is enough."
    return f"{none}{_or_adapter(config, shape, 'workers=', size_with)} Choose a smaller model."


def _or_adapter(
    config: GRPOConfig,
    shape: Shape,
    words: str,
    size_with: Callable[[GRPOConfig], str | None],
) -> str:
    """Where nothing but more ranks is enough: how an adapter can be trained on those there are."""
    if config.lora is not None or "workers=" not in words:
        return ""
    adapted = config.model_copy(update={"lora": LoraConfig()})
    options = [("", adapted)]
    options += [
        (f" {more}", one) for more, one in smaller(adapted, shape) if "workers=" not in more
    ]
    for more, changed in options:
        if now := size_with(changed):
            return f" Or train an adapter, lora.rank={LoraConfig().rank}{more}: then it is {now}."
    return ""


def _valid(config: GRPOConfig) -> bool:
    """Whether its settings go together."""
    try:
        type(config).model_validate(config.model_dump())
    except ValidationError:
        return False
    return True


def smaller(config: GRPOConfig, shape: Shape) -> Iterator[tuple[str, GRPOConfig]]:
    """Settings with which less memory is taken, in words too."""
    together: dict[str, object] = {}
    for options in (_same_bits(config), _other_bits(config, shape)):
        before = dict(together)
        for option in options:
            yield _changed(config, option)
        for option in options:
            yield _changed(config, {**before, **option})
            together |= option
            yield _changed(config, together)
    if _on_gpu(config):
        for factor in RANKS:
            for changes in ({}, together):
                yield _changed(config, changes, factor)


def _same_bits(config: GRPOConfig) -> list[Settings]:
    """Settings that change what is held and nothing that is computed, the cheapest first.

    That they do not is compared in tests/engines/train/test_memory_settings.py.
    """
    train, ranks = config.train, config.cluster.pools[config.cluster.roles.actor].workers
    resharded = train.reshard_after_forward is True
    if train.reshard_after_forward == "auto":
        resharded = ranks > train.replicas
    found: list[Settings] = [] if resharded else [{"reshard_after_forward": True}]
    if train.gradient_checkpointing < 1:
        found.append({"gradient_checkpointing": 1.0})
    if _on_gpu(config) and train.optimizer_device == "device":
        found.append({"optimizer_device": "host"})
    if _on_gpu(config) and train.weights_dtype == "float32" and train.compute_dtype == "bfloat16":
        found.append({"weights_dtype": "bfloat16"})
    if _on_gpu(config) and not train.activation_offload:
        found.append({"activation_offload": True})
    return found


def _other_bits(config: GRPOConfig, shape: Shape) -> list[Settings]:
    """Settings with which sums are made in another order or rounded otherwise."""
    train, ranks = config.train, config.cluster.pools[config.cluster.roles.actor].workers
    longest = config.data.max_prompt_tokens + config.longest_response - 1
    if (episode := episode_tokens(config, shape)) is not None:
        longest = episode
    budgets = [train.micro_batch_tokens // part for part in (2, 4, 8, 16)]
    least = -(-longest // train.sequence_parallel)
    found: list[Settings] = [
        {"micro_batch_tokens": budget} for budget in budgets if budget >= least
    ]
    if train.logit_chunk_tokens > FEW_LOGITS:
        found.append({"logit_chunk_tokens": FEW_LOGITS})
    for parts in () if config.sees_frames or not shape.divisible else (2, 4, 8):
        budget = -(-longest // parts)
        helps = parts > train.sequence_parallel and budget < train.micro_batch_tokens
        if helps and not ranks % parts and not shape.heads % parts:
            found.append({"sequence_parallel": parts, "micro_batch_tokens": budget})
    if train.optimizer_dtype == "float32":
        found.append({"optimizer_dtype": "bfloat16"})
    if train.optimizer_dtype != "8bit":
        found.append({"optimizer_dtype": "8bit"})
    return found


def _on_gpu(config: GRPOConfig) -> bool:
    return config.cluster.pools[config.cluster.roles.actor].gpus > 0


def _changed(config: GRPOConfig, settings: Settings, factor: int = 1) -> tuple[str, GRPOConfig]:
    """With other settings of the train engine and `factor` times as many ranks; in words too."""
    train = config.train.model_copy(update=dict(settings))
    changed = config.model_copy(update={"train": train})
    words = [f"train.{name}={_as_word(value)}" for name, value in settings.items()]
    if factor > 1:
        name = config.cluster.roles.actor
        pool = config.cluster.pools[name]
        more = pool.model_copy(update={"workers": factor * pool.workers})
        pools = {**config.cluster.pools, name: more}
        cluster = config.cluster.model_copy(update={"pools": pools})
        changed = changed.model_copy(update={"cluster": cluster})
        words.append(f"cluster.pools.{name}.workers={more.workers}")
    return " ".join(words), changed


def _as_word(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
