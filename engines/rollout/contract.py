"""What every rollout engine takes and gives: its spec, requests, results, errors.

No torch, no vLLM, no transformers here: the flow process imports this module, and calls `Sampler`.
"""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import Field

from configs.base import Settings
from configs.lora import LoraConfig
from configs.model import Model
from configs.rollout import RolloutConfig
from engines.failures import InfrastructureError
from engines.weight_transfer.offer import TransferOffer
from engines.workers.engine import Engine, Memory, Moved
from storage.batches.columns import SEGMENT
from storage.batches.refs import BatchRef
from storage.runs.weights import WeightsRef

# idle: running shards finish under the old weights first. keep: they pause, keep their cached keys
# and values of the old policy, and go on under the new one. recompute: they pause, and their keys
# and values are computed again under the new policy.
SyncMode = Literal["idle", "keep", "recompute"]
EngineState = Literal["ready", "paused", "asleep", "no weights", "dead", "closed"]
# What a greedy completion takes of several tokens with the same logit; results are told apart by it.
# Those without this word had one drawn among them.
GREEDY = "lowest id"


class EngineDead(InfrastructureError):
    """The engine's process is gone; says why. The engine must be built anew."""


class RolloutCancelled(RuntimeError):
    """A shard was in flight when `cancel` or `close` was called."""


class NoWeights(InfrastructureError):
    """The engine holds no complete policy version: none was synced yet, or the last sync failed."""


class RolloutSpec(Settings):
    """Everything from which a rollout engine is built; picklable and JSON-able."""

    name: str = Field("rollout", description="Name of the engine in results, logs and errors.")
    model: Model = Field(description="The model; the engine takes its weights from a sync only.")
    model_cache: str = Field(
        ".refrain/models", description="Directory for models that are converted or drawn."
    )
    rollout: RolloutConfig = Field(description="Engine settings.")
    store_uri: str = Field(description="Store of batches and policy versions.")
    store_options: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Arguments of the store's file system."
    )
    node_cache_bytes: int = Field(
        0, ge=0, description="What this machine keeps of the store's policy versions, in bytes."
    )
    routed_experts: bool = Field(
        False, description="Whether shards may ask for the experts of each token."
    )
    measured: bool = Field(False, description="Whether vLLM counts what it does, for Prometheus.")
    lora: LoraConfig | None = Field(
        None, description="Adapters that vLLM loads beside their base; none: all are merged."
    )
    sleeps: bool = Field(False, description="Whether the engine must be able to go to sleep.")
    max_model_len: int = Field(
        ge=2, description="Longest sequence, prompt and completion together, in tokens."
    )


NO_EXPERTS_ON_CPU = (
    "train.router_replay = true, and vLLM gives the experts of each token on a GPU alone. Set "
    "rollout.engine = transformers, or train.router_replay = false."
)

NO_MASK_ON_CPU = (
    "rollout.sampling_mask = true, and vLLM gives the words that top_p, top_k and min_p leave on a "
    "GPU alone. Set rollout.engine = transformers, or rollout.sampling_mask = false."
)


