"""The train engine: one rank of a policy, its frozen reference or its critic, sharded by FSDP2.

Every rank gets the same arguments, the whole BatchRef among them, makes the same plan from the
rows' lengths (engines/train/packing.py) and reads its own rows only. The loss is in
engines/algorithms/objective.py, one update in engines/train/updater.py.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.from_config import objective_of
from engines.models import prepared
from engines.progress import report
from engines.train.building import build, materialize, tokens_of_student
from engines.train.checkpoint import load_snapshot, save_snapshot
from engines.train.critic import Critic, CriticUpdater
from engines.train.fsdp import fill
from engines.train.loading import open_checkpoint
from engines.train.logprob_pass import (
    TEACHER_COLUMNS,
    Computed,
    chosen_logprobs,
    likeliest_words,
    score,
    write_token_columns,
)
from engines.train.lora import base_alone, reset
from engines.train.memory import PUT_AWAY, held_by_rank, on_device, setting_for_less
from engines.train.mfu import CostModel, cost_model
from engines.train.micro_batch import MicroBatch
from engines.train.optimizer import Optimizer
from engines.train.order_of_sums import prepare
from engines.train.policy import Policy
from engines.train.policy_update import Forward, PolicyUpdater
from engines.train.rendezvous import Meeting, meet
from engines.train.sequence_parallel import SequenceGroup, sequence_group
from engines.train.spec import ColumnsResult, JoinReport, TrainSpec, UpdateResult, WeightsComparison
from engines.train.updater import TrainRank, Updater
from engines.train.versions import AdapterVersions, Versions
from engines.workers.engine import Memory, Ranked
from engines.workers.messages import Moved
from engines.workers.storages import Storages
from storage.batches.refs import BatchRef
from storage.objects.node_cache import open_node_cache
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FSDPEngine(Ranked):
    """One rank; see the module's docstring."""

    REMOTE: ClassVar[tuple[str, ...]] = (
        "logprobs",
        "values",
        "teach",
        "update",
        "cost",
        "export_weights",
        "settle_weights",
        "save_state",
        "load_state",
        "load_weights",
        "compare",
        "score",
        "digest",
        "offload",
        "onload",
    )
    CONCAT: ClassVar[tuple[str, ...]] = ("logprobs", "values", "teach")

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec
        self._store = Store(spec.store_uri, spec.store_options, cache_bytes=spec.cache_bytes)
        self._node_cache = open_node_cache(self._store, spec.node_cache_bytes)
        self._files = RunStore(self._store, spec.run, spec.role)
        torch.set_num_threads(spec.threads)
        prepare(spec.train)
        # torch 2.13's checkpoint code calls what it warns of itself:
        # https://github.com/pytorch/pytorch/pull/161385
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._directory = prepared(spec.model, Path(spec.model_cache))
        self._checkpoint = open_checkpoint(self._directory)
        self._readable = tokens_of_student(self._spec, self._directory)
        self._policy: Policy | Critic | None = None
        self._optimizer: Optimizer | None = None
        self._published: Versions | None = None
        self._meeting: Meeting | None = None
        self._sequence: SequenceGroup | None = None
        self._storages = Storages()

    # --- the gang -----------------------------------------------------------------------------

    def join(
        self, rank: int, world: int, host: str, port: int, generation: int, timeout: float
    ) -> JoinReport:
        """Meet the other ranks and load this rank's part of the model: version 0."""
        self.leave()
        report("meeting the other ranks")
        self._meeting = meet(
            rank, world, host, port, self._device, timeout, self._spec.train.deadline
        )
        began = time.monotonic()
        config = self._spec.train
        self._sequence = sequence_group(self._meeting, config.sequence_parallel, config.deadline)
        report("building the model")
        policy = build(self._spec, self._directory, self._sequence.size)
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        self._cost = cost_model(policy)
        materialize(
            *(policy, self._spec, self._checkpoint, self._meeting, self._store, self._compute)
        )
        self._policy = policy.train()
        self._begin_versions(policy)
        if not self._spec.frozen:
            self._optimizer = Optimizer(policy, self._spec.train, self._spec.total_steps)
        self.version = 0
        seconds = {**self._meeting.seconds, "model": time.monotonic() - began}
        return JoinReport(
            rank=rank, device=str(self._device), parameters=parameters, seconds=seconds
        )

    def leave(self) -> None:
        """Leave the process group and forget the weights."""
        if self._meeting is None:
            return
        if self._published is not None:
            self._published.close()
        self._meeting = self._policy = self._optimizer = self._published = self.version = None
        self._storages = Storages()
        gc.collect()

    def close(self) -> None:
        """Give memory back."""
        self.leave()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def offload(self) -> Moved:
        """Put weights, gradients and optimizer state into the host's memory, until `onload`.

        The device's memory is free then; every other call is an error.
        """
        self._joined()
        held = on_device(self._loaded(), self._optimizer, self._device)
        return self._storages.put_away(held, keep=True)

    def onload(self) -> Moved:
        """Bring back what `offload` put away, the same to the bit."""
        return self._storages.bring_back()

    def memory_held(self, memory: Memory) -> dict[str, int]:
        if self._storages.away:
            return {PUT_AWAY: self._storages.on_host if memory == "host" else 0}
        return held_by_rank(self._policy, self._optimizer, self._device, memory)

    @classmethod
    def memory_setting(
        cls, payload: TrainSpec, memory: Memory, held: Mapping[str, int], said: str
    ) -> str:
        return setting_for_less(payload.train, memory, held)

    # --- forward passes -----------------------------------------------------------------------

    def logprobs(
        self,
        batch: BatchRef,
        column: Literal["old_logprobs", "ref_logprobs"],
        out_key: str,
        temperature: float,
        squared: bool = False,
    ) -> ColumnsResult:
        """Write log-probs of response tokens under the weights held; all rows, in their order.

        `squared`: sum_pi_squared, the sum over the vocabulary of pi^2, is written too. The reference
        of an engine with adapters is its base.
        """
        computed = chosen_logprobs(self._forward(temperature), column, squared)
        of_base = self._spec.lora is not None and column == "ref_logprobs"
        with base_alone(self._loaded()) if of_base else nullcontext():
            return self._columns(batch, out_key, computed, (column, "sum_pi_squared"))

    def values(self, batch: BatchRef, out_key: str) -> ColumnsResult:
        """Write the critic's value of every response token; all rows, in their order."""
        critic = self._policy
        if not isinstance(critic, Critic):
            raise ValueError(f"An engine of role {self._spec.role} has no values. Ask the critic.")

        def computed(micro: MicroBatch) -> dict[str, Tensor]:
            return {"values": critic(micro.packed, self._shared())[0]}

        return self._columns(batch, out_key, computed, ("values",))

    def teach(
        self, batch: BatchRef, out_key: str, temperature: float, top_k: int = 0
    ) -> ColumnsResult:
        """Write teacher_logprobs of all rows, in their order; with `top_k` the likeliest words too.

        teacher_topk_ids and teacher_topk_logprobs have [top_k] numbers for each token,
        teacher_tail_logprobs the probability of all other words, in nats. The words are among those
        that the student knows.
        """
        computed = likeliest_words(self._forward(temperature), top_k, self._readable)
        return self._columns(batch, out_key, computed, TEACHER_COLUMNS)

    def _columns(
        self,
        batch: BatchRef,
        out_key: str,
        computed: Computed,
        names: tuple[str, ...],
    ) -> ColumnsResult:
        ref, sums = write_token_columns(
            self._store,
            self._shared(),
            self._device,
            batch,
            out_key,
            computed,
            names,
            budget=self._spec.train.shared_micro_batch_tokens,
            cost=self._cost,
            tree_training=self._spec.train.tree_training,
        )
        return ColumnsResult(batch=ref, metrics=sums)

    @staticmethod
    def concat(method: str, parts: list[ColumnsResult]) -> ColumnsResult:
        """The ranks' rows, in rank order."""
        assert method in FSDPEngine.CONCAT, method
        return ColumnsResult.together(parts)

    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """Log-probs, at temperature 1, of what follows the first prompt_lengths[i] tokens."""
        self._joined()
        return score(self._forward(1.0), token_ids, prompt_lengths, self._device)

    # --- training -----------------------------------------------------------------------------

    def update(
        self,
        batch: BatchRef,
        algorithm: AlgorithmConfig,
        temperature: float,
        max_new_tokens: int,
        step: int,
        plan: BatchRef | None = None,
    ) -> UpdateResult:
        """Train on a batch: train.epochs passes of train.mini_batches optimizer steps.

        plan: as engines/train/stored_plan.py has stored it for this batch and gang; None: each rank
        makes it.
        """
        meeting = self._joined()
        if self._optimizer is None:
            raise ValueError(f"An engine of role {self._spec.role} is frozen. Update the actor.")
        torch.manual_seed(self._spec.seed * 1_000_003 + step)  # so that a replay draws the same
        self.version = None
        model = self._loaded()
        assert isinstance(model, FSDPModule)
        rank = TrainRank(
            store=self._store,
            meeting=meeting,
            sequence=self._shared(),
            optimizer=self._optimizer,
            sharded=model,
            config=self._spec.train,
            cost=self._cost,
        )
        updater: Updater
        if isinstance(model, Critic):
            updater = CriticUpdater(rank, model, algorithm.critic)
        else:
            updater = PolicyUpdater(rank, self._forward(temperature), objective_of(algorithm))
        result = updater.run(batch, max_new_tokens, step, plan)
        self.version = step
        return result

    def cost(self) -> CostModel:
        """What plans are balanced by: the model's floating-point operations."""
        self._joined()
        return self._cost

    # --- weights and state --------------------------------------------------------------------

    def export_weights(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        """Publish the weights held as a policy version; transformers and vLLM can load its folder.

        Engines on the ranks' machines may read it at once, others once it is settled. Unless `whole`
        some versions are stored as the difference from another one, if the settings say so; such a
        folder is read by this program only.

        Each rank writes the tensors that it gathers. The output head is among the tensors also where
        it is tied to the embedding.
        """
        self._joined()
        if self._spec.role == "critic":
            raise ValueError("A critic is no policy, so it has no version to publish.")
        return self._versions().publish(version, DTYPES[dtype], whole)

    def settle_weights(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        """Return once the store has what `export_weights` has published with these arguments."""
        self._joined()
        return self._versions().settle(version, DTYPES[dtype], whole)

    def digest(self, dtype: str | None = None) -> str:
        """Digest of all weights to the bit, whatever the number of ranks; cast to `dtype` first."""
        self._joined()
        return self._versions().digest(DTYPES[dtype] if dtype else None)

    def compare(self, weights: WeightsRef, dtype: str) -> WeightsComparison:
        """The weights held, cast to `dtype`, beside a published version's."""
        self._joined()
        return self._versions().compare(weights, DTYPES[dtype])

    def save_state(self, step: int, run: str | None = None) -> None:
        """Store weights, optimizer and counters as a snapshot of this or another run."""
        meeting = self._joined()
        optimizer = self._trained()
        facts = {"step": step, "steps": optimizer.steps, "applied": optimizer.applied}
        save_snapshot(self._files_of(run), step, self._state(), facts, meeting.group)

    def load_state(self, step: int, run: str | None = None, version: int | None = None) -> None:
        """Go back (or on) to the snapshot after `step`, of this or another run.

        `version`: what the weights are called here, if not `step`.
        """
        meeting = self._joined()
        optimizer = self._trained()
        self.version = None
        facts = load_snapshot(self._files_of(run), step, self._state(), meeting.group)
        optimizer.resume(facts["steps"], facts["applied"])
        self.version = step if version is None else version

    def load_weights(self, weights: WeightsRef, version: int) -> None:
        """Take the weights of a published policy version, with the optimizer as it is.

        An engine with adapters takes them as its base, below adapters that change nothing yet.
        """
        meeting = self._joined()
        model = self._loaded()
        self.version = None
        if weights != self._spec.base:
            fill(model.model, self._store, weights, meeting.group)
        self._begin_versions(model)
        self.version = version

    def _begin_versions(self, policy: Policy | Critic) -> None:
        """What is held now is a beginning: below fresh adapters, if this engine trains any."""
        module = policy if isinstance(policy, Critic) else policy.model
        made: type[Versions] = Versions
        if self._spec.lora is not None:
            reset(policy.model, self._spec.seed)
            made = AdapterVersions
        if self._published is not None:
            self._published.close()
        group, cache = self._joined().group, self._node_cache
        self._published = made(module, self._spec, self._files, self._directory, cache, group)

    def _files_of(self, run: str | None) -> RunStore:
        return self._files if run is None else replace(self._files, run=run)

    def _state(self) -> dict[str, Tensor]:
        optimizer = self._trained()
        weights = {f"model.{name}": value.detach() for name, value in optimizer.parameters.items()}
        return {**weights, **optimizer.moments()}

    def _versions(self) -> Versions:
        assert self._published is not None
        return self._published

    def _forward(self, temperature: float) -> Forward:
        policy = self._loaded()
        if not isinstance(policy, Policy):
            raise ValueError("A critic has no log-probs. Ask the actor or the reference.")
        return Forward(
            policy=policy,
            sequence=self._shared(),
            temperature=temperature,
            chunk=self._spec.train.logit_chunk_tokens,
            dtype=self._compute,
        )

    @property
    def _compute(self) -> torch.dtype:
        return DTYPES[self._spec.train.compute_dtype]

    def _loaded(self) -> Policy | Critic:
        assert self._policy is not None
        return self._policy

    def _joined(self) -> Meeting:
        if self._meeting is None:
            raise RuntimeError("This engine has not joined its process group. Form the gang first.")
        if self._storages.away:
            raise RuntimeError("This engine's weights are off its device. Call onload first.")
        return self._meeting

    def _shared(self) -> SequenceGroup:
        self._joined()
        assert self._sequence is not None
        return self._sequence

    def _trained(self) -> Optimizer:
        if self._optimizer is None:
            raise ValueError(f"An engine of role {self._spec.role} has no trainer state.")
        return self._optimizer
