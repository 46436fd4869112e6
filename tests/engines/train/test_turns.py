"""Episodes in the update: tokens of others are context and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs.algorithm.algorithm import AlgorithmConfig
from engines.train.fsdp_engine import FSDPEngine
from storage.batches.refs import BatchRef
from tests.engines.train.conftest import Make
from tests.engines.train.naive_training import Sample
from tests.engines.train.train_ranks import stored, update_of

# What looks at other log-probs too, so that those of the environment's tokens could matter.
EVERYTHING = AlgorithmConfig.model_validate(
    {
        "kl": {"coefficient": 0.3},
        "entropy": {"coefficient": 0.01},
        "correction": [{"kind": "truncate"}],
    }
)


def episodes(seed: int, count: int = 4) -> list[Sample]:
    """Two turns of the policy with an answer of the environment between them."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        first, answer, second = random.integers(2, 7, 3)
        length = int(first + answer + second)
        mask = np.ones(length, np.uint8)
        mask[first : first + answer] = 0
        logprobs = {
            name: np.float32(random.normal(-4.5, 0.3, length)) for name in ("old", "ref", "rollout")
        }
        found.append(
            Sample(
                prompt=random.integers(4, 90, 5),
                response=random.integers(4, 90, length),
                mask=mask,
                advantages=np.full(length, random.normal(), np.float32),
                **logprobs,
            )
        )
    return found


def update(engine: FSDPEngine, batch: BatchRef, algorithm: AlgorithmConfig) -> dict[str, float]:
    """The metrics that are no times."""
    found = engine.update(update_of(batch, algorithm, 1))
    timed = ("second", "mfu")
    return {n: value for n, value in found.metrics.items() if not any(t in n for t in timed)}


def test_labels_of_others_tokens_change_nothing(make: Make, tmp_path: Path) -> None:
    rows = episodes(1)

    def other(row: Sample, name: str) -> np.ndarray:
        values = np.array(getattr(row, name))
        return np.where(row.mask, values, values - 7).astype(values.dtype)

    names = ("advantages", "old", "ref", "rollout")
    changed = [replace(row, **{name: other(row, name) for name in names}) for row in rows]
    one, two = make(run="one"), make(run="two")
    seen = update(one, stored(tmp_path, rows, "as-it-is"), EVERYTHING)
    again = update(two, stored(tmp_path, changed, "changed"), EVERYTHING)
    assert one.digest() == two.digest()
    assert seen == again, "no metric counts them either"
    context = [replace(row, response=np.where(row.mask, row.response, 50)) for row in rows]
    three = make(run="three")
    update(three, stored(tmp_path, context, "context"), EVERYTHING)
    assert three.digest() != one.digest(), "the policy's tokens stand after them"


def turns(row: Sample) -> list[Sample]:
    """An episode as a row for each turn: what stands before a turn is its prompt."""
    whole = np.concatenate([row.prompt, row.response])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask, [0]])))
    return [
        Sample(
            prompt=whole[: len(row.prompt) + start],
            response=row.response[start:stop],
            mask=row.mask[start:stop],
            advantages=row.advantages[start:stop],
        )
        for start, stop in edges.reshape(-1, 2)
    ]


def test_a_row_of_merged_turns_trains_like_a_row_for_each_turn(make: Make, tmp_path: Path) -> None:
    """The mean over tokens is over the same tokens; sums of float32 come in another order."""
    rows = [replace(row, old=None, ref=None, rollout=None) for row in episodes(2)]
    apart = [turn for row in rows for turn in turns(row)]
    assert len(apart) == 2 * len(rows)
    algorithm = AlgorithmConfig.model_validate({"aggregation": "token-mean"})
    merged, single = make(run="merged"), make(run="single")
    one = update(merged, stored(tmp_path, rows, "merged"), algorithm)
    two = update(single, stored(tmp_path, apart, "apart"), algorithm)
    assert one["train/grad_norm"] == pytest.approx(two["train/grad_norm"], rel=1e-5)
    assert one["train/loss"] == pytest.approx(two["train/loss"], rel=1e-5)
    ours, theirs = merged._state(), single._state()
    moments = [name for name in ours if name.startswith("exp_avg.")]
    assert moments
    for name in moments:
        gap = (ours[name] - theirs[name]).abs().max()
        assert float(gap) <= 1e-6, name
