"""The language model as a policy: packed tokens in, log-probs of response tokens out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines.attention import PACKED
from engines.logprobs import token_statistics
from engines.packed import PackedBatch


class Policy(nn.Module):
    """A causal language model whose forward pass gives figures of response tokens, not logits.

    The output head is applied inside this module's forward pass, where FSDP has its weights whole.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        packed: PackedBatch,
        *,
        temperature: float,
        chunk: int,
        dtype: torch.dtype,
        entropy_gradient: bool = False,
        squared: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs [R], entropy [R] and (squared) sum of squared probabilities [R], float32.

        dtype is that of the output head's product; chunk the number of logit rows held at once.
        A tuple, because FSDP looks for the outputs' gradients there.
        """
        hidden = self.model.get_decoder()(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            packed_layout=packed.layout,
        ).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        stats = token_statistics(
            hidden.index_select(0, packed.predictors).to(dtype),
            head.weight.to(dtype),
            packed.labels,
            temperature=temperature,
            chunk=chunk,
            entropy_gradient=entropy_gradient,
            squared=squared,
        )
        return stats.logprobs, stats.entropy, stats.sum_pi_squared


def load_policy(directory: Path) -> Policy:
    """The model of a checkpoint directory in float32, with packed attention and no dropout."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return policy_of(model)


def policy_of(model: PreTrainedModel) -> Policy:
    """Make a policy of a transformers model, in place."""
    model.set_attn_implementation(PACKED)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return Policy(model)
