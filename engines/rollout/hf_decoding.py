"""Decoding of many completions at once with a transformers model, token by token.

The caller decides when a step runs and under which policy version; nothing here waits or locks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engines.models.attention import LONG, rope_limit
from engines.models.grammars import Progress
from engines.models.routed_experts import RoutedExperts, checked, merged
from engines.models.routers import ChosenExperts
from engines.models.vla.openvla import OpenVLA, turn
from engines.rollout.contract import Sampling
from engines.rollout.hf_rows import (
    Cached,
    KeysAndValues,
    Prefill,
    Step,
    block_of,
    by_rows,
    sequences_of,
)
from engines.rollout.samples import Completion
from storage.batches.columns import UNFINISHED
from storage.batches.sampling_mask import SamplingMask, Words

# A stop string ends in the newest token, so it lies within the last few; some tokens are parts of a
# character and add no text of their own.
_STOP_MARGIN = 8
FRAMES = 8  # images that a policy looks at together
PREFILL = 8192  # tokens of one forward pass over whole sequences, unless one is longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """Knows where completions end."""

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]  # tokens that end a completion
    max_model_len: int  # tokens of prompt and completion together
    device: torch.device  # where noise is drawn

    def ended(self, row: Row) -> str:
        """The finish reason after the newest token; empty while the row goes on."""
        sampling = row.sampling
        by_grammar = row.progress is not None  # alone says then where the text ends
        if row.tokens[-1] in self.ends and (by_grammar or not sampling.ignore_eos):
            return "stop"
        if not by_grammar and self._stopped(row):
            return "stop"
        most = sampling.most(len(row.begun.tokens), row.begun.turn)
        full = len(row.tokens) >= min(most, self.max_model_len - len(row.prompt))
        return sampling.limit(len(row.tokens)) if full else ""

    def _stopped(self, row: Row) -> bool:
        if not row.sampling.stop:
            return False
        reach = max(len(stop) for stop in row.sampling.stop) + _STOP_MARGIN
        turn = row.tokens[row.begun.turn :]
        text = self.tokenizer.decode(turn[-reach:], skip_special_tokens=True)
        return any(stop in text for stop in row.sampling.stop)


class Row:
    """A completion in the making."""

    def __init__(
        self,
        prompt: list[int],
        seed: int | None,
        sampling: Sampling,
        reader: Reader,
        begun: Completion,
        frame: Tensor | None = None,
        progress: Progress | None = None,
    ) -> None:
        """frame: uint8 [H, W, 3], what a policy that looks at images has before it. progress: in the
        grammar of its text, up to where it goes on."""
        self.progress = progress
        self.prompt = prompt
        self.frame = frame
        self.sampling = sampling
        self.noise = torch.Generator(reader.device).manual_seed(
            _entropy() if seed is None else seed
        )
        self.cached = Cached()
        self.begun = begun
        self.tokens = list(begun.tokens)
        self.logprobs = list(begun.logprobs)
        self.spans = list(begun.spans)
        self.ended = begun.finish_reason if begun.ended else ""  # empty while it goes on
        self._words: list[Words | None] = []  # that its tokens were drawn from, if wanted
        self._sets: dict[bytes, Words] = {}  # those that came in a grammar, each once
        self._routed: list[RoutedExperts] = []  # of the tokens that the model has read, in parts
        self._read = 0  # tokens of those parts
        self._reader = reader

    def read(self, model: PreTrainedModel, image: int = 0) -> list[int]:
        """What the model reads: all so far, or at a turn after an image that turn alone.

        image: the number of its frame among those that are looked at together.
        """
        if isinstance(model, OpenVLA):
            return turn(self.prompt, self.tokens[self.begun.turn :], image, model.patches)
        return self.prompt + self.tokens

    @property
    def drawn(self) -> int:
        """Tokens that were drawn here."""
        return len(self.tokens) - len(self.begun.tokens)

    def add(
        self,
        token: int,
        logprob: float,
        version: int,
        words: Words | None = None,
    ) -> None:
        """A token that was drawn; words: from which, where not from all."""
        if self.progress is not None:
            self.progress.take(token)
        if words is not None and self.progress is not None:
            words = self._sets.setdefault(blake2b(words.coded.tobytes()).digest(), words)
        self._words.append(words)
        place = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version and self.spans[-1][2] == place:
            self.spans[-1] = (version, self.spans[-1][1], place + 1)
        else:
            self.spans.append((version, place, place + 1))
        self.ended = self._reader.ended(self)

    def routed(self, chosen: RoutedExperts, start: int) -> None:
        """The experts [S, L, k] of its tokens from number `start` on, the prompt's included.

        Of those that were read before they are not taken again, nor where nobody wants them.
        """
        if self.begun.routed_experts is None:
            return
        self._routed.append(chosen[self._read - start :])
        self._read = start + len(chosen)

    def _routed_experts(self) -> RoutedExperts | None:
        before = self.begun.routed_experts
        if before is None or not self.drawn:
            return before
        self._routed = [np.concatenate(self._routed)]
        return merged(before, self._routed[0])

    def completion(self) -> Completion:
        """As it stands."""
        return Completion(
            tokens=list(self.tokens),
            logprobs=list(self.logprobs),
            spans=list(self.spans),
            finish_reason=self.ended or UNFINISHED,
            digest="" if self.drawn else self.begun.digest,
            authors=self.begun.authors,
            routed_experts=self._routed_experts(),
            sampling_mask=self._sampling_mask(),
        )

    def _sampling_mask(self) -> SamplingMask | None:
        before = self.begun.sampling_mask
        if before is None or not self.drawn:
            return before
        return before.extended(len(self.begun.tokens)).followed_by(SamplingMask.of(self._words))


class Decoding:
    """The rows that a model decodes together; rows join and leave between steps.

    A row's tokens and log-probs are the same bits whatever rows are beside it, where `apart` is
    false: see hf_rows.py.
    """

    def __init__(self, model: PreTrainedModel, experts: ChosenExperts | None = None) -> None:
        """experts: where those of each token are wanted."""
        self._model = model
        self._experts = experts
        # Only the language model's rows change from step to step; images are seen FRAMES at a time.
        language = model.language_model if isinstance(model, OpenVLA) else model
        self._block = block_of(model)
        self._limit = rope_limit(language.config)
        # Whether rows of one shard alone may be decoded together. On a CPU with several threads too:
        # there rows have been seen to change by a bit with their place in the batch.
        threads = torch.get_num_threads() if model.device.type == "cpu" else 1
        self.apart = not by_rows(language) or threads > 1
        self._cache = KeysAndValues()
        self._rows: dict[Cached, Row] = {}  # those whose keys and values are held

    def holds(self, row: Row) -> bool:
        """Whether keys and values of a row are cached."""
        return row.cached.shelf is not None

    @torch.inference_mode()
    def forget(self, rows: Iterable[Row] | None = None) -> None:
        """Let go of some rows, or of all: their keys and values are computed again if they return."""
        for row in list(self._rows.values()) if rows is None else rows:
            self._cache.remove(row.cached)
            self._rows.pop(row.cached, None)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], version: int) -> None:
        """Draw the next token of each of some rows, of which none is done; others are let go of."""
        caches = {row.cached for row in rows}
        self.forget([row for cached, row in self._rows.items() if cached not in caches])
        # What is cached of a row has the positions of a short one; from the limit on it has others.
        self.forget([row for row in rows if row.cached.length == self._limit])
        fresh = [row for row in rows if row.cached not in self._rows]
        if self._rows:
            draw_next(*self._decode(), version)
        for some in _batches(fresh, self._model):
            draw_next(self._prefill(some), some, version)

    @torch.inference_mode()
    def score(self, tokens: list[int], prompt: int) -> list[float]:
        """Log-probs, nats, of the tokens of a sequence after its first `prompt` ones.

        A policy that looks at images takes it for a turn after `probe_image`.
        """
        read, image = tokens, None
        if isinstance(self._model, OpenVLA):
            tokens = self._model.probed(tokens, prompt)
            read = turn(tokens[:prompt], tokens[prompt:], 0, self._model.patches)
            image = self._see([self._model.probe_image[0]])
        places = self._positions(len(read))
        logits = self._forward([read], places, Prefill(lengths=[len(read)]), None, image)
        labels = torch.tensor(tokens[prompt:], device=logits.device)
        logprobs = logits[-len(labels) - 1 : -1].float().log_softmax(1)
        scores: list[float] = logprobs.gather(1, labels[:, None])[:, 0].tolist()
        return scores

    def _prefill(self, rows: Sequence[Row]) -> Tensor:
        """Logits [R, V] after what each row has so far, of which equal ones are computed once."""
        images: dict[bytes, int] = {}
        frames: list[Tensor] = []
        reading = []
        for row in rows:
            number = 0
            if row.frame is not None:
                number = images.setdefault(row.frame.numpy().tobytes(), len(images))
                frames += [row.frame] if number == len(frames) else []
            reading.append(row.read(self._model, number))
        whole, which = sequences_of(reading)
        prefill = Prefill(lengths=[len(tokens) for tokens in whole], rows=[[] for _ in whole])
        for row, number in zip(rows, which, strict=True):
            self._cache.place(row.cached, len(whole[number]))
            row.cached.length = len(whole[number])
            prefill.rows[number].append(row.cached)
            self._rows[row.cached] = row
        device = self._model.device
        positions = torch.cat([self._positions(length) for length in prefill.lengths])
        stops = torch.tensor(prefill.lengths, device=device).cumsum(0)
        logits = self._forward(whole, positions, prefill, stops - 1, self._see(frames))
        if self._experts is not None:
            parts = np.split(last_routed(self._experts), stops.cpu().numpy())
            for row, number in zip(rows, which, strict=True):
                row.routed(parts[number], 0)
        return logits[torch.tensor(which, device=device)]

    def _decode(self) -> tuple[Tensor, list[Row]]:
        """Logits [R, V] after the tokens drawn last, of all rows held, and these in that order."""
        step, order = self._cache.step(self._model.device)
        rows = [self._rows[cached] for cached in order]
        places = torch.cat(step.places)
        if self._limit is not None:
            places = torch.where(places >= self._limit, places + LONG, places)
        logits = self._forward([row.tokens[-1:] for row in rows], places, step)
        if self._experts is not None:
            for experts, row in zip(last_routed(self._experts), rows, strict=False):
                row.routed(experts[None], row.cached.length)
        for cached in order:
            cached.length += 1
        return logits, rows

    def _positions(self, length: int) -> Tensor:
        """Of a whole sequence; see engines/models/attention.py."""
        places = torch.arange(length, device=self._model.device)
        long = self._limit is not None and length > self._limit
        return places + LONG if long else places

    def _forward(
        self,
        tokens: Sequence[list[int]],
        positions: Tensor,
        rows: Prefill | Step,
        ends: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Logits [T, V] after each token, or [E, V] after those at `ends`; seen: see `_see`."""
        ids = torch.tensor([token for some in tokens for token in some], device=positions.device)
        missing = -len(ids) % self._block  # so that no operation has a rest that it treats apart
        logits: Tensor = self._model(
            input_ids=F.pad(ids, (0, missing))[None],
            position_ids=F.pad(positions, (0, missing))[None],
            use_cache=False,
            rows=rows,
            logits_to_keep=torch.arange(len(ids), device=ids.device) if ends is None else ends,
            **({} if seen is None else {"seen": seen}),
        ).logits[0]
        return logits

    def _see(self, frames: Sequence[Tensor]) -> Tensor | None:
        """Embeddings of the patches of images, FRAMES at a time whatever their number; None: of none.

        So what is seen in one does not depend on those beside it.
        """
        if not frames:
            return None
        assert isinstance(self._model, OpenVLA)
        images = torch.stack(list(frames)).to(self._model.device)
        missing = -len(images) % FRAMES
        padded = torch.cat([images, images[:1].expand(missing, -1, -1, -1)])
        states = torch.cat([self._model.see(some) for some in padded.split(FRAMES)])
        return states[: len(images) * self._model.patches]


