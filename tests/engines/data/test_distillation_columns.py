"""Advantages of a distillation: the task's, weighed, and the teacher's; in one piece and in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.distillation import DistillAlgorithm
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store
from tests.engines.data.test_advantage_parts import assert_equal, in_one, in_parts, samples

WHITENED: dict[str, Any] = {"advantage": {"kind": "reinforce_plus_plus"}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def taught(store: Store, broken: float | None = None) -> BatchRef:
    """The samples with their teacher's log-probs; `broken`: one of sample 4's, of prompt 10."""
    ref = samples(store, old=True)
    _, offsets = ref.fetch_numpy(store, "response_mask")
    assert offsets is not None
    values = np.random.default_rng(5).uniform(-3, -0.1, int(offsets[-1])).astype(np.float32)
    if broken is not None:
        values[offsets[4]] = broken
    columns: dict[str, object] = {"teacher_logprobs": Jagged(values, offsets)}
    return ref.with_columns(write_batch(store, "run/taught.safetensors", columns))


def algorithm(task_weight: float, kind: str = "reverse_kl", **recipe: Any) -> DistillAlgorithm:
    distillation = {"loss": {"kind": kind}, "coefficient": 0.5, "task_weight": task_weight}
    return DistillAlgorithm.model_validate({**recipe, "distillation": distillation})


def column(store: Store, ref: BatchRef, name: str) -> np.ndarray:
    return ref.fetch_numpy(store, name)[0].astype(np.float64)


@pytest.mark.parametrize("recipe", [{}, WHITENED], ids=["grpo", "whitened"])
def test_the_log_ratio_is_added_to_what_the_task_gives(
    store: Store, recipe: dict[str, Any]
) -> None:
    ref = taught(store)
    task = in_one(store, ref, AlgorithmConfig.model_validate(recipe)).ref
    both = in_one(store, ref, algorithm(2.0, **recipe)).ref
    old, own = (column(store, both, name) for name in ("old_logprobs", "teacher_logprobs"))
    mask = column(store, both, "response_mask")
    wanted = 2 * column(store, task, "advantages") + 0.5 * mask * (own - old)
    np.testing.assert_allclose(column(store, both, "advantages"), wanted, atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_parts_are_the_whole_to_the_bit(store: Store, weight: float) -> None:
    ref, chosen = taught(store), algorithm(weight, **WHITENED)
    whole = in_one(store, ref, chosen)
    for tokens in (400, 150):
        assert_equal(store, in_parts(store, ref, chosen, tokens), whole)


def test_a_loss_over_words_leaves_the_advantages_to_the_task(store: Store) -> None:
    ref = taught(store)
    none = in_one(store, ref, algorithm(0.0, "forward_kl_topk")).ref
    assert not column(store, none, "advantages").any()
    task = in_one(store, ref, AlgorithmConfig()).ref
    same = in_one(store, ref, algorithm(1.0, "forward_kl_topk")).ref
    np.testing.assert_array_equal(
        column(store, same, "advantages"), column(store, task, "advantages")
    )


@pytest.mark.parametrize("broken", [np.nan, -np.inf, -8e37])
def test_what_a_teacher_cannot_score_is_left_out_and_counted(store: Store, broken: float) -> None:
    before = in_one(store, taught(store), algorithm(0.0))
    found = in_one(store, taught(store, broken), algorithm(0.0))
    assert before.dropped == {"reward_failed": 1}
    assert found.dropped == {"teacher_failed": 1, "reward_failed": 1}
    assert found.trained == before.trained - 1
    assert 10 not in column(store, found.ref, "group_id")
    assert np.isfinite(column(store, found.ref, "advantages")).all()
