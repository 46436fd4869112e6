"""The optimizer steps of one update: forward, loss and backward of each micro-batch, then AdamW."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from configs.train import TrainConfig
from engines.algorithms.aggregation import Normaliser
from engines.algorithms.from_config import objective_of
from engines.algorithms.inputs import PolicyBatch
from engines.algorithms.jagged import Rows
from engines.algorithms.metric_sums import MetricSums, largest_of, mean_over
from engines.algorithms.objective import Objective
from engines.algorithms.rollout_correction_metrics import correction_sample_size
from engines.train.critic import Critic
from engines.train.mfu import peak_flops
from engines.train.micro_batch import (
    PER_TOKEN,
    MicroBatch,
    PackedBatch,
    read_lengths,
    read_mask_counts,
    read_micro_batch,
)
from engines.train.optimizer import Optimizer, StepReport
from engines.train.packing import CostModel, MiniBatch, plan_update
from engines.train.policy import Policy
from engines.train.rendezvous import Meeting
from engines.train.spec import UpdateResult
from storage.batches.refs import BatchRef
from storage.objects.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """A policy's forward pass with its settings."""

    policy: Policy | Critic
    temperature: float
    chunk: int  # rows of logits held at once
    dtype: torch.dtype

    def __call__(
        self, packed: PackedBatch, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [R] and entropy [R] of the response tokens."""
        return self.policy(
            packed,
            temperature=self.temperature,
            chunk=self.chunk,
            dtype=self.dtype,
            entropy_gradient=entropy_gradient,
        )


@dataclass(kw_only=True, slots=True)
class Tally:
    """What an update adds up as it goes."""

    sums: MetricSums = field(default_factory=MetricSums)  # of this rank
    reports: list[StepReport] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    tokens: int = 0  # in forward passes of this rank
    responses: int = 0  # response tokens of this rank
    flops: float = 0.0  # of this rank, forward and backward

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a block; a device's queue is waited for."""
        began = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class Updater:
    """One update; made anew for each."""

    def __init__(
        self,
        *,
        store: Store,
        meeting: Meeting,
        optimizer: Optimizer,
        forward: Forward,
        config: TrainConfig,
        cost: CostModel,
    ) -> None:
        self._store = store
        self._meeting = meeting
        self._optimizer = optimizer
        self._forward = forward
        self._config = config
        self._cost = cost
        self._tally = Tally()

    def run(
        self, batch: BatchRef, algorithm: AlgorithmConfig, max_new_tokens: int, step: int
    ) -> UpdateResult:
        """Train on the batch. Raises ValueError where a column is missing or a row too long."""
        began = time.perf_counter()
        config = self._config
        objective = objective_of(algorithm)
        columns = self._columns(batch, objective)
        with self._tally.phase("plan"):
            plan = plan_update(
                read_lengths(self._store, batch),
                world=self._meeting.world,
                budget=config.micro_batch_tokens,
                mini_batches=config.mini_batches,
                cost=self._cost,
            )
        for _ in range(config.epochs):
            for mini in plan:
                self._optimizer_step(batch, mini, columns, objective, max_new_tokens)
        return self._result(step, time.perf_counter() - began)

    def _columns(self, batch: BatchRef, objective: Objective) -> list[str]:
        """Columns per token that the loss, or a metric, is made of."""
        steps = self._config.epochs * self._config.mini_batches
        needed = {"advantages", *objective.needs} - {"entropy"}
        if steps > 1:
            needed.add("old_logprobs")
        missing = sorted(needed - set(batch.names))
        if missing:
            raise ValueError(
                f"The update ({steps} optimizer steps) needs the columns {', '.join(missing)}; the "
                f"batch has {', '.join(batch.names)}. Run the logprob and advantage tasks first."
            )
        return [name for name in PER_TOKEN if name in batch.names]

    def _optimizer_step(
        self,
        batch: BatchRef,
        mini: MiniBatch,
        columns: list[str],
        objective: Objective,
        max_new_tokens: int,
    ) -> None:
        tally, mine = self._tally, mini.ranks[self._meeting.rank]
        with tally.phase("plan"):
            normaliser = self._normaliser(batch, mini, max_new_tokens)
        selected = self._select(batch, mini, columns, objective)
        finite = True
        for number, rows in enumerate(mine):
            with tally.phase("read"):
                micro = read_micro_batch(self._store, batch, rows, columns, self._meeting.device)
            chosen = None if selected is None else selected[number]
            with tally.phase("forward"):
                loss, sums = self._loss(micro, objective, normaliser, chosen)
            with tally.phase("backward"):
                loss.backward()
            finite = finite and bool(torch.isfinite(loss.detach()))
            tally.sums += sums
            self._count(micro)
        with tally.phase("optimizer"):
            tally.reports.append(self._optimizer.step(self._agreed(finite)))

    def _loss(
        self,
        micro: MicroBatch,
        objective: Objective,
        normaliser: Normaliser,
        selected: Tensor | None,
    ) -> tuple[Tensor, MetricSums]:
        logprobs, entropy = self._forward(micro.packed, objective.entropy_gradient)
        kept = micro.columns.get("correction_kept")
        batch = PolicyBatch(
            rows=micro.packed.rows,
            mask=micro.mask,
            logprobs=logprobs,
            entropy=entropy,
            advantages=micro.columns["advantages"],
            old_logprobs=micro.columns.get("old_logprobs"),
            rollout_logprobs=micro.columns.get("rollout_logprobs"),
            ref_logprobs=micro.columns.get("ref_logprobs"),
            weights=micro.columns.get("correction_weights"),
            kept=None if kept is None else kept.bool(),
            selected=None if selected is None else selected[0],
            counted=None if selected is None else selected[1],
        )
        loss, sums = objective(batch, normaliser)
        return loss, sums + self._mismatch(batch)

    def _mismatch(self, batch: PolicyBatch) -> MetricSums:
        """How far the rollout engine's log-probs are from those of this one."""
        if batch.rollout_logprobs is None:
            return MetricSums()
        distance = (batch.proximal - batch.rollout_logprobs).abs()
        return MetricSums(
            means={"rollout_mismatch": mean_over(distance, batch.mask)},
            maxima={"rollout_mismatch_max": largest_of(distance, batch.mask)},
        )

    def _select(
        self, batch: BatchRef, mini: MiniBatch, columns: list[str], objective: Objective
    ) -> list[Tensor] | None:
        """For recipes that choose tokens over the whole mini-batch: the choice for each micro-batch.

        Needs a forward pass of its own, whose log-probs and entropies are exchanged.
        """
        if not objective.selects:
            return None
        rows = mini.rows()
        whole = read_micro_batch(self._store, batch, rows, columns, torch.device("cpu"))
        offsets = dict(zip(rows, whole.packed.rows.offsets.tolist(), strict=False))
        lengths = dict(zip(rows, whole.packed.rows.lengths.tolist(), strict=True))
        places = [
            [torch.arange(offsets[row], offsets[row] + lengths[row]) for row in micro]
            for micro in mini.ranks[self._meeting.rank]
        ]
        index = [torch.cat(place) if place else torch.zeros(0).long() for place in places]
        logprobs_entropy = torch.zeros(2, whole.mask.numel())
        for place, micro_rows in zip(index, mini.ranks[self._meeting.rank], strict=True):
            micro = read_micro_batch(self._store, batch, micro_rows, (), self._meeting.device)
            with torch.no_grad():
                logprobs_entropy[:, place] = torch.stack(self._forward(micro.packed)).cpu()
        logprobs_entropy = self._added(logprobs_entropy).cpu()
        chosen = objective.select(
            PolicyBatch(
                rows=Rows.of_offsets(whole.packed.rows.offsets),
                mask=whole.mask,
                logprobs=logprobs_entropy[0],
                entropy=logprobs_entropy[1],
                advantages=whole.columns["advantages"],
                old_logprobs=whole.columns.get("old_logprobs"),
                rollout_logprobs=whole.columns.get("rollout_logprobs"),
                ref_logprobs=whole.columns.get("ref_logprobs"),
            )
        )
        return [chosen[:, i].to(self._meeting.device) for i in index]

    def _normaliser(self, batch: BatchRef, mini: MiniBatch, max_new_tokens: int) -> Normaliser:
        mine = [row for micro in mini.ranks[self._meeting.rank] for row in micro]
        counts = torch.tensor(read_mask_counts(self._store, batch, mine), dtype=torch.float64)
        tokens, sequences, rows = self._added(counts).tolist()
        return Normaliser(
            tokens=tokens,
            sequences=sequences,
            rows=rows,
            max_tokens=float(max_new_tokens),
            ranks=self._meeting.world,
        )

    def _added(self, values: Tensor) -> Tensor:
        values = values.to(self._meeting.device)
        dist.all_reduce(values, group=self._meeting.group)
        return values

    def _agreed(self, finite: bool) -> bool:
        """Whether every rank's losses were finite."""
        return float(self._added(torch.tensor(0.0 if finite else 1.0))) == 0

    def _count(self, micro: MicroBatch) -> None:
        packed, tally = micro.packed, self._tally
        responses = packed.labels.numel()
        tally.tokens += micro.tokens
        tally.responses += responses
        tally.flops += 3 * self._cost.forward(micro.tokens, responses, packed.squares)

    def _utilisation(self, rate: float) -> dict[str, float]:
        """Model FLOPs utilisation: `rate` (FLOP/s of all ranks) by the devices' peak, if known."""
        if self._meeting.device.type != "cuda":
            return {}
        peak = peak_flops(torch.cuda.get_device_name(self._meeting.device))
        return {} if peak is None else {"mfu": rate / (peak * self._meeting.world)}

    def _result(self, step: int, seconds: float) -> UpdateResult:
        tally, meeting = self._tally, self._meeting
        added, peaks = (part.to(meeting.device) for part in tally.sums.stacked())
        dist.all_reduce(added, group=meeting.group)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=meeting.group)
        totals = self._added(
            torch.tensor([tally.tokens, tally.responses, tally.flops], dtype=torch.float64)
        )
        tokens, responses, flops = totals.tolist()
        metrics = tally.sums.restored(added, peaks).values()
        metrics |= correction_sample_size(metrics)
        for name in ("loss", "policy_loss"):  # sums over optimizer steps
            if name in metrics:
                metrics[name] /= len(tally.reports)
        skipped = sum(report.skipped for report in tally.reports)
        norms = [report.grad_norm for report in tally.reports]
        metrics |= {
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": tally.reports[-1].learning_rate,
            "optimizer_steps": float(len(tally.reports)),
            "skipped_steps": float(skipped),
            "tokens": tokens,
            "response_tokens": responses,
            "tokens_per_second": tokens / seconds,
            "flops": flops,
            "flops_per_second": flops / seconds,
            "seconds": seconds,
            **self._utilisation(flops / seconds),
            **{f"{phase}_seconds": spent for phase, spent in tally.seconds.items()},
        }
        return UpdateResult(
            step=step,
            optimizer_steps=len(tally.reports),
            skipped=skipped,
            metrics={f"train/{name}": value for name, value in metrics.items()},
        )
