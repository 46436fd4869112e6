"""Rounds of sampling: how large they are, when they end, and that no prompt of them is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from configs.dapo import DAPOConfig
from configs.recipe import load_recipe
from engines.data.contract import AdvantagesRequest, TooFewGroups
from engines.data.training_batch import choose
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.prompts.cursor import Cursor, Exhausted
from storage.runs.commit_log import Commit, Ledger
from tasks.commit import ledger_after
from tasks.dynamic_sampling import Rounds, is_over, round_size
from tasks.reporting.artifacts import left_out, sampled_in_rounds
from tasks.reporting.progress import ProgressTracker
from tasks.results import LeftOver, Prompts, TrainBatch
from tasks.run.events import Listeners, RoundBegan, ShardSampled, StepBegan
from tasks.run.shard_driver import ShardDriver

ROWS = 60


def settings(*words: str) -> DAPOConfig:
    return load_recipe(DAPOConfig, "tiny", [f"data.source.size={ROWS}", *words])


def prompts(groups: int, position: int = 0, epoch: int = 0, long: tuple[int, ...] = ()) -> Prompts:
    """A round that drew so many prompts, besides rows that were too long."""
    cursor = Cursor(
        epoch=epoch, position=position, seed=0, order="sequential", size=ROWS, digest="of the data"
    )
    dropped = {"too_long": list(long)} if long else {}
    ref = BatchRef(groups, {})
    return Prompts(ref=ref, cursor=cursor, drawn=groups + len(long), dropped=dropped)


@pytest.mark.parametrize(
    ("factor", "groups", "size"),
    [(1.0, 0, 4), (1.0, 3, 1), (1.5, 0, 6), (1.5, 1, 5), (1.5, 2, 3), (1.5, 3, 2), (3.0, 2, 6)],
)
def test_a_round_is_a_multiple_of_what_is_missing(factor: float, groups: int, size: int) -> None:
    assert round_size(settings(f"dynamic_sampling.over_sampling={factor}"), groups) == size


def test_rounds_end_with_enough_groups_or_after_the_most() -> None:
    config = settings("dynamic_sampling.max_rounds=3")
    rounds = [prompts(6), prompts(6), prompts(6)]
    assert is_over(config, 1, rounds[:1], 4) and is_over(config, 1, rounds[:1], 6)
    assert not is_over(config, 1, rounds[:1], 3)
    assert not is_over(config, 1, rounds[:2], 0)
    assert is_over(config, 1, rounds, 3) and is_over(config, 1, rounds, 0)


def test_too_few_groups_can_end_the_run_in_one_sentence() -> None:
    config = settings("dynamic_sampling.max_rounds=2", "dynamic_sampling.on_shortage=stop")
    assert not is_over(config, 1, [prompts(6)], 3)
    with pytest.raises(TooFewGroups) as error:
        is_over(config, 7, [prompts(6), prompts(2)], 3)
    assert str(error.value) == (
        "Step 7 wants 4 groups whose rewards differ, and dynamic_sampling.max_rounds = 2 rounds gave "
        "3, out of 8 prompts. Go on with dynamic_sampling.max_rounds higher, or with "
        "dynamic_sampling.on_shortage = train; what was sampled is used again."
    )


def test_where_the_data_end_it_goes_by_the_last_step() -> None:
    """Also where too few groups are to stop the run: more rounds would be of no use."""
    words = ("data.epochs=1", "dynamic_sampling.on_shortage=stop", "dynamic_sampling.max_rounds=2")
    rounds = [prompts(6, position=58), prompts(2, epoch=1)]
    with pytest.raises(Exhausted, match="8 prompts for step 3, of which 3 have answers whose"):
        is_over(settings(*words), 3, rounds, 3)
    partial = settings(*words, "data.last_step=partial")
    assert is_over(partial, 3, rounds, 3)
    with pytest.raises(Exhausted, match="of which 0 have"):
        is_over(partial, 3, rounds, 0)
    assert is_over(settings(*words), 3, rounds, 4)


def test_the_rounds_of_a_step_are_told_as_one() -> None:
    rounds = Rounds(drawn=(prompts(6, 7, long=(3,)), prompts(0, 9, long=(7, 8))), groups=3)
    whole = rounds.prompts
    assert (len(whole.ref), whole.drawn, whole.cursor.position) == (6, 9, 9)
    assert whole.dropped == {"too_long": [3, 7, 8]}
    assert whole.metrics == {
        "sampling/rounds": 2.0,
        "sampling/groups": 6.0,
        "sampling/informative": 0.5,
    }


def scored(store: Store, number: int, groups: np.ndarray, dice: np.random.Generator) -> BatchRef:
    """Four samples of each group; half of the groups have equal rewards, a tenth has a failure."""
    rows = np.repeat(groups, 4)
    rewards = dice.integers(0, 2, len(rows)).astype(np.float32)
    same = np.repeat(dice.random(len(groups)) < 0.5, 4)
    rewards[same] = np.repeat(dice.integers(0, 2, len(groups)), 4)[same]
    status = np.full(len(rows), SampleStatus.OK, np.int64)
    status[::4][dice.random(len(groups)) < 0.1] = SampleStatus.FAILED
    rewards[status == SampleStatus.FAILED] = np.nan
    columns: dict[str, Any] = {
        "group_id": rows,
        "sample_id": np.concatenate([4 * one + np.arange(4) for one in groups]),
        "status": status,
        "reward": rewards,
        "response_ids": [[5, 6]] * len(rows),
        "response_mask": [np.ones(2, np.uint8)] * len(rows),
    }
    return write_batch(store, f"run/{number}.safetensors", columns)


@pytest.mark.parametrize("seed", range(12))
def test_every_prompt_that_is_drawn_stands_in_the_ledger(tmp_path: Path, seed: int) -> None:
    """Steps of up to three rounds under planted rewards, as tasks and data engine make them."""
    store, dice = Store(str(tmp_path / "store")), np.random.default_rng(seed)
    factor = [1, 1.5, 3][seed % 3]
    words = (f"dynamic_sampling.over_sampling={factor}", "dynamic_sampling.max_rounds=3")
    config, ledger, number = settings(*words), Ledger(), 0
    for step in range(1, 6):
        drawn: list[Prompts] = []
        parts: list[BatchRef] = []
        groups, choice = 0, None
        while choice is None or not is_over(config, step, drawn, groups):
            size = round_size(config, groups)
            first = 1000 * step + sum(len(one.ref) for one in drawn)
            long = tuple(range(int(dice.integers(0, 2))))
            drawn.append(prompts(size, long=long))
            parts.append(scored(store, number, np.arange(first, first + size), dice))
            number += 1
            samples = BatchRef.concat(parts)
            request = AdvantagesRequest(
                samples=samples, algorithm=config.algorithm, version=0, most_groups=4
            )
            choice = choose(store, request, config.rewards, 16)
            assert choice.informative >= groups  # what was found in a round stays
            groups = choice.informative
        whole = Rounds(drawn=tuple(drawn), groups=groups).prompts
        batch = choice.result(choice.training.samples, {})
        before, counted = (
            ledger,
            TrainBatch(
                ref=batch.ref,
                trained=batch.trained,
                filtered_by=batch.filtered_by,
                dropped=batch.dropped,
                metrics={},
            ),
        )
        ledger = ledger_after(before, whole, counted, LeftOver())  # which refuses to be unbalanced
        rewards = samples.fetch_numpy(store, "reward")[0].reshape(-1, 4)
        failed = np.isnan(rewards).any(1)
        differ = ~failed & (rewards.min(1) != rewards.max(1))
        made = Counter(ledger.dropped)
        made.subtract(before.dropped)
        assert ledger.trained - before.trained == min(4, differ.sum())
        assert ledger.filtered - before.filtered == (~failed & ~differ).sum()
        assert ledger.filtered_by.get("informative", 0) == ledger.filtered
        assert made["reward_failed"] == failed.sum()
        assert made["surplus"] == max(0, differ.sum() - 4)
        assert factor > 1 or not made["surplus"]
        wanted = samples.fetch_numpy(store, "group_id")[0][::4][differ][:4]
        trained = batch.ref.fetch_numpy(store, "group_id")[0]
        assert np.unique(trained).tolist() == cast("list[int]", wanted.tolist())


def test_shards_of_later_rounds_go_on_counting() -> None:
    driver = ShardDriver(threads=1, task_runs=2)
    assert [str(one) for one in driver.ranges(3)] == ["1/3", "2-3/3"]
    assert [str(one) for one in driver.ranges(3, before=3)] == ["4/6", "5-6/6"]
    assert driver.ranges(0, before=3) == []
    listeners, tracker = Listeners(), ProgressTracker(9)
    tracker.listen(listeners)
    listeners.tell(StepBegan(step=2, shards=1))
    listeners.tell(ShardSampled(step=2, tokens=5))
    listeners.tell(RoundBegan(step=2, shards=2))
    listeners.tell(RoundBegan(step=1, shards=7))  # of a step that is not the one shown
    listeners.tell(ShardSampled(step=2, tokens=5))
    (sampling,) = tracker.progress().phases
    assert (sampling.name, sampling.done, sampling.total) == ("sampling", 2, 3)
    assert sampling.note.startswith("10 tokens, ")


def test_the_steps_page_says_how_it_was_sampled_and_what_was_left_out() -> None:
    names = {"sampling/rounds": 2.0, "sampling/groups": 9.0, "sampling/informative": 5 / 9}
    commit = cast("Commit", SimpleNamespace(metrics=names))
    assert sampled_in_rounds(commit)[-1] == (
        "Sampled in 2 rounds: 9 groups, of which 56% have rewards that differ."
    )
    assert sampled_in_rounds(cast("Commit", SimpleNamespace(metrics={}))) == []
    ledger = Ledger(
        drawn=9, trained=4, filtered=4, filtered_by={"informative": 4}, dropped={"surplus": 1}
    )
    (_, line) = left_out(ledger)
    assert line == "Filtered or dropped so far: informative 4, surplus 1."
    assert left_out(Ledger(drawn=4, trained=4)) == []


def test_a_ledger_has_no_more_reasons_than_filtered_prompts() -> None:
    with pytest.raises(ValueError, match="2 prompts filtered, but by rule"):
        Ledger(drawn=6, trained=4, filtered=2, filtered_by={"informative": 3})
