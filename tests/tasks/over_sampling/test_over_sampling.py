"""Which groups a step trains on, drops and hands on: the decisions, and random schedules of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.prompts.cursor import Cursor
from storage.runs.commit_log import CarriedGroup, Ledger
from tasks.commit import ledger_after
from tasks.over_sampling.drawing import new_groups
from tasks.over_sampling.feature import FEATURE
from tasks.over_sampling.groups import (
    OVER_SAMPLED,
    OVERDUE,
    choose,
    handed_on,
    overdue_groups,
    ranges_apart,
)
from tasks.results import Carried, LeftOver, Prompts, TrainBatch
from tasks.run.features import features_of


def config_of(*words: str) -> GRPOConfig:
    given = [
        "max_staleness=2",
        "algorithm.correction=[{kind: truncate}]",
        "rollout.shards=4",
        "rollout.over_sampling=1.5",
        "rollout.partial_rollout=carry",
        *words,
    ]
    return load_recipe(GRPOConfig, "tiny", given)


def carried(*oldest: int | None, since: int = 1) -> Carried:
    groups = [CarriedGroup(since=since, begun=one is not None, oldest=one) for one in oldest]
    return Carried(groups=tuple(groups))


def test_a_group_is_overdue_when_the_next_step_could_not_train_it() -> None:
    # Step 6 trains version 5, under the bound 2 no token of a version below 3.
    assert overdue_groups(config_of(), 5, carried(2, 3, None, 4)) == {0}
    assert overdue_groups(config_of(), 5, carried(3, None, since=4)) == frozenset()
    most = config_of("rollout.max_carried_steps=1")
    assert overdue_groups(most, 5, carried(4, None, since=4)) == {0, 1}


class Visited(tuple[CarriedGroup, ...]):
    """Groups that count how many of them were looked through."""

    visits = 0

    def __iter__(self) -> Iterator[CarriedGroup]:
        for group in super().__iter__():
            Visited.visits += 1
            yield group


def test_the_samples_of_carried_groups_are_found_without_counting_all_before_them(
    tmp_path: Path,
) -> None:
    begun = [number % 3 != 0 for number in range(300)]
    groups = Visited(CarriedGroup(since=1, begun=one, oldest=1 if one else None) for one in begun)
    rows = [number for number, one in enumerate(begun) if one for _ in range(2)]
    ref = write_batch(Store(f"file://{tmp_path}"), "begun", {"group_id": np.array(rows)})
    given = Carried(begun=ref, groups=groups)
    for number, one in enumerate(begun):
        found = given.begun_of(number)
        assert (found is not None) == one
        if found is not None:
            ids, _ = found.fetch_numpy(Store(f"file://{tmp_path}"), "group_id")
            assert ids.tolist() == [number, number]
    assert Visited.visits == 300


def test_groups_that_the_next_step_waits_for_are_a_range_of_it() -> None:
    config = config_of()
    since = dict.fromkeys(range(1, 100), 4)
    oldest = {number: 2 if number % 2 else None for number in since}
    groups = handed_on(config, 5, since, oldest)
    assert list(groups) == [*range(1, 100, 2), *range(2, 100, 2)]
    due = overdue_groups(config, 5, Carried(groups=tuple(groups.values())))
    assert due == frozenset(range(50))
    assert len(ranges_apart(120, due, 8)) <= 8 + 2


@given(st.integers(1, 200), st.data())
def test_groups_that_are_awaited_are_in_task_runs_of_their_own(
    count: int, data: st.DataObject
) -> None:
    awaited = data.draw(st.sets(st.integers(0, count - 1)))
    found = ranges_apart(count, awaited, 8)
    assert [shard for part in found for shard in part] == list(range(1, count + 1))
    for part in found:
        assert len({shard - 1 in awaited for shard in part}) == 1


def test_due_groups_come_first_then_the_oldest() -> None:
    assert choose({0: 4, 2: 1, 3: 4, 5: 2}, frozenset({3}), 3) == [2, 3, 5]
    assert choose({4: 1, 1: 1}, frozenset(), 1) == [1]
    assert choose({}, frozenset(), 3) == []


def place(position: int, size: int = 100) -> Cursor:
    return Cursor(epoch=0, position=position, seed=0, order="shuffled", size=size, digest="d")


def test_a_step_draws_what_is_missing_and_the_last_one_leaves_nothing() -> None:
    config = config_of("steps=9", "data.epochs=1")
    assert new_groups(config, 1, place(0), 0, True) == 6  # 4 to train, 2 to hand on
    assert new_groups(config, 2, place(6), 2, True) == 4
    assert new_groups(config, 9, place(38), 2, True) == 2
    # The data's last step: 5 rows and 2 carried make one step of 4, and 3 rows are too few for more.
    assert new_groups(config, 5, place(95), 2, True) == 2
    assert new_groups(config, 5, place(90), 2, True) == 4
    assert new_groups(config, 5, place(20), 2, False) == 2  # a guard made the run synchronous
    plain = load_recipe(GRPOConfig, "tiny", ["rollout.over_sampling=1.5", "rollout.shards=4"])
    assert new_groups(plain, 9, place(38), 0, False) == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.shards=2"], "Set rollout.shards = 4"),
        (["max_staleness=0"], "Set max_staleness = 1 or more"),
        (
            ["rollout.partial_rollout=off", "rollout.overdue=wait", "rollout.max_carried_steps=1"],
            "is about carried groups",
        ),
        (["rollout.over_sampling=1", "rollout.max_carried_steps=2"], "is about carried groups"),
        (["rollout.over_sampling=3"], "rollout.over_sampling = 3"),
    ],
)
def test_what_cannot_be_carried_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(*words)


STEPS = 8


@settings(max_examples=300)
@given(
    staleness=st.integers(1, 4),
    factor=st.sampled_from(["1.25", "1.5", "2"]),
    overdue=st.sampled_from(["wait", "drop_and_refill", "cut"]),
    most=st.sampled_from(["null", "1", "2"]),
    data=st.data(),
)
def test_whatever_finishes_when(
    staleness: int, factor: str, overdue: str, most: str, data: st.DataObject
) -> None:
    """No sample is staler than the bound, every prompt is accounted for, and each one that is
    dropped is replaced once."""
    config = config_of(
        f"max_staleness={staleness}",
        f"steps={STEPS}",
        f"rollout.over_sampling={factor}",
        f"rollout.overdue={overdue}",
        f"rollout.max_carried_steps={most}",
    )
    ledger, position, handed_on = Ledger(), 0, list[tuple[int, CarriedGroup]]()
    fates: dict[int, list[str]] = {}
    for step in range(1, STEPS + 1):
        new = new_groups(config, step, place(position, 10_000), len(handed_on), True)
        expected = config.prompts_per_step if step == STEPS else config.groups_at_once
        assert len(handed_on) + new == expected
        rows = [row for row, _ in handed_on] + list(range(position, position + new))
        position += new
        given = Carried(groups=tuple(group for _, group in handed_on))
        due = overdue_groups(config, step, given)
        # The engines hold some version that the gate allows, and draw a token for some groups.
        held = data.draw(st.integers(max(0, step - staleness), step - 1))
        drawn = [data.draw(st.booleans()) for _ in rows]
        before = [group.oldest for group in given.groups] + [None] * new
        oldest = [
            held if was is None and now else was for was, now in zip(before, drawn, strict=True)
        ]
        awaited = due if overdue == "wait" else frozenset[int]()
        order = data.draw(st.permutations(range(len(rows))))
        finished: set[int] = set()
        for number in order:
            if len(finished - awaited) >= config.prompts_per_step - len(awaited):
                break
            finished.add(number)
        finished |= {n for n in order if data.draw(st.integers(0, 9)) == 0}  # while it was cut
        if overdue == "cut":
            finished |= {n for n in due if oldest[n] is not None}
        oldest = [
            held if n in finished | awaited and o is None else o for n, o in enumerate(oldest)
        ]
        ages = {n: cast("int", oldest[n]) for n in finished | awaited}
        others = {n: age for n, age in ages.items() if n not in awaited}
        chosen = [*awaited, *choose(others, due, config.prompts_per_step - len(awaited))]
        assert len(chosen) == config.prompts_per_step
        for number in chosen:
            assert step - 1 - ages[number] <= staleness
            fates.setdefault(rows[number], []).append("trained")
        rest = [n for n in range(len(rows)) if n not in chosen]
        late = [n for n in rest if n in due]
        assert overdue != "wait" or not late
        for number in late:
            fates.setdefault(rows[number], []).append("dropped")
        since = [group.since for group in given.groups] + [step] * new
        handed_on = [
            (
                rows[n],
                CarriedGroup(since=since[n], begun=oldest[n] is not None, oldest=oldest[n]),
            )
            for n in rest
            if n not in late
        ]
        if most != "null":
            assert all(step - group.since < int(most) for _, group in handed_on)
        ledger = ledger_after(
            ledger,
            cast("Prompts", SimpleNamespace(drawn=new, dropped={}, passed_over=0)),
            cast(
                "TrainBatch",
                SimpleNamespace(trained=len(chosen), filtered=0, filtered_by={}, dropped={}),
            ),
            LeftOver(
                carried=Carried(groups=tuple(group for _, group in handed_on)),
                dropped={OVERDUE: len(late)} if late else {},
            ),
        )
    assert handed_on == []
    assert ledger.drawn == position == len(fates)
    assert all(len(fate) == 1 for fate in fates.values())
    dropped: dict[str, Any] = ledger.dropped
    assert ledger.trained == STEPS * config.prompts_per_step
    assert dropped.get(OVERDUE, 0) == ledger.drawn - ledger.trained
    assert OVER_SAMPLED not in dropped


def test_groups_of_a_parent_are_gone_on_with_whatever_the_settings() -> None:
    plain = load_recipe(GRPOConfig, "tiny", [])
    assert features_of(plain) == []
    left: Any = SimpleNamespace(carried=["a group"], last=None)
    assert features_of(plain, left) == features_of(config_of(), left) == [FEATURE]
