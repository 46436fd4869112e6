"""The train engine: one rank of a policy or its frozen reference, sharded by FSDP2.

Every rank gets the same arguments, the whole BatchRef among them, makes the same plan from the
rows' lengths (engines/train/batching/packing.py) and reads its own rows only. The loss is in
engines/algorithms/objective.py, one update in engines/train/updater.py.

The model is built empty from its checkpoint, wrapped, sharded, and only then filled: no rank ever
holds the whole of it (docs/decisions/loading-by-rank.md).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from engines.algorithms.from_config import objective_of
from engines.models.adapters import is_factor
from engines.models.checkpoints import build_empty, is_score_bias, prepared
from engines.models.routers import find_experts
from engines.models.tensor_files import CheckpointNames
from engines.models.tokens import ModelTokens, model_tokens, tokens_of_student
from engines.models.vla.openvla import OpenVLA
from engines.start_progress import report
from engines.train.activations import checkpoint_layers
from engines.train.batching.mfu import CostModel, cost_model
from engines.train.batching.packed_batch import why_together
from engines.train.contract import (
    ColumnsResult,
    JoinReport,
    LogprobRequest,
    TeachRequest,
    TrainEngine,
    TrainSpec,
    UpdateProfile,
    UpdateRequest,
    UpdateResult,
    WeightsComparison,
)
from engines.train.forward_passes import (
    TEACHER_COLUMNS,
    TOLERANCE,
    ForwardPass,
    chosen_logprobs,
    likeliest_words,
    median_difference,
    score,
    write_token_columns,
)
from engines.train.kernels import flash_attention, use
from engines.train.memory import PUT_AWAY, held_by_rank, on_device, setting_for_less
from engines.train.memory_plan import without_fsdp
from engines.train.model.fsdp import fill, shard
from engines.train.model.loading import Checkpoint, load, open_checkpoint
from engines.train.model.lora import base_alone, inject, reset
from engines.train.model.master_weights import (
    MasterWeights,
    Remainder,
    base_weights,
    sum_gradients_in_float32,
)
from engines.train.model.rendezvous import Meeting, meet
from engines.train.model.routers import compute_in_float32
from engines.train.model.sequence_parallel import SequenceGroup, check_heads, sequence_group
from engines.train.optimizer import Optimizer
from engines.train.policy import Forward, HeadedModel, Policy
from engines.train.publication import AdapterVersions, Versions
from engines.train.snapshots import DeferredTensor, load_snapshot, save_snapshot
from engines.train.transfer import WeightSending
from engines.train.updater import PolicyUpdater, TrainRank, Updater, prepare_fixed_order
from engines.weight_transfer.offer import Transfer, TransferOffer, TransferReport
from engines.workers.device_memory import Storages
from engines.workers.engine import Memory, Moved
from storage.batches.refs import BatchRef
from storage.objects.node_cache import open_node_cache
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef

M = TypeVar("M", bound=HeadedModel)  # what is trained, or frozen

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WHOLE = ("cuda",)  # kinds of device on which there are plain models
LONE = True  # whether a lone rank on a GPU does without FSDP; a benchmark compares both


class FSDPEngine(TrainEngine):
    """One rank of a policy, its frozen reference, a teacher, or what else is trained."""

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec
        self._store = Store(spec.store_uri, spec.store_options, cache_bytes=spec.cache_bytes)
        self._node_cache = open_node_cache(self._store, spec.node_cache_bytes)
        self._files = RunStore(self._store, spec.run, spec.role)
        torch.set_num_threads(spec.threads)
        prepare_fixed_order(spec.train)
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
            self._spec,
            self._with_head,
            self._directory,
            self._sequence.size,
            self._compute,
            whole,
            world // config.replicas,
        )
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        self._cost = cost_model(policy)
        self._masters = materialize(
            policy, self._spec, self._checkpoint, self._meeting, self._store, self._compute
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

    def _state(self) -> dict[str, Tensor | DeferredTensor]:
        optimizer, masters = self._trained(), self._masters
        tensors: dict[str, Tensor] = {}
        deferred: dict[str, DeferredTensor] = {}
        for name, parameter in optimizer.parameters.items():
            if isinstance(masters.beside(parameter), Remainder):
                deferred[f"model.{name}"] = DeferredTensor(
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
        return {**weights, **deferred, **optimizer.moments()}

    # --- forward passes -----------------------------------------------------------------------

    def logprobs(self, request: LogprobRequest) -> ColumnsResult:
        column = request.column
        forward_pass = chosen_logprobs(self._forward(request.temperature), column, request.squared)
        of_base = self._spec.lora is not None and column == "ref_logprobs"
        with base_alone(self._loaded()) if of_base else nullcontext():
            names = (column, "sum_pi_squared")
            return self._columns(request.batch, request.out_key, forward_pass, names)

    def teach(self, request: TeachRequest) -> ColumnsResult:
        among = self._readable if request.readable is None else request.readable
        forward_pass = likeliest_words(self._forward(request.temperature), request.top_k, among)
        return self._columns(
            request.batch, request.out_key, forward_pass, TEACHER_COLUMNS, request.store
        )

    def tokens(self) -> ModelTokens | None:
        return model_tokens(self._directory)

    def _columns(
        self,
        batch: BatchRef,
        out_key: str,
        forward_pass: ForwardPass,
        names: tuple[str, ...],
        store: Store | None = None,
    ) -> ColumnsResult:
        ref, sums = write_token_columns(
            store or self._store,
            self._shared(),
            self._device,
            batch,
            out_key,
            forward_pass,
            names,
            budget=self._spec.train.shared_micro_batch_tokens,
            cost=self._cost,
            tree_training=self._spec.train.tree_training,
            lone_rank=self._spec.lone_rank_plans,
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
        difference = median_difference(self._forward(1.0), self._device)
        allowed = TOLERANCE[self._compute]
        if difference <= allowed:
            return None
        return (
            f"the train engine's log-probs of packed samples differ from transformers' own by "
            f"{difference:.2g} nats (median over some tokens, {allowed:g} are allowed)"
        )

    # --- training -----------------------------------------------------------------------------

    def update(self, request: UpdateRequest) -> UpdateResult:
        result = self._begun(request).run(request)
        self.version = request.step
        return result

    def profile(self, request: UpdateRequest, key: str) -> UpdateProfile:
        from engines.train.profiling import recorded

        result, timing, trace = recorded(lambda: self.update(request), self._device)
        if self._joined().group.rank() == 0:
            self._store.write(key, trace)
        return replace(timing, trace=key, tokens=int(result.metrics["train/tokens"]))

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
            lone_rank=self._spec.lone_rank_plans,
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

    # --- what is held -------------------------------------------------------------------------

    def _transfers(self) -> WeightSending:
        assert self._sending is not None
        return self._sending

    def _versions(self) -> Versions:
        assert self._published is not None
        return self._published

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


def whole_on(spec: TrainSpec, ranks: int, device: torch.device) -> bool:
    """Whether this rank does without FSDP: `memory_plan.without_fsdp`."""
    alone = LONE and device.type in WHOLE
    return without_fsdp(spec.train, spec.role, ranks, alone, spec.lora)


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Give a module of the meta device memory, in place; weights that are tied stay so.

    `to_empty` gives each place of a tied weight memory of its own.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False, remove_duplicate=False):
            if old not in copies:
                empty = torch.empty_like(old, device=device)
                copies[old] = nn.Parameter(empty, requires_grad=old.requires_grad)
            part.register_parameter(name, copies[old])
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = torch.empty_like(buffer, device=device)


def build(
    spec: TrainSpec,
    with_head: Callable[[PreTrainedModel], M],
    directory: Path,
    sharing: int,
    compute: torch.dtype,
    whole: bool = False,
    shards: int = 1,
) -> M:
    """The model of `spec.role` on the meta device, with adapters where it has any.

    Weights that never change are held in the number format in which they are multiplied, likewise
    those that have masters (master_weights.py): what is computed is the same to the bit. Buffers,
    such as rotary frequencies, and adapters stay as they are.

    Args:
        spec: Of the engine.
        with_head: Makes what is trained of the language model.
        directory: Of the model's files.
        sharing: Ranks that share a sequence.
        compute: In what weights are multiplied.
        whole: See `whole_on`.
        shards: Ranks that share a copy of the model.

    Raises:
        ValueError: `sharing` does not divide the model's heads, or a setting does not fit the model.
    """
    model = build_empty(directory)
    if heads := getattr(model.config.get_text_config(), "num_attention_heads", None):
        check_heads(heads, sharing)
    if (why := why_together(model)) is not None and (sharing > 1 or spec.train.compile):
        setting = "sequence_parallel = 1" if sharing > 1 else "compile = false"
        raise ValueError(f"The model of role {spec.role}: {why}. Set train.{setting}.")
    if spec.lora is not None:
        inject(model, spec.lora)
    policy = with_head(model)
    setting, instead = spec.train.of_experts
    if setting and spec.role == "actor" and not policy.routers:
        raise ValueError(
            f"{setting} is for mixtures of experts, and this model has no routers of a form that is "
            f"known. Set {instead}."
        )
    if spec.train.expert_parallel > 1:
        policy.experts = find_experts(model)
        if spec.student is None and not policy.experts:  # a run's teachers may be of any kind
            raise ValueError(
                f"train.expert_parallel = {spec.train.expert_parallel} is for mixtures whose experts "
                "transformers holds in one stack, and this model has none. Set it to 1."
            )
        from engines.train.model.expert_parallel import check_experts

        check_experts(policy.experts, spec.train.expert_parallel, shards, spec.role)
    rate = spec.train.router_bias_update_rate
    if rate and spec.role == "actor" and not all(router.bias for router in policy.routers):
        raise ValueError(
            f"train.router_bias_update_rate = {rate:g} moves biases of routers' scores, which this "
            "model has not. Set it to 0."
        )
    if rate and spec.version_names != "files":
        raise ValueError(
            f"train.router_bias_update_rate = {rate:g}, and this run goes on with the versions of an "
            "older Refrain, in which biases are rounded. Set it to 0, or begin a new run."
        )
    if spec.train.router_replay and spec.role == "actor":
        assert isinstance(policy, Policy), "an actor is one"
        policy.replay_routing()
    if spec.role in ("actor", "ref"):
        policy.needs = replace(policy.needs, sampling_mask=True)
    if spec.train.router_dtype == "float32":
        compute_in_float32(policy.routers, model.config.get_text_config().hidden_size, compute)
    if spec.frozen:
        policy.requires_grad_(False)
    if spec.frozen or whole or spec.train.weights_dtype == "bfloat16":
        for name, parameter in policy.named_parameters():
            if not is_factor(name):
                parameter.data = parameter.data.to(compute)
    return policy


def materialize(
    policy: HeadedModel,
    spec: TrainSpec,
    checkpoint: Checkpoint,
    meeting: Meeting,
    store: Store,
    compute: torch.dtype,
) -> MasterWeights:
    """Shard what `build` made over the ranks and load this rank's part, in place; a collective.

    Returns the masters of weights that are trained, or lie below adapters, in bfloat16.
    """
    config, group = spec.train, meeting.group
    checkpoint_layers(policy.model, config.gradient_checkpointing, config.recompute)
    on_gpu = meeting.device.type == "cuda"
    use(config.kernels)
    if on_gpu:
        flash_attention.use(config.flash_attention, policy.model.config, meeting.device)
    if config.kernels and not config.compile and on_gpu and find_spec("triton") is not None:
        from engines.train.kernels.placing import place_kernels

        place_kernels(policy.model, meeting.device)
    if config.compile:
        from engines.train.model.compiled import check_compiling, compile_layers

        check_compiling(spec.role, on_gpu)
        compile_layers(policy.model, spec.threads, on_gpu)
    if whole_on(spec, group.size(), meeting.device):
        give_memory(policy, meeting.device)
        where = "cpu" if config.weights_dtype == "bfloat16" else meeting.device.type
    else:
        where = "cpu"
        shard(
            policy,
            group,
            meeting.device,
            compute,
            reshard=config.reshard_after_forward,
            replicas=config.replicas,
            experts=policy.experts,
            timeout=config.deadline,
        )
    remainders = config.master_weights == "remainder"
    masters = MasterWeights(() if spec.frozen else policy.parameters(), where, remainders)
    if whole_on(spec, group.size(), meeting.device):
        masters.gradients.watch(policy.parameters())
    elif masters.tensors:
        sum_gradients_in_float32(policy)
    for experts in policy.experts:
        masters.gradients.watch(experts.parameters())
    load(policy.model, policy.place_in(checkpoint), checkpoint, group, masters)
    policy.reset()
    if spec.base is not None:
        targets = base_weights(policy.model, masters, to_set=True)
        fill(targets, store, spec.base, group, policy.names_in(checkpoint))
    masters.round()
    return masters
