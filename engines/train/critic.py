"""The critic: the language model's decoder with a value head. How it is updated: critic_update.py."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from engines.models import load_for_training
from engines.train.micro_batch import PackedBatch
from engines.train.policy import packed_attention


class Critic(nn.Module):
    """Packed tokens in, the value of each response token out."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.value = nn.Linear(model.config.get_text_config().hidden_size, 1)
        # All values begin at 0, so that no seed decides what the first advantages are.
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    @property
    def head(self) -> Tensor:
        """The value head's weight [1, H]."""
        return self.value.weight

    def forward(self, packed: PackedBatch) -> tuple[Tensor]:
        """Values [R], float32: what is expected of the state in which a response token is chosen.

        A tuple, because FSDP looks for the outputs' gradients there.
        """
        hidden = self.model(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            packed_layout=packed.layout,
        ).last_hidden_state[0]
        states = hidden.index_select(0, packed.predictors).float()
        values = functional.linear(states, self.value.weight.float(), self.value.bias.float())
        return (values.squeeze(-1).clone(),)  # FSDP warns of views


def load_critic(directory: Path) -> Critic:
    """A critic on the decoder of a checkpoint directory, in float32."""
    model = packed_attention(load_for_training(directory, "float32"))
    decoder = model.get_decoder()
    assert isinstance(decoder, PreTrainedModel)
    return Critic(decoder)
