"""A step's advantages in parts are, to the bit, those of one piece; what is not needed is not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from configs.rewards import RewardsConfig
from engines.algorithms.advantages import ADVANTAGES, AdvantageEstimator, Scope
from engines.algorithms.from_config import estimator_of
from engines.algorithms.inputs import AdvantageBatch, Advantages
from engines.algorithms.rollout_correction import Mismatch
from engines.data.advantage_parts import part_edges, parts_of, write_part, write_statistics
from engines.data.advantages import write_advantages
from engines.data.contract import (
    AdvantagePartRequest,
    AdvantagesRequest,
    AdvantagesResult,
    join_parts,
)
from engines.data.training_batch import choose, write_repetition
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

GROUPS, SIZE = 12, 4
ROWS = GROUPS * SIZE
WRITTEN = {
    "advantages",
    "response_mask",
    "returns",
    "baseline_reward",
    "staleness",
    "correction_weights",
    "correction_kept",
}
REWARDS = RewardsConfig.model_validate({"functions": [{"kind": "function", "path": "json:loads"}]})
PENALTY = {"coefficient": 0.1, "estimator": "k1", "placement": "reward"}
MORE: list[dict[str, Any]] = [
    {"advantage": {"kind": "grpo", "normalize": "batch"}},
    {"advantage": {"kind": "grpo", "baseline": "batch", "leave_one_out": True}},
    {"advantage": {"kind": "cpgd", "weight": "filter"}},
    {"advantage": {"kind": "gae", "whiten": False, "gamma": 0.9, "lam": 0.9}},
    {"advantage": {"kind": "gae", "gamma": 0.9, "lam": 0.9}},
    {"advantage": {"kind": "gdpo", "over": "samples"}},
    {"advantage": {"kind": "gigpo", "among": "batch", "gamma": 0.9}},
    {"advantage": {"kind": "gigpo", "among": "batch", "normalize": True}, "kl": PENALTY},
    {"advantage": {"kind": "grpo"}, "kl": PENALTY},
    {"advantage": {"kind": "reinforce_plus_plus"}, "kl": PENALTY},
    {"advantage": {"kind": "reinforce_plus_plus_baseline"}, "kl": PENALTY},
    {"advantage": {"kind": "grpo"}, "shaping": {"truncated": "mask", "overlong": {"buffer": 20}}},
    {"advantage": {"kind": "gdpo"}, "shaping": {"truncated": "zero", "repetition": {"ngram": 1}}},
    {"advantage": {"kind": "grpo"}, "selection": [{"kind": "top_p_groups", "share": 0.5}]},
    {"advantage": {"kind": "gpg"}, "selection": [{"kind": "best_of", "best": 1, "worst": 1}]},
    {
        "advantage": {"kind": "grpo"},
        "proximal": "loglinear",
        "loss": {"kind": "decoupled"},
        "ratio_against": "old_logprobs",
    },
    {"advantage": {"kind": "tree", "prefix_weight": "once", "scale": "prompt_std"}},
    {"advantage": {"kind": "tree_segment", "whiten": False}},
    {"advantage": {"kind": "tree_sibling", "whiten": True, "prefix_weight": "once"}},
]
RECIPES = [{"advantage": {"kind": kind}} for kind in ADVANTAGES] + MORE
OLD = {"ratio_against": "old_logprobs"}
TRUNCATE = {"kind": "truncate", "upper": 1.5, "normalize": True}
BAND = {"kind": "band", "level": "sequence", "normalize": True}
CORRECTED: dict[str, dict[str, Any]] = {
    "no correction": {"advantage": {"kind": "grpo"}},
    "token weights": {"advantage": {"kind": "grpo"}, "correction": [TRUNCATE]},
    "row weights": {"advantage": {"kind": "gpg"}, "correction": [BAND, {"kind": "veto"}]},
    "two weights": {
        "advantage": {"kind": "reinforce_plus_plus"},
        "correction": [BAND, TRUNCATE, {"kind": "truncate", "upper": None}],
    },
    "rejections": {
        "advantage": {"kind": "gae", "gamma": 0.9, "lam": 0.9},
        "correction": [
            {"kind": "reject", "statistic": "token_k3", "upper": 0.5},
            {"kind": "reject", "statistic": "seq_mean_k1", "lower": 0.8, "upper": 1.2},
            {"kind": "reject", "statistic": "seq_max_k2", "upper": 3.0},
        ],
    },
    "by the advantages": {
        "advantage": {"kind": "gpg"},
        "correction": [{"kind": "dppo"}, {"kind": "off_policy_sequence"}],
    },
    "in a baseline": {
        "advantage": {"kind": "multi_turn_optimal_token_baseline"},
        "correction": [TRUNCATE],
    },
    "masked rows": {
        "advantage": {"kind": "gigpo", "among": "batch"},
        "shaping": {"truncated": "mask"},
        "kl": PENALTY,
        "correction": [TRUNCATE],
    },
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def samples(store: Store, *, old: bool) -> BatchRef:
    """48 samples of 12 prompts with about 40 tokens each; one is empty, some are cut off."""
    random = np.random.default_rng(3)
    lengths = random.integers(12, 60, ROWS)
    lengths[5] = 0

    def drawn(low: float, high: float) -> list[np.ndarray]:
        return [random.uniform(low, high, n).astype(np.float32) for n in lengths]

    status = np.where(lengths > 50, SampleStatus.TRUNCATED, SampleStatus.OK).astype(np.int64)
    reward = random.choice([0.0, 0.25, 1.0], ROWS).astype(np.float32)
    status[9], reward[9] = SampleStatus.FAILED, np.nan
    columns: dict[str, object] = {
        "prompt_ids": [[1, 2, 3]] * ROWS,
        "response_ids": [random.integers(4, 90, n) for n in lengths],
        "response_mask": [(random.random(n) > 0.1).astype(np.uint8) for n in lengths],
        "rollout_logprobs": drawn(-3.0, -0.1),
        "weight_spans": [[4, 0, n // 2, 5, n // 2, n] if n else [] for n in lengths.tolist()],
        "ref_logprobs": drawn(-3.0, -0.1),
        "values": drawn(-1.0, 1.0),
        "group_id": np.repeat(np.arange(GROUPS)[::-1].copy(), SIZE),
        # Of each prompt's samples, 0 and 2 share their first 5 tokens.
        "tree_path": [[[1, 2], [3], [1, 4], [5]][i % SIZE] for i in range(ROWS)],
        "tree_lengths": [[5, n - 5] if i % 2 == 0 else [n] for i, n in enumerate(lengths)],
        "status": status,
        "reward": reward,
        "score/right": reward,
        "score/brief": np.where(lengths < 40, 1.0, 0.0).astype(np.float32),
    }
    if old:
        columns |= {"old_logprobs": drawn(-3.0, -0.1), "sum_pi_squared": drawn(0.1, 0.9)}
    # Turns of 7 tokens, in few states, which prompts share.
    columns["turn_ids"] = [np.arange(n) // 7 for n in lengths]
    columns["turn_states"] = [(np.arange(n) // 7 + row) % 5 for row, n in enumerate(lengths)]
    return write_batch(store, "run/samples.safetensors", columns)


def chosen(store: Store, ref: BatchRef, algorithm: AlgorithmConfig, **more: Any) -> Any:
    baselines = None
    if algorithm.needs_baselines:
        greedy = {
            "group_id": np.arange(GROUPS),
            "reward": np.linspace(0, 1, GROUPS, dtype=np.float32),
        }
        baselines = write_batch(store, "run/greedy.safetensors", greedy)
    request = AdvantagesRequest(
        samples=ref, algorithm=algorithm, version=6, baselines=baselines, **more
    )
    return choose(store, request, REWARDS, 59)


def in_one(store: Store, ref: BatchRef, algorithm: AlgorithmConfig) -> AdvantagesResult:
    choice = chosen(store, ref, algorithm)
    written, metrics = write_advantages(
        store, choice.training, algorithm, "run/whole.safetensors", 6
    )
    return choice.result(written, metrics)


def in_parts(
    store: Store, ref: BatchRef, algorithm: AlgorithmConfig, tokens: int
) -> AdvantagesResult | None:
    """As tasks/advantage.py has it made."""
    more = {}
    if algorithm.shaping.repetition is not None:
        written = [
            write_repetition(store, part, algorithm, f"run/{tokens}-repetition-{n}.safetensors")
            for n, part in enumerate(ref.chunk(5))
        ]
        more["repetition"] = BatchRef.concat(written)
    choice = chosen(store, ref, algorithm, **more)
    parts = parts_of(store, choice, algorithm, tokens, f"run/{tokens}-rows.safetensors")
    if parts is None:
        return None
    assert len(parts) > 1
    statistics = None
    if parts.measured:
        rows = [
            write_statistics(store, *parts.part(n), algorithm, f"run/{tokens}-sums-{n}.safetensors")
            for n in range(len(parts))
        ]
        statistics = BatchRef.concat(rows)
    return join_parts(
        parts,
        [
            write_part(
                store,
                AdvantagePartRequest(
                    parts=parts, number=n, algorithm=algorithm, version=6, statistics=statistics
                ),
                f"run/{tokens}-part-{n}.safetensors",
            )
            for n in range(len(parts))
        ],
    )


def name_of(recipe: dict[str, Any]) -> str:
    return "-".join(str(part) for part in recipe["advantage"].values())


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_parts_are_the_whole_to_the_bit(store: Store, recipe: dict[str, Any]) -> None:
    # Against the rollout policy nothing is corrected before the update: see the test after this.
    algorithm = AlgorithmConfig.model_validate({"ratio_against": "rollout_logprobs", **recipe})
    ref = samples(store, old=algorithm.needs_stored_logprobs)
    whole = in_one(store, ref, algorithm)
    for tokens in (400, 150):
        assert_equal(store, in_parts(store, ref, algorithm, tokens), whole)


@pytest.mark.parametrize("name", CORRECTED)
def test_corrections_of_parts_are_those_of_the_whole_to_the_bit(store: Store, name: str) -> None:
    algorithm = AlgorithmConfig.model_validate(OLD | CORRECTED[name])
    ref = samples(store, old=True)
    whole = in_one(store, ref, algorithm)
    gap = {name: value for name, value in whole.metrics.items() if name.startswith("correction/")}
    assert "correction/chi2_seq" in gap
    if algorithm.correction:
        assert ("correction_weights" in whole.ref.names) and "correction/kl" in gap
    for tokens in (400, 150):
        found = in_parts(store, ref, algorithm, tokens)
        assert_equal(store, found, whole)
        assert found is not None
        assert gap == {name: found.metrics[name] for name in gap}


def assert_equal(store: Store, found: AdvantagesResult | None, whole: AdvantagesResult) -> None:
    assert found is not None
    assert found.ref.names == whole.ref.names
    for column in WRITTEN & set(whole.ref.names):
        ours, theirs = (one.ref.fetch_numpy(store, column) for one in (found, whole))
        np.testing.assert_array_equal(ours[0], theirs[0], err_msg=column)
        if theirs[1] is not None:
            np.testing.assert_array_equal(ours[1], theirs[1], err_msg=column)
    assert found.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)
    assert (found.trained, found.filtered, found.dropped) == (
        whole.trained,
        whole.filtered,
        whole.dropped,
    )


def test_turns_of_other_parts_are_compared(store: Store) -> None:
    """Were each part compared by itself, the advantages would be others."""
    ref = samples(store, old=False)
    one, other = (
        AlgorithmConfig.model_validate({"advantage": {"kind": "gigpo", "among": among}})
        for among in ("batch", "group")
    )
    advantages = [
        in_one(store, ref, recipe).ref.fetch_numpy(store, "advantages")[0]
        for recipe in (one, other)
    ]
    assert not np.array_equal(*advantages)


def test_a_normalised_weight_is_divided_by_the_mean_of_all_parts(store: Store) -> None:
    algorithm = AlgorithmConfig.model_validate(
        {**OLD, "advantage": {"kind": "grpo"}, "correction": [TRUNCATE]}
    )
    found = in_parts(store, samples(store, old=True), algorithm, 150)
    assert found is not None
    weights, mask = (
        found.ref.fetch_numpy(store, name)[0] for name in ("correction_weights", "response_mask")
    )
    assert weights[mask > 0].mean(dtype=np.float64) == pytest.approx(1.0, rel=1e-6)


def test_what_looks_at_the_whole_batch_is_not_cut(store: Store) -> None:
    ref = samples(store, old=True)
    own = {"kind": "function", "path": f"{__name__}:fresh"}
    for recipe in (
        {"advantage": {"kind": "function", "path": f"{__name__}:half"}},
        {**OLD, "advantage": {"kind": "grpo"}, "correction": [own]},
    ):
        algorithm = AlgorithmConfig.model_validate({"ratio_against": "rollout_logprobs", **recipe})
        assert in_parts(store, ref, algorithm, 150) is None


def fresh(mismatch: Mismatch) -> Tensor:
    """A user's correction; it may look at anything."""
    return mismatch.log_ratio() > mismatch.log_ratio().mean()


