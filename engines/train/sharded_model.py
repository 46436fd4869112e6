"""One rank's part of a model that is sharded by FSDP2: how it joins the others, weights and state.

What is computed with it is in engines/train/fsdp_engine.py.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engines.models.checkpoints import is_score_bias, prepared
from engines.models.tensor_files import CheckpointNames
from engines.models.tokens import tokens_of_student
from engines.start_progress import report
from engines.train.batching.mfu import cost_model
from engines.train.building import build, materialize, whole_on
from engines.train.checkpoint import Computed, load_snapshot, save_snapshot
from engines.train.contract import TrainEngine
from engines.train.memory import PUT_AWAY, held_by_rank, on_device, setting_for_less
from engines.train.model.fsdp import fill
from engines.train.model.loading import open_checkpoint
from engines.train.model.lora import base_weights, reset
from engines.train.model.master_weights import MasterWeights, Remainder
from engines.train.model.rendezvous import Meeting, meet
from engines.train.model.sequence_parallel import SequenceGroup, sequence_group
from engines.train.optimizer import Optimizer
from engines.train.order_of_sums import prepare
from engines.train.policy import HeadedModel, Policy
from engines.train.spec import JoinReport, TrainSpec, WeightsComparison
from engines.train.transfer import WeightSending
from engines.train.versions import AdapterVersions, Versions
from engines.weight_transfer.offer import Transfer, TransferOffer, TransferReport
from engines.workers.device_memory import Storages
from engines.workers.engine import Memory, Moved
from storage.objects.node_cache import open_node_cache
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ShardedModel(TrainEngine):
    """A policy, its frozen reference, a teacher, or what else is trained, on one rank."""

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
        self._readable: int | None = None
        if spec.student is not None:
            student = prepared(spec.student, Path(spec.model_cache))
            self._readable = tokens_of_student(student, self._directory, spec.name)
        self._policy: HeadedModel | None = None
        self._parameters: tuple[nn.Parameter, ...] = ()  # this rank's parts
        self._masters = MasterWeights()
        self._optimizer: Optimizer | None = None
        self._published: Versions | None = None
        self._sending: WeightSending | None = None
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
        self._sending = WeightSending(self._meeting.group, self._device, host)
        began = time.monotonic()
        config = self._spec.train
        self._sequence = sequence_group(self._meeting, config.sequence_parallel, config.deadline)
        report("building the model")
        whole = whole_on(self._spec, world, self._device)
        policy = build(
            *(self._spec, self._with_head, self._directory, self._sequence.size),
            *(self._compute, whole, world // config.replicas),
        )
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        self._cost = cost_model(policy)
        self._masters = materialize(
            *(policy, self._spec, self._checkpoint, self._meeting, self._store, self._compute)
        )
        self._policy, self._parameters = policy.train(), tuple(policy.parameters())
        self._begin_versions(policy)
        self._optimizer = self._new_optimizer(policy)
        self.version = 0
        seconds = {**self._meeting.seconds, "model": time.monotonic() - began}
        return JoinReport(
            rank=rank, device=str(self._device), parameters=parameters, seconds=seconds
        )

    def _with_head(self, model: PreTrainedModel) -> HeadedModel:
        """What is held here, of a language model."""
        return Policy(model)

    def _new_optimizer(self, policy: HeadedModel) -> Optimizer | None:
        """The optimizer of what is trained here, with its state all zeros."""
        if self._spec.frozen:
            return None
        return Optimizer(policy, self._spec.train, self._spec.total_steps, self._masters)

    def leave(self) -> None:
        """Leave the process group and forget the weights."""
        if self._meeting is None:
            return
        if self._published is not None:
            self._published.close()
        if self._sending is not None:
            self._sending.close()
        self._sending = None
        self._meeting = self._policy = self._optimizer = self._published = self.version = None
        self._parameters, self._masters = (), MasterWeights()
        self._storages = Storages()
        gc.collect()

    def close(self) -> None:
        """Give memory back."""
        self.leave()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def offload(self) -> Moved:
        """Put weights, gradients and optimizer state into the host's memory, until `onload`."""
        self._joined()
        tensors = on_device(self._loaded(), self._optimizer, self._device)
        return self._storages.put_away(tensors, keep=True)

    def onload(self) -> Moved:
        return self._storages.bring_back()

    def memory_held(self, memory: Memory) -> dict[str, int]:
        if self._storages.away:
            return {PUT_AWAY: self._storages.on_host if memory == "host" else 0}
        return held_by_rank(self._parameters, self._optimizer, self._device, memory)

    @classmethod
    def memory_setting(
        cls, payload: TrainSpec, memory: Memory, held: Mapping[str, int], said: str
    ) -> str:
        return setting_for_less(payload.train, memory, held, payload.frozen)

    # --- weights and state --------------------------------------------------------------------

    def export_weights(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        self._joined()
        return self._versions().publish(version, DTYPES[dtype], whole)

    def settle_weights(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        self._joined()
        return self._versions().settle(version, DTYPES[dtype], whole)

    def offer_transfer(
        self, version: int, dtype: str, way: Transfer, receivers: int, timeout: float
    ) -> TransferOffer:
        self._joined()
        _, outlines = self._versions().whole(DTYPES[dtype])
        return self._transfers().offer(way, version, outlines, receivers, timeout)

    def transfer_weights(self, version: int, dtype: str) -> TransferReport:
        self._joined()
        state, _ = self._versions().whole(DTYPES[dtype])
        return self._transfers().send(version, state)

    def digest(self, dtype: str | None = None) -> str:
        self._joined()
        return self._versions().digest(DTYPES[dtype] if dtype else None)

    def compare(self, weights: WeightsRef, dtype: str) -> WeightsComparison:
        self._joined()
        return self._versions().compare(weights, DTYPES[dtype])

    def agree(self, weights: WeightsRef) -> int:
        self._joined()
        differing = self._versions().agree(weights)
        self._masters.round()
        return differing

    def save_state(self, step: int, run: str | None = None) -> None:
        meeting = self._joined()
        optimizer = self._trained()
        facts = {"step": step, "steps": optimizer.steps, "applied": optimizer.applied}
        save_snapshot(self._files_of(run), step, self._state(), facts, meeting.group)

    def load_state(self, step: int, run: str | None = None, version: int | None = None) -> None:
        meeting = self._joined()
        optimizer = self._trained()
        self.version = None
        facts = load_snapshot(self._files_of(run), step, self._state(), meeting.group)
        self._masters.round()
        optimizer.resume(facts["steps"], facts["applied"])
        self.version = step if version is None else version

    def load_weights(self, weights: WeightsRef, version: int) -> None:
        meeting = self._joined()
        model = self._loaded()
        self.version = None
        if weights != self._spec.base:
            targets = base_weights(model.model, self._masters, to_set=True)
            names = model.names_in(self._checkpoint)
            fill(targets, self._store, weights, meeting.group, names)
            self._masters.round()
        self._begin_versions(model)
        self.version = version

    def _begin_versions(self, policy: HeadedModel) -> None:
        """What is held now is a beginning: below fresh adapters, if this engine trains any."""
        kind_of_versions: type[Versions] = Versions
        if self._spec.lora is not None:
            reset(policy.model, self._spec.seed)
            kind_of_versions = AdapterVersions
        if self._published is not None:
            self._published.close()
        kind = self._spec.version_names
        as_files = kind == "files" or (kind == "checkpoint" and not self._checkpoint.stacked)
        names = policy.names_in(self._checkpoint)
        published = names if as_files else CheckpointNames()
        self._published = kind_of_versions(
            policy.versioned,
            self._spec,
            self._files,
            self._directory,
            self._node_cache,
            self._joined().group,
            self._masters,
            published,
            names.untold(published),
            self._unrounded(policy, names) if kind == "files" else frozenset(),
        )

    def _unrounded(self, policy: HeadedModel, names: CheckpointNames) -> frozenset[str]:
        """Names of what a version has in float32 in any case: biases of routers' scores.

        With rounded ones tokens would go to other experts.
        """
        buffers = {name for name, _ in policy.versioned.named_buffers() if is_score_bias(name)}
        return frozenset(buffers | {names.in_files.get(name, name) for name in buffers})

    def _files_of(self, run: str | None) -> RunStore:
        return self._files if run is None else replace(self._files, run=run)

    def _state(self) -> dict[str, Tensor | Computed]:
        optimizer, masters = self._trained(), self._masters
        tensors: dict[str, Tensor] = {}
        computed: dict[str, Computed] = {}
        for name, parameter in optimizer.parameters.items():
            if isinstance(masters.beside(parameter), Remainder):
                computed[f"model.{name}"] = Computed(
                    like=parameter.detach(),
                    values=partial(masters.of, parameter),
                    place=partial(masters.to_set, parameter),
                    take=masters.take,
                )
            else:
                tensors[name] = masters.of(parameter)
        if self._spec.version_names == "files":  # of older runs no step has changed them
            biases = self._loaded().router_biases()
            tensors |= {
                f"model.{name}": masters.of(parameter) for name, parameter in biases.items()
            }
        weights = {f"model.{name}": value.detach() for name, value in tensors.items()}
        return {**weights, **computed, **optimizer.moments()}

    def _versions(self) -> Versions:
        assert self._published is not None
        return self._published

    def _transfers(self) -> WeightSending:
        assert self._sending is not None
        return self._sending

    @property
    def _compute(self) -> torch.dtype:
        return DTYPES[self._spec.train.compute_dtype]

    def _loaded(self) -> HeadedModel:
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