def last_routed(experts: ChosenExperts) -> RoutedExperts:
    """The experts [T, L, k] of the tokens of the last forward pass, and of those that fill it up."""
    chosen = torch.stack(experts.chosen, 1).cpu().numpy()
    return checked(chosen, experts.of_no_token, experts.experts)


def draw_next(logits: Tensor, rows: Sequence[Row], version: int) -> None:
    """Give each row its next token, from its row of the logits [R, V]."""
    alike: dict[Sampling, list[int]] = {}
    for number, row in enumerate(rows):
        alike.setdefault(row.sampling, []).append(number)
    for sampling, numbers in alike.items():
        chosen = logits if len(numbers) == len(rows) else logits[numbers]
        chosen = _left_by_grammar(chosen, [rows[number].progress for number in numbers])
        if sampling.greedy:
            for number, token in zip(numbers, chosen.argmax(1).tolist(), strict=True):
                rows[number].add(token, 0.0, version)  # no other could have been
            continue
        logprobs = _distribution(chosen.float(), sampling)
        tokens = _draw(logprobs, [rows[number].noise for number in numbers])
        logprobs_drawn = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        words = words_left(logprobs) if sampling.sampling_mask else [None] * len(numbers)
        for number, token, logprob, support in zip(
            numbers, tokens.tolist(), logprobs_drawn, words, strict=True
        ):
            rows[number].add(token, logprob, version, support)


