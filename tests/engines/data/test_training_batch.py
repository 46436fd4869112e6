"""From stored samples to the stored batch that trains: what each method finds there, and counts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.algorithm.algorithm import AlgorithmConfig
from configs.rewards import RewardsConfig
from engines.data.advantages import write_advantages
from engines.data.contract import AdvantagesRequest, AdvantagesResult, NothingToTrain, RewardsFailed
from engines.data.training_batch import Choice, choose, resolve_failures
from engines.train.fsdp_engine import FSDPEngine
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tests.engines.train.train_ranks import MAX_NEW_TOKENS, spec, update_of

LENGTHS = [3, 5, 4, 2, 6, 3, 0, 4]
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]
REWARDS = [1.0, 0.0, 2.0, 0.5, 1.0, 1.0, 0.0, 3.0]
DROP = RewardsConfig.model_validate({"functions": [{"kind": "function", "path": "json:loads"}]})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def rows(random: np.random.Generator, low: float, high: float) -> list[np.ndarray]:
    return [random.uniform(low, high, length).astype(np.float32) for length in LENGTHS]


def samples(store: Store, **columns: Any) -> BatchRef:
    """Eight samples of four prompts; the seventh is empty, the eighth was cut off."""
    random = np.random.default_rng(0)
    old = rows(random, -3.0, -0.5)
    status = np.full(8, SampleStatus.OK, dtype=np.int64)
    status[7] = SampleStatus.TRUNCATED
    prompts = [random.integers(4, 90, 5) for _ in range(4)]
    made: dict[str, Any] = {
        "prompt_ids": [prompts[group] for group in GROUPS],
        "response_ids": [random.integers(4, 90, length) for length in LENGTHS],
        "response_mask": [np.ones(length, dtype=np.uint8) for length in LENGTHS],
        "rollout_logprobs": [row + random.normal(0, 0.3, len(row)).astype("f4") for row in old],
        "old_logprobs": old,
        "group_id": np.array(GROUPS, dtype=np.int64),
        "status": status,
        "reward": np.array(REWARDS, dtype=np.float32),
        "score/a": np.array(REWARDS, dtype=np.float32),
    }
    return write_batch(store, "run/samples.safetensors", {**made, **columns})


def trained(
    store: Store,
    ref: BatchRef,
    baselines: BatchRef | None = None,
    name: str = "batch",
    **recipe: Any,
) -> AdvantagesResult:
    algorithm = AlgorithmConfig.model_validate(recipe)
    request = AdvantagesRequest(samples=ref, algorithm=algorithm, version=7, baselines=baselines)
    choice = choose(store, request, DROP, MAX_NEW_TOKENS)
    batch, metrics = write_advantages(
        store, choice.training, algorithm, f"run/{name}.safetensors", 7
    )
    return choice.result(batch, metrics)


def column(store: Store, batch: AdvantagesResult, name: str) -> list[list[float]]:
    """A jagged column, row by row."""
    values, offsets = batch.ref.fetch_numpy(store, name)
    assert offsets is not None
    return [values[a:b].tolist() for a, b in pairwise(offsets)]


def firsts(store: Store, batch: AdvantagesResult) -> list[float]:
    """The advantage of each row's first token; 0 of an empty row."""
    return [row[0] if row else 0.0 for row in column(store, batch, "advantages")]


def test_a_response_is_one_turn_from_its_prompt(store: Store) -> None:
    batch = trained(store, samples(store), advantage={"kind": "gigpo", "step_weight": 1.0})
    alone = trained(store, samples(store), name="plain", advantage={"kind": "dr_grpo"})
    twice = [2 * value for value in firsts(store, alone)]
    # The last group's other sample has no tokens, so no turn: its partner's turn is alone.
    assert firsts(store, batch)[:6] == pytest.approx(twice[:6])
    assert firsts(store, batch)[7] == pytest.approx(twice[7] / 2)


def test_rows_of_one_state_are_compared_over_the_batch(store: Store) -> None:
    ref = samples(store, state_id=np.array([5, 6, 5, 6, 7, 8, 9, 9], dtype=np.int64))
    recipe = {"kind": "gigpo", "among": "batch"}
    got = firsts(store, trained(store, ref, advantage=recipe))
    # Group: +-1/2 and +-3/4; state 5: rewards 1 and 2; state 6: 0 and 1/2.
    assert got[:4] == pytest.approx([0.5 - 0.5, -0.5 - 0.25, 0.75 + 0.5, -0.75 + 0.25])


