"""What a model needs of packed rows besides where each sequence's tokens are."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from engines.models.attention import hands_on, mixers, rope_limit


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNeeds:
    """How rows are laid out for a model; a plain one needs nothing of this."""

    # On any device dense batches of sequences of about one length: for recurrent layers, and for
    # attention with a cap or sinks.
    dense: bool = False
    # One dense batch of whole sequences, none shared: the model's own code computes attention.
    whole: bool = False
    rope_limit: int | None = None  # tokens from which on sequences have other rotary positions
    routed_experts: bool = False  # the experts that each token was sampled with
    sampling_mask: bool = False  # the words that it was drawn from, where samples have them


PLAIN = RowNeeds()


def row_needs(model: PreTrainedModel) -> RowNeeds:
    """Of a language model, by its code and its config."""
    mixing, limit = mixers(model), rope_limit(model.config)
    if mixing.own or not mixing.attention or not hands_on(model):
        return RowNeeds(dense=True, whole=True, rope_limit=limit)
    text = model.config.get_text_config()
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    return RowNeeds(dense=bool(mixing.recurrent) or capped or sinks, rope_limit=limit)


def why_together(model: PreTrainedModel) -> str | None:
    """Why a model's layers are not compiled and its sequences not divided over ranks, as a clause.

    None: they may be.
    """
    mixing, needs = mixers(model), row_needs(model)
    if needs.whole:
        names = f" ({', '.join(mixing.names)})" if mixing.names else ""
        return f"its attention is computed by its own code{names}"
    if mixing.recurrent:
        return f"its layers ({', '.join(mixing.names)}) carry a state from token to token"
    if needs.dense:
        return "its attention has a cap on scores, or sinks"
    if needs.rope_limit is not None:
        return f"its positions depend on whether a sample has more than {needs.rope_limit} tokens"
    return None
