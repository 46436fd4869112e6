"""A role's model from its checkpoint: built empty, wrapped, sharded, and only then filled.

No rank ever holds the whole of it (docs/decisions/loading-by-rank.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from engines.models.adapters import is_factor
from engines.models.checkpoints import build_empty
from engines.train.activations import checkpoint_layers
from engines.train.batching.packed_batch import why_together
from engines.train.contract import TrainSpec
from engines.train.kernels import use
from engines.train.kernels.placing import place_kernels
from engines.train.memory_plan import without_fsdp
from engines.train.model.compiled import check_compiling, compile_layers
from engines.train.model.expert_parallel import check_experts, find_experts
from engines.train.model.fsdp import fill, shard
from engines.train.model.loading import Checkpoint, load
from engines.train.model.lora import base_weights, inject
from engines.train.model.master_weights import MasterWeights, sum_gradients_in_float32
from engines.train.model.rendezvous import Meeting
from engines.train.model.routers import compute_in_float32
from engines.train.model.sequence_parallel import check_heads
from engines.train.policy import HeadedModel, Policy
from storage.objects.store import Store

M = TypeVar("M", bound=HeadedModel)  # what is trained, or frozen

WHOLE = ("cuda",)  # kinds of device on which there are plain models
LONE = True  # whether a lone rank on a GPU does without FSDP; a benchmark compares both


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
    use(config.kernels)
    on_gpu = meeting.device.type == "cuda" and find_spec("triton") is not None
    if config.kernels and not config.compile and on_gpu:
        place_kernels(policy.model, meeting.device)
    if config.compile:
        gpu = meeting.device.type == "cuda"
        check_compiling(spec.role, gpu)
        compile_layers(policy.model, spec.threads, gpu)
    if whole_on(spec, group.size(), meeting.device):
        give_memory(policy, meeting.device)
        where = "cpu" if config.weights_dtype == "bfloat16" else meeting.device.type
    else:
        where = "cpu"
        shard(
            *(policy, group, meeting.device, compute),
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
