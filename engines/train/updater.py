"""One update: the optimizer steps of a pass over a batch, micro-batch by micro-batch, then AdamW.

`Updater` is the loop. `PolicyUpdater` has the policy's loss, whose objective is in
engines/algorithms/objective.py, and tokens that are chosen over a whole mini-batch.

On a CPU sums come out the same to the bit when they are made again: each model of CPU adds in one
order. MKL and oneDNN choose their kernels by maker and model: of two with AVX-512, an Intel and an
AMD one, bits differ. On a GPU the backward passes of attention and of lookups add with atomics, in
the order in which blocks of threads happen to end. torch has slower kernels with a fixed order, for
attention too (aten's _flash_attention_backward asks the same switch).
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from configs.environment import cpu_model
from configs.train import TrainConfig
from engines.algorithms.aggregation import MetricSums, Normaliser, largest_of, mean_over
from engines.algorithms.distillation import with_tail
from engines.algorithms.inputs import PolicyBatch
from engines.algorithms.objective import Objective
from engines.algorithms.rollout_correction import sample_sizes
from engines.train.activations import kept_on_host
from engines.train.batching.mfu import CostModel, utilisation
from engines.train.batching.micro_batch import PER_TOKEN, MicroBatch, read_ahead, read_micro_batch
from engines.train.batching.packed_batch import RowNeeds
from engines.train.batching.packing import (
    LoneRankPlans,
    MiniBatch,
    plan_update,
    read_lengths,
    read_mask_counts,
)
from engines.train.batching.stored_plan import read_plan
from engines.train.contract import MadeOn, UpdateRequest, UpdateResult
from engines.train.model.rendezvous import Meeting
from engines.train.model.routers import (
    Routing,
    aux_loss,
    load_metrics,
    load_of,
    move_biases,
    replay_metrics,
    router_means,
    watched,
)
from engines.train.model.sequence_parallel import SequenceGroup
from engines.train.optimizer import Optimizer, StepReport
from engines.train.policy import Forward
from storage.batches.refs import BatchRef
from storage.objects.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRank:
    """What an update works with on this rank."""

    store: Store
    meeting: Meeting
    sequence: SequenceGroup
    optimizer: Optimizer | None  # None: it computes gradients for another one
    sharded: FSDPModule | None  # what is trained; None: a lone rank's, which exchanges nothing
    config: TrainConfig
    cost: CostModel
    lone_rank: LoneRankPlans
    needs: RowNeeds  # of the model


class UpdateWork(Protocol):
    """What was computed, as a tally counts it."""

    @property
    def tokens(self) -> int: ...
    @property
    def whole(self) -> int: ...
    @property
    def responses(self) -> int: ...
    @property
    def flops(self) -> float: ...


@dataclass(kw_only=True, slots=True)
class Tally:
    """What an update adds up as it goes; all of this rank."""

    sums: MetricSums = field(default_factory=MetricSums)
    reports: list[StepReport] = field(default_factory=list)  # one for each optimizer step
    seconds: dict[str, float] = field(default_factory=dict)  # by phase; on a device, see `timed`
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    tokens: int = 0  # in forward passes
    whole: int = 0  # what they would be if nothing were shared
    responses: int = 0  # response tokens
    flops: float = 0.0  # forward and backward

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a block; of a device's, the time between marks in its queue."""
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self.marks.append((name, begin, end))
            return
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def timed(self) -> dict[str, float]:
        """Seconds by phase, once all is done; waits for the device, which no phase does."""
        if self.marks:
            torch.cuda.synchronize()
        for name, begin, end in self.marks:
            spent = begin.elapsed_time(end) / 1000.0  # it counts milliseconds
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
        self.marks.clear()
        return self.seconds

    def add(self, sums: MetricSums, work: UpdateWork) -> None:
        """Add what was computed elsewhere."""
        self.sums += sums
        self.tokens += work.tokens
        self.whole += work.whole
        self.responses += work.responses
        self.flops += work.flops

    def count(self, micro: MicroBatch, cost: CostModel) -> None:
        """Add the work on a micro-batch, forward and backward."""
        self.tokens += micro.tokens
        self.whole += micro.packed.whole
        self.responses += micro.packed.labels.numel()
        images = micro.packed.images
        images_seen = 0 if images is None else len(images)
        work = (micro.tokens, micro.packed.predicted, micro.packed.squares, images_seen)
        self.flops += cost.forward(*work) + cost.backward(*work)


