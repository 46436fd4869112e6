"""The language model as a policy: packed tokens in, log-probs out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engines.models.attention import mixers, rotate_by_sequence
from engines.models.routers import ChosenExperts, Router, chosen_experts, find_routers
from engines.models.tensor_files import CheckpointNames
from engines.models.vla.openvla import OpenVLA
from engines.train.batching.packed_batch import PackedBatch, RowNeeds, row_needs
from engines.train.logprobs import token_statistics, top_words
from engines.train.model.attention import PACKED, collapse
from engines.train.model.head import Head, head_form
from engines.train.model.loading import Checkpoint
from engines.train.model.recurrent import sequences_apart
from engines.train.model.sequence_parallel import SequenceGroup

OWN = "eager"  # attention of models that have code of their own for it, and for no other maybe


class HeadedModel(nn.Module):
    """What a train engine holds: layers of a language model, and a head inside its forward pass."""

    model: PreTrainedModel
    needs: RowNeeds  # of rows that are packed for it
    routers: tuple[Router, ...] = ()  # of a mixture of experts
    experts: tuple[nn.Module, ...] = ()  # of its layers, where they are spread over ranks

    @property
    def head(self) -> Head:
        """The last layer."""
        raise NotImplementedError

    def router_biases(self) -> dict[str, Tensor]:
        """What balances experts without a loss, by its name in `model`; a tensor for each router."""
        state = self.model.state_dict(keep_vars=True)
        return {router.bias: state[router.bias] for router in self.routers if router.bias}

    @property
    def versioned(self) -> nn.Module:
        """What a version has the weights of."""
        return self.model

    def place_in(self, checkpoint: Checkpoint) -> str:
        """What the names of `model`'s weights have before them in a language model's checkpoint."""
        return ""

    def names_in(self, checkpoint: Checkpoint) -> CheckpointNames:
        """What the checkpoint's files call the weights of `versioned`; empty: the same."""
        return CheckpointNames()

    def reset(self) -> None:
        """Give weights that no checkpoint has the values with which they begin."""


