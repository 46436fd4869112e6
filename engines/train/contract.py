"""What the flow process asks of the engines that train, or that are frozen: specs, requests, answers.

Free of torch. Kept by engines/train/fsdp_engine.py. Every rank gets the same arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from configs.base import Settings
from configs.lora import LoraConfig
from configs.model import Model
from configs.train import TrainConfig
from engines.train.batching.packing import LoneRankPlans
from engines.workers.engine import Ranked, joined_by
from storage.batches.refs import BatchRef
from storage.runs.weights import WeightsRef

if TYPE_CHECKING:
    from configs.algorithm.algorithm import AlgorithmConfig
    from engines.models.tokens import ModelTokens
    from engines.train.batching.mfu import CostModel
    from engines.weight_transfer.offer import Transfer, TransferOffer, TransferReport
    from storage.objects.store import Store


class TrainSpec(Settings):
    """From what every rank of a train engine is built."""

    model: Model = Field(description="The model at version 0.")
    model_cache: str = Field(description="Directory for models that are converted or drawn.")
    train: TrainConfig = Field(description="Optimizer, precision, batching.")
    lora: LoraConfig | None = Field(None, description="The adapter; none: all is trained.")
    base: WeightsRef | None = Field(
        None, description="Version below the adapter, where it is not the model's own weights."
    )
    role: Literal["actor", "ref", "critic", "teacher"] = Field(
        description="ref and teacher have no optimizer and never change; critic has a value head."
    )
    name: str = Field("", description="Of a teacher: what the run calls it.")
    student: Model | None = Field(
        None, description="Of a teacher: the model whose tokens it scores, which has the same ones."
    )
    store_uri: str = Field(description="Store of batches, weights and snapshots.")
    store_options: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Arguments of its file system."
    )
    cache_bytes: int = Field(0, ge=0, description="Batch cache of this process, in bytes.")
    whole_every: int = Field(
        1, ge=1, description="Of so many policy versions one is stored whole, unless in float32."
    )
    version_names: Literal["model", "checkpoint", "files"] = Field(
        "model",
        description="files: policy versions call weights as the checkpoint's files do, and carry "
        "what these hold besides; experts that are stacked keep the model's names. checkpoint: they "
        "do where the files have none that transformers stacks; model: they call them as "
        "transformers' model does. Older runs have the latter two.",
    )
    lone_rank_plans: LoneRankPlans = Field(
        "whole_groups",
        description="How one rank's rows come into micro-batches: whole_groups: groups are cut where "
        "they do not fit; balanced: also so that micro-batches cost alike, as older runs have it.",
    )
    node_cache_bytes: int = Field(
        0, ge=0, description="What this machine keeps of the store's policy versions, in bytes."
    )
    run: str = Field(description="Name of the run, the first part of its keys in the store.")
    threads: int = Field(1, ge=1, description="CPU threads of each rank.")
    seed: int = Field(0, ge=0, description="Seed of the engine's random numbers.")
    total_steps: int | None = Field(
        None, ge=1, description="Optimizer steps of the run, where a decaying schedule ends."
    )

    @property
    def frozen(self) -> bool:
        """Whether the weights never change."""
        return self.role in ("ref", "teacher")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinReport:
    """A rank has entered its process group."""

    rank: int
    device: str  # as torch names it
    parameters: int  # of the whole model
    seconds: Mapping[str, float]  # by phase


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnsResult:
    """What forward passes give for each response token (log-probs, values), as new columns."""

    batch: BatchRef | None  # those columns only; of one rank, None where it had no rows
    # "tokens": number of tokens with mask 1. Others: sum over those (one rank), mean (all ranks).
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def together(cls, parts: Sequence[ColumnsResult]) -> ColumnsResult:
        """The ranks' rows, in rank order; of their sums the means over tokens."""
        tokens = sum(part.metrics["tokens"] for part in parts)
        names = {name for part in parts for name in part.metrics} - {"tokens"}
        means = {
            name: sum(part.metrics.get(name, 0.0) for part in parts) / max(tokens, 1.0)
            for name in sorted(names)
        }
        return cls(
            batch=BatchRef.concat([part.batch for part in parts if part.batch is not None]),
            metrics={"tokens": tokens, **means},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeOn:
    """On what an update was made: whether it comes out equal to the bit again, and where."""

    device: str  # rank 0's, as its maker calls it, or the CPU's instructions and model
    torch: str  # version
    fixed: bool  # whether sums had a fixed order

    @classmethod
    def of(cls, record: Mapping[str, object]) -> MadeOn:
        """From what a commit says."""
        device, version = str(record.get("device")), str(record.get("torch"))
        return cls(device=device, torch=version, fixed=record.get("fixed") is True)

    @property
    def on_cpu(self) -> bool:
        return self.device.startswith("CPU")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitAttempt:
    """One try of a unit of an elastic update by a worker."""

    unit: int  # counted from 1 over the step's optimizer steps
    number: int  # 1 is its first try
    worker: str  # name
    started: float  # seconds since the epoch
    ended: float
    error: str = ""  # empty for success


LogprobColumn = Literal["old_logprobs", "ref_logprobs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobRequest:
    """Log-probs of responses that are wanted."""

    batch: BatchRef  # [N]
    column: LogprobColumn
    out_key: str
    temperature: float  # by which logits are divided
    squared: bool = False  # whether sum_pi_squared, the sum over the vocabulary of pi^2, is too


@dataclass(frozen=True, kw_only=True, slots=True)
class TeachRequest:
    """A student's samples, of whose tokens a teacher's log-probs are wanted."""

    batch: BatchRef  # [N]
    out_key: str
    temperature: float  # by which logits are divided
    top_k: int = 0  # likeliest words of each token
    store: Store | None = None  # of the batch and the columns, if not the engine's own
    readable: int | None = None  # token ids that the student knows, if the spec names no student


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRequest:
    """The update of a step: the same on every rank, and for every worker of an elastic one."""

    step: int  # RL step; what the weights are called afterwards
    batch: BatchRef  # [N] rows with advantages; without any, nothing is changed
    algorithm: AlgorithmConfig
    temperature: float  # at which the samples were drawn
    max_new_tokens: int  # limit of a response, by which some aggregations divide
    # Its micro-batches (engines/train/batching/stored_plan.py), of an elastic update its units. None:
    # each rank makes them, and they are the same.
    plan: BatchRef | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """What an update did; the same on every rank."""

    step: int  # RL step, the version of the weights now held
    metrics: Mapping[str, float]  # train/loss, train/grad_norm, train/tokens_per_second, …
    made_on: MadeOn  # this rank's device
    units: tuple[UnitAttempt, ...] = ()  # who computed an elastic one


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationTime:
    """What an operation of torch, or a kernel of a GPU, took in an update."""

    name: str  # empty: several short ones together
    group: str  # as engines/train/profiling.py has them
    seconds: float  # on a GPU its kernels', on a CPU its own without those that it calls
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateProfile:
    """Where the time of an update went, on one rank."""

    seconds: float  # of the whole update, under the profiler
    busy: float | None  # share of these in which a GPU ran a kernel; None on a CPU
    operations: tuple[OperationTime, ...]  # the longest first
    trace: str = ""  # key in the store of Chrome's trace, gzipped
    tokens: int = 0  # that were computed, on all ranks

    def by_group(self) -> dict[str, float]:
        """Seconds by group, the longest first."""
        seconds: dict[str, float] = {}
        for operation in self.operations:
            seconds[operation.group] = seconds.get(operation.group, 0.0) + operation.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """A tensor that is not, to the bit, the published one of its name."""

    name: str
    shape: tuple[int, ...]
    elements: int  # that differ
    largest: float  # absolute difference
    total: float  # sum of the absolute differences


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsComparison:
    """The weights held beside a published policy version."""

    digest: str  # of the weights held, in the version's number format
    tensors: int
    differing: tuple[TensorDifference, ...]  # in the order in which they were published


class TrainEngine(Ranked):
    """A policy, its frozen reference, a teacher, or what else is trained."""

    @abstractmethod
    @joined_by(ColumnsResult.together)
    def logprobs(self, request: LogprobRequest) -> ColumnsResult:
        """Write log-probs of response tokens under the weights held; all rows, in their order.

        The reference of an engine with adapters is its base.
        """

    @abstractmethod
    @joined_by(ColumnsResult.together)
    def teach(self, request: TeachRequest) -> ColumnsResult:
        """Write teacher_logprobs of all rows, in their order; with `top_k` the likeliest words too.

        teacher_topk_ids and teacher_topk_logprobs have [top_k] numbers for each token,
        teacher_tail_logprobs the probability of all other words, in nats. The words are among those
        that the student knows.
        """

    @abstractmethod
    def tokens(self) -> ModelTokens | None:
        """The tokens of the model; None where its files do not have them."""

    @abstractmethod
    def update(self, request: UpdateRequest) -> UpdateResult:
        """Train on a batch: train.epochs passes of train.mini_batches optimizer steps."""

    @abstractmethod
    def profile(self, request: UpdateRequest, key: str) -> UpdateProfile:
        """The same, recorded by torch's profiler; the store gets rank 0's trace under `key`."""

    @abstractmethod
    def cost(self) -> CostModel:
        """What plans are balanced by: the model's floating-point operations."""

    @abstractmethod
    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """Log-probs, at temperature 1, of what follows the first prompt_lengths[i] tokens."""

    @abstractmethod
    def mismatch(self) -> str | None:
        """How log-probs of a few short samples differ from transformers' own; None: they do not.

        Nothing is said of layers that are compiled, which would be compiled once more for it, and
        of a policy that looks at images.
        """

    @abstractmethod
    def export_weights(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        """Publish the weights held as a policy version; transformers and vLLM can load its folder.

        Engines on the ranks' machines may read it at once, others once it is settled. Unless `whole`
        some versions are stored as the difference from another one, if the settings say so; such a
        folder is read by this program only.

        Each rank writes the tensors that it gathers. The output head is among the tensors also where
        it is tied to the embedding.
        """

    @abstractmethod
    def settle_weights(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        """Return once the store has what `export_weights` has published with these arguments."""

    @abstractmethod
    def offer_transfer(
        self, version: int, dtype: str, way: Transfer, receivers: int, timeout: float
    ) -> TransferOffer:
        """Listen for engines that get the weights held, as `export_weights` publishes them.

        receivers: processes that come; timeout: seconds in which they do, and in which the tensors
        travel then.
        """

    @abstractmethod
    def transfer_weights(self, version: int, dtype: str) -> TransferReport:
        """Send the weights held to those who have come for what was offered.

        One that fails is left out, and is named in the report. Returns after twice the offer's
        timeout at the latest.
        """

    @abstractmethod
    def digest(self, dtype: str | None = None) -> str:
        """Digest of all weights to the bit, whatever the number of ranks; cast to `dtype` first."""

    @abstractmethod
    def compare(self, weights: WeightsRef, dtype: str) -> WeightsComparison:
        """The weights held, cast to `dtype`, beside a published version's."""

    @abstractmethod
    def agree(self, weights: WeightsRef) -> int:
        """Take a published version's weights where those held are others in its number format.

        Where they are the same the digits that only a master has stay, as does the optimizer's state.
        Returns the number of tensors that differed.
        """

    @abstractmethod
    def save_state(self, step: int, run: str | None = None) -> None:
        """Store weights, optimizer and counters as a snapshot of this or another run."""

    @abstractmethod
    def load_state(self, step: int, run: str | None = None, version: int | None = None) -> None:
        """Go back (or on) to the snapshot after `step`, of this or another run.

        `version`: what the weights are called here, if not `step`.
        """

    @abstractmethod
    def load_weights(self, weights: WeightsRef, version: int) -> None:
        """Take the weights of a published policy version, with the optimizer as it is.

        An engine with adapters takes them as its base, below adapters that change nothing yet.
        """
