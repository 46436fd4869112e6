"""The critic: the language model's decoder with a value head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from engines.train.batching.packed_batch import PackedBatch
from engines.train.model.head import Head, HeadForm
from engines.train.model.loading import Checkpoint
from engines.train.model.sequence_parallel import SequenceGroup
from engines.train.policy import HeadedModel, decoder_states, use_packed_attention


class Critic(HeadedModel):
    """Packed tokens in, the value of each response token out."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model`: a causal language model, of which only the decoder is kept."""
        super().__init__()
        whole, self.needs = use_packed_attention(model)
        decoder = whole.get_decoder()
        assert isinstance(decoder, PreTrainedModel)
        self.model = decoder
        size = decoder.config.get_text_config().hidden_size
        self.value = nn.Linear(size, 1, device=decoder.device)
        self.reset()

    def place_in(self, checkpoint: Checkpoint) -> str:
        return checkpoint.decoder

    @torch.no_grad()
    def reset(self) -> None:
        """Make all values 0, so that no seed decides what the first advantages are."""
        self.value.weight.zero_()
        self.value.bias.zero_()

    @property
    def versioned(self) -> nn.Module:
        return self

    @property
    def head(self) -> Head:
        """The value head, whose weight is [1, H]."""
        return Head.of(self.value, HeadForm())

    def forward(self, packed: PackedBatch, sequence: SequenceGroup) -> tuple[Tensor]:
        """Values [R], float32: what is expected of the state in which a response token is chosen.

        A tuple, because FSDP looks for the outputs' gradients there.
        """
        states, places = decoder_states(
            self.model, packed, packed.predictors, sequence, self.needs.whole
        )
        weight, bias = self.value.weight.float(), self.value.bias.float()
        local = functional.linear(states.float(), weight, bias).squeeze(-1)
        (values,) = sequence.together((local,), places, packed.labels.numel())
        # No view may leave an FSDP module: https://github.com/pytorch/pytorch/issues/181832
        return (values.clone(),)
