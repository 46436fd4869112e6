"""A role's model from its checkpoint: built empty, wrapped, sharded, and only then filled.

No rank ever holds the whole of it (docs/decisions/loading-by-rank.md).
"""

from __future__ import annotations

from pathlib import Path

import torch

from engines.adapters import is_factor
from engines.models import build_empty
from engines.train.activations import checkpoint_layers
from engines.train.critic import Critic
from engines.train.model.compiled import check_compiling, compile_layers
from engines.train.model.fsdp import fill, shard
from engines.train.model.loading import Checkpoint, load
from engines.train.model.lora import base_weights, inject
from engines.train.model.master_weights import MasterWeights, sum_gradients_in_float32
from engines.train.model.rendezvous import Meeting
from engines.train.model.sequence_parallel import check_heads
from engines.train.policy import Policy
from engines.train.spec import TrainSpec
from storage.objects.store import Store


def build(spec: TrainSpec, directory: Path, sharing: int, compute: torch.dtype) -> Policy | Critic:
    """The model of `spec.role` on the meta device, with adapters where it has any.

    Weights that never change are held in the number format in which they are multiplied, likewise
    those that have masters (master_weights.py): what is computed is the same to the bit. Buffers,
    such as rotary frequencies, and adapters stay as they are.

    Args:
        spec: Of the engine.
        directory: Of the model's files.
        sharing: Ranks that share a sequence. Raises ValueError where they do not divide its heads.
        compute: In what weights are multiplied.
    """
    model = build_empty(directory)
    check_heads(model.config.get_text_config().num_attention_heads, sharing)
    if spec.lora is not None:
        inject(model, spec.lora)
    policy = Critic(model) if spec.role == "critic" else Policy(model)
    if spec.frozen:
        policy.requires_grad_(False)
    if spec.frozen or spec.train.weights_dtype == "bfloat16":
        for name, parameter in policy.named_parameters():
            if not is_factor(name):
                parameter.data = parameter.data.to(compute)
    return policy


def materialize(
    policy: Policy | Critic,
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
    checkpoint_layers(policy.model, config.gradient_checkpointing)
    if config.compile:
        check_compiling(spec.role, gpu=meeting.device.type == "cuda")
        compile_layers(policy.model, spec.threads)
    shard(
        *(policy, group, meeting.device, compute),
        reshard=config.reshard_after_forward,
        replicas=config.replicas,
    )
    masters = MasterWeights(() if spec.frozen else policy.parameters())
    if masters.tensors:
        sum_gradients_in_float32(policy)
    if isinstance(policy, Critic):
        load(policy.model, checkpoint.decoder, checkpoint, group, masters)
        policy.reset_head()
    else:
        load(policy.model, "", checkpoint, group, masters)
    if spec.base is not None:
        fill(base_weights(policy.model, masters), store, spec.base, group)
    masters.round()
    return masters
