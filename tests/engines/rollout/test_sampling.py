"""What of a distribution is sampled from, where several tokens have the same logit."""

from __future__ import annotations

import math

import pytest
import torch

from engines.rollout import hf_decoding
from engines.rollout.contract import GREEDY, Sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("logits", "top_k", "left"),
    [
        ([1.0, 3.0, 3.0, 0.0], 1, [1]),
        ([3.0, 3.0, 3.0, 3.0], 1, [0]),
        ([1.0, 3.0, 3.0, 0.0], 2, [1, 2]),
        ([2.0, 3.0, 2.0, 2.0], 2, [0, 1]),
        ([2.0, 3.0, 2.0, 2.0], 3, [0, 1, 2]),
        ([0.0, 1.0, 2.0, 3.0], 2, [2, 3]),
        ([0.0, 0.0, 0.0, 0.0], 4, [0, 1, 2, 3]),
        ([-math.inf, -math.inf, 1.0, -math.inf], 2, [2]),
    ],
)
def test_top_k_leaves_k_tokens_and_of_equal_ones_the_lowest_ids(
    dtype: torch.dtype, logits: list[float], top_k: int, left: list[int]
) -> None:
    sampling = Sampling(n=1, max_new_tokens=1, top_k=top_k)
    rows = torch.tensor([logits, [5.0, 1.0, 0.0, -1.0]], dtype=dtype).float()
    found = hf_decoding._distribution(rows, sampling)
    assert found[0].isfinite().nonzero()[:, 0].tolist() == left
    assert found[1].isfinite().sum() == top_k
    torch.testing.assert_close(found.exp().sum(1), torch.ones(2))


def test_greedy_sampling_is_one_thing_whatever_the_run_samples_with() -> None:
    hot = Sampling(n=8, max_new_tokens=9, temperature=1.7, top_p=0.9, top_k=40, seed=3)
    cold = Sampling(n=2, max_new_tokens=9, temperature=0.2, seed=3)
    assert hot.as_greedy == cold.as_greedy
    assert hot.as_greedy.greedy and not hot.greedy
    assert hot.as_greedy.identity["greedy"] == GREEDY, "told apart from those that drew among ties"
    assert "greedy" not in hot.identity
