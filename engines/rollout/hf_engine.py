"""The rollout engine on transformers: the same promises as vLLM's, for machines without vLLM.

Decoding steps of all shards, syncs and scores take turns on one model. A sync in the middle of a
shard keeps the shard's keys and values or has them computed again, as its mode says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engines import models
from engines.rollout.contract import (
    EngineDead,
    RolloutCancelled,
    RolloutRequest,
    RolloutSpec,
    SyncMode,
)
from engines.rollout.engine import RolloutEngine
from engines.rollout.hf_decoding import Decoding
from engines.rollout.samples import Completion, PromptTokens, sample_seed
from engines.rollout.weight_reader import LoadedWeights, LoadReport
from storage.runs.weights import WeightsRef


class _Shard:
    """A shard in flight."""

    def __init__(self, out_key: str, begun: list[Completion]) -> None:
        self.out_key = out_key
        self.completions = begun  # of all its rows; those being decoded are in `decoding`
        self.first = 0  # row of the first one that is being decoded
        self.decoding: Decoding | None = None
        self.ended: Exception | None = None  # why it must end

    def so_far(self) -> list[Completion]:
        """All its completions as they stand."""
        rows = [] if self.decoding is None else [row.completion() for row in self.decoding.rows]
        return [
            *self.completions[: self.first],
            *rows,
            *self.completions[self.first + len(rows) :],
        ]


class HFEngine(RolloutEngine):
    """A rollout engine on transformers, in the worker's own process."""

    def __init__(self, spec: RolloutSpec) -> None:
        """Build the model with weights of no meaning; the first `sync` brings version 0."""
        directory = models.materialize(spec.model, Path(spec.model_cache))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = models.build_untied(directory, spec.rollout.dtype, device)
        shapes = {name: tuple(value.shape) for name, value in self._model.state_dict().items()}
        super().__init__(spec, shapes)
        self._tokenizer = models.load_tokenizer(directory)
        self._ends = models.end_token_ids(directory)
        self._changed = threading.Condition()  # guards what follows
        self._busy = False  # somebody uses the model
        self._sync: SyncMode | None = None  # a sync that waits or runs
        self._over = False  # closed
        self._shards: set[_Shard] = set()
        self._base = ""  # digest of the base below the adapter that is held, if one is

    @torch.inference_mode()
    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """Log-probs, at temperature 1 and unfiltered, of each sequence's tokens past its prompt."""
        scores = []
        for tokens, start in zip(token_ids, prompt_lengths, strict=True):
            ids = torch.tensor([tokens], device=self._model.device)
            with self._model_for(lambda: not self._busy):
                logits = self._model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
            logprobs = logits.float().log_softmax(1)
            scores.append(logprobs.gather(1, ids[0, start:, None])[:, 0].tolist())
        return scores

    def pause(self) -> None:
        """Stop decoding; shards in flight keep their place. Waits for a running sync."""
        with self._changed:
            self._changed.wait_for(lambda: self._sync is None)
            self._check_open()
            self._paused = True
            self._changed.wait_for(lambda: not self._busy)

    def resume(self) -> None:
        """Go on decoding."""
        with self._changed:
            self._check_open()
            self._paused = False
            self._changed.notify_all()

    def cancel(self) -> int:
        """End the shards in flight with RolloutCancelled; returns how many."""
        self._check_open()
        return super().cancel()

    def close(self) -> None:
        """End the shards in flight and let go of the model."""
        with self._changed:
            if self._over:
                return
            self._over = True
        self._end_shards(RolloutCancelled(f"{self._label}: closed"))
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and not self._shards)
            self._model.to_empty(device="meta")  # frees the weights

    @property
    def _closed(self) -> bool:
        return self._over

    def _counts(self) -> tuple[int, int, int]:
        with self._changed:
            decodings = [s.decoding for s in self._shards if s.decoding is not None]
            waiting = sum(shard.decoding is None for shard in self._shards)
            running = sum(decoding.running for decoding in decodings)
            return running, waiting, sum(decoding.tokens for decoding in decodings)

    def _load(self, weights: WeightsRef, mode: SyncMode) -> LoadReport:
        with self._model_for_sync(mode):
            began = time.monotonic()
            self._let_go()
            loaded = LoadedWeights(self._store, weights, self._node_cache, self._base)
            self._base = ""
            state = self._model.state_dict()
            try:
                for name, tensor in loaded:
                    state[name].copy_(tensor)
                held = self._hold(weights, loaded.held())
                self._base = loaded.base
            except Exception as error:
                self._end_shards(error)
                raise
            if mode == "recompute":
                for shard in self._shards:
                    if shard.decoding is not None:
                        shard.decoding.forget_cache()
            return LoadReport(
                held=held,
                tensors=loaded.tensors,
                nbytes=loaded.nbytes,
                seconds=time.monotonic() - began,
            )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"{self._label} is closed")

    def _sample(
        self, prompts: PromptTokens, request: RolloutRequest, begun: list[Completion]
    ) -> list[Completion]:
        """All completions of a shard, as many sequences at once as the settings allow."""
        with self._in_flight(_Shard(request.out_key, begun)) as shard:
            self._sample_in_turns(shard, prompts, request)
            return shard.completions

    def _sample_in_turns(
        self, shard: _Shard, prompts: PromptTokens, request: RolloutRequest
    ) -> None:
        sampling = request.sampling
        at_once = max(1, self._spec.rollout.max_sequences // sampling.n)
        for first in range(0, len(prompts.tokens), at_once):
            if shard.out_key in self._cut:
                return
            some = prompts.tokens[first : first + at_once]
            begun = shard.completions[first * sampling.n :][: len(some) * sampling.n]
            seeds = [
                sample_seed(
                    sampling.seed,
                    request.step,
                    prompts.sample_id(first + row, k, sampling.n),
                    len(begun[row * sampling.n + k].tokens),
                )
                for row in range(len(some))
                for k in range(sampling.n)
            ]
            decoding = Decoding(
                self._model,
                self._tokenizer,
                some,
                seeds,
                sampling,
                self._ends,
                self._spec.max_model_len,
                begun,
            )
            shard.first, shard.decoding = first * sampling.n, decoding
            while decoding.running and shard.out_key not in self._cut:
                with self._model_for_step(shard):
                    decoding.step(self._holding().version)
            with self._changed:
                self._drawn += decoding.tokens
                shard.completions = shard.so_far()
                shard.decoding = None

    @contextmanager
    def _in_flight(self, shard: _Shard) -> Iterator[_Shard]:
        """A new shard; it is let in when no sync waits or runs."""
        with self._changed:
            self._changed.wait_for(lambda: self._sync is None or self._closed)
            self._check_open()
            self._shards.add(shard)
        try:
            yield shard
        finally:
            with self._changed:
                self._shards.discard(shard)
                self._changed.notify_all()

    @contextmanager
    def _model_for_step(self, shard: _Shard) -> Iterator[None]:
        """The model, for one decoding step; raises what the shard was ended with."""

        def turn() -> bool:
            free = not self._busy and not self._paused and self._sync in (None, "idle")
            return free or shard.ended is not None

        with self._model_for(turn, shard):
            yield

    @contextmanager
    def _model_for_sync(self, mode: SyncMode) -> Iterator[None]:
        """The model, for a sync; with mode idle when the shards in flight are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._sync is None)
            self._refuse_endless_wait(mode, bool(self._shards))
            self._sync = mode
        try:
            with self._model_for(lambda: not self._busy and (mode != "idle" or not self._shards)):
                yield
        finally:
            with self._changed:
                self._sync = None
                self._changed.notify_all()

    @contextmanager
    def _model_for(self, turn: Callable[[], bool], shard: _Shard | None = None) -> Iterator[None]:
        """The model, alone, when `turn` says so; wakes the others afterwards."""
        with self._changed:
            self._changed.wait_for(turn)
            if shard is not None and shard.ended is not None:
                raise shard.ended
            if shard is None:
                self._check_open()
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _cut_shards(self) -> None:
        """Nothing to do: each shard looks before its next token."""

    def _so_far(self, out_key: str) -> list[Completion] | None:
        with self._model_for(lambda: not self._busy):  # between two tokens
            found = [shard.so_far() for shard in self._shards if shard.out_key == out_key]
        return found[0] if found else None

    def _end_shards(self, error: Exception) -> int:
        with self._changed:
            for shard in self._shards:
                shard.ended = error
            self._changed.notify_all()
            return len(self._shards)