def test_turns_and_their_states_come_from_the_samples(store: Store) -> None:
    turns = [np.minimum(np.arange(length) // 2, 1) for length in LENGTHS]
    states = [
        np.where(turn == 0, 1, 2 + group % 2) for turn, group in zip(turns, GROUPS, strict=True)
    ]
    ref = samples(store, turn_ids=turns, turn_states=states)
    recipe = {"kind": "gigpo", "gamma": 0.5, "step_weight": 10.0}
    got = column(store, trained(store, ref, advantage=recipe), "advantages")
    # Row 0 has turns of 2 and 1 tokens, row 1 of 2 and 3: returns 0.5, 1 and 0, 0.
    assert got[0] == pytest.approx([0.5 + 2.5, 0.5 + 2.5, 0.5 + 5.0])
    assert got[1] == pytest.approx([-0.5 - 2.5] * 2 + [-0.5 - 5.0] * 3)


def test_the_greedy_completion_is_what_a_sample_is_compared_with(store: Store) -> None:
    greedy = write_batch(
        store,
        "run/greedy.safetensors",
        {
            "group_id": np.array([2, 0, 3, 1], dtype=np.int64),  # in another order
            "reward": np.array([0.25, 0.5, 1.0, np.nan], dtype=np.float32),
        },
    )
    batch = trained(store, samples(store), greedy, advantage={"kind": "remax"})
    # Group 1's greedy completion could not be scored: no baseline, so the group does not train.
    assert batch.ref.fetch_numpy(store, "group_id")[0].tolist() == [0, 0, 2, 2, 3, 3]
    assert batch.dropped == {"reward_failed": 1} and batch.trained == 3
    assert firsts(store, batch) == pytest.approx([0.5, -0.5, 0.75, 0.75, 0.0, 2.0])
    baselines = batch.ref.fetch_numpy(store, "baseline_reward")[0].tolist()
    assert baselines == [0.5, 0.5, 0.25, 0.25, 1.0, 1.0]
    assert batch.metrics["reward/baseline_mean"] == pytest.approx((0.5 + 0.25 + 1.0) / 3)


def test_shaping_and_selection_are_counted(store: Store) -> None:
    batch = trained(
        store,
        samples(store),
        shaping={"overlong": {"max_tokens": 6, "buffer": 2}, "truncated": "mask"},
        selection=[{"kind": "informative"}, {"kind": "best_of", "best": 1}],
    )
    metrics = batch.metrics
    assert metrics["shaping/overlong_samples"] == 2  # of 5 and 6 tokens
    assert metrics["shaping/truncated_samples"] == 1
    assert metrics["shaping/penalty_overlong"] == pytest.approx(-(0.5 + 1.0) / 8)
    # Every group has variance: the overlong sample of group 2 lost its reward.
    assert metrics["selection/informative_left_out"] == 0
    assert metrics["selection/best_of_left_out"] == 4
    assert metrics["selection/samples_kept"] == metrics["selection/samples_left_out"] == 4
    assert metrics["selection/groups_left_out"] == batch.filtered == 0
    assert column(store, batch, "response_mask")[-1] == [0, 0, 0, 0]


def chosen(store: Store, ref: BatchRef, most: int | None = None, **recipe: Any) -> Choice:
    algorithm = AlgorithmConfig.model_validate(recipe)
    request = AdvantagesRequest(samples=ref, algorithm=algorithm, version=7, most_groups=most)
    return choose(store, request, DROP, MAX_NEW_TOKENS)


def test_groups_beyond_those_wanted_are_surplus(store: Store) -> None:
    rewards = np.array([1, 0, np.nan, 1, 1, 1, 0, 1], dtype=np.float32)
    status = np.full(8, SampleStatus.OK, dtype=np.int64)
    status[2] = SampleStatus.FAILED
    numbers = np.array([9, 9, 7, 7, 8, 8, 6, 6])  # group 6 was drawn first
    ref = samples(store, reward=rewards, status=status, group_id=numbers, sample_id=np.arange(8))
    recipe: dict[str, Any] = {"selection": [{"kind": "informative"}]}
    one = chosen(store, ref, 1, **recipe)
    assert (one.trained, one.filtered) == (1, {"informative": 1})
    assert one.dropped == {"reward_failed": 1, "surplus": 1}
    assert one.informative == 2
    assert one.training.samples.fetch_numpy(store, "group_id")[0].tolist() == [6, 6]
    every = chosen(store, ref, 4, **recipe)
    assert (every.trained, every.dropped) == (2, {"reward_failed": 1})
    assert every.informative == 2
    # Columns that were made for the samples that train alone go with them, and with no others.
    made = write_batch(store, "run/made.safetensors", {"old_logprobs": [[-1.0] * 3, [-2.0] * 4]})
    kept = one.training.samples.with_columns(made)
    assert one.with_columns(store, kept).training.samples.names == kept.names
    with pytest.raises(AssertionError, match="of other samples"):
        every.with_columns(store, ref.rows(0, 4))


def test_each_filtered_group_has_the_rule_that_left_it_out(store: Store) -> None:
    rules = [{"kind": "informative"}, {"kind": "top_p_groups", "share": 0.5}]
    found = chosen(store, samples(store), selection=rules)  # deviations 0.7, 1.1, 0 and 2.1
    assert (found.trained, found.filtered) == (1, {"informative": 1, "top_p_groups": 2})


def test_groups_are_compared_by_their_rewards_before_shaping_if_asked(store: Store) -> None:
    """The third group's answers are equally right, and one of them is overlong."""
    shaping = {"overlong": {"max_tokens": 6, "buffer": 2}}
    after = chosen(store, samples(store), shaping=shaping, selection=[{"kind": "informative"}])
    assert (after.trained, after.filtered) == (4, {})
    rule = {"kind": "informative", "rewards": "given"}
    before = chosen(store, samples(store), shaping=shaping, selection=[rule])
    assert (before.trained, before.filtered) == (3, {"informative": 1})


def test_where_every_group_is_filtered_none_is_left_and_where_all_failed_it_is_an_error(
    store: Store,
) -> None:
    equal = samples(store, reward=np.ones(8, dtype=np.float32))
    none = chosen(store, equal, selection=[{"kind": "informative"}])
    none.check()
    assert (len(none.training.samples), none.trained, none.filtered) == (0, 0, {"informative": 4})
    assert len(BatchRef.from_json(none.training.samples.to_json())) == 0
    status = np.full(8, SampleStatus.FAILED, dtype=np.int64)
    with pytest.raises(
        NothingToTrain, match="samples of every group of the step, so none of them may train"
    ):
        chosen(store, samples(store, status=status)).check()


def test_a_penalty_is_a_component_of_its_own(store: Store) -> None:
    recipe = {"advantage": {"kind": "gdpo", "normalize": False, "over": "samples"}}
    plain = trained(store, samples(store), name="plain", **recipe)
    shaped = trained(
        store, samples(store), shaping={"overlong": {"max_tokens": 6, "buffer": 2}}, **recipe
    )
    assert firsts(store, plain)[4] == pytest.approx(firsts(store, plain)[5])
    assert firsts(store, shaped)[4] < firsts(store, shaped)[5]


NORMALISED = {
    "correction": [
        {"kind": "truncate", "upper": 1.1, "normalize": True},
        {"kind": "reject", "statistic": "token_k2", "upper": 0.05},
    ]
}


def test_corrections_are_stored_with_their_diagnostics(store: Store) -> None:
    batch = trained(store, samples(store), **NORMALISED)
    weights, _ = batch.ref.fetch_numpy(store, "correction_weights")
    kept = batch.ref.fetch_numpy(store, "correction_kept")[0].tolist()
    assert float(weights.mean()) == pytest.approx(1.0)
    assert 0 < sum(kept) < len(kept)
    for name in ("kl", "k3_kl", "log_ppl_diff", "weight_eff_sample_size", "weight_oob_ratio"):
        assert np.isfinite(batch.metrics[f"correction/{name}"])
    left_out = batch.metrics["correction/reject_masked_fraction"]
    assert left_out == pytest.approx(1 - sum(kept) / len(kept))
    bypass = trained(
        store, samples(store), name="bypass", ratio_against="rollout_logprobs", correction=[]
    )
    assert "correction_weights" not in bypass.ref.names


def test_normalised_corrections_do_not_depend_on_micro_batches(
    store: Store, tmp_path: Path
) -> None:
    batch = trained(store, samples(store), **NORMALISED)
    algorithm = AlgorithmConfig.model_validate(NORMALISED)
    found = []
    for budget in (4096, 16):
        engine = FSDPEngine(spec(tmp_path, micro_batch_tokens=budget))
        engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)
        result = engine.update(update_of(batch.ref, algorithm, 1))
        found.append(result.metrics)
        unstored = batch.ref.drop(["correction_weights", "correction_kept"])
        with pytest.raises(ValueError, match="needs the columns correction_weights"):
            engine.update(update_of(unstored, algorithm, 2))
        engine.close()
    names = ("loss", "grad_norm", "correction_weight", "correction_effective_sample_size")
    for name in (*names, "correction_left_out", "correction_clipped_high", "log_ppl_gap"):
        assert found[1][f"train/{name}"] == pytest.approx(found[0][f"train/{name}"], rel=1e-4), name
    assert found[0]["train/correction_weight"] == pytest.approx(1.0)


def test_tokens_of_high_entropy_do_not_depend_on_micro_batches(
    store: Store, tmp_path: Path
) -> None:
    recipe = {"entropy": {"top_share": 0.3}}
    batch = trained(store, samples(store), **recipe)
    losses = []
    for budget in (4096, 16):
        engine = FSDPEngine(spec(tmp_path, micro_batch_tokens=budget))
        engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)
        algorithm = AlgorithmConfig.model_validate(recipe)
        result = engine.update(update_of(batch.ref, algorithm, 1))
        losses.append((result.metrics["train/loss"], result.metrics["train/grad_norm"]))
        engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_metrics_leave_out_what_failed_and_where_a_function_does_not_apply(store: Store) -> None:
    nan, status = np.nan, np.full(8, SampleStatus.OK, dtype=np.int64)
    status[0], status[7] = SampleStatus.FAILED, SampleStatus.TRUNCATED
    ref = samples(
        store,
        status=status,
        reward=np.array([nan, 0.0, 0.1, 0.1, 1.0, 3.0, 0.0, 0.0], dtype=np.float32),
        **{
            "score/a": np.array([nan, 0.0, 0.5, nan, 1.0, 3.0, nan, nan], dtype=np.float32),
            "score/never": np.full(8, nan, dtype=np.float32),  # None for every sample
        },
    )
    metrics = trained(store, ref, advantage={"kind": "grpo"}).metrics
    assert not [name for name, value in metrics.items() if np.isnan(value)]
    assert metrics["samples/failed"] == 1
    assert metrics["reward/a"] == pytest.approx((0.0 + 0.5 + 1.0 + 3.0) / 4)
    assert "reward/never" not in metrics
    assert metrics["reward/mean"] == pytest.approx(4.2 / 7)
    assert metrics["response/tokens_mean"] == pytest.approx((5 + 4 + 2 + 6 + 3 + 0 + 4) / 7)
    assert metrics["response/truncated_fraction"] == pytest.approx(1 / 7)
    assert metrics["reward/group_std"] == pytest.approx(2**0.5 / 4)  # of groups 0, 0, sqrt 2, 0
    assert metrics["groups/without_variance"] == pytest.approx(3 / 4)


