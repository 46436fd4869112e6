"""The language model as a policy: packed tokens in, log-probs out; how it is sharded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from engines.attention import PACKED
from engines.logprobs import token_statistics
from engines.models import load_for_training
from engines.packed import PackedBatch

if TYPE_CHECKING:
    from engines.critic import Critic


class Policy(nn.Module):
    """A causal language model whose forward pass gives figures of response tokens, not logits.

    The output head is applied inside this module's forward pass, where FSDP has its weights whole.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    def head(self) -> Tensor:
        """The output head's weight [V, H]; the embedding's where they are tied."""
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(
        self,
        packed: PackedBatch,
        *,
        temperature: float,
        chunk: int,
        dtype: torch.dtype,
        entropy_gradient: bool = False,
        squared: bool = False,
    ) -> tuple[Tensor, ...]:
        """Log-probs [R] and entropy [R] of response tokens, float32; `squared`: sums of pi^2 [R] too.

        dtype is that of the output head's product; chunk the number of logit rows held at once.
        A tuple, because FSDP looks for the outputs' gradients there.
        """
        hidden = self.model.get_decoder()(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            packed_layout=packed.layout,
        ).last_hidden_state[0]
        stats = token_statistics(
            hidden.index_select(0, packed.predictors).to(dtype),
            self.head.to(dtype),
            packed.labels,
            temperature=temperature,
            chunk=chunk,
            entropy_gradient=entropy_gradient,
            squared=squared,
        )
        found = (stats.logprobs.clone(), stats.entropy.clone())  # FSDP warns of views
        return found if stats.sum_pi_squared is None else (*found, stats.sum_pi_squared.clone())


def load_policy(directory: Path) -> Policy:
    """The model of a checkpoint directory in float32."""
    return policy_of(load_for_training(directory, "float32"))


def policy_of(model: PreTrainedModel) -> Policy:
    """Make a policy of a transformers model, in place."""
    return Policy(packed_attention(model))


def packed_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model take packed batches, in place; without dropout."""
    model.set_attn_implementation(PACKED)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def shard(
    policy: Policy | Critic, group: dist.ProcessGroup, device: torch.device, compute: torch.dtype
) -> None:
    """Shard the policy over a group, one unit per decoder layer, in place.

    Weights and their gradients' sums stay float32; a layer's weights are gathered in `compute`. A
    lone rank keeps gathered weights between forward and backward pass, for there is nothing to save.
    """
    policy.to(device)
    mesh = DeviceMesh.from_group(group, device.type)
    precision = MixedPrecisionPolicy()
    if compute != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    several = group.size() > 1
    for layer in layers(policy):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=several)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def layers(policy: Policy | Critic) -> list[nn.Module]:
    """The decoder's repeated layers: the largest list of modules in it."""
    lists = [module for module in policy.model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(
            f"{type(policy.model).__name__} has no list of layers to shard. Choose another model."
        )
    sizes = [sum(parameter.numel() for parameter in found.parameters()) for found in lists]
    return list(lists[sizes.index(max(sizes))])


def fsdp(policy: Policy) -> FSDPModule:
    """A sharded policy under the type that fully_shard gave it."""
    return cast(FSDPModule, policy)
