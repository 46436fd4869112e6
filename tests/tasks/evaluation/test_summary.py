"""From scored samples to metrics: a failed sample is in no mean, prompts are the unit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from configs.data import FileSource
from configs.evaluation import SuiteConfig
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tasks.evaluation.summary import counts_of, metrics_of, paired, scores_of, sentence

NAN = math.nan


def suite(**settings: object) -> SuiteConfig:
    return SuiteConfig(source=FileSource(path="x.jsonl"), **settings)  # type: ignore[arg-type]


def samples(store: Store, rewards: list[float], rows: list[int], key: str = "s") -> BatchRef:
    failed = np.isnan(rewards)
    columns: dict[str, object] = {
        "reward": np.array(rewards, np.float32),
        "status": np.where(failed, SampleStatus.FAILED, SampleStatus.OK).astype(np.int64),
        "prompt_row": np.array(rows, np.int64),
        "group_id": np.array(rows, np.int64) + 7,
        "response_ids": [[1] * (n + 1) for n in range(len(rewards))],
    }
    return write_batch(store, f"{key}.safetensors", columns)


@pytest.fixture
def store(tmp_path: object) -> Store:
    return Store(f"file://{tmp_path}")


def test_metrics_are_means_over_prompts_of_their_scored_samples(store: Store) -> None:
    ref = samples(store, [1, 0, 1, 1, NAN, 0, 0, 0, 0], [3, 3, 3, 4, 4, 4, 5, 5, 5])
    settings = suite(samples=3, greedy=False, pass_at=(1, 2, 3))
    metrics, intervals = metrics_of(scores_of(store, ref, 1.0), settings)
    assert metrics["reward"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert metrics["mean@3"] == metrics["reward"] == pytest.approx(metrics["pass@1"])
    # C(1,2)/C(3,2) = 0 missed by the first, C(1,2)/C(2,2) = 0 by the second, 1 by the third
    assert metrics["pass@2"] == pytest.approx(2 / 3)
    assert metrics["pass@3"] == pytest.approx(1 / 2), (
        "the prompt with two scored samples is left out"
    )
    assert intervals["reward"].kind == "bootstrap"
    assert counts_of(store, ref) == {"samples": 9.0, "failed": 1.0, "truncated": 0.0, "tokens": 5.0}


def test_a_failed_sample_is_never_a_0(store: Store) -> None:
    whole = metrics_of(scores_of(store, samples(store, [1, 1], [0, 1]), 1.0), suite())[0]
    failed = metrics_of(scores_of(store, samples(store, [1, NAN], [0, 1], "f"), 1.0), suite())[0]
    assert whole["reward"] == failed["reward"] == 1.0
    none = metrics_of(scores_of(store, samples(store, [NAN, NAN], [0, 1], "n"), 1.0), suite())
    assert none == ({}, {})
    assert "none of 2 samples" in sentence(
        "x", 3, counts_of(store, samples(store, [NAN] * 2, [0, 1], "m"))
    )


def test_right_and_wrong_of_one_sample_have_wilsons_interval(store: Store) -> None:
    rewards = [1.0] + [0.0] * 28
    scores = scores_of(store, samples(store, rewards, list(range(29))), 1.0)
    metrics, intervals = metrics_of(scores, suite())
    assert intervals["reward"].kind == "wilson"
    # Newcombe (1998), table I: 1 of 29
    assert (metrics["reward_low"], metrics["reward_high"]) == pytest.approx(
        (0.0061, 0.1718), abs=5e-5
    )


def test_what_counts_as_right_is_a_setting(store: Store) -> None:
    ref = samples(store, [0.4, 0.6, 0.9, 0.1], [0, 0, 1, 1])
    settings = suite(samples=2, greedy=False, right_from=0.5)
    metrics, _ = metrics_of(scores_of(store, ref, settings.right_from), settings)
    assert metrics["mean@2"] == 0.5
    assert metrics["reward"] == pytest.approx(0.5)


def test_pairs_are_made_by_the_row_and_of_prompts_that_both_have(store: Store) -> None:
    first = scores_of(store, samples(store, [1, 0, NAN, 1], [0, 1, 2, 3]), 1.0)
    second = scores_of(store, samples(store, [0, 1, 1], [3, 2, 0], "second"), 1.0)
    ours, theirs = paired(first, second)
    assert json.dumps([ours.tolist(), theirs.tolist()]) == "[[1.0, 1.0], [1.0, 0.0]]"