FAILED_GROUPS = np.array([7, 7, 7, 3, 3, 3, 5, 5, 5])
FAILED = np.array([0, 1, 0, 0, 0, 0, 1, 1, 0], dtype=bool)


def test_drop_leaves_out_groups_with_a_failure() -> None:
    keep = resolve_failures(FAILED_GROUPS, FAILED, "drop")
    assert keep.tolist() == [False] * 3 + [True] * 3 + [False] * 3


def test_complete_goes_on_with_the_others() -> None:
    keep = resolve_failures(FAILED_GROUPS, FAILED, "complete")
    assert keep.tolist() == [True, False, True] + [True] * 3 + [False] * 3


def test_abort_says_how_many() -> None:
    with pytest.raises(RewardsFailed, match="3 of 9 samples, in 2 of 3 groups"):
        resolve_failures(FAILED_GROUPS, FAILED, "abort")
    assert resolve_failures(FAILED_GROUPS, np.zeros(9, dtype=bool), "abort").all()


@pytest.mark.parametrize("policy", ["drop", "complete", "abort"])
def test_groups_of_one_and_none_at_all(policy: str) -> None:
    one = resolve_failures(np.array([4]), np.array([False]), policy)  # type: ignore[arg-type]
    assert one.tolist() == [True]
    none = resolve_failures(np.array([], dtype=np.int64), np.array([], dtype=bool), policy)  # type: ignore[arg-type]
    assert none.tolist() == []