class Updater(ABC):
    """One update, made anew for each. A subclass has the loss."""

    def __init__(self, rank: TrainRank) -> None:
        self._store = rank.store
        self._meeting = rank.meeting
        self._sequence = rank.sequence
        self._optimizer = rank.optimizer
        self._sharded = rank.sharded
        self._config = rank.config
        self._cost = rank.cost
        self._lone_rank = rank.lone_rank
        self._needs = rank.needs
        self._tally = Tally()

    def run(self, request: UpdateRequest) -> UpdateResult:
        """Train on the batch, of which this rank reads its own rows; all ranks get the same request.

        Raises ValueError where a column is missing, or a row is longer than the micro-batch's budget.
        """
        began = time.perf_counter()
        config, batch = self._config, request.batch
        if not len(batch):  # optimizer and schedule stay as they are
            return self.result(request.step, 0.0)
        columns = self._columns(batch)
        steps = self.optimizer_steps(request)
        parts = [rows for mini in steps for rows in mini.ranks[self._sequence.replica]]
        with (
            in_fixed_order(config.deterministic),
            self._read(batch, parts, columns) as micros,
        ):
            for mini in steps:
                self._optimizer_step(request, mini, columns, micros)
        self._tally.timed()  # before the clock is read: it waits for the device
        return self.result(request.step, time.perf_counter() - began)

    def result(self, step: int, seconds: float) -> UpdateResult:
        """What the update did, in so many seconds, after its last optimizer step."""
        if self._tally.reports:
            metrics = self._metrics(seconds, self._tally.timed())
        else:
            metrics = {"train/optimizer_steps": 0.0, "train/skipped_steps": 0.0}
        device = self._meeting.device
        return UpdateResult(step=step, metrics=metrics, made_on=made_on(self._config, device))

    def optimizer_steps(self, request: UpdateRequest) -> list[MiniBatch]:
        """The mini-batches of the update, one for each optimizer step."""
        with self._tally.phase("plan"):
            stored = request.plan
            plan = self._plan(request.batch) if stored is None else read_plan(self._store, stored)
        return [mini for _ in range(self._config.epochs) for mini in plan]

    def gradient(
        self, batch: BatchRef, parts: Sequence[Sequence[int]], normaliser: Normaliser
    ) -> tuple[Tally, bool]:
        """Add the gradients of some micro-batches up in the parameters, without an optimizer step.

        Returns what was added up besides, and whether every loss was finite. Arguments: `parts` are
        the rows of each. A loss that chooses tokens over the whole mini-batch
        has no such parts.
        """
        columns, config = self._columns(batch), self._config
        with (
            in_fixed_order(config.deterministic),
            self._read(batch, parts, columns) as micros,
        ):
            finite = self._accumulate(len(parts), normaliser, None, micros)
        return self._tally, bool(torch.stack(finite).all())

    def _read(
        self, batch: BatchRef, parts: Sequence[Sequence[int]], columns: Sequence[str]
    ) -> AbstractContextManager[Iterator[MicroBatch]]:
        """The micro-batches of these rows; see `read_ahead`."""
        return read_ahead(
            self._store,
            batch,
            parts,
            columns,
            self._meeting.device,
            tree_training=self._config.tree_training,
            patches=self._cost.patches,
            needs=self._needs,
        )

    @property
    def tally(self) -> Tally:
        """What has been added up so far."""
        return self._tally

    def _plan(self, batch: BatchRef) -> tuple[MiniBatch, ...]:
        return plan_update(
            read_lengths(self._store, batch, self._config.tree_training, self._cost.patches),
            world=self._sequence.replicas,
            budget=self._config.planned_tokens,
            mini_batches=self._config.mini_batches,
            cost=self._cost,
            lone_rank=self._lone_rank,
        )

    @abstractmethod
    def _columns(self, batch: BatchRef) -> list[str]:
        """Columns per token that the loss, or a metric, is made of."""

    @abstractmethod
    def _loss(
        self, micro: MicroBatch, normaliser: Normaliser, selected: Tensor | None
    ) -> tuple[Tensor, MetricSums]:
        """The loss (scalar with gradient) and metrics of one micro-batch."""

    def _select(self, batch: BatchRef, mini: MiniBatch, columns: list[str]) -> list[Tensor] | None:
        """bool [2, R] for each micro-batch, where tokens are chosen over the whole mini-batch."""
        return None

    def _optimizer_step(
        self,
        request: UpdateRequest,
        mini: MiniBatch,
        columns: list[str],
        micros: Iterator[MicroBatch],
    ) -> None:
        tally, own_micro_batches = self._tally, mini.ranks[self._sequence.replica]
        with tally.phase("plan"):
            normaliser = self.normaliser(request, mini)
        selected = self._select(request.batch, mini, columns)
        finite = self._accumulate(len(own_micro_batches), normaliser, selected, micros)
        with tally.phase("optimizer"):
            assert self._optimizer is not None
            tally.reports.append(self._optimizer.step(self._agreed(finite)))
        self._stepped(tally.reports[-1])

    def _stepped(self, report: StepReport) -> None:  # noqa: B027 -- most losses have nothing here
        """What else changes with an optimizer step; a collective."""

    def _accumulate(
        self,
        count: int,
        normaliser: Normaliser,
        selected: Sequence[Tensor] | None,
        micros: Iterator[MicroBatch],
    ) -> list[Tensor]:
        """Add up the gradients of the next `count` micro-batches; whether each loss was finite."""
        tally, finite = self._tally, []
        for number in range(count):
            with tally.phase("read"):  # what of it was not done while the last one was computed
                micro = next(micros)
            chosen = None if selected is None else selected[number]
            if self._sharded and self._config.reduce_gradients == "optimizer_step":
                self._sharded.set_requires_gradient_sync(number == count - 1)
            with tally.phase("forward"), kept_on_host(self._config.activation_offload):
                loss, sums = self._loss(micro, normaliser, chosen)
            with tally.phase("backward"):
                loss.backward()
            finite.append(torch.isfinite(loss.detach()))
            tally.sums += sums
            tally.count(micro, self._cost.of_heads)
        return finite

    def normaliser(self, request: UpdateRequest, mini: MiniBatch) -> Normaliser:
        """Counts over the mini-batch of all ranks, by which the loss is divided."""
        own_rows = [row for micro in mini.ranks[self._sequence.replica] for row in micro]
        counts = torch.tensor(
            read_mask_counts(self._store, request.batch, own_rows), dtype=torch.float64
        )
        tokens, sequences, rows = self._added(counts).tolist()
        return Normaliser(
            tokens=tokens,
            sequences=sequences,
            rows=rows,
            max_tokens=float(request.max_new_tokens),
            ranks=self._meeting.world,
        )

    def _added(self, values: Tensor) -> Tensor:
        """The sum over the ranks, on each of them; of ranks that share micro-batches one counts."""
        values = values.to(self._meeting.device)
        if not self._sequence.counts:
            values = torch.zeros_like(values)
        dist.all_reduce(values, group=self._meeting.group)
        return values

    def _agreed(self, finite: list[Tensor]) -> bool:
        """Whether every rank's losses, bool scalars, were finite."""
        return float(self._added(torch.stack(finite).logical_not().sum())) == 0

    def _metrics(self, seconds: float, phases: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the update over all ranks; seconds by phase are rank 0's."""
        reports = self._tally.reports
        norms = [report.grad_norm for report in reports]
        metrics = self._summed()
        for name in ("loss", "policy_loss"):  # sums over optimizer steps
            if name in metrics:
                metrics[name] /= len(reports)
        metrics |= {
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": reports[-1].learning_rate,
            "optimizer_steps": float(len(reports)),
            "skipped_steps": float(sum(report.skipped for report in reports)),
            **self._rates(seconds),
            **{f"{phase}_seconds": spent for phase, spent in phases.items()},
        }
        # A name with a slash is that of a part which has its own group of metrics.
        return {n if "/" in n else f"train/{n}": value for n, value in metrics.items()}

    def _summed(self) -> dict[str, float]:
        """The objective's metrics over the tokens of all ranks."""
        added, peaks = (part.to(self._meeting.device) for part in self._tally.sums.stacked())
        added = self._added(added)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=self._meeting.group)
        metrics = self._tally.sums.restored(added, peaks).values()
        return metrics | sample_sizes(metrics)

    def _rates(self, seconds: float) -> dict[str, float]:
        """Tokens and FLOPs of all ranks, in all and by the second; MFU where it is known."""
        tally, device = self._tally, self._meeting.device
        amounts = [tally.tokens, tally.whole, tally.responses, tally.flops]
        added = self._added(torch.tensor(amounts, dtype=torch.float64))
        tokens, whole, responses, flops = added.tolist()
        rates = {
            "tokens": tokens,
            "tokens_saved": 1 - tokens / whole,  # the share that rows have in common
            "response_tokens": responses,
            "tokens_per_second": tokens / seconds,
            "flops": flops,
            "flops_per_second": flops / seconds,
            "seconds": seconds,
        }
        if self._config.engine != "elastic":  # whose workers, unlike the aggregator, come and go
            rates["tokens_per_second_per_device"] = tokens / seconds / self._meeting.world
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            mfu = utilisation(flops / seconds, name, self._meeting.world)
            rates |= {} if mfu is None else {"mfu": mfu}
        return rates


