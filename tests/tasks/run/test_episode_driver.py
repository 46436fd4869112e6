"""How many episodes are played at once: a limit, and what moves it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs.episodes import EpisodesConfig
from engines.failures import CallCancelled, InfrastructureError, NoWorkers, WorkerLost
from tasks.run import episode_driver
from tasks.run.episode_driver import AtOnceLimit, EpisodeDriver


def room_for(most: int, cancelled: threading.Event | None = None) -> EpisodeDriver:
    """Room for so many, as a run has it."""
    settings = EpisodesConfig.model_validate(
        {"environment": {"kind": "class", "path": "some.py:Game"}, "at_once": most}
    )
    return EpisodeDriver(settings, cancelled or threading.Event())


def test_no_more_are_played_at_once_than_the_limit() -> None:
    """256 episodes in shards of different sizes, each asleep for a moment."""
    room = room_for(16)
    lock = threading.Lock()
    held, most = [0], [0]

    def play(count: int) -> int:
        with room.held(count):
            with lock:
                held[0] += count
                most[0] = max(most[0], held[0])
            time.sleep(0.005)
            with lock:
                held[0] -= count
        return count

    sizes = [1, 4, 8, 3] * 16
    with ThreadPoolExecutor(len(sizes)) as threads:
        assert sum(threads.map(play, sizes)) == 256
    assert 8 <= most[0] <= 16


def test_a_shard_larger_than_the_limit_is_played_alone() -> None:
    room = room_for(2)
    entered = threading.Event()

    def play() -> None:
        with room.held(1):
            entered.set()

    with ThreadPoolExecutor(1) as threads:
        with room.held(5):
            waits = threads.submit(play)
            assert not entered.wait(0.1)
        waits.result(30)
    assert entered.is_set()


def test_a_run_that_ends_ends_the_wait_for_room() -> None:
    cancelled = threading.Event()
    room = room_for(1, cancelled)
    cancelled.set()
    with room.held(1), pytest.raises(CallCancelled), room.held(1):
        pass


class Engine:
    """An engine with room for 40 episodes in its cache, in which a turn takes a moment for each."""

    room = 40

    def use(self, held: int) -> float:
        """Share of the cache in use while so many are played."""
        return min(held / self.room, 1.0)


def played(limit: AtOnceLimit, turns: int) -> list[int]:
    """How many are played at each of some turns, where always more wait."""
    found = []
    for _ in range(turns):
        held = max(int(limit.limit), 1)
        found.append(held)
        limit.tell(Engine().use(held), held)
    return found


def test_the_number_at_once_comes_to_what_the_cache_holds() -> None:
    """From far above it is there within a few rounds, and swings between 3/4 of the edge and it."""
    found = played(AtOnceLimit(least=2, most=256), 6000)
    assert found[0] == 256
    assert found[1] == 192
    late = found[3000:]
    assert max(late) == 36, "at nine tenths it goes back"
    assert min(late) == 27
    assert sum(late) / len(late) > 30


def test_one_full_cache_is_one_decrease() -> None:
    """All turns that were under way see the same full cache."""
    limit = AtOnceLimit(least=2, most=100)
    for _ in range(100):
        limit.tell(1.0, 100)
    assert limit.limit == 75
    limit.tell(1.0, 75)
    assert limit.limit == 56.25


def test_bounds_hold_and_an_engine_that_says_nothing_moves_nothing() -> None:
    limit = AtOnceLimit(least=3, most=8)
    for _ in range(1000):
        limit.tell(0.1, 8)
    assert limit.limit == 8
    for _ in range(1000):
        limit.tell(None, 8)
    assert limit.limit == 8
    for _ in range(1000):
        limit.tell(1.0, max(int(limit.limit), 1))
    assert limit.limit == 3
    limit.tell(0.1, 2)
    assert limit.limit == 3, "fewer are played than may be, so the limit is not what bounds them"
    limit.tell(0.1, 3)
    assert limit.limit == 3 + 1 / 3


def test_a_limit_that_is_lowered_holds_those_that_wait() -> None:
    """Those that are played go on; the next comes when fewer than the limit are left."""
    room = EpisodeDriver(
        EpisodesConfig.model_validate(
            {
                "environment": {"kind": "class", "path": "some.py:Game"},
                "drive": "apart",
                "at_once": 4,
            }
        ),
        threading.Event(),
    )
    with room.held(1), room.held(1):
        with room.held(1), room.held(1):
            room.told(1.0)
            assert room.at_once == 3
        entered = threading.Event()

        def play() -> None:
            with room.held(2):
                entered.set()

        with ThreadPoolExecutor(1) as threads:
            waits = threads.submit(play)
            assert not entered.wait(0.2), "4 would be played"
            room._limit.limit = 4.0
            waits.result(30)


def test_an_episode_that_lost_its_engine_goes_on_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has tries of its own; where there are no workers at all there is nothing to try."""
    monkeypatch.setattr(episode_driver, "backoff", lambda tries: 0.01 * tries)
    tries: Counter[int] = Counter()

    def play(number: int) -> int:
        tries[number] += 1
        if tries[number] < number:
            raise WorkerLost("rollout-0", "it was killed")
        return number

    room = room_for(8)
    assert room.drive(1, "rollout 1", 4, play) == [1, 2, 3, 4]
    assert tries == {1: 1, 2: 2, 3: 3, 4: 4}

    def failing(error: InfrastructureError) -> int:
        tried: list[int] = []

        def play(number: int) -> int:
            tried.append(number)
            raise error

        with pytest.raises(type(error)):
            room.drive(1, f"rollout of {error}", 1, play)
        return len(tried)

    assert failing(NoWorkers("rollout", 1.0)) == 1
    assert failing(WorkerLost("rollout-0", "it was killed again")) == 4
