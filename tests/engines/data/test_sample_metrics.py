"""Metrics of a step's samples: by task, repetition, staleness, episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.data.advantages import token_staleness
from engines.data.column_reading import drawn_tokens
from engines.data.sample_metrics import (
    SampleValues,
    episode_metrics,
    repeated_ngrams,
    sample_metrics,
    staleness_metrics,
    task_metrics,
)
from storage.batches.writing import write_batch
from storage.objects.store import Store


def test_each_task_has_the_metrics_of_its_samples() -> None:
    nan = float("nan")
    measured = SampleValues(
        rewards=np.array([1, 0, 0.5, nan, nan], np.float32),
        components={"right": np.array([1, 0, nan, nan, nan], np.float32)},
        failed=np.array([False, False, False, True, True]),
        truncated=np.array([False, True, False, False, False]),
        lengths=np.array([2, 4, 6, 8, 10]),
        groups=np.array([0, 0, 1, 1, 2]),
    )
    tasks = np.array(["a", "a", "b", "b", "c"])
    found = task_metrics(measured, tasks, right_from=0.5)
    assert (found["task/a/prompts"], found["task/a/right"]) == (1, 0.5)
    assert (found["task/b/prompts"], found["task/b/right"]) == (1, 1.0)
    assert found["task/a/reward/right"] == 0.5 and "task/b/reward/right" not in found
    assert found["task/a/response/truncated_fraction"] == 0.5
    assert found["task/b/reward/mean"] == 0.5, "a failed sample counts nowhere"
    assert found["task/c/samples/failed"] == 1 and "task/c/right" not in found
    own = sample_metrics(measured.at(tasks == "b"))
    assert all(found[f"task/b/{name}"] == value for name, value in own.items())


STORE = Store("memory://repetition")


def test_repeated_ngrams_are_a_share_of_all() -> None:
    ids = [
        np.array(row, np.int32) for row in ([1] * 7, [1, 2, 3, 4, 5], [1, 2, 3, 4, 1, 2, 3, 4], [9])
    ]
    ref = write_batch(STORE, "ngrams.safetensors", {"response_ids": ids})
    assert repeated_ngrams(STORE, ref).tolist() == [np.float32(0.75), 0.0, np.float32(0.2), 0.0]
    said = {"author": [np.ones(len(one), np.uint8) for one in ids]}
    said["response_mask"] = [np.array([1, 1, 1, 1, 0, 0, 0]), *(np.ones(len(x)) for x in ids[1:])]
    said["response_mask"] = [one.astype(np.uint8) for one in said["response_mask"]]
    own = ref.with_columns(write_batch(STORE, "authors.safetensors", said))
    assert repeated_ngrams(STORE, own).tolist()[0] == 0.0, "only what the policy wrote counts"


def test_the_metrics_of_guards_leave_failed_samples_out() -> None:
    found = sample_metrics(
        SampleValues(
            rewards=np.array([1, 0, np.nan, 1], np.float32),
            components={},
            failed=np.array([False, False, True, False]),
            truncated=np.zeros(4, bool),
            lengths=np.ones(4, np.int64),
            groups=np.zeros(4, np.int64),
            repeated=np.array([0.5, 0.25, 1.0, 0.0], np.float32),
        )
    )
    assert (found["samples/failed_fraction"], found["response/repeated_ngrams"]) == (0.25, 0.25)


def test_drawn_tokens_are_those_of_the_spans(tmp_path: Path) -> None:
    """Two turns under two versions with an answer between them, none at all, and one turn."""
    spans = [[0, 0, 2, 1, 4, 5], [], [3, 0, 1]]
    masks = [[1, 1, 0, 0, 1], [], [1, 0]]
    store = Store(str(tmp_path / "store"))
    columns = {
        "weight_spans": [np.array(one, np.int64) for one in spans],
        "response_mask": [np.array(one, np.uint8) for one in masks],
    }
    made = write_batch(store, "run/drawn.safetensors", columns)
    assert drawn_tokens(store, made).tolist() == [True, True, False, False, True, True, False]
    assert drawn_tokens(store, made.take(np.array([2, 1]))).tolist() == [True, False]


def drift(drawn: list[int], mask: list[int]) -> float:
    def tokens(values: list[int]) -> NDArray[np.bool_]:
        return np.array(values, np.bool_)

    found = episode_metrics(
        turns=np.array([2]),
        tokens=np.array([len(mask)]),
        seconds=np.zeros(1),
        ended=["done"],
        drawn=tokens(drawn),
        mask=tokens(mask),
    )
    return found["episode/drift"]


@pytest.mark.parametrize(
    ("drawn", "mask", "share"),
    [
        ([1, 1, 0, 1], [1, 1, 0, 1], 0.0),
        ([1, 1, 0, 0], [1, 0, 0, 1], 2 / 3),  # one that was drawn is gone, one was not drawn
        ([0, 0], [0, 0], 0.0),
        ([], [], 0.0),
    ],
)
def test_drift_is_the_share_that_is_not_both(
    drawn: list[int], mask: list[int], share: float
) -> None:
    assert drift(drawn, mask) == pytest.approx(share)


def test_staleness_goes_by_the_oldest_token(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    spans = [[3, 0, 4], [5, 0, 2, 6, 2, 9], [], [4, 0, 1, 6, 1, 2]]
    made = write_batch(
        store, "run/spans.safetensors", {"weight_spans": [np.array(one, np.int64) for one in spans]}
    )
    assert staleness_metrics(store, made, 6) == {"staleness/mean": 2.0, "staleness/max": 3.0}
    assert staleness_metrics(store, made.take(np.array([2])), 6) == {}


def test_each_token_has_the_staleness_of_its_version() -> None:
    """An answer under one version, one that three versions wrote with a tool between, none, one."""
    spans = [[3, 0, 2], [4, 0, 1, 5, 1, 2, 6, 4, 5], [], [6, 0, 1]]
    found = token_staleness(
        np.concatenate([np.array(one, np.int64) for one in spans]),
        np.cumsum([0, *map(len, spans)]),
        np.array([0, 2, 7, 7, 8]),
        6,
    )
    assert found.dtype == np.int32
    assert found.tolist() == [3, 3, 2, 1, 0, 0, 0, 0]


def test_no_tokens_at_all() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert token_staleness(nothing, np.array([0, 0]), np.array([0, 0]), 6).tolist() == []
