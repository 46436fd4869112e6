"""Decoding of several prompts at once with a transformers model, token by token.

The caller decides when a step runs and under which policy version; nothing here waits or locks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from engines.rollout.contract import Sampling
from engines.rollout.samples import UNFINISHED, Completion

# A stop string ends in the newest token, so it lies within the last few; some tokens are parts of a
# character and add no text of their own.
_STOP_MARGIN = 8


class _Row:
    """A completion in the making."""

    __slots__ = ("begun", "ended", "limit", "logprobs", "noise", "prompt", "spans", "tokens")

    def __init__(
        self, prompt: list[int], noise: torch.Generator, limit: int, begun: Completion
    ) -> None:
        self.prompt = prompt
        self.noise = noise
        self.limit = limit  # most tokens that it may get
        self.begun = begun
        self.tokens = list(begun.tokens)
        self.logprobs = list(begun.logprobs)
        self.spans = list(begun.spans)
        self.ended = begun.finish_reason if begun.ended else ""  # empty while it goes on

    @property
    def drawn(self) -> int:
        """Tokens that were drawn here."""
        return len(self.tokens) - len(self.begun.tokens)

    def add(self, token: int, logprob: float, version: int) -> None:
        place = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], place + 1)
        else:
            self.spans.append((version, place, place + 1))

    def completion(self) -> Completion:
        """As it stands."""
        return Completion(
            tokens=list(self.tokens),
            logprobs=list(self.logprobs),
            spans=list(self.spans),
            finish_reason=self.ended or UNFINISHED,
            digest="" if self.drawn else self.begun.digest,
        )


class Decoding:
    """n completions of each of some prompts, which share the prompt's keys and values."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[list[int]],
        seeds: Sequence[int | None],  # one per completion: prompts x n, in that order
        sampling: Sampling,
        ends: Sequence[int],  # tokens that end a completion
        max_model_len: int,
        begun: Sequence[Completion],  # what each completion has already
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._ends = frozenset() if sampling.ignore_eos else frozenset(ends)
        self._prompts = list(prompts)
        self.rows = [
            _Row(
                prompts[number // sampling.n],
                torch.Generator(model.device).manual_seed(_entropy() if seed is None else seed),
                min(sampling.max_new_tokens, max_model_len - len(prompts[number // sampling.n])),
                begun[number],
            )
            for number, seed in enumerate(seeds)
        ]
        # Rows of the cache, those that end on the way among them.
        self._active = [row for row in self.rows if not row.ended]
        self._cache: DynamicCache | None = None
        self._mask = torch.empty(0)
        self._next = torch.empty(0)

    @property
    def running(self) -> int:
        """Completions that are not done."""
        return sum(not row.ended for row in self.rows)

    @property
    def tokens(self) -> int:
        """Tokens drawn so far."""
        return sum(row.drawn for row in self.rows)

    def forget_cache(self) -> None:
        """Have keys and values computed again, by the weights that the model has then."""
        self._active = [row for row in self.rows if not row.ended]
        self._cache = None

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Draw the next token of each completion that is not done."""
        logits = self._decode() if self._cache is not None else self._prefill()
        logprobs = _distribution(logits.float(), self._sampling)
        tokens = _draw(logprobs, [row.noise for row in self._active])
        drawn = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        for row, token, logprob in zip(self._active, tokens.tolist(), drawn, strict=True):
            if not row.ended:
                row.add(token, logprob, version)
                row.ended = self._ended(row)
        self._next = tokens
        if self.running and 2 * self.running <= len(self._active):
            self._drop_ended()

    def _prefill(self) -> torch.Tensor:
        """Logits [R, V] after what each row has so far; fills the cache."""
        fresh = all(not row.tokens for row in self._active)
        whole = self._prompts if fresh else [row.prompt + row.tokens for row in self._active]
        device = self._model.device
        width = max(len(tokens) for tokens in whole)
        ids = torch.zeros(len(whole), width, dtype=torch.long)
        mask = torch.zeros(len(whole), width, dtype=torch.long)
        for number, tokens in enumerate(whole):
            ids[number, width - len(tokens) :] = torch.tensor(tokens)
            mask[number, width - len(tokens) :] = 1
        self._mask = mask.to(device)
        self._cache = DynamicCache(config=self._model.config)
        logits = self._forward(ids.to(device), (self._mask.cumsum(1) - 1).clamp(min=0))
        if fresh and self._sampling.n > 1:
            self._cache.batch_repeat_interleave(self._sampling.n)
            self._mask = self._mask.repeat_interleave(self._sampling.n, 0)
            logits = logits.repeat_interleave(self._sampling.n, 0)
        return logits

    def _decode(self) -> torch.Tensor:
        """Logits [R, V] after the tokens drawn last."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], 1)
        return self._forward(self._next[:, None], self._mask.sum(1, keepdim=True) - 1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _ended(self, row: _Row) -> str:
        if row.tokens[-1] in self._ends or self._stopped(row):
            return "stop"
        return "length" if len(row.tokens) >= row.limit else ""

    def _stopped(self, row: _Row) -> bool:
        if not self._sampling.stop:
            return False
        reach = max(len(stop) for stop in self._sampling.stop) + _STOP_MARGIN
        text = self._tokenizer.decode(row.tokens[-reach:], skip_special_tokens=True)
        return any(stop in text for stop in self._sampling.stop)

    def _drop_ended(self) -> None:
        """Take the rows that are done out of the cache."""
        assert self._cache is not None
        kept = [number for number, row in enumerate(self._active) if not row.ended]
        index = torch.tensor(kept, device=self._mask.device)
        self._cache.batch_select_indices(index)
        self._mask, self._next = self._mask[index], self._next[index]
        self._active = [self._active[number] for number in kept]


def _entropy() -> int:
    """A seed that no other engine has: torch's own default is the same in every process."""
    return int.from_bytes(os.urandom(8), "big") >> 1


def _distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probs [R, V] of the distribution that is sampled from; filtered-out tokens have -inf."""
    logits = logits / sampling.temperature
    if sampling.top_k and sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k, 1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = logits.sort(1)  # ascending; the likeliest stays whatever its probability
        drop = ordered.softmax(1).cumsum(1) <= 1 - sampling.top_p
        drop[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), -torch.inf)
    return logits.log_softmax(1)


def _draw(logprobs: torch.Tensor, noises: Sequence[torch.Generator]) -> torch.Tensor:
    """One token [R] of each row by the Gumbel-max trick, argmax(log p - log e), e exponential.

    Each row has its own noise, drawn anew at each position, so that a row's tokens do not depend on
    the other rows.
    """
    noise = torch.empty_like(logprobs)
    for row, source in zip(noise, noises, strict=True):
        row.exponential_(generator=source)
    return (logprobs - noise.log_()).argmax(1)
