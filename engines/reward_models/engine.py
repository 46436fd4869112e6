"""The engine of reward models: stored samples in, stored scores out.

It lives on the workers of the pool that cluster.roles.reward_model names, and holds all reward models
of the recipe. What it writes is given to the data engine, which puts the functions' scores together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engines.data.contract import ModelScores
from engines.data.scoring import ERROR, SampleTexts, read_texts
from engines.reward_models.contract import RewardModels, RewardModelSpec
from engines.reward_models.model import RewardModel
from engines.rewards.protocol import Unscored
from engines.rewards.runner import LoggedMetric, RewardCode
from engines.workers.engine import Memory
from storage.batches.columns import EXTRA, SCORE, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresOfModel:
    """What one model makes of N samples."""

    name: str
    scores: Sequence[float | Unscored]
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)  # of the samples
    metrics: Mapping[str, LoggedMetric] = field(default_factory=dict)


class RewardModelEngine(RewardModels):
    """Scores samples by all reward models of a run."""

    def __init__(self, spec: RewardModelSpec) -> None:
        from engines.models.checkpoints import load_tokenizer, prepared

        self._spec = spec
        self._store = spec.open_store()
        cache = Path(spec.model_cache)
        self._tokenizer = load_tokenizer(prepared(spec.model, cache))
        self._models = {
            settings.label: RewardModel(settings, cache) for settings in spec.reward_models
        }
        self._lock = threading.Lock()  # one batch at a time is on the device

    def score(self, prompts: BatchRef, samples: BatchRef, out_key: str) -> ModelScores:
        """Score the completions of a shard, of these prompts."""
        began = time.monotonic()
        texts = read_texts(self._store, prompts, samples, self._spec.data, self._tokenizer)
        columns: dict[str, object] = {}
        metrics: dict[str, LoggedMetric] = {}
        for scores in self.scored(texts, samples):
            columns[f"{SCORE}{scores.name}"] = np.array(
                [np.nan if isinstance(score, Unscored) else score for score in scores.scores],
                dtype=np.float32,
            )
            columns[f"{EXTRA}{scores.name}/{ERROR}"] = [
                score.reason if isinstance(score, Unscored) else None for score in scores.scores
            ]
            for column, values in scores.columns.items():
                columns[f"{EXTRA}{scores.name}/{column}"] = list(values)
            for metric, value in scores.metrics.items():
                metrics[f"{scores.name}/{metric}"] = value
        return ModelScores(
            ref=write_batch(self._store, out_key, columns),
            code=self.code,
            seconds=time.monotonic() - began,
            metrics=metrics,
        )

    def scored(self, texts: SampleTexts, samples: BatchRef) -> Iterator[ScoresOfModel]:
        """What each of the models makes of samples; `texts`: their texts."""
        for reward in self._spec.reward_models:
            with self._lock:
                model = self._models[reward.label]
                if reward.pairwise is None:
                    scores = model.scores(texts.prompts, texts.completions)
                else:
                    scores = compared(self._store, model, texts, samples)
            yield ScoresOfModel(name=reward.label, scores=scores)

    @property
    def code(self) -> tuple[RewardCode, ...]:
        """What each of them is."""
        return tuple(model.code for model in self._models.values())

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


def compared(
    store: Store, model: RewardModel, texts: SampleTexts, samples: BatchRef
) -> list[float | Unscored]:
    """The scores of N samples by a model that compares answers: those of one prompt and player.

    A sample that had failed is no answer, and none is compared with it.
    """
    failed = samples.fetch_numpy(store, "status")[0] == SampleStatus.FAILED
    scores: list[float | Unscored] = [Unscored(reason="the sample had failed")] * len(failed)
    answers: dict[int, dict[int, str]] = {}
    for number, group in enumerate(samples.own_groups(store).tolist()):
        if not failed[number]:
            answers.setdefault(group, {})[number] = texts.completions[number]
    for of_group in answers.values():
        prompt = texts.prompts[min(of_group)]
        for number, score in model.compared(prompt, of_group).items():
            scores[number] = score
    return scores