def test_an_interpolated_proximal_policy_finds_the_staleness_of_each_token(store: Store) -> None:
    """Version 7 trains; with selection, only the rows that are left are looked at."""
    spans = [np.array([4, 0, 1, 7, 1, length], np.int64)[: 6 * bool(length)] for length in LENGTHS]
    ref = samples(store, weight_spans=spans)
    assert "staleness" not in trained(store, ref).ref.names
    recipe: dict[str, Any] = {
        "proximal": "loglinear",
        "selection": [{"kind": "best_of", "best": 1}],
    }
    batch = trained(store, ref, name="interpolated", **recipe)
    assert len(batch.ref) == 4
    assert column(store, batch, "staleness") == [
        [3] + [0] * (len(row) - 1) for row in column(store, batch, "response_ids")
    ]


SEATS = [0, 0, 1, 1, 0, 0, 1, 1]  # of two prompts, two players and two episodes each


def test_each_player_has_a_baseline_of_its_own(store: Store) -> None:
    """The prompt is counted once, whatever becomes of its players' groups."""
    ref = samples(
        store,
        group_id=np.array([4, 4, 4, 4, 5, 5, 5, 5], dtype=np.int64),
        player=np.array(SEATS, dtype=np.int64),
        status=np.full(8, SampleStatus.OK, dtype=np.int64),
    )
    batch = trained(store, ref, advantage={"kind": "dr_grpo"})
    assert batch.ref.fetch_list(store, "player") == [0, 0, 1, 1, 0, 0, 1]
    # Player 1 of the second prompt: one of its rows has no turn, and so is no part of the baseline.
    assert firsts(store, batch)[:6] == pytest.approx([0.5, -0.5, 0.75, -0.75, 0.0, 0.0])
    assert (batch.trained, batch.filtered, batch.dropped) == (2, 0, {})
    kept = trained(store, ref, name="kept", selection=[{"kind": "informative"}])
    assert kept.ref.fetch_list(store, "player") == [0, 0, 1, 1, 1], "player 0's are all equal in 5"
    assert (kept.trained, kept.filtered) == (2, 0)


