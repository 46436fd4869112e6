"""Reward functions of several tasks: each sees the samples of its own, and scores no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from configs.data import DataConfig
from configs.rewards import RewardsConfig
from engines.rewards.runner import Column, RewardRunner

CODE = '''
def strict(completions, answer, log_extra, **columns):
    """Fails where it is given a row of another task."""
    assert set(columns["task"]) == {"sums"}, columns["task"]
    log_extra("right", answer)
    return [float(text == right) for text, right in zip(completions, answer)]

def brevity(completions, **columns):
    return [1 / len(text) for text in completions]
'''


def test_a_function_scores_its_tasks_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    rows = {"kind": "file", "path": str(tmp_path / "rows.jsonl")}
    (tmp_path / "rows.jsonl").write_text('{"question": "1"}\n')
    tasks = {
        "sums": {"source": rows, "rewards": ["strict", "model"]},
        "words": {"source": rows, "rewards": ["brevity"]},
        "both": {"source": rows},
    }
    data = DataConfig.model_validate({"source": {"kind": "tasks", "tasks": tasks}})
    functions = [
        {"kind": "function", "path": f"{tmp_path}/own.py:strict"},
        {"kind": "function", "path": f"{tmp_path}/own.py:brevity"},
        {"kind": "reward_model", "name": "model", "model": "any"},
    ]
    rewards = RewardsConfig.model_validate({"functions": functions})
    model = Column(
        values=np.array([3.0, 3.0, 0.0]),
        applied=np.array([True, True, False]),
        errors={1: "too long", 2: "too long"},
    )
    with RewardRunner(rewards, data) as runner:
        scores = runner.score(
            ["", "", ""],
            ["7", "four", "7"],
            [
                {"task": "sums", "answer": "7"},
                {"task": "words"},
                {"task": "sums", "answer": "8"},
            ],
            given={"model": model},
        )
    assert scores.applied.tolist() == [
        [True, False, True],
        [False, True, False],
        [True, False, False],
    ]
    assert scores.rewards.tolist() == [4.0, 0.25, 0.0]
    assert scores.extras["strict/right"] == ["7", None, "8"]
    assert scores.failed.tolist() == [False, False, True], "its own failures alone are its task's"
    assert [(one.index, one.function) for one in scores.failures] == [(2, "model")]