class PolicyUpdater(Updater):
    """One update of a policy; made anew for each."""

    def __init__(self, rank: TrainRank, forward: Forward, objective: Objective) -> None:
        super().__init__(rank)
        self._forward = forward
        self._objective = objective
        # Ranks that share samples have a part of each, and compiled layers are not looked into.
        routers_seen = self._sequence.size == 1 and not self._config.compile
        self._routers = forward.policy.routers if routers_seen else ()
        self._replay = forward.policy.replay
        self._compared = False  # with what the routers would have chosen
        # Of their experts: choices [layers, E] of the update, and of the optimizer step.
        self._load: Tensor | None = None
        self._step_load: Tensor | None = None

    def _columns(self, batch: BatchRef) -> list[str]:
        steps = self._config.epochs * self._config.mini_batches
        needed = {"advantages", *self._objective.needs} - {"entropy"}
        if steps > 1 and not self._objective.interpolated:
            needed.add("old_logprobs")
        missing = sorted(needed - set(batch.names))
        if missing:
            raise ValueError(
                f"The update ({steps} optimizer steps) needs the columns {', '.join(missing)}; the "
                f"batch has {', '.join(batch.names)}. Run the logprob and advantage tasks first."
            )
        return [name for name in PER_TOKEN if name in batch.names]

    def _loss(
        self, micro: MicroBatch, normaliser: Normaliser, selected: Tensor | None
    ) -> tuple[Tensor, MetricSums]:
        words, bins = self._words(micro)
        own_routing = self._with_own_routing(micro)
        with watched(self._routers) if self._routers else nullcontext(Routing()) as routing:
            logprobs, entropy, *own = self._forward(
                micro.packed, entropy_gradient=self._objective.entropy_gradient, words=words
            )
        correction_kept = micro.columns.get("correction_kept")
        batch = replace(
            _policy_batch(micro, logprobs, entropy),
            teacher_logprobs=micro.columns.get("teacher_logprobs"),
            student_bins=own[0] if own else None,
            teacher_bins=bins,
            weights=micro.columns.get("correction_weights"),
            kept=None if correction_kept is None else correction_kept.bool(),
            selected=None if selected is None else selected[0],
            counted=None if selected is None else selected[1],
        )
        loss, sums = self._objective(batch, normaliser)
        if self._routers:
            routing = routing.of_tokens(micro.packed.tokens.numel(), micro.packed.layout)
            loss, sums = self._balanced(loss, sums, routing, micro.mask, normaliser)
        if self._replay is not None:
            sums += replay_metrics(self._replay, micro.packed.layout, micro.mask)
        return loss, sums + _rollout_mismatch(batch) + own_routing

    def _with_own_routing(self, micro: MicroBatch) -> MetricSums:
        """`rollout_mismatch` as it would be without replay, of the update's first micro-batch.

        Before its own forward pass: what routers are told stays for the backward pass.
        """
        sampled = micro.columns.get("rollout_logprobs")
        if self._replay is None or self._compared or sampled is None:
            return MetricSums()
        self._compared = True
        with torch.no_grad():
            logprobs, *_ = self._forward(replace(micro.packed, routed_experts=None))
        off = mean_over((logprobs - sampled).abs(), micro.mask)
        return MetricSums(means={"rollout_mismatch_own_routing": off})

    def _balanced(
        self,
        loss: Tensor,
        sums: MetricSums,
        routing: Routing,
        mask: Tensor,
        normaliser: Normaliser,
    ) -> tuple[Tensor, MetricSums]:
        """The loss with the routers' part, of which a micro-batch has a share by its tokens."""
        weight, counted = self._config.router_aux_loss_coef, mask.sum()
        with torch.set_grad_enabled(weight > 0):
            auxiliary = aux_loss(self._routers, routing)
        if weight:
            loss = (
                loss + weight * counted * normaliser.ranks / max(normaliser.tokens, 1) * auxiliary
            )
        load = load_of(routing) * (counted > 0)  # a rank without a micro-batch computes one token
        self._load = load if self._load is None else self._load + load
        self._step_load = load if self._step_load is None else self._step_load + load
        return loss, sums + router_means(self._routers, routing, auxiliary, counted > 0)

    def _stepped(self, report: StepReport) -> None:
        load, self._step_load = self._step_load, None
        rate, policy = self._config.router_bias_update_rate, self._forward.policy
        if rate and load is not None and not report.skipped:
            assert self._optimizer is not None
            masters = self._optimizer.masters
            bias_formats = [(masters.of(bias), bias) for bias in policy.router_biases().values()]
            move_biases(bias_formats, self._added(load), rate)

    def _metrics(self, seconds: float, phases: Mapping[str, float]) -> dict[str, float]:
        metrics = super()._metrics(seconds, phases)
        return metrics if self._load is None else metrics | load_metrics(self._added(self._load))

    def _words(self, micro: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        """The teacher's likeliest words [R, k], and its log-probs of them and of the tail."""
        taught = self._objective.distillation
        if taught is None or not taught.by_words:
            return None, None
        columns = micro.columns
        bins = with_tail(columns["teacher_topk_logprobs"], columns["teacher_tail_logprobs"])
        return columns["teacher_topk_ids"], bins

    def _select(self, batch: BatchRef, mini: MiniBatch, columns: list[str]) -> list[Tensor] | None:
        """Needs a forward pass of its own, whose log-probs and entropies are exchanged."""
        if not self._objective.selects:
            return None
        rows, own_micro_batches = mini.rows(), mini.ranks[self._sequence.replica]
        device, tree = self._meeting.device, self._config.tree_training
        whole = read_micro_batch(self._store, batch, rows, columns, torch.device("cpu"))
        places = _places(rows, whole, own_micro_batches)
        statistics = torch.zeros(2, whole.mask.numel())
        for place, micro_rows in zip(places, own_micro_batches, strict=True):
            micro = read_micro_batch(
                self._store, batch, micro_rows, (), device, tree, self._cost.patches, self._needs
            )
            with torch.no_grad():
                statistics[:, place] = torch.stack(self._forward(micro.packed)).cpu()
        logprobs, entropy = self._added(statistics).cpu()
        chosen = self._objective.select(_policy_batch(whole, logprobs, entropy))
        return [chosen[:, place].to(device) for place in places]


def _policy_batch(micro: MicroBatch, logprobs: Tensor, entropy: Tensor) -> PolicyBatch:
    """Rows with the columns that choosing tokens may need too."""
    return PolicyBatch(
        rows=micro.packed.rows,
        mask=micro.mask,
        logprobs=logprobs,
        entropy=entropy,
        advantages=micro.columns["advantages"],
        old_logprobs=micro.columns.get("old_logprobs"),
        rollout_logprobs=micro.columns.get("rollout_logprobs"),
        staleness=micro.columns.get("staleness"),
        ref_logprobs=micro.columns.get("ref_logprobs"),
    )


def _places(rows: Sequence[int], whole: MicroBatch, parts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Where the response tokens of each part's rows are among those of all `rows`; int64."""
    edges = whole.packed.rows.offsets.tolist()
    spans = {row: torch.arange(a, b) for row, (a, b) in zip(rows, pairwise(edges), strict=True)}
    nothing = torch.zeros(0, dtype=torch.int64)
    return [torch.cat([nothing, *(spans[row] for row in part)]) for part in parts]


def _rollout_mismatch(batch: PolicyBatch) -> MetricSums:
    """How far the rollout engine's log-probs are from those of this one, in nats."""
    if batch.rollout_logprobs is None:
        return MetricSums()
    distance = (batch.proximal - batch.rollout_logprobs).abs()
    return MetricSums(
        means={"rollout_mismatch": mean_over(distance, batch.mask)},
        maxima={"rollout_mismatch_max": largest_of(distance, batch.mask)},
    )


def prepare_fixed_order(train: TrainConfig) -> None:
    """Before the process's first product on a GPU: cuBLAS reads its settings then.

    Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def in_fixed_order(fixed: bool) -> Iterator[None]:
    """Within it torch uses kernels with a fixed order of sums, and raises where it has none."""
    if not fixed:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    switches: Any = torch.utils.deterministic  # a module whose switch is a property
    filling = switches.fill_uninitialized_memory
    switches.fill_uninitialized_memory = False  # nothing here reads such memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        switches.fill_uninitialized_memory = filling


def made_on(train: TrainConfig, device: torch.device) -> MadeOn:
    """What an update is made on."""
    gpu = device.type == "cuda"
    cpu = filter(None, (torch.backends.cpu.get_cpu_capability(), cpu_model()))
    return MadeOn(
        device=torch.cuda.get_device_name(device) if gpu else f"CPU ({', '.join(cpu)})",
        torch=str(torch.__version__),  # its own class would bring torch into the flow process
        fixed=not train.compile and (train.deterministic or not gpu),
    )
