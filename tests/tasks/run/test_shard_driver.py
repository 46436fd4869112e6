"""Task runs that drive several shards: which ones, a retry, and the wait for enough of them."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.futures import PrefectConcurrentFuture

from configs.cluster import PoolConfig
from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from tasks.run.run import _shards_of
from tasks.run.shard_driver import ShardDriver, ShardRange, shard_ranges, task_runs


@given(st.integers(1, 5000), st.integers(1, 24))
def test_parts_cover_every_shard_once_in_order(count: int, most: int) -> None:
    found = shard_ranges(1, count, count, most)
    assert [shard for part in found for shard in part] == list(range(1, count + 1))
    assert len(found) == min(count, most)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_task_runs_are_as_many_as_are_scored_at_once() -> None:
    assert task_runs(PoolConfig(workers=1, slots=2), 2) == 8
    assert task_runs(PoolConfig(workers=3, slots=4), 2) == 12
    assert task_runs(PoolConfig(workers=16, slots=4), 2) == 24


def test_task_runs_of_a_step_are_bounded_whatever_its_stages() -> None:
    grpo, remax = (
        load_recipe(GRPOConfig, "tiny", ["cluster.pools.cpu={workers: 64, slots: 4}", *words])
        for words in ([], ["algorithm.advantage={kind: remax}"])
    )
    for config, stages in ((grpo, 2), (remax, 3)):
        assert config.sharded_stages == stages
        driver = _shards_of(config)
        assert stages * len(driver.ranges(4096)) == 48
        assert len(driver.ranges(512, before=4096)) == 8, "a later round"


def test_names_of_parts() -> None:
    assert [str(part) for part in shard_ranges(1, 3, 3, 8)] == ["1/3", "2/3", "3/3"]
    assert str(ShardRange(5, 8, 64)) == "5-8/64"


@pytest.fixture
def driver() -> ShardDriver:
    return ShardDriver(8, task_runs=24)


def test_a_retry_repeats_the_shard_that_failed_and_finds_the_others(driver: ShardDriver) -> None:
    begun: Counter[int] = Counter()
    going_on = threading.Event()

    def one(shard: int) -> str:
        begun[shard] += 1
        if shard == 2 and begun[shard] == 1:
            raise OSError("the worker died")
        if shard == 3:
            assert going_on.wait(10)
        return f"shard {shard}"

    part = ShardRange(1, 3, 3)
    with pytest.raises(OSError, match="the worker died"):
        driver.drive(7, "rollout", part, one)  # while shard 3 goes on
    going_on.set()
    assert driver.drive(7, "rollout", part, one) == ["shard 1", "shard 2", "shard 3"]
    assert begun == {1: 1, 2: 2, 3: 1}
    assert driver.drive(8, "rollout", part, one) == ["shard 1", "shard 2", "shard 3"]
    assert begun == {1: 2, 2: 3, 3: 2}, "another step's shards are others"


def tasks_of(*futures: Future[Any]) -> list[PrefectConcurrentFuture[Any]]:
    class Task:
        def __init__(self, future: Future[Any]) -> None:
            self.future = future

        def add_done_callback(self, call: Any) -> None:
            self.future.add_done_callback(lambda _: call(self))

        def result(self) -> Any:
            return self.future.result()

    return cast("list[PrefectConcurrentFuture[Any]]", [Task(future) for future in futures])


def test_the_wait_ends_with_enough_shards_of_those_asked_for(driver: ShardDriver) -> None:
    one, other = Future[None](), Future[None]()
    returned = threading.Event()

    def wait() -> None:
        driver.wait_for(3, 2, frozenset({2, 3, 4}), tasks_of(one, other))
        returned.set()

    thread = threading.Thread(target=wait)
    thread.start()
    driver.ended(3, 1)  # not among them
    driver.ended(3, 2)
    driver.ended(4, 3)  # another step's
    one.set_result(None)
    assert not returned.wait(0.2)
    driver.ended(3, 4)
    assert returned.wait(10)
    thread.join(10)


class Numbers(frozenset[int]):
    """Shards that count how often they are looked up."""

    looked_up = 0

    def __contains__(self, shard: object) -> bool:
        Numbers.looked_up += 1
        return super().__contains__(shard)


def test_the_end_of_a_shard_is_looked_at_once(driver: ShardDriver) -> None:
    awaited, count = Numbers(range(1, 5001)), 5000
    waiting = threading.Thread(target=driver.wait_for, args=(3, count, awaited, tasks_of()))
    waiting.start()
    for shard in range(1, count + 1):
        driver.ended(3, shard)
        driver.ended(3, shard)  # as an attempt that was tried again says
        if shard == count - 1:
            assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()
    assert Numbers.looked_up == pytest.approx(2 * count, abs=2)


def test_steps_that_are_committed_leave_nothing_behind(driver: ShardDriver) -> None:
    for step in range(1, 301):
        for part in driver.ranges(64):
            assert driver.drive(step, "rollout", part, lambda shard: shard) == list(part)
            for shard in part:
                driver.ended(step, shard)
        driver.committed(step)
    assert driver._under_way == driver._ended == {}


def test_the_wait_raises_what_a_task_raised(driver: ShardDriver) -> None:
    failing = Future[None]()
    failing.set_exception(ValueError("no such column"))
    with pytest.raises(ValueError, match="no such column"):
        driver.wait_for(3, 1, frozenset({1}), tasks_of(Future[None](), failing))
