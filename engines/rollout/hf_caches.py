"""Decoding by a model's own code and cache, a row at a time: recurrent layers, own attention.

hf_decoding.py decodes all rows in one batch, for which it puts its attention into the model. Models
whose layers carry a state, or compute attention themselves, get their rows one after the other, each
with the cache that transformers makes for it. So a row's bits do not depend on others, and a step
takes as long as its rows together.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines.models.attention import hands_on, mixers
from engines.models.routed_experts import RoutedExperts
from engines.models.routers import ChosenExperts
from engines.rollout.hf_decoding import Decoding, Row, draw_next, last_routed

CLOSE = 1e-3  # share of the logits' spread by which a model's cache may be off; bfloat16: 0.05
TRIAL = 12  # tokens


def decoding_of(
    model: PreTrainedModel, experts: ChosenExperts | None = None
) -> Decoding | CachedDecoding:
    """The way in which a model's rows are decoded; experts: where those of tokens are wanted."""
    if model.config.model_type == "openvla":
        return Decoding(model)
    mixing = mixers(model)
    plain = mixing.attention and not (mixing.recurrent or mixing.own) and hands_on(model)
    return Decoding(model, experts) if plain else CachedDecoding(model, experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A sequence that was computed whole."""

    last: Tensor  # logits [V] after it
    cache: Any  # None where it is computed whole each time
    routed: RoutedExperts | None  # of its tokens, where they are wanted


class CachedDecoding:
    """The rows that a model decodes, each by itself; see `Decoding`."""

    apart = False

    def __init__(self, model: PreTrainedModel, experts: ChosenExperts | None = None) -> None:
        self._model = model
        self._experts = experts
        parameters = inspect.signature(type(model).forward).parameters
        self._cache = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._held: dict[Row, Any] = {}  # by row, what the model keeps of all but its last token
        self._trusted: bool | None = None  # whether its cache gives what the whole sequence does

    def holds(self, row: Row) -> bool:
        """Whether something of a row is cached."""
        return row in self._held

    def forget(self, rows: Iterable[Row] | None = None) -> None:
        """Let go of some rows, or of all: they are computed again if they return."""
        for row in list(self._held) if rows is None else rows:
            self._held.pop(row, None)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], version: int) -> None:
        """Draw the next token of each of some rows, of which none is done; others are let go of."""
        uncached = set(rows)
        self.forget([row for row in self._held if row not in uncached])
        prefixes: dict[tuple[int, ...], _Begun] = {}
        draw_next(torch.stack([self._next(row, prefixes) for row in rows]), rows, version)

    @torch.inference_mode()
    def score(self, tokens: list[int], prompt: int) -> list[float]:
        """Log-probs, nats, of the tokens of a sequence after its first `prompt` ones."""
        logits, _ = self._forward(tokens, None, keep=False)
        labels = torch.tensor(tokens[prompt:], device=logits.device)
        logprobs = logits[-len(labels) - 1 : -1].float().log_softmax(1)
        scores: list[float] = logprobs.gather(1, labels[:, None])[:, 0].tolist()
        return scores

    def _next(self, row: Row, begun: dict[tuple[int, ...], _Begun]) -> Tensor:
        """Logits [V] after what a row has so far; begun: those of this step's other sequences."""
        tokens = row.prompt + row.tokens
        if row in self._held:
            logits, self._held[row] = self._forward(tokens[-1:], self._held[row])
            if self._experts is not None:
                row.routed(last_routed(self._experts), len(tokens) - 1)
            return logits[-1]
        key = tuple(tokens)
        if key not in begun:
            begun[key] = self._begin(tokens)
        first = begun[key]
        if first.cache is not None:
            self._held[row] = copy.deepcopy(first.cache)
        if first.routed is not None:
            row.routed(first.routed, 0)
        return first.last

    def _begin(self, tokens: list[int]) -> _Begun:
        if self._trusted is None:
            self._trusted = self._cache_is_exact()
        logits, cache = self._forward(tokens, None, keep=self._trusted)
        routed = None if self._experts is None else last_routed(self._experts)
        return _Begun(last=logits[-1], cache=cache, routed=routed)

    def _cache_is_exact(self) -> bool:
        """By a trial: some models' caches give other logits than the whole sequence."""
        words = int(self._model.config.get_text_config().vocab_size)
        tokens = [number * 7 % words for number in range(1, TRIAL + 1)]
        try:
            whole, _ = self._forward(tokens, None, keep=False)
            _, cache = self._forward(tokens[: TRIAL // 2], None)
            parts = []
            for token in tokens[TRIAL // 2 :]:
                logits, cache = self._forward([token], cache)
                parts.append(logits[-1])
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError):
            return False  # it keeps nothing that could be gone on with
        whole = whole[TRIAL // 2 :].float()
        off = float((torch.stack(parts).float() - whole).abs().max())
        close = CLOSE if self._model.dtype == torch.float32 else 50 * CLOSE
        return off <= close * float(whole.std())

    def _forward(self, tokens: list[int], cache: Any, keep: bool = True) -> tuple[Tensor, Any]:
        """Logits [T, V] after tokens that follow what is cached, and the cache with them."""
        ids = torch.tensor([tokens], device=self._model.device)
        caches = {} if cache is None else {self._cache: cache}
        out = self._model(input_ids=ids, use_cache=keep, **caches)
        return out.logits[0], out.get(self._cache) if keep else None
