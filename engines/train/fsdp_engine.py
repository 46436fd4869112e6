"""The train engine: one rank of a policy or its frozen reference, sharded by FSDP2.

Every rank gets the same arguments, the whole BatchRef among them, makes the same plan from the
rows' lengths (engines/train/batching/packing.py) and reads its own rows only. The loss is in
engines/algorithms/objective.py, one update in engines/train/updater.py, weights and state in
engines/train/sharded_model.py.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import torch
from torch.distributed.fsdp import FSDPModule

from engines.algorithms.from_config import objective_of
from engines.models.tokens import ModelTokens, model_tokens
from engines.models.vla.openvla import OpenVLA
from engines.train.batching.mfu import CostModel
from engines.train.contract import (
    ColumnsResult,
    LogprobRequest,
    TeachRequest,
    UpdateProfile,
    UpdateRequest,
    UpdateResult,
)
from engines.train.logprob_pass import (
    TEACHER_COLUMNS,
    Computed,
    chosen_logprobs,
    likeliest_words,
    score,
    write_token_columns,
)
from engines.train.model.lora import base_alone
from engines.train.policy import Policy
from engines.train.policy_update import Forward, PolicyUpdater
from engines.train.self_test.on_weights import TOLERANCE, median_difference
from engines.train.sharded_model import ShardedModel
from engines.train.updater import TrainRank, Updater
from storage.batches.refs import BatchRef
from storage.objects.store import Store


class FSDPEngine(ShardedModel):
    """One rank; see the module's docstring."""

    # --- forward passes -----------------------------------------------------------------------

    def logprobs(self, request: LogprobRequest) -> ColumnsResult:
        column = request.column
        computed = chosen_logprobs(self._forward(request.temperature), column, request.squared)
        of_base = self._spec.lora is not None and column == "ref_logprobs"
        with base_alone(self._loaded()) if of_base else nullcontext():
            names = (column, "sum_pi_squared")
            return self._columns(request.batch, request.out_key, computed, names)

    def teach(self, request: TeachRequest) -> ColumnsResult:
        among = self._readable if request.readable is None else request.readable
        computed = likeliest_words(self._forward(request.temperature), request.top_k, among)
        return self._columns(
            request.batch, request.out_key, computed, TEACHER_COLUMNS, request.store
        )

    def tokens(self) -> ModelTokens | None:
        return model_tokens(self._directory)

    def _columns(
        self,
        batch: BatchRef,
        out_key: str,
        computed: Computed,
        names: tuple[str, ...],
        store: Store | None = None,
    ) -> ColumnsResult:
        ref, sums = write_token_columns(
            store or self._store,
            self._shared(),
            self._device,
            batch,
            out_key,
            computed,
            names,
            budget=self._spec.train.shared_micro_batch_tokens,
            cost=self._cost,
            tree_training=self._spec.train.tree_training,
            needs=self._loaded().needs,
        )
        return ColumnsResult(batch=ref, metrics=sums)

    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        self._joined()
        return score(self._forward(1.0), token_ids, prompt_lengths, self._device)

    def mismatch(self) -> str | None:
        self._joined()
        if isinstance(self._loaded().model, OpenVLA) or self._spec.train.compile:
            return None
        difference, most = (
            median_difference(self._forward(1.0), self._device),
            TOLERANCE[self._compute],
        )
        if difference <= most:
            return None
        return (
            f"the train engine's log-probs of packed samples differ from transformers' own by "
            f"{difference:.2g} nats (median over some tokens, {most:g} are allowed)"
        )

    # --- training -----------------------------------------------------------------------------

    def update(self, request: UpdateRequest) -> UpdateResult:
        result = self._begun(request).run(request)
        self.version = request.step
        return result

    def profile(self, request: UpdateRequest, key: str) -> UpdateProfile:
        from engines.train.profiling import recorded

        result, found, trace = recorded(lambda: self.update(request), self._device)
        if self._joined().group.rank() == 0:
            self._store.write(key, trace)
        return dataclasses.replace(found, trace=key, tokens=int(result.metrics["train/tokens"]))

    def _begun(self, request: UpdateRequest) -> Updater:
        """What makes the update of a step; from now on the weights are no version's."""
        self._joined()
        if self._optimizer is None:
            raise ValueError(f"An engine of role {self._spec.role} is frozen. Update the actor.")
        # So that a replay draws the same.
        torch.manual_seed(self._spec.seed * 1_000_003 + request.step)
        self.version = None
        return self._updater(request)

    def _updater(self, request: UpdateRequest) -> Updater:
        """What makes one update on this rank."""
        forward, objective = self._forward(request.temperature), objective_of(request.algorithm)
        return PolicyUpdater(self._rank(), forward, objective)

    def _rank(self) -> TrainRank:
        model = self._loaded()
        return TrainRank(
            store=self._store,
            meeting=self._joined(),
            sequence=self._shared(),
            optimizer=self._optimizer,
            sharded=model if isinstance(model, FSDPModule) else None,
            config=self._spec.train,
            cost=self._cost,
            needs=model.needs,
        )

    def cost(self) -> CostModel:
        self._joined()
        return self._cost

    def _forward(self, temperature: float) -> Forward:
        policy = self._loaded()
        assert isinstance(policy, Policy)
        return Forward(
            policy=policy,
            sequence=self._shared(),
            temperature=temperature,
            chunk=self._spec.train.logit_chunk_tokens,
            dtype=self._compute,
        )
