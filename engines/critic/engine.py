"""One rank of a critic: the language model's decoder with a value head, and its update.

The update is the policy's (engines/train/updater.py) with the value loss as objective. Sharding,
weights and state are those of every train engine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.algorithm.algorithm import CriticConfig
from engines.algorithms.aggregation import MetricSums, Normaliser
from engines.algorithms.losses import value_loss
from engines.critic.contract import CriticEngine
from engines.train.batching.micro_batch import MicroBatch
from engines.train.batching.packed_batch import PackedBatch
from engines.train.contract import ColumnsResult, UpdateRequest
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.head import Head, HeadForm
from engines.train.model.loading import Checkpoint
from engines.train.model.sequence_parallel import SequenceGroup
from engines.train.policy import Forward, HeadedModel, decoder_states, use_packed_attention
from engines.train.updater import TrainRank, Updater
from storage.batches.refs import BatchRef
from storage.runs.weights import WeightsRef

COLUMNS = ("returns", "values")  # what the value loss is made of


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


class CriticUpdater(Updater):
    """One update of a critic; made anew for each."""

    def __init__(self, rank: TrainRank, critic: Critic, settings: CriticConfig) -> None:
        super().__init__(rank)
        self._critic = critic
        self._settings = settings

    def _columns(self, batch: BatchRef) -> list[str]:
        missing = sorted(set(COLUMNS) - set(batch.names))
        if missing:
            raise ValueError(
                f"The critic's update needs the columns {', '.join(missing)}; the batch has "
                f"{', '.join(batch.names)}. Run the values and advantage tasks first."
            )
        return list(COLUMNS)

    def _loss(
        self, micro: MicroBatch, normaliser: Normaliser, selected: Tensor | None
    ) -> tuple[Tensor, MetricSums]:
        assert selected is None, "every token counts"
        (values,) = self._critic(micro.packed, self._sequence)
        loss, metrics = value_loss(
            values,
            micro.columns["returns"],
            micro.columns["values"],
            micro.mask,
            micro.packed.rows,
            normaliser,
            clip=self._settings.clip,
            aggregation=self._settings.aggregation,
        )
        return loss, MetricSums(means=metrics.means, sums={"loss": metrics.sums["value_loss"]})


class CriticRank(FSDPEngine, CriticEngine):
    """See the module's docstring."""

    def _with_head(self, model: PreTrainedModel) -> Critic:
        return Critic(model)

    @property
    def _critic(self) -> Critic:
        critic = self._loaded()
        assert isinstance(critic, Critic)
        return critic

    def values(self, batch: BatchRef, out_key: str) -> ColumnsResult:
        self._joined()
        critic = self._critic

        def computed(micro: MicroBatch) -> dict[str, Tensor]:
            return {"values": critic(micro.packed, self._shared())[0]}

        return self._columns(batch, out_key, computed, ("values",))

    def mismatch(self) -> str | None:
        self._joined()
        return None  # transformers has no values

    def export_weights(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        self._joined()
        raise ValueError("A critic is no policy, so it has no version to publish.")

    def _updater(self, request: UpdateRequest) -> Updater:
        return CriticUpdater(self._rank(), self._critic, request.algorithm.critic)

    def _forward(self, temperature: float) -> Forward:
        raise ValueError("A critic has no log-probs. Ask the actor or the reference.")
