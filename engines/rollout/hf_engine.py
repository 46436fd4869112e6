"""The rollout engine on transformers: the same contract as vLLM's, for machines without vLLM.

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
from engines.failures import WeightMismatch
from engines.rollout.contract import (
    REMOTE,
    EngineDead,
    EngineState,
    NoWeights,
    RolloutCancelled,
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    RolloutStatus,
    SyncMode,
    SyncReport,
    sample_seed,
)
from engines.rollout.hf_decoding import Decoding
from engines.rollout.samples import Completion, PromptTokens, read_prompts, write_samples
from engines.rollout.weight_reader import Held, LoadedWeights, check_manifest
from engines.workers.engine import Engine
from storage.objects.store import Store
from storage.runs.weights import WeightsRef


class _Shard:
    """A shard in flight."""

    def __init__(self) -> None:
        self.decoding: Decoding | None = None
        self.ended: Exception | None = None  # why it must end


class HFEngine(Engine):
    """A rollout engine (see engines.rollout.contract.RolloutEngine) on transformers."""

    REMOTE = REMOTE

    def __init__(self, spec: RolloutSpec) -> None:
        """Build the model with weights of no meaning; the first `sync` brings version 0."""
        self._spec = spec
        self._store = Store(spec.store_uri, spec.store_options)
        directory = models.materialize(spec.model, Path(spec.model_cache))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = models.build_untied(directory, spec.rollout.dtype, device)
        self._tokenizer = models.load_tokenizer(directory)
        self._ends = models.end_token_ids(directory)
        self._held: Held | None = None
        self._digests: dict[int, str] = {}
        self._state = threading.Condition()  # guards what follows
        self._busy = False  # somebody uses the model
        self._sync: SyncMode | None = None  # a sync that waits or runs
        self._paused = False
        self._closed = False
        self._shards: set[_Shard] = set()
        self._drawn = 0  # tokens of shards that are done

    def generate(self, request: RolloutRequest) -> RolloutResult:
        """Sample a shard, write it, return its ref."""
        started = time.monotonic()
        prompts = read_prompts(self._store, request.prompts, self._spec.max_model_len)
        with self._in_flight() as shard:
            completions = self._sample(shard, prompts, request)
        return write_samples(
            self._store,
            request,
            prompts,
            completions,
            engine=self._spec.name,
            digests=self._digests,
            started=started,
        )

    def sync(self, weights: WeightsRef, mode: SyncMode = "idle") -> SyncReport:
        """Load a policy version from the store."""
        started = time.monotonic()
        state = self._model.state_dict()
        check_manifest(self._store, weights, {k: tuple(v.shape) for k, v in state.items()})
        with self._model_for_sync(mode):
            loading = time.monotonic()
            self._hold(None)
            loaded = LoadedWeights(self._store, weights)
            try:
                for name, tensor in loaded:
                    state[name].copy_(tensor)
            except Exception as error:
                self._end_shards(error)
                raise
            held = loaded.held()
            if held.digest != weights.digest:
                raise WeightMismatch(
                    f"Loaded digest {held.digest} of policy version {held.version}, "
                    f"not {weights.digest}."
                )
            self._digests[held.version] = held.digest
            self._hold(held)
            if mode == "recompute":
                for shard in self._shards:
                    if shard.decoding is not None:
                        shard.decoding.forget_cache()
        return SyncReport(
            version=held.version,
            digest=held.digest,
            tensors=loaded.tensors,
            nbytes=loaded.nbytes,
            seconds=time.monotonic() - started,
            load_seconds=time.monotonic() - loading,
        )

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
        with self._state:
            self._state.wait_for(lambda: self._sync is None)
            self._check_open()
            self._paused = True
            self._state.wait_for(lambda: not self._busy)

    def resume(self) -> None:
        """Go on decoding."""
        with self._state:
            self._check_open()
            self._paused = False
            self._state.notify_all()

    def cancel(self) -> int:
        """End the shards in flight with RolloutCancelled; returns how many."""
        self._check_open()
        return self._end_shards(RolloutCancelled(f"rollout engine {self._spec.name}: cancelled"))

    def status(self) -> RolloutStatus:
        """What the engine is doing."""
        with self._state:
            held = self._held
            decodings = [s.decoding for s in self._shards if s.decoding is not None]
            return RolloutStatus(
                name=self._spec.name,
                state=self._state_name(),
                cause="",
                version=held.version if held else None,
                digest=held.digest if held else "",
                running=sum(decoding.running for decoding in decodings),
                waiting=sum(shard.decoding is None for shard in self._shards),
                tokens=self._drawn + sum(decoding.tokens for decoding in decodings),
                pids=(),
            )

    def close(self) -> None:
        """End the shards in flight and let go of the model."""
        with self._state:
            if self._closed:
                return
            self._closed = True
        self._end_shards(RolloutCancelled(f"rollout engine {self._spec.name}: closed"))
        with self._state:
            self._state.wait_for(lambda: not self._busy and not self._shards)
            self._model.to_empty(device="meta")  # frees the weights

    def _hold(self, held: Held | None) -> None:
        self._held = held
        self.version = held.version if held else None

    def _state_name(self) -> EngineState:
        if self._closed:
            return "closed"
        if self._paused:
            return "paused"
        return "ready" if self._held else "no weights"

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"rollout engine {self._spec.name} is closed")

    def _sample(
        self, shard: _Shard, prompts: PromptTokens, request: RolloutRequest
    ) -> list[Completion]:
        """All completions of a shard, as many sequences at once as the settings allow."""
        sampling = request.sampling
        at_once = max(1, self._spec.rollout.max_sequences // sampling.n)
        completions: list[Completion] = []
        for first in range(0, len(prompts.tokens), at_once):
            some = prompts.tokens[first : first + at_once]
            seeds = [
                None
                if sampling.seed is None
                else sample_seed(
                    sampling.seed, request.step, prompts.sample_id(first + row, k, sampling.n)
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
            )
            shard.decoding = decoding
            while decoding.running:
                with self._model_for_step(shard):
                    if self._held is None:
                        raise NoWeights(
                            f"rollout engine {self._spec.name} holds no policy version: sync first"
                        )
                    decoding.step(self._held.version)
            with self._state:
                self._drawn += decoding.tokens
                shard.decoding = None
            completions.extend(row.completion() for row in decoding.rows)
        return completions

    @contextmanager
    def _in_flight(self) -> Iterator[_Shard]:
        """A new shard; it is let in when no sync waits or runs."""
        shard = _Shard()
        with self._state:
            self._state.wait_for(lambda: self._sync is None or self._closed)
            self._check_open()
            self._shards.add(shard)
        try:
            yield shard
        finally:
            with self._state:
                self._shards.discard(shard)
                self._state.notify_all()

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
        with self._state:
            self._state.wait_for(lambda: self._sync is None)
            if mode == "idle" and self._paused and self._shards:
                raise RuntimeError(
                    f"rollout engine {self._spec.name} is paused with shards in flight, which an "
                    "idle sync would wait for. Resume it, or sync with mode = keep."
                )
            self._sync = mode
        try:
            with self._model_for(lambda: not self._busy and (mode != "idle" or not self._shards)):
                yield
        finally:
            with self._state:
                self._sync = None
                self._state.notify_all()

    @contextmanager
    def _model_for(self, turn: Callable[[], bool], shard: _Shard | None = None) -> Iterator[None]:
        """The model, alone, when `turn` says so; wakes the others afterwards."""
        with self._state:
            self._state.wait_for(turn)
            if shard is not None and shard.ended is not None:
                raise shard.ended
            if shard is None:
                self._check_open()
            self._busy = True
        try:
            yield
        finally:
            with self._state:
                self._busy = False
                self._state.notify_all()

    def _end_shards(self, error: Exception) -> int:
        with self._state:
            for shard in self._shards:
                shard.ended = error
            self._state.notify_all()
            return len(self._shards)
