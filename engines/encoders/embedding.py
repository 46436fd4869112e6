"""The engine of the encoder: stored episodes in, stored embeddings out.

It lives on the workers of the pool that cluster.roles.encoder names, and reads frames by reference.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from configs.encoder import EncoderConfig, FramesSettings, ProjectionEncoder
from engines.encoders.contract import EpisodeEncoder
from engines.encoders.encoder import Encoder, Frames, Projection, looked_at
from engines.episodes.frames import FIRST
from engines.workers.engine import Memory, StoreSpec
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

CHUNK_BYTES = 64 * 2**20  # frames that are read at once
BEFORE = -1  # in the place of a turn, and of a row: the frame before the first turn


class EncoderSpec(StoreSpec):
    """From what the engine is built."""

    encoder: EncoderConfig = Field(description="The encoder.")
    model_cache: str = Field(description="Directory for models.")


class EncoderEngine(EpisodeEncoder):
    """Makes embeddings of episodes."""

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._store = spec.open_store()
        self._encoder = make_encoder(spec.encoder, Path(spec.model_cache))
        self._lock = threading.Lock()  # one episode at a time is on the device

    def embed(self, samples: BatchRef, frames: BatchRef | None, out_key: str) -> BatchRef:
        """Write the embeddings of the episodes of a shard."""
        status = samples.fetch_numpy(self._store, "status")[0]
        embeddings = np.full((len(samples), self._encoder.dim), np.nan, np.float32)
        errors, digest = [""] * len(samples), ""
        every = episodes_seen(self._store, samples, frames, self._spec.encoder)
        for row, views in enumerate(every):
            if status[row] == SampleStatus.FAILED:
                errors[row] = "the episode had failed"
                continue
            with self._lock:
                digest = digest or self._encoder.digest(views[0])
                embedded = self._encoder.embed(views)
            if np.isfinite(embedded).all():
                embeddings[row] = embedded
            else:
                errors[row] = "the encoder gave an embedding that is not finite"
        columns: dict[str, object] = {
            "embedding": embeddings,
            "encoder": [digest] * len(samples),
            "embedding_error": errors,
        }
        return write_batch(self._store, out_key, columns)

    def memory_held(self, memory: Memory) -> Mapping[str, int]:
        """The weights, on a GPU or not."""
        import torch

        from engines.encoders.vision import Vision

        here: Memory = "device" if torch.cuda.is_available() else "host"
        if here != memory or not isinstance(self._encoder, Vision):
            return {}
        return {"encoder": self._encoder.weight_bytes}

    @classmethod
    def memory_setting(
        cls, payload: Any, memory: Memory, held: Mapping[str, int], said: str
    ) -> str:
        """What takes memory beside the weights are frames."""
        return "Set encoder.frames lower, or give cluster.roles.encoder a pool of its own."


def make_encoder(config: EncoderConfig, cache: Path) -> Encoder:
    """The encoder of the settings; `cache`: directory for models."""
    if isinstance(config, ProjectionEncoder):
        return Projection(config)
    from engines.encoders.vision import Vision

    return Vision(config, cache)


def episodes_seen(
    store: Store, samples: BatchRef, frames: BatchRef | None, settings: FramesSettings
) -> Iterator[Frames]:
    """The frames of each of N episodes that are looked at; no others are read."""
    firsts = samples.fetch_numpy(store, FIRST)[0]
    episode_frames = frames_of_episodes(store, samples, frames)
    chosen = [looked_at(settings, places) for places in episode_frames]
    size = max(1, firsts[:1].nbytes)
    waiting: list[Sequence[int]] = []
    for number, places in enumerate(chosen, 1):
        waiting.append(places)
        if number == len(chosen) or size * sum(map(len, waiting)) >= CHUNK_BYTES:
            rows = [row for each in waiting for row in each if row != BEFORE]
            images: NDArray[np.generic] = firsts[:0]
            if rows and frames is not None:
                images = frames[["frame"]].take(rows).fetch_numpy(store, "frame")[0]
            read = iter(images)
            for place, each in enumerate(waiting, number - len(waiting)):
                yield [firsts[place] if row == BEFORE else next(read) for row in each]
            waiting = []


def frames_of_episodes(store: Store, samples: BatchRef, frames: BatchRef | None) -> list[list[int]]:
    """Rows of the frames of each of N episodes in the order of its turns, BEFORE them the first."""
    numbers = samples.fetch_numpy(store, "sample_id")[0].tolist()
    spans: dict[int, list[tuple[int, int]]] = {number: [(BEFORE, BEFORE)] for number in numbers}
    if frames is not None:
        of = frames.fetch_numpy(store, "sample_id")[0].tolist()
        turns = frames.fetch_numpy(store, "turn")[0].tolist()
        for row, (number, turn) in enumerate(zip(of, turns, strict=True)):
            spans[number].append((turn, row))
    return [[row for _, row in sorted(spans[number])] for number in numbers]