class Policy(HeadedModel):
    """A causal language model whose forward pass gives numbers of response tokens, not logits.

    The output head is applied inside this module's forward pass, where FSDP has its weights whole.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.needs = use_packed_attention(model)
        self.routers = () if isinstance(model, OpenVLA) else find_routers(model)
        self.replay: ChosenExperts | None = None  # of routers that take the sampler's choice
        self._head_form = head_form(model.language_model if isinstance(model, OpenVLA) else model)

    @property
    def head(self) -> Head:
        """The output head; its weight is the embedding's where they are tied."""
        return Head.of(self.model.get_output_embeddings(), self._head_form)

    def names_in(self, checkpoint: Checkpoint) -> CheckpointNames:
        return CheckpointNames() if isinstance(self.model, OpenVLA) else checkpoint.names

    def replay_routing(self) -> None:
        """Have the routers take the experts that tokens were sampled with, where rows have them.

        Raises ValueError where they are of a form that is not known.
        """
        self.replay = chosen_experts(self.model)
        self.needs = replace(self.needs, routed_experts=True)

    def forward(
        self,
        packed: PackedBatch,
        sequence: SequenceGroup,
        *,
        temperature: float,
        chunk: int,
        dtype: torch.dtype,
        entropy_gradient: bool = False,
        squared: bool = False,
        words: Tensor | None = None,
        top: int = 0,
        among: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Statistics of the R response tokens; a tuple, where FSDP looks for outputs' gradients.

        Args:
            packed: T tokens of some rows. Probabilities are those among the words that a token was
                drawn from, and of a policy that looks at images among its action tokens.
            sequence: The ranks that share them; each gets the numbers of all R.
            temperature: Sampling temperature, by which logits are divided.
            chunk: Rows of logits held at once.
            dtype: Of the output head's product.
            entropy_gradient: Whether a gradient flows through the entropy.
            squared: Whether sums over the vocabulary of pi^2 are wanted too.
            words: [R, k] int64, words whose log-probs are wanted too, with all others' as a tail.
            top: In their place, that many words that are likeliest here; 0: none.
            among: Only of the first so many words of the vocabulary; None: of all.

        Returns:
            Log-probs [R] and entropy [R] in nats, and with `squared` sums of pi^2 [R]; float32. With
            `words` or `top` log-probs of these and the tail [R, k + 1], and with `top` the words,
            int64 [R, k].
        """
        # Words that are handed in, or were drawn from, are each row's own: no two rows' numbers are
        # the same then.
        support = packed.support
        distinct = packed.distinct if words is None and support is None else None
        labels, predictors = packed.labels, packed.predictors
        if distinct is not None:
            labels, predictors = labels[distinct.first], predictors[distinct.first]
        decoder, total = self.model.get_decoder(), labels.numel()
        head, embedded = self.head, None
        if isinstance(self.model, OpenVLA):
            assert packed.images is not None, "its rows are packed turn by turn"
            embedded = self.model.embedded(packed.tokens, self.model.see(packed.images))
            first, stop = self.model.config.action_tokens
            head, labels = head.words(first, stop), (labels - first).clamp(0, stop - first - 1)
        weight = head.weight.to(dtype)
        if self.replay is not None:
            slots = packed.layout.expand if self.needs.whole else None
            self.replay.tell(packed.routed_experts, slots)
        states, places = decoder_states(
            decoder, packed, predictors, sequence, self.needs.whole, embedded
        )
        states = states.to(dtype)
        if top:
            words = top_words(states, weight, top, chunk=chunk, among=among, bias=head.bias)
        elif words is not None and places is not None:
            words = words[places]
        stats = token_statistics(
            states,
            weight,
            labels if places is None else labels[places],
            temperature=temperature,
            chunk=chunk,
            entropy_gradient=entropy_gradient,
            squared=squared,
            words=words,
            bias=head.bias,
            scale=head.scale,
            cap=head.cap,
            support=support if support is None or places is None else support.at(places),
        )
        outputs: tuple[Tensor, ...] = (stats.logprobs, stats.entropy)
        if stats.sum_pi_squared is not None:
            outputs = (*outputs, stats.sum_pi_squared)
        outputs = sequence.together(outputs, places, total)
        if stats.bins is not None:
            outputs = (*outputs, sequence.table(stats.bins, places, total))
        if top:
            assert words is not None
            outputs = (*outputs, sequence.table(words, places, total))
        if distinct is not None:
            return tuple(each.index_select(0, distinct.member) for each in outputs)
        # No view may leave an FSDP module: https://github.com/pytorch/pytorch/issues/181832
        return tuple(each.clone() for each in outputs)

    def own_logits(self, tokens: Tensor) -> Tensor:
        """Logits [S, T, V] of whole sequences [S, T], as transformers computes them."""
        if self.replay is not None:
            self.replay.tell(None)
        logits = self.model(input_ids=tokens, use_cache=False).logits
        assert isinstance(logits, Tensor)
        return logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """A policy's forward pass with its settings."""

    policy: Policy
    sequence: SequenceGroup
    temperature: float
    chunk: int  # rows of logits held at once
    dtype: torch.dtype  # of the output head's product

    def __call__(
        self,
        packed: PackedBatch,
        *,
        entropy_gradient: bool = False,
        squared: bool = False,
        words: Tensor | None = None,
        top: int = 0,
        among: int | None = None,
    ) -> tuple[Tensor, ...]:
        """As `Policy.forward`: log-probs [R], entropy [R], … of the response tokens."""
        outputs: tuple[Tensor, ...] = self.policy(
            packed,
            self.sequence,
            temperature=self.temperature,
            chunk=self.chunk,
            dtype=self.dtype,
            entropy_gradient=entropy_gradient,
            squared=squared,
            words=words,
            top=top,
            among=among,
        )
        return outputs


def decoder_states(
    decoder: nn.Module,
    packed: PackedBatch,
    predictors: Tensor,
    sequence: SequenceGroup,
    whole: bool,
    embedded: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The last hidden states [r, H] of this rank's tokens among `predictors`, int64 [R].

    And which of the R those are, int64 [r]; None: all. whole: see `RowNeeds`. embedded: the T
    tokens [T, H], where some of them are patches of images.
    """
    if whole:
        return _by_rows(decoder, packed).index_select(0, predictors), None
    inputs = {"input_ids": packed.tokens} if embedded is None else {"inputs_embeds": embedded}
    hidden = decoder(
        **{name: sequence.own(tokens)[None] for name, tokens in inputs.items()},
        position_ids=sequence.own(packed.positions)[None],
        use_cache=False,
        packed_layout=packed.layout,
        sequence_group=None if sequence.size == 1 else sequence,
    ).last_hidden_state[0]
    assert isinstance(hidden, Tensor)
    if sequence.size == 1:
        return hidden.index_select(0, predictors), None
    places, rows = sequence.places_held(predictors)
    return hidden.index_select(0, rows), places


def _by_rows(decoder: nn.Module, packed: PackedBatch) -> Tensor:
    """Hidden states [T, H] by the decoder's own code, in one pass over whole sequences.

    They are padded on the right, where no token reaches an earlier one.
    """
    layout = packed.layout
    rows, _ = layout.buckets  # all sequences, and the spare slot
    slots = layout.expand[: rows.sequences * rows.length].view(rows.sequences, rows.length)
    hidden = decoder(
        input_ids=packed.tokens[slots],
        position_ids=torch.arange(rows.length, device=slots.device).expand_as(slots),
        use_cache=False,
    ).last_hidden_state
    assert isinstance(hidden, Tensor)
    return collapse(hidden.flatten(0, 1), layout)


def use_packed_attention(model: PreTrainedModel) -> tuple[PreTrainedModel, RowNeeds]:
    """Make a model take packed batches, in place, without dropout; and what it needs of them."""
    language = model.language_model if isinstance(model, OpenVLA) else model
    needs = row_needs(language)
    if needs.whole:
        language.set_attn_implementation(OWN)
    else:
        if recurrent := mixers(language).recurrent:
            sequences_apart(language, recurrent)
        rotate_by_sequence(language)
        language.set_attn_implementation(PACKED)
    drop_nothing(model)
    return model, needs


# What mixtures of experts multiply by numbers about 1, in training alone.
JITTER = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def drop_nothing(model: nn.Module) -> None:
    """Set to 0, in place, what modules drop in training, or change at random."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("drop" in name or name in JITTER) and isinstance(value, float):
                setattr(module, name, 0.0)