def half(batch: AdvantageBatch) -> Advantages:
    """A user's own; it may look at anything."""
    return Advantages(advantages=batch.at_tokens(batch.rewards / 2))


per_group = AdvantageEstimator(estimator=half, per_group=True)


def test_an_estimator_may_say_that_groups_will_do(store: Store) -> None:
    ref = samples(store, old=False)
    recipes = [
        AlgorithmConfig.model_validate({"advantage": {"kind": "function", "path": path}})
        for path in (f"{__name__}:half", f"{__name__}:per_group")
    ]
    whole, found = in_one(store, ref, recipes[0]), in_parts(store, ref, recipes[1], 150)
    assert found is not None
    for one, two in zip(
        whole.ref.fetch_numpy(store, "advantages"),
        found.ref.fetch_numpy(store, "advantages"),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)


def test_token_ids_and_other_methods_columns_are_not_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, read = samples(store, old=True), set()
    fetch = BatchRef.fetch_numpy

    def recorded(self: BatchRef, store: Store, name: str) -> Any:
        read.add(name)
        return fetch(self, store, name)

    monkeypatch.setattr(BatchRef, "fetch_numpy", recorded)
    recipe = {"advantage": {"kind": "grpo"}, "ratio_against": "rollout_logprobs"}
    assert in_parts(store, ref, AlgorithmConfig.model_validate(recipe), 400) is not None
    tokens = {name for name in read if name in ref.names and ref.column(name).kind == "jagged"}
    assert tokens == {"response_mask", "weight_spans"}  # the spans for the metric of staleness


def test_parts_lie_between_groups_and_are_bounded() -> None:
    groups = np.array([7, 7, 8, 8, 9, 9])
    assert part_edges(groups, np.full(6, 3), 6) == (0, 2, 4, 6)
    assert part_edges(groups, np.full(6, 3), 7) == (0, 4, 6)
    assert part_edges(groups, np.full(6, 3), 100) == (0, 6)
    # Rows of the groups 7 and 8 are mixed: no cut before the second row of each has come.
    assert part_edges(np.array([7, 8, 7, 8, 9, 9]), np.full(6, 3), 3) == (0, 4, 6)
    many = np.repeat(np.arange(5000), 2)
    edges = part_edges(many, np.full(10_000, 10), 1)
    assert len(edges) - 1 <= 256
    assert (edges[0], edges[-1]) == (0, 10_000)
    assert all(edge % 2 == 0 for edge in edges)


def test_every_estimator_has_a_scope() -> None:
    for kind in ADVANTAGES:
        algorithm = AlgorithmConfig.model_validate({"advantage": {"kind": kind}})
        assert estimator_of(algorithm)[1] is not Scope.BATCH, kind
