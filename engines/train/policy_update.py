"""An update of the policy: its forward pass, its objective, and tokens chosen over a mini-batch.

The loop is `engines.train.updater.Updater`, the objective is in engines/algorithms/objective.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from engines.algorithms.aggregation import MetricSums, Normaliser, largest_of, mean_over
from engines.algorithms.distillation import with_tail
from engines.algorithms.inputs import PolicyBatch
from engines.algorithms.objective import Objective
from engines.train.batching.micro_batch import PER_TOKEN, MicroBatch, read_micro_batch
from engines.train.batching.packed_batch import PackedBatch
from engines.train.batching.packing import MiniBatch
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
from engines.train.optimizer import StepReport
from engines.train.policy import Policy
from engines.train.updater import TrainRank, Updater
from storage.batches.refs import BatchRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """A policy's forward pass with its settings."""

    policy: Policy
    sequence: SequenceGroup
    temperature: float
    chunk: int  # rows of logits held at once
    dtype: torch.dtype  # of the output head's product

    def __call__(
        self,
        packed: PackedBatch,
        *,
        entropy_gradient: bool = False,
        squared: bool = False,
        words: Tensor | None = None,
        top: int = 0,
        among: int | None = None,
    ) -> tuple[Tensor, ...]:
        """As `Policy.forward`: log-probs [R], entropy [R], … of the response tokens."""
        found: tuple[Tensor, ...] = self.policy(
            packed,
            self.sequence,
            temperature=self.temperature,
            chunk=self.chunk,
            dtype=self.dtype,
            entropy_gradient=entropy_gradient,
            squared=squared,
            words=words,
            top=top,
            among=among,
        )
        return found


class PolicyUpdater(Updater):
    """One update of a policy; made anew for each."""

    def __init__(self, rank: TrainRank, forward: Forward, objective: Objective) -> None:
        super().__init__(rank)
        self._forward = forward
        self._objective = objective
        # Ranks that share samples have a part of each, and compiled layers are not looked into.
        seen = self._sequence.size == 1 and not self._config.compile
        self._routers = forward.policy.routers if seen else ()
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
        with watched(self._routers) as routing:
            logprobs, entropy, *own = self._forward(
                micro.packed, entropy_gradient=self._objective.entropy_gradient, words=words
            )
        kept = micro.columns.get("correction_kept")
        batch = PolicyBatch(
            rows=micro.packed.rows,
            mask=micro.mask,
            logprobs=logprobs,
            entropy=entropy,
            advantages=micro.columns["advantages"],
            old_logprobs=micro.columns.get("old_logprobs"),
            rollout_logprobs=micro.columns.get("rollout_logprobs"),
            staleness=micro.columns.get("staleness"),
            ref_logprobs=micro.columns.get("ref_logprobs"),
            teacher_logprobs=micro.columns.get("teacher_logprobs"),
            student_bins=own[0] if own else None,
            teacher_bins=bins,
            weights=micro.columns.get("correction_weights"),
            kept=None if kept is None else kept.bool(),
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
            held = [(masters.of(bias), bias) for bias in policy.router_biases().values()]
            move_biases(held, self._added(load), rate)

    def _metrics(self, seconds: float, phases: Mapping[str, float]) -> dict[str, float]:
        found = super()._metrics(seconds, phases)
        return found if self._load is None else found | load_metrics(self._added(self._load))

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
        rows, mine = mini.rows(), mini.ranks[self._sequence.replica]
        device, tree = self._meeting.device, self._config.tree_training
        whole = read_micro_batch(self._store, batch, rows, columns, torch.device("cpu"))
        places = _places(rows, whole, mine)
        statistics = torch.zeros(2, whole.mask.numel())
        for place, micro_rows in zip(places, mine, strict=True):
            micro = read_micro_batch(
                self._store, batch, micro_rows, (), device, tree, self._cost.patches, self._needs
            )
            with torch.no_grad():
                statistics[:, place] = torch.stack(self._forward(micro.packed)).cpu()
        logprobs, entropy = self._added(statistics).cpu()
        chosen = self._objective.select(
            PolicyBatch(
                rows=whole.packed.rows,
                mask=whole.mask,
                logprobs=logprobs,
                entropy=entropy,
                advantages=whole.columns["advantages"],
                old_logprobs=whole.columns.get("old_logprobs"),
                rollout_logprobs=whole.columns.get("rollout_logprobs"),
                staleness=whole.columns.get("staleness"),
                ref_logprobs=whole.columns.get("ref_logprobs"),
            )
        )
        return [chosen[:, place].to(device) for place in places]


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
