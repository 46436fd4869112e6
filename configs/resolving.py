"""What settings are where nobody has set them: decided once, when the settings are whole.

Reading settings decides nothing, so the same text means the same settings on every machine. A run
that begins has them resolved before it is checked and stored; those of a stored run are complete, and
what was decided there is kept on whatever machine goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from pydantic import BaseModel

from configs.cluster import Role
from configs.environment import cpu_multiplies_bfloat16
from configs.run import RunConfig

SLOW = "this CPU is slow in bfloat16"
GPU_SEQUENCES = 512  # that a vLLM on GPUs decodes at once, unless set
TRAINED: tuple[Role, ...] = ("actor", "ref", "critic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What decisions go by, of the machine where they are made."""

    multiplies_bfloat16: bool  # its CPU does, with instructions of its own


def this_machine() -> Machine:
    """That of this process."""
    return Machine(multiplies_bfloat16=cpu_multiplies_bfloat16())


ANY_MACHINE = Machine(multiplies_bfloat16=True)  # one by which nothing is decided


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A setting that nobody had set."""

    path: tuple[str, ...]  # of the setting, such as ("rollout", "dtype")
    value: object
    because: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} = {_text(self.value)}: {self.because}"


def _text(value: object) -> str:
    """A value as a recipe has it; of a group what is not as usual."""
    if isinstance(value, BaseModel):
        named = value.model_dump(mode="json", exclude_defaults=True).items()
        return f"{{{', '.join(f'{name}: {_text(inner)}' for name, inner in named)}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


Decider = Callable[[Any, Machine], Iterable[Decision]]  # of settings, on a machine


class Resolvable(Protocol):
    """Settings with a say in what they are where nobody has set them."""

    @property
    def deciders(self) -> tuple[Decider, ...]:
        """They decide in this order, each by the settings as those before have left them."""
        ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As of any pydantic model."""
        ...


S = TypeVar("S", bound=Resolvable)


@dataclass(frozen=True, kw_only=True)
class Resolved(Generic[S]):
    """Settings as they are used, and what of them was decided."""

    settings: S
    decisions: tuple[Decision, ...]


def resolve(settings: S, machine: Machine) -> Resolved[S]:
    """Decide what nobody has set; what is set stays, and with it all of a stored run."""
    decisions: list[Decision] = []
    for decide in settings.deciders:
        for decision in decide(settings, machine):
            settings = _placed(settings, decision.path, decision.value)
            decisions.append(decision)
    return Resolved(settings=settings, decisions=tuple(decisions))


def _placed(group: Any, path: tuple[str, ...], value: object) -> Any:
    """A copy of a group of settings with another value at a path below it."""
    name, *below = path
    if isinstance(group, BaseModel):
        inner = _placed(getattr(group, name), tuple(below), value) if below else value
        return group.model_copy(update={name: inner})
    inner = _placed(group[name], tuple(below), value) if below else value
    return {**group, name: inner} if name in group else {name: inner, **group}


def number_formats(config: RunConfig, machine: Machine) -> Iterator[Decision]:
    """Float32 on CPUs that are slow in bfloat16."""
    if machine.multiplies_bfloat16:
        return
    for group, field in _formats_on_cpus(config):
        if field not in getattr(config, group).model_fields_set:
            yield Decision(path=(group, field), value="float32", because=SLOW)


