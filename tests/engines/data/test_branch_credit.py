"""Advantages by branch: each token's is of its own branch, among the same branch of its group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from configs.algorithm.advantages import GRPOAdvantage
from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.aggregation import Rows
from engines.algorithms.from_config import advantages_of
from engines.algorithms.inputs import AdvantageBatch
from engines.data.advantages import branch_advantages
from storage.batches.writing import write_batch
from storage.objects.store import Store


def test_each_branch_is_compared_with_itself(tmp_path: Path) -> None:
    """Three samples of a group; the last one has no branch 7. By hand, rewards less the mean:

    whole 3 1 2; branch 0: 1 1 4 (mean 2); branch 7: 2 0 (mean 1).
    """
    store = Store(f"file://{tmp_path}")
    lengths, ids = [3, 2, 2], [[0, 7, 7], [7, 0], [0, 0]]
    rewards = torch.tensor([3.0, 1.0, 2.0])
    own = [[-2.0, -1.0, -1.0], [-1.0, 0.0], [2.0, 2.0]]
    columns: dict[str, object] = {
        "branch_ids": [np.array(one, np.int64) for one in ids],
        "branch_rewards": [np.array(one, np.float32) for one in own],
    }
    batch = AdvantageBatch(
        rows=Rows.of_lengths(torch.tensor(lengths)),
        mask=torch.ones(sum(lengths), dtype=torch.bool),
        rewards=rewards,
        groups=torch.zeros(3, dtype=torch.int64),
    )
    algorithm = AlgorithmConfig(advantage=GRPOAdvantage(normalize="none"))
    samples = write_batch(store, "samples.safetensors", columns)
    found = branch_advantages(store, samples, batch, algorithm).advantages
    assert found.tolist() == [-1.0, 1.0, 1.0, -1.0, -1.0, 2.0, 2.0]
    plain = write_batch(store, "plain.safetensors", {"branch_ids": columns["branch_ids"]})
    without = branch_advantages(store, plain.drop(["branch_ids"]), batch, algorithm).advantages
    assert without.tolist() == advantages_of(batch, algorithm).advantages.tolist()
    assert without.tolist() == [1.0, 1.0, 1.0, -1.0, -1.0, 0.0, 0.0]
