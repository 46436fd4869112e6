"""One update: the optimizer steps of a pass over a batch, micro-batch by micro-batch, then AdamW.

`Updater` is the loop; the policy's loss is in policy_update.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from configs.train import TrainConfig
from engines.algorithms.aggregation import MetricSums, Normaliser
from engines.algorithms.rollout_correction import sample_sizes
from engines.train.activations import kept_on_host
from engines.train.batching.mfu import CostModel, utilisation
from engines.train.batching.micro_batch import MicroBatch, read_ahead
from engines.train.batching.packed_batch import RowNeeds
from engines.train.batching.packing import MiniBatch, plan_update, read_lengths, read_mask_counts
from engines.train.batching.stored_plan import read_plan
from engines.train.contract import UpdateRequest, UpdateResult
from engines.train.model.rendezvous import Meeting
from engines.train.model.sequence_parallel import SequenceGroup
from engines.train.optimizer import Optimizer, StepReport
from engines.train.order_of_sums import in_fixed_order, made_on
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
        seen = 0 if images is None else len(images)
        work = (micro.tokens, micro.packed.predicted, micro.packed.squares, seen)
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
            *(self._store, batch, parts, columns, self._meeting.device),
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
        tally, mine = self._tally, mini.ranks[self._sequence.replica]
        with tally.phase("plan"):
            normaliser = self.normaliser(request, mini)
        selected = self._select(request.batch, mini, columns)
        finite = self._accumulate(len(mine), normaliser, selected, micros)
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
        mine = [row for micro in mini.ranks[self._sequence.replica] for row in micro]
        found = read_mask_counts(self._store, request.batch, mine)
        counts = torch.tensor(found, dtype=torch.float64)
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
        mine = [tally.tokens, tally.whole, tally.responses, tally.flops]
        added = self._added(torch.tensor(mine, dtype=torch.float64))
        tokens, whole, responses, flops = added.tolist()
        found = {
            "tokens": tokens,
            "tokens_saved": 1 - tokens / whole,  # the share that rows have in common
            "response_tokens": responses,
            "tokens_per_second": tokens / seconds,
            "flops": flops,
            "flops_per_second": flops / seconds,
            "seconds": seconds,
        }
        if self._config.engine != "elastic":  # whose workers, unlike the aggregator, come and go
            found["tokens_per_second_per_device"] = tokens / seconds / self._meeting.world
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            mfu = utilisation(flops / seconds, name, self._meeting.world)
            found |= {} if mfu is None else {"mfu": mfu}
        return found