def words_left(logprobs: Tensor) -> list[Words | None]:
    """The words of each row of log-probs [R, V] that are not -inf; None: all."""
    return [Words.of(row) for row in (logprobs > -torch.inf).cpu().numpy()]


def _left_by_grammar(logits: Tensor, progress: Sequence[Progress | None]) -> Tensor:
    """Logits [R, V], those -inf that a row's grammar leaves out; None: it has none."""
    if all(one is None for one in progress):
        return logits
    left = np.ones(logits.shape, bool)
    for row, one in enumerate(progress):
        if one is not None:
            left[row] = one.left()
    return logits.masked_fill(~torch.from_numpy(left).to(logits.device), -torch.inf)


def _batches(rows: Sequence[Row], model: PreTrainedModel) -> Iterator[list[Row]]:
    """Rows whose sequences are computed in one forward pass, within PREFILL tokens or of one row."""
    batch: list[Row] = []
    tokens = 0
    for row in rows:
        length = len(row.read(model))
        if batch and tokens + length > PREFILL:
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += length
    if batch:
        yield batch


def _entropy() -> int:
    """A seed that no other engine has: torch's own default is the same in every process."""
    return int.from_bytes(os.urandom(8), "big") >> 1


def _distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probs [R, V] of the distribution that is sampled from; filtered-out tokens have -inf."""
    logits = logits / sampling.temperature
    if sampling.min_p:  # first, as vLLM does
        least = logits.amax(1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_k and sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k, 1).values[:, -1:]
        tied = logits == least
        room = sampling.top_k - (logits > least).sum(1, keepdim=True)
        stays = (logits > least) | tied & (tied.cumsum(1) <= room)  # of equal ones the lowest ids
        logits = logits.masked_fill(~stays, -torch.inf)
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
    noise = torch.stack(
        [torch.empty_like(logprobs[0]).exponential_(generator=each).log_() for each in noises]
    )
    return (logprobs - noise).argmax(1)