NO_GRAMMAR_WITHOUT_MASK = (
    "a grammar leaves out words, and rollout.sampling_mask = false does not keep which: the policy "
    "would be trained as if on all. Set it to true in the recipe, or ask for text without tool_choice"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are drawn; part of a shard's identity."""

    n: int  # completions of each prompt
    max_new_tokens: int  # longest completion, in tokens
    max_turn_tokens: int = 0  # longest turn of an episode; 0 is off
    segment_tokens: int = 0  # tokens of a segment, after which a completion waits; 0 is off
    segments: int = 0  # so many at most; the last one goes on to the end
    temperature: float = 1.0
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off; 1 is greedy
    min_p: float = 0.0  # share of the likeliest token's probability; 0 is off
    stop: tuple[str, ...] = ()  # end a completion, kept in it; special tokens are no text
    ignore_eos: bool = False  # go on past the model's end-of-sequence tokens
    seed: int | None = None  # None: not reproducible
    routed_experts: bool = False  # whether the experts of each token are stored
    sampling_mask: bool = False  # whether the words are that each token was drawn from
    thinking_budget: int = 0  # tokens of a turn within which a thought has to end; 0 is off
    thinking_words: tuple[str, ...] = ()  # that begin a thought, end it, and end it at its budget
    group: int = 0  # completions of each prompt in all, where only some are asked for; 0: n
    first: int = 0  # number of the first of these among them

    def most(self, begun: int, turn: int) -> int:
        """The longest that a completion gets now, in tokens.

        begun: tokens that it has already. turn: where its turn began.
        """
        limit = self.max_new_tokens
        if self.max_turn_tokens:
            limit = min(limit, turn + self.max_turn_tokens)
        if self.segment_tokens and (full := begun // self.segment_tokens) < self.segments - 1:
            limit = min(limit, (full + 1) * self.segment_tokens)
        return limit

    def limit(self, tokens: int) -> str:
        """The finish reason at a limit of tokens: the end, or that of a segment."""
        inside = self.segment_tokens and tokens < self.max_new_tokens
        return SEGMENT if inside and tokens % self.segment_tokens == 0 else "length"

    def only(self, number: int) -> Sampling:
        """The same for one of the n completions of each prompt, whose number and seed it keeps."""
        return replace(self, n=1, group=self.n, first=number)

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest, the lowest id of several: nothing is drawn."""
        return self.top_k == 1

    @property
    def of_one(self) -> Sampling:
        """The same with one completion of each prompt, whose number is the prompt's."""
        return replace(self, n=1, group=0, first=0)

    @property
    def as_greedy(self) -> Sampling:
        """The same with the likeliest tokens, one completion of each prompt."""
        likeliest = replace(self, n=1, temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
        return likeliest.of_nothing_trained

    @property
    def of_nothing_trained(self) -> Sampling:
        """The same without what only training needs."""
        return replace(self, routed_experts=False, sampling_mask=False)

    @property
    def identity(self) -> dict[str, object]:
        """What tells shards apart; as older versions had it where there are no turns or segments."""
        return dict(_identity(self))

    @classmethod
    def of(cls, config: RolloutConfig, n: int, max_turn_tokens: int = 0) -> Sampling:
        """The sampling that `config` asks for, with `n` completions of each prompt."""
        thinking = config.thinking
        return cls(
            n=n,
            max_new_tokens=config.max_new_tokens,
            max_turn_tokens=max_turn_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            sampling_mask=config.sampling_mask,
            thinking_budget=0 if thinking is None else thinking.budget,
            thinking_words=(
                () if thinking is None else (thinking.start, thinking.end, thinking.closing)
            ),
            stop=config.stop,
            ignore_eos=config.ignore_eos,
            seed=config.seed,
        )


# Fields that older shards have not; without effect as they stand there.
LATER = (
    *("max_turn_tokens", "segment_tokens", "segments"),
    *("routed_experts", "min_p", "sampling_mask", "thinking_budget", "thinking_words"),
    *("group", "first"),
)


@functools.lru_cache(maxsize=64)
def _identity(sampling: Sampling) -> dict[str, object]:
    fields = asdict(sampling)
    for name in LATER:
        if not fields[name]:
            del fields[name]
    if sampling.greedy:
        fields["greedy"] = GREEDY
    return fields


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One shard: prompts to complete, and where the samples go."""

    prompts: (
        BatchRef  # columns prompt_ids, group_id, prompt_row; branch_seed, where a prompt has rows
    )
    sampling: Sampling
    out_key: str  # store key of the object that is written
    step: int
    shard: int
    attempt: int = 0
    worker: str = ""  # name of the worker, for the column `worker`; empty takes the engine's name
    begun: BatchRef | None = None  # samples to go on with, as generate gave them: n for each prompt
    save_every: float | None = None  # seconds between saves of the tokens so far; None: none
    may_be_cut: bool = False  # whether RolloutPool.cut of its step ends it
    marked: bool = False  # whether the engine marks the result as done, for who asks for it again
    frozen: bool = False  # whether it asks for the turns of frozen players, or else the policy's


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardStats:
    """What a shard cost and under which weights it was drawn."""

    rows: int
    prompt_tokens: int
    tokens: int  # response tokens that were drawn for it, those that had been begun with left out
    truncated: int  # rows ended by the limit of new tokens
    seconds: float
    worker: str
    attempt: int
    version: int  # policy version at the shard's end
    digest: str  # digest of that version's weights
    unfinished: int = 0  # rows that were cut and can go on
    oldest: int | None = None  # policy version of the oldest token; None where there is no token
    read: int = 0  # tokens before the drawn ones, of the rows of which `cached` is known
    cached: int = 0  # of these, whose keys and values were in the engine's prefix cache
    # Share of the engine's cache of keys and values that was in use at the end; None: not known.
    cache_use: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """The samples of a shard; row i belongs to row i // n of its prompts."""

    ref: BatchRef  # the columns listed in engines.rollout.samples
    stats: ShardStats

    def record(self) -> dict[str, object]:
        """As the mark of a finished shard has it."""
        return {"ref": self.ref.to_json(), "stats": asdict(self.stats)}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> RolloutResult:
        """A finished shard by its mark."""
        return cls(ref=BatchRef.from_json(record["ref"]), stats=ShardStats(**record["stats"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What an engine holds after a sync, as it found it, not as it was told."""

    version: int
    digest: str  # of the bytes that were loaded
    tensors: int
    nbytes: int
    seconds: float  # the whole sync, running shards included
    load_seconds: float  # reading and loading alone
    waited: float = 0.0  # seconds for the store to have what the trainer's machine has
    transferred: bool = False  # whether the tensors came from the trainer, past the store
    missed: str = ""  # why they did not, where they were offered


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStatus:
    """A look at an engine; costs no more than a lock."""

    name: str
    state: EngineState
    cause: str  # why it is dead, else empty
    version: int | None
    digest: str
    running: int  # sequences being decoded
    waiting: int  # sequences in flight that wait for their turn
    tokens: int  # response tokens drawn since the engine was built
    pids: tuple[int, ...]  # processes that the engine started


class Sampler(Engine):
    """Samples completions under a policy version (engines/rollout/engine.py)."""

    @abstractmethod
    def generate(self, request: RolloutRequest) -> RolloutResult:
        """Sample a shard, write it, return its ref. Several shards may be in flight.

        With `request.begun`, samples that are not done go on from the tokens that they have, under
        the weights held now, which compute the keys and values of those tokens anew. With
        `request.save_every`, tokens are saved on the way, and what an attempt before this one saved
        of the shard is gone on with. With `request.marked` the shard is marked as done, and what is
        returned is what the mark says: of two attempts, the one that finished first.

        Raises NoWeights, RolloutCancelled, EngineDead; ValueError for a prompt that does not fit.
        """

    @abstractmethod
    def sync(
        self, weights: WeightsRef, mode: SyncMode = "idle", offer: TransferOffer | None = None
    ) -> SyncReport:
        """Load a policy version from the store; offer: from its trainer, if that can be.

        Raises WeightMismatch or storage.objects.errors.ObjectDamaged, both naming the tensor; the
        engine then refuses to sample until a sync succeeds, and shards in flight fail. A version
        that does not fit the model is refused before anything is loaded. An engine that sleeps wakes.
        """

    @abstractmethod
    def sync_and_score(
        self,
        weights: WeightsRef,
        mode: SyncMode,
        token_ids: list[list[int]],
        prompt_lengths: list[int],
        offer: TransferOffer | None = None,
    ) -> tuple[SyncReport, list[list[float]]]:
        """`sync`, then log-probs, at temperature 1 and unfiltered, of each sequence's tokens past its
        prompt: one call, for a flow with many engines.
        """

    @abstractmethod
    def cut(self, out_keys: list[str]) -> None:
        """End the shards of these out_keys as they stand, begun or not; `generate` returns them.

        Their samples that are not done have the finish reason "unfinished", and can go on.
        """

    @abstractmethod
    def sleep(self, level: int) -> Moved:
        """Give the device's memory back: keys, values, and weights, which level 1 keeps.

        Shards in flight end with RolloutCancelled. Until a sync, or a `wake` that attests the
        weights, the engine holds no policy version: `generate` raises NoWeights.
        """

    @abstractmethod
    def wake(self) -> Moved:
        """Take the memory again; at level 1 hold the version again if its bits are the same."""

    @abstractmethod
    def status(self) -> RolloutStatus:
        """What the engine is doing; never raises, and costs no more than a lock."""

    @classmethod
    def memory_setting(
        cls, payload: RolloutSpec, memory: Memory, held: Mapping[str, int], said: str
    ) -> str:
        return setting_for_less(payload.rollout, memory, said)


def engine_class(config: RolloutConfig) -> str:
    """Import path of the engine that `config` names, for an EngineSpec."""
    if config.engine == "transformers":
        return "engines.rollout.hf_engine:HFEngine"
    if config.own_process:
        return "engines.rollout.vllm_own_process:VllmInOwnProcess"
    return "engines.rollout.vllm_engine:VllmEngine"


def setting_for_less(config: RolloutConfig, memory: Memory, said: str) -> str:
    """What to set where an engine ran out of memory, as a sentence; `said`: the error's words."""
    if config.engine == "transformers":
        return f"Set rollout.max_sequences lower than {config.max_sequences}."
    if memory == "host":
        return f"Set rollout.kv_cache_gib lower than {config.kv_cache_gib:g}."
    share = f"{config.gpu_memory_utilization:g}"
    if "KV cache" in said or "cache blocks" in said:
        return (
            f"Set rollout.gpu_memory_utilization higher than {share}, or rollout.max_new_tokens "
            f"lower than {config.max_new_tokens}."
        )
    return (
        f"Set rollout.gpu_memory_utilization lower than {share}, or rollout.max_sequences lower "
        f"than {config.max_sequences}."
    )


def worker_environment(config: RolloutConfig) -> dict[str, str]:
    """Environment variables of a worker process that will hold a rollout engine.

    They must stand before the process imports vllm. The number of compute threads
    (OMP_NUM_THREADS) is the pool's affair.
    """
    if config.engine != "vllm":
        return {"TOKENIZERS_PARALLELISM": "false"}
    return {
        "TOKENIZERS_PARALLELISM": "false",
        # Several workers share the cores: no pinning of threads to cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # An engine's processes write their log to a file (engines/rollout/vllm_plugin.py).
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # The model runs in vLLM's core process, not in one more below it: half the start-up time.
        # On CPU vLLM wants that one to pin threads, which is off.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A forked child of a Dask worker would inherit its locks and sockets.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # vLLM's import has torch look for Triton, and torch warns on a CPU that it is not there.
        "TORCH_LOGS": os.environ.get("TORCH_LOGS") or "-torch._library.triton",
    }
