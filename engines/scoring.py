"""The work of a cpu worker: rows to prompts, completions to rewards, rewards to advantages.

Whole batches, no device. The reward functions themselves run in child processes
(engines/rewards.py), so that one that hangs or crashes fails its samples and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from configs.algorithm import AlgorithmConfig
from configs.base import Settings
from configs.data import DataConfig
from configs.model import Model
from configs.rewards import RewardsConfig
from engines.remote import Call, Engine
from storage.batches import write_batch
from storage.columns import Status
from storage.prompts import open_source
from storage.refs import BatchRef
from storage.store import Store

if TYPE_CHECKING:
    from tensordict import TensorDict

PROBE_TOKENS = 48  # of each probe sequence; the first half stands for the prompt


class ScoringSpec(Settings):
    """From what the engine is built."""

    model: Model = Field(description="The model, for its tokenizer.")
    model_cache: str = Field(description="Directory for models that are converted or drawn.")
    data: DataConfig = Field(description="Rows and their template.")
    rewards: RewardsConfig = Field(description="Reward functions.")
    algorithm: AlgorithmConfig = Field(description="Estimator, filters.")
    max_new_tokens: int = Field(description="Longest completion, in tokens.")
    store_uri: str = Field(description="Store of batches.")
    store_options: dict[str, str | int | float | bool] = Field(description="Its arguments.")


@dataclass(frozen=True, kw_only=True, slots=True)
class MadePrompts:
    """Rows that became prompts."""

    ref: BatchRef | None  # prompt_ids, group_id, prompt_row, row; None when all were dropped
    dropped: tuple[tuple[int, str], ...]  # (row number, reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFailure:
    """A sample whose scoring failed."""

    sample_id: int
    function: str
    error: str  # traceback or reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """A scored shard."""

    ref: BatchRef  # reward, score/<function>, status
    failures: tuple[SampleFailure, ...]
    seconds: float  # in the reward functions


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredBatch:
    """The samples of a step that train."""

    ref: BatchRef  # the kept samples with advantages
    trained: int  # groups kept
    filtered: int  # groups left out by the algorithm's filter
    dropped: dict[str, int]  # groups left out for a failure, by reason
    metrics: dict[str, float] = field(default_factory=dict)


class NothingToTrain(RuntimeError):
    """No group of a step is left for the update."""


class ScoringEngine(Engine):
    """Prompts, rewards and advantages; see the module's docstring."""

    REMOTE: ClassVar[Mapping[str, Call]] = {
        "prompts": Call(),
        "probe": Call(),
        "score": Call(),
        "advantages": Call(),
    }

    def __init__(self, spec: ScoringSpec) -> None:
        from engines.models import materialize, tokenizer
        from engines.rewards import RewardRunner

        self._spec = spec
        self._store = Store(spec.store_uri, spec.store_options)
        self._tokenizer = tokenizer(materialize(spec.model, spec.model_cache))
        self._source = open_source(spec.data.source)
        self._rewards = RewardRunner(spec.rewards, spec.data)

    def prompts(self, rows: list[int], first_group: int, out_key: str) -> MadePrompts:
        """Write the prompts of dataset rows; groups are numbered on from `first_group`."""
        from engines.prompting import tokenize

        found = self._source.rows(rows)
        made = tokenize(found, self._spec.data, self._tokenizer)
        kept = [position for position, ids in enumerate(made.prompt_ids) if ids is not None]
        dropped = tuple((rows[position], reason) for position, reason in made.dropped)
        if not kept:
            return MadePrompts(ref=None, dropped=dropped)
        ref = write_batch(
            self._store,
            out_key,
            {
                "prompt_ids": [np.asarray(made.prompt_ids[p], dtype=np.int64) for p in kept],
                "group_id": np.arange(first_group, first_group + len(kept), dtype=np.int64),
                "prompt_row": np.asarray([rows[p] for p in kept], dtype=np.int64),
                "row": [found[p] for p in kept],
            },
        )
        return MadePrompts(ref=ref, dropped=dropped)

    def probe(self) -> tuple[list[list[int]], list[int]]:
        """Two short sequences of the dataset, and how many tokens of each stand for the prompt."""
        from engines.prompting import tokenize

        made = tokenize(self._source.rows([0, 1][: len(self._source)]), self._spec.data, self._tokenizer)
        tokens = [ids[:PROBE_TOKENS] for ids in made.prompt_ids if ids is not None]
        return tokens, [len(ids) // 2 for ids in tokens]

    def score(self, prompts: BatchRef, samples: BatchRef, out_key: str) -> Scores:
        """Score the completions of a shard; row i of samples belongs to row i // n of prompts."""
        rows = prompts.fetch(self._store, ["prompt_ids", "row"])
        data = samples.fetch(self._store, ["response_ids", "status", "sample_id"])
        repeat = len(samples) // len(prompts)
        prompt_texts = self._texts(rows["prompt_ids"])
        completion_ids = [ids.tolist() for ids in data["response_ids"].unbind()]
        began = time.monotonic()
        scores = self._rewards.score(
            [text for text in prompt_texts for _ in range(repeat)],
            self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True),
            [row for row in rows["row"] for _ in range(repeat)],
            completion_ids,
        )
        seconds = time.monotonic() - began
        failed = np.asarray(scores.failed)
        status = np.where(failed, int(Status.FAILED), data["status"].numpy())
        columns: dict[str, Any] = {
            # A failed sample's reward is not a number, so that no mistake can make it count as 0.
            "reward": np.where(failed, np.nan, scores.rewards).astype(np.float32),
            "status": status.astype(np.int64),
        }
        for name, component in scores.components.items():
            columns[f"score/{name}"] = np.asarray(component, dtype=np.float32)
        sample_ids = data["sample_id"].tolist()
        return Scores(
            ref=write_batch(self._store, out_key, columns),
            failures=tuple(
                SampleFailure(sample_id=sample_ids[f.index], function=f.function, error=f.error)
                for f in scores.failures
            ),
            seconds=seconds,
        )

    def _texts(self, ids: Any) -> list[str]:
        return self._tokenizer.batch_decode(
            [row.tolist() for row in ids.unbind()], skip_special_tokens=False
        )
