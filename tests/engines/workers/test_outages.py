"""What is told of a pool that has too few workers: a line every half minute, whoever waits."""

from __future__ import annotations

import time

import pytest

from engines.workers.cluster import EVERY, GAP, Outages, Wait


class Clock:
    """Seconds since 1970, as a test has them."""

    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "time", found.time)
    return found


def wait_for(outages: Outages, clock: Clock, seconds: int, until: float, pool: str = "a") -> None:
    """Two callers wait, looking once a second."""
    for _ in range(seconds):
        for _ in range(2):
            outages.waiting(pool, 0, 1, until - clock.now, 300.0, "a-0: it went")
        clock.now += 1.0


def test_one_line_every_half_minute_for_all_who_wait(clock: Clock) -> None:
    outages, told = Outages(), list[tuple[float, Wait]]()
    outages.say = lambda wait: told.append((clock.now, wait))
    wait_for(outages, clock, 100, until=1300.0)
    assert [when - 1000.0 for when, _ in told] == [EVERY, 2 * EVERY, 3 * EVERY]
    assert {(one.since, one.until, one.there, one.needed) for _, one in told} == {
        (1000.0, 1300.0, 0, 1)
    }
    assert told[0][1].cause == "a-0: it went" and told[0][1].limit == 300.0


def test_an_outage_that_is_over_is_another_one(clock: Clock) -> None:
    outages, told = Outages(), list[Wait]()
    outages.say = told.append
    wait_for(outages, clock, int(EVERY) + 1, until=1300.0)
    outages.over("a")
    wait_for(outages, clock, int(EVERY) + 1, until=1300.0)
    clock.now += GAP + 1.0  # nobody waited, and nobody saw its end
    wait_for(outages, clock, int(EVERY) + 1, until=1400.0)
    since = [one.since for one in told]
    assert since == [1000.0, 1000.0 + EVERY + 1, 1000.0 + 2 * (EVERY + 1) + GAP + 1.0]


def test_a_short_wait_is_not_told(clock: Clock) -> None:
    outages, told = Outages(), list[Wait]()
    outages.say = told.append
    wait_for(outages, clock, int(EVERY) - 1, until=1300.0)
    assert told == []
