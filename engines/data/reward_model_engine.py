"""The engine of reward models: stored samples in, stored scores out.

It lives on the workers of the pool that cluster.roles.reward_model names, and holds all reward models
of the recipe. What it writes is given to the data engine, which puts the functions' scores together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from configs.reward_model import RewardModelReward
from engines.data.data_engine import ERROR
from engines.data.results import ModelScores, RowsSpec
from engines.data.sample_texts import read_texts
from engines.rewards.protocol import Unscored
from engines.rewards.reward_model import RewardModel
from engines.workers.engine import Engine, Memory
from storage.batches.columns import EXTRA, SCORE
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store


class RewardModelSpec(RowsSpec):
    """From what the engine is built; the model is the policy's, for its tokenizer."""

    reward_models: tuple[RewardModelReward, ...] = Field(description="The reward models.")


class RewardModelEngine(Engine):
    """Scores samples by all reward models of a run."""

    REMOTE: ClassVar[tuple[str, ...]] = ("score",)

    def __init__(self, spec: RewardModelSpec) -> None:
        from engines.models import load_tokenizer, prepared

        self._spec = spec
        self._store = Store(spec.store_uri, spec.store_options, cache_bytes=spec.cache_bytes)
        cache = Path(spec.model_cache)
        self._tokenizer = load_tokenizer(prepared(spec.model, cache))
        self._models = {one.label: RewardModel(one, cache) for one in spec.reward_models}
        self._lock = threading.Lock()  # one batch at a time is on the device

    def score(self, prompts: BatchRef, samples: BatchRef, out_key: str) -> ModelScores:
        """Score the completions of a shard; row i of samples belongs to row i // n of prompts.

        Writes score/<function>, NaN where there is none, and extra/<function>/error, which says why.
        """
        began = time.monotonic()
        texts = read_texts(self._store, prompts, samples, self._spec.data, self._tokenizer)
        columns: dict[str, object] = {}
        for name, model in self._models.items():
            with self._lock:
                scores = model.scores(texts.prompts, texts.completions)
            columns[f"{SCORE}{name}"] = np.array(
                [np.nan if isinstance(one, Unscored) else one for one in scores], dtype=np.float32
            )
            columns[f"{EXTRA}{name}/{ERROR}"] = [
                one.reason if isinstance(one, Unscored) else None for one in scores
            ]
        return ModelScores(
            ref=write_batch(self._store, out_key, columns),
            code=tuple(model.code for model in self._models.values()),
            seconds=time.monotonic() - began,
        )

    def memory_held(self, memory: Memory) -> Mapping[str, int]:
        """The weights, on a GPU or not."""
        import torch

        here: Memory = "device" if torch.cuda.is_available() else "host"
        return (
            {"reward models": sum(m.held for m in self._models.values())} if here == memory else {}
        )

    @classmethod
    def memory_setting(
        cls, payload: Any, memory: Memory, held: Mapping[str, int], said: str
    ) -> str:
        """What takes memory beside the weights is a batch."""
        return (
            "Set batch_tokens of the reward model (rewards.functions[]) lower, or give "
            "cluster.roles.reward_model a pool of its own."
        )
