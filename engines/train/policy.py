"""The language model as a policy: packed tokens in, log-probs out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engines.train.attention import PACKED
from engines.train.logprobs import token_statistics
from engines.train.micro_batch import PackedBatch


class Policy(nn.Module):
    """A causal language model whose forward pass gives numbers of response tokens, not logits.

    The output head is applied inside this module's forward pass, where FSDP has its weights whole.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = packed_attention(model)

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
        """Statistics of the R response tokens; a tuple, where FSDP looks for outputs' gradients.

        Args:
            packed: T tokens of some rows.
            temperature: Sampling temperature, by which logits are divided.
            chunk: Rows of logits held at once.
            dtype: Of the output head's product.
            entropy_gradient: Whether a gradient flows through the entropy.
            squared: Whether sums over the vocabulary of pi^2 are wanted too.

        Returns:
            Log-probs [R] and entropy [R] in nats, and with `squared` sums of pi^2 [R]; float32.
        """
        stats = token_statistics(
            decoder_states(self.model.get_decoder(), packed).to(dtype),
            self.head.to(dtype),
            packed.labels,
            temperature=temperature,
            chunk=chunk,
            entropy_gradient=entropy_gradient,
            squared=squared,
        )
        # No view may leave an FSDP module: https://github.com/pytorch/pytorch/issues/181832
        found = (stats.logprobs.clone(), stats.entropy.clone())
        return found if stats.sum_pi_squared is None else (*found, stats.sum_pi_squared.clone())


def decoder_states(decoder: nn.Module, packed: PackedBatch) -> Tensor:
    """The last hidden states [R, H] of the tokens that predict the response tokens."""
    hidden = decoder(
        input_ids=packed.tokens[None],
        position_ids=packed.positions[None],
        use_cache=False,
        packed_layout=packed.layout,
    ).last_hidden_state[0]
    assert isinstance(hidden, Tensor)
    return hidden.index_select(0, packed.predictors)


def packed_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model take packed batches, in place; without dropout."""
    model.set_attn_implementation(PACKED)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