def _formats_on_cpus(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Group and field of the number formats that CPUs compute in.

    Weights held in bfloat16 (train.weights_dtype) are multiplied so on any.
    """
    groups: list[tuple[str, str, tuple[Role, ...]]] = [("rollout", "dtype", ("rollout",))]
    if config.train.weights_dtype != "bfloat16":
        groups.append(("train", "compute_dtype", TRAINED))
    for group, field, roles in groups:
        pools = [config.cluster.pools.get(config.cluster.roles.pool_of(role)) for role in roles]
        if not any(pool and pool.gpus for pool in pools):
            yield group, field


def slow_formats(config: RunConfig, machine: Machine) -> list[str]:
    """A sentence for each number format that is decided, by a person or elsewhere, and slow here."""
    if machine.multiplies_bfloat16:
        return []
    return [
        f"{group}.{field} = bfloat16 is what the run has, and {SLOW}. It is kept; a "
        "CPU with AVX-512 or bf16 instructions is several times as fast."
        for group, field in _formats_on_cpus(config)
        if getattr(getattr(config, group), field) == "bfloat16"
    ]


def gpu_sampling(config: RunConfig, _: Machine) -> Iterator[Decision]:
    """Compiled graphs and more sequences at once for a vLLM on GPUs."""
    pool = config.cluster.pools.get(config.cluster.roles.rollout)
    if pool is None or not pool.gpus:
        return
    usual: dict[str, object] = {"enforce_eager": False}
    if config.rollout.engine == "vllm":
        usual["max_sequences"] = GPU_SEQUENCES
    for name, value in usual.items():
        if name not in config.rollout.model_fields_set:
            yield Decision(path=("rollout", name), value=value, because="rollout workers have GPUs")


def own_process(config: RunConfig, _: Machine) -> Iterator[Decision]:
    """A process for vLLM's front end where it and a trainer are busy on one worker at a time.

    On CPUs the two want more processors than there are (benchmarks/own_process.py).
    """
    name, beside = config.cluster.roles.rollout, [*config.frozen_roles, *config.trained_roles]
    pool = config.cluster.pools.get(name)
    if (
        config.rollout.engine == "vllm"
        and "own_process" not in config.rollout.model_fields_set
        and config.max_staleness > 0
        and not config.cluster.share_devices
        and (pool is not None and pool.gpus > 0)
        and name in map(config.cluster.roles.pool_of, beside)
    ):
        because = "steps overlap, and a trainer has the same workers"
        yield Decision(path=("rollout", "own_process"), value=True, because=because)


def shards(config: RunConfig, _: Machine) -> Iterator[Decision]:
    """As many as there are prompts, at most; with over-sampling a shard is a group."""
    rollout, prompts = config.rollout, config.prompts_per_step
    number = prompts if config.over_samples else min(rollout.shards, prompts)
    if "shards" in rollout.model_fields_set or number == rollout.shards:
        return
    because = f"a step has {prompts} prompts"
    if config.over_samples:
        because = "with rollout.over_sampling each group is a shard"
    yield Decision(path=("rollout", "shards"), value=number, because=because)


def driving(config: RunConfig, _: Machine) -> Iterator[Decision]:
    """Episodes with a program or a server go on each by itself."""
    episodes = config.episodes
    if episodes is None or "drive" in episodes.model_fields_set:
        return
    kinds = [one.environment.kind for one in config.played.values()]
    if slow := next((kind for kind in kinds if kind in ("agent", "openenv")), None):
        because = f"episodes.environment.kind = {slow} takes its time"
        yield Decision(path=("episodes", "drive"), value="apart", because=because)


def slots(config: RunConfig, _: Machine) -> Iterator[Decision]:
    """Of GPU pools that sample, for a step's shards.

    As many as the engine can decode at once, and one more, so that there is always a next one.
    """
    at_once = config.shards_at_once
    each = -(-config.groups_at_once * config.samples_per_prompt // at_once)
    for name in dict.fromkeys(map(config.cluster.roles.pool_of, config.sampling_roles)):
        pool = config.cluster.pools.get(name)
        if pool is None or not pool.gpus or "slots" in pool.model_fields_set:
            continue
        decoded = -(-config.rollout.max_sequences // each)
        number = 1 + min(-(-at_once // pool.workers), decoded)
        if number > pool.slots:
            yield Decision(
                path=("cluster", "pools", name, "slots"),
                value=number,
                because="shards that an engine on GPUs decodes at once, and the next one",
            )
