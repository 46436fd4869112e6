"""embodied_rewards.json: its own form as cases of ours, and the adapter for its function.

A case there has embeddings, which episodes succeeded, tasks with the number of a trial, and scores. An
all-zero embedding stands for one that is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engines.algorithms.progress_rewards import progress_rewards

if TYPE_CHECKING:
    from tests.parity.answers import Adapter, Answer
    from tests.parity.vectors import Case

FUNCTION = "compute_embodied_reward"
INPUTS = ("embeddings", "complete", "task")


def is_embodied(content: dict[str, Any]) -> bool:
    """Whether a file has this form."""
    cases = content.get("cases")
    return isinstance(cases, dict) and all(set(INPUTS) <= set(case) for case in cases.values())


def records(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Its cases in the form of the others."""
    return [
        {
            "name": f"{FUNCTION}/{name}",
            "function": FUNCTION,
            "dtype": "float32",
            "params": {},
            "inputs": {key: case[key] for key in INPUTS},
            "outputs": {"score": case["score"]},
        }
        for name, case in content["cases"].items()
    ]


def reward_case(case: Case) -> Answer:
    """The scores; not a number where there is no embedding."""
    points = case.tensor("embeddings").numpy()
    success = np.array(case.inputs["complete"])
    names = [one.partition("_trial_")[0] for one in case.inputs["task"]]
    tasks = np.unique(names, return_inverse=True)[1].astype(np.int64)
    there = (points != 0).any(1)
    defaults = pytest.importorskip("configs.srpo").ProgressConfig()
    settings = defaults.model_dump(exclude={"task_column", "success"})
    score = np.full(len(points), np.nan)
    score[there] = progress_rewards(points[there], success[there], tasks[there], **settings).rewards
    return {"score": torch.from_numpy(score)}


ADAPTERS: dict[str, Adapter] = {FUNCTION: reward_case}