def test_a_failed_sample_is_that_of_its_players_group(store: Store) -> None:
    status = np.full(8, SampleStatus.OK, dtype=np.int64)
    status[[1, 3]] = SampleStatus.FAILED  # an episode, of both players
    status[5] = SampleStatus.FAILED  # one player's sample, that a reward function could not score
    ref = samples(
        store,
        group_id=np.array([4, 4, 4, 4, 5, 5, 5, 5], dtype=np.int64),
        player=np.array(SEATS, dtype=np.int64),
        status=status,
    )
    batch = trained(store, ref, advantage={"kind": "dr_grpo"})
    assert batch.ref.fetch_list(store, "group_id") == [5]
    assert batch.ref.fetch_list(store, "player") == [1]
    assert (batch.trained, batch.dropped) == (1, {"reward_failed": 1})


def test_the_greedy_episode_is_that_of_the_same_player(store: Store) -> None:
    greedy = write_batch(
        store,
        "run/greedy.safetensors",
        {
            "group_id": np.array([5, 5, 4, 4], dtype=np.int64),
            "player": np.array([1, 0, 1, 0], dtype=np.int64),
            "reward": np.array([4.0, 3.0, 2.0, 1.0], dtype=np.float32),
        },
    )
    ref = samples(
        store,
        group_id=np.array([4, 4, 4, 4, 5, 5, 5, 5], dtype=np.int64),
        player=np.array(SEATS, dtype=np.int64),
    )
    batch = trained(store, ref, baselines=greedy, advantage={"kind": "remax"})
    found = batch.ref.fetch_list(store, "baseline_reward")
    assert found == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0]
