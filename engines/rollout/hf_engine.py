"""The rollout engine on transformers: the same promises as vLLM's, for machines without vLLM.

All shards in flight are decoded in one batch, which one of their threads steps for all; a shard's
rows join it between two steps and leave it when they are done. Steps, syncs and scores take turns on
the model. A sync in the middle of a shard keeps the shard's keys and values or has them computed
again, as its mode says.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from engines.models import checkpoints
from engines.models.checkpoints import prepared
from engines.models.grammars import Grammars
from engines.models.routers import chosen_experts
from engines.models.tensor_files import checkpoint_names
from engines.models.vla.openvla import OpenVLA
from engines.rollout.contract import (
    EngineDead,
    RolloutCancelled,
    RolloutRequest,
    RolloutSpec,
    SyncMode,
)
from engines.rollout.engine import RolloutEngine
from engines.rollout.hf_caches import decoding_of
from engines.rollout.hf_decoding import Reader, Row
from engines.rollout.samples import Completion, PromptTokens
from engines.rollout.transferred_weights import take
from engines.rollout.weight_reader import (
    IncomingWeights,
    LoadedWeights,
    LoadReport,
    check_manifest,
)
from engines.start_progress import report
from engines.weight_transfer.offer import TransferOffer
from engines.weight_transfer.receiver import Receiver
from engines.workers.device_memory import Storages, checksum, fill
from engines.workers.engine import Moved
from storage.runs.weights import WeightsRef


class _Shard:
    """A shard in flight."""

    def __init__(self, out_key: str, rows: list[Row]) -> None:
        self.out_key = out_key
        self.rows = rows
        self.ended: Exception | None = None  # why it must end

    def so_far(self) -> list[Completion]:
        """All its completions as they stand."""
        return [row.completion() for row in self.rows]

    @property
    def tokens(self) -> int:
        """Tokens drawn so far."""
        return sum(row.drawn for row in self.rows)


class HFEngine(RolloutEngine):
    """A rollout engine on transformers, in the worker's own process."""

    def __init__(self, spec: RolloutSpec) -> None:
        """Build the model with weights of no meaning; the first `sync` brings version 0."""
        directory = prepared(spec.model, Path(spec.model_cache))
        report("building the model")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = checkpoints.build_untied(directory, spec.rollout.dtype, device)
        shapes = {name: tuple(value.shape) for name, value in self._model.state_dict().items()}
        experts = chosen_experts(self._model) if spec.routed_experts else None
        super().__init__(spec, shapes, checkpoint_names(directory), experts)
        self._reader = Reader(
            tokenizer=checkpoints.load_tokenizer(directory),
            ends=frozenset(checkpoints.end_token_ids(directory)),
            max_model_len=spec.max_model_len,
            device=self._model.device,
        )
        self._decoding = decoding_of(self._model, experts)  # used by whoever has the model
        self._changed = threading.Condition()  # guards what follows
        self._busy = False  # somebody uses the model
        self._sync: SyncMode | None = None  # a sync that waits or runs
        self._over = False  # closed
        self._shards: dict[_Shard, None] = {}  # in flight, in the order in which they came
        self._asking: list[Callable[[], bool]] = []  # who waits for the model, beside shards
        self._base = ""  # digest of the base below the adapter that is held, if one is
        self._storages = Storages()
        self._receiver = Receiver(self._model.device)

    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """Log-probs, at temperature 1 and unfiltered, of each sequence's tokens past its prompt."""
        self._check_awake()
        scores = []
        for tokens, start in zip(token_ids, prompt_lengths, strict=True):
            with self._model_for(lambda: not self._busy):
                scores.append(self._decoding.score(tokens, start))
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
            self._receiver.close()
            self._model.to_empty(device="meta")  # frees the weights

    @property
    def _closed(self) -> bool:
        return self._over

    def _counts(self) -> tuple[int, int, int]:
        with self._changed:
            rows = [row for shard in self._shards for row in shard.rows if not row.ended]
            running = sum(map(self._decoding.holds, rows))
            return running, len(rows) - running, sum(shard.tokens for shard in self._shards)

    def _load(self, weights: WeightsRef, mode: SyncMode, offer: TransferOffer | None) -> LoadReport:
        with self._model_for_sync(mode):
            began = time.monotonic()
            self._let_go()
            base, self._base = self._base, ""
            state = self._model.state_dict()

            def fill_in(transferred: IncomingWeights | None) -> IncomingWeights:
                incoming = transferred or LoadedWeights(
                    self._store, weights, self._node_cache, base
                )
                named_tensors = ((self._names.own(name), tensor) for name, tensor in incoming)
                pairs = ((state[own], tensor) for own, tensor in named_tensors if own is not None)
                fill(self._model.device, pairs, there=transferred is not None)
                return incoming

            try:
                taken = take(self._receiver, offer, fill_in, partial(self._wait_for, weights))
                version = self._hold(weights, taken.loaded.held())
                self._base = taken.loaded.base
            except Exception as error:
                self._end_shards(error)
                raise
            if mode == "recompute":
                self._decoding.forget()
            return LoadReport(
                held=version,
                tensors=taken.loaded.tensors,
                nbytes=taken.loaded.nbytes,
                seconds=time.monotonic() - began,
                waited=taken.waited,
                transferred=taken.transferred,
                missed=taken.missed,
            )

    def _wait_for(self, weights: WeightsRef) -> float:
        """Return once the store has a version that fits; with the seconds."""
        return check_manifest(*(self._store, weights, self._shapes, self._names, self._node_cache))

    def _put_away(self, level: int) -> Moved:
        with self._model_for_sync("idle"):
            if level > 1:
                self._base = ""
            return self._storages.put_away(self._model.state_dict().values(), keep=level == 1)

    def _bring_back(self, level: int) -> Moved:
        with self._model_for_sync("idle"):
            return self._storages.bring_back()

    def _checksum(self) -> str:
        with self._model_for_sync("idle"):
            return checksum(self._model.state_dict())

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(f"{self._label} is closed")

    def _sample(
        self, prompts: PromptTokens, request: RolloutRequest, begun: list[Completion]
    ) -> list[Completion]:
        """All completions of a shard, decoded beside those of the others in flight."""
        rows = []
        frames = self._frames(prompts, request, begun)
        for number, completion in enumerate(begun):
            seed = prompts.seed(request, number, len(completion.tokens))
            frame = frames.get(number)
            own = prompts.sampling(request, number)
            tokens = prompts.tokens_of(number)
            turn = completion.turn_in(prompts.grammar_of(number))
            progress = None if turn is None else self._grammars.begin(turn)
            rows.append(Row(tokens, seed, own, self._reader, completion, frame, progress))
        with self._in_flight(_Shard(request.out_key, rows)) as shard:
            while self._take_turn(shard):
                try:
                    self._step()
                except Exception as error:
                    self._end_shards(error)  # what they have of this step is not known
                    raise
                finally:
                    self._leave_turn()
            with self._model_for(lambda: not self._busy):  # others step the rows of one that is cut
                return shard.so_far()

    @functools.cached_property
    def _grammars(self) -> Grammars:
        words = self._model.get_output_embeddings().weight.shape[0]
        return Grammars(self._reader.tokenizer, sorted(self._reader.ends), words)

    def _frames(
        self, prompts: PromptTokens, request: RolloutRequest, begun: list[Completion]
    ) -> dict[int, torch.Tensor]:
        """What each row that goes on has before it, by its number; nothing where it does not look."""
        going = [number for number, completion in enumerate(begun) if not completion.ended]
        if not isinstance(self._model, OpenVLA) or not going:
            return {}
        source, places = request.begun, going
        if source is None or "frame" not in source.names:
            source, places = request.prompts, [prompts.samples[number][0] for number in going]
        if "frame" not in source.names:
            raise ValueError(
                "The model looks at images, and the prompts have none. Set episodes.sees = frames."
            )
        frames = source.take(places).fetch(self._store, ["frame"])["frame"]
        return dict(zip(going, frames, strict=True))

    def _step(self) -> None:
        """Draw a token for every row in flight, as many as the settings allow; holds the model."""
        with self._changed:
            open_shards = [shard for shard in self._shards if self._goes_on(shard)]
        if self._decoding.apart:
            open_shards = open_shards[:1]
        rows = [row for shard in open_shards for row in shard.rows if not row.ended]
        self._decoding.step(rows[: self._spec.rollout.max_sequences], self._holding().version)

    def _goes_on(self, shard: _Shard) -> bool:
        """Whether there is something left to draw for a shard."""
        if shard.ended is not None or shard.out_key in self._cut:
            return False
        return not all(row.ended for row in shard.rows)

    def _take_turn(self, shard: _Shard) -> bool:
        """Wait to hold the model for a step; false: the shard is done. Raises what ended it."""

        def turn() -> bool:
            free = not self._busy and not self._paused and self._sync in (None, "idle")
            return free and not any(waits() for waits in self._asking)

        with self._changed:
            self._changed.wait_for(lambda: not self._goes_on(shard) or turn())
            if shard.ended is not None:
                raise shard.ended
            goes_on = self._goes_on(shard) and turn()  # looked at once: a cut may come at any time
            self._busy = self._busy or goes_on
            return goes_on

    def _leave_turn(self) -> None:
        """Let go of the model; wakes others where one of them may have waited for this step."""
        with self._changed:
            self._busy = False
            waited = self._asking or self._paused or self._sync is not None
            if waited or not all(self._goes_on(shard) for shard in self._shards):
                self._changed.notify_all()

    @contextmanager
    def _in_flight(self, shard: _Shard) -> Iterator[_Shard]:
        """A new shard; it is let in when no sync waits or runs."""
        with self._changed:
            self._changed.wait_for(lambda: self._sync is None or self._closed)
            self._check_open()
            self._shards[shard] = None
        try:
            yield shard
        finally:
            with self._changed:
                del self._shards[shard]
                self._drawn += shard.tokens
                self._changed.notify_all()

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
    def _model_for(self, turn: Callable[[], bool]) -> Iterator[None]:
        """The model, alone, when `turn` says so; wakes the others afterwards."""
        with self._changed:
            self._asking.append(turn)
            try:
                self._changed.wait_for(turn)
            finally:
                self._asking.remove(turn)
            self._check_open()
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _cut_shards(self) -> None:
        """Wake their threads; rows are looked at before each step."""
        with self._changed:
            self._changed.notify_all()

    def _so_far(self, out_key: str) -> list[Completion] | None:
        with self._model_for(lambda: not self._busy):  # between two tokens
            shards = [shard.so_far() for shard in self._shards if shard.out_key == out_key]
        return shards[0] if shards else None

    def _end_shards(self, error: Exception) -> int:
        with self._changed:
            for shard in self._shards:
                shard.ended = error
            self._changed.notify_all()
            return len(self._shards)
