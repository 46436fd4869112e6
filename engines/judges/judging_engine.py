"""The engine of a run's reward models and judges, where it has judges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engines.data.reward_model_engine import RewardModelEngine, RewardModelSpec, Scored
from engines.data.sample_texts import SampleTexts
from engines.judges.local_judge import LocalJudge
from engines.rewards.runner import RewardCode
from engines.workers.engine import Memory
from storage.batches.refs import BatchRef


class JudgingEngine(RewardModelEngine):
    """Scores samples by all reward models and judges of a run."""

    def __init__(self, spec: RewardModelSpec) -> None:
        super().__init__(spec)
        self._judges = [LocalJudge(one, spec) for one in spec.judges]

    def scored(self, texts: SampleTexts, samples: BatchRef) -> Iterator[Scored]:
        """What each of the models and judges makes of samples."""
        yield from super().scored(texts, samples)
        for judge in self._judges:
            yield judge.scored(texts)

    @property
    def code(self) -> tuple[RewardCode, ...]:
        """What each of them is."""
        return (*super().code, *(judge.code for judge in self._judges))

    def memory_held(self, memory: Memory) -> Mapping[str, int]:
        """What each model and each judge's engine holds."""
        found = dict(super().memory_held(memory))
        for judge in self._judges:
            for what, size in judge.memory_held(memory).items():
                found[f"{judge.code.name}'s {what}"] = size
        return found

    def close(self) -> None:
        """End the judges' engines."""
        for judge in self._judges:
            judge.close()
