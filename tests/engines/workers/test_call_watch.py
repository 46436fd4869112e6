"""One thread that wakes those whose call has to be looked at."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from engines.workers import transport
from engines.workers.transport import LOOK, CallWatch

SOON = 15 * LOOK  # seconds, on a machine with company too


@dataclass(eq=False)
class Call:
    """A call whose deadline is over at `until`."""

    address: str = "tcp://a"
    until: float = float("inf")
    ended: bool = False
    attention: threading.Event = field(default_factory=threading.Event)

    def overdue(self, now: float) -> bool:
        return now >= self.until

    def ended_unheard(self) -> bool:
        return self.ended


class Workers:
    """Those that live; the cluster is lost where there are None."""

    def __init__(self) -> None:
        self.found: Mapping[str, str] | None = {"tcp://a": "cpu", "tcp://b": "cpu"}
        self.asked = 0

    def __call__(self) -> Mapping[str, str]:
        self.asked += 1
        if self.found is None:
            raise ConnectionError("the scheduler is gone")
        return self.found


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def watch(workers: Workers) -> Iterator[CallWatch]:
    made = CallWatch(workers)
    yield made
    made.close()


def test_only_the_call_whose_deadline_is_over_is_woken(watch: CallWatch) -> None:
    late, early = Call(until=time.monotonic() + LOOK / 2), Call()
    with watch.over(late), watch.over(early):
        assert late.attention.wait(SOON)
        assert not early.attention.is_set()


def test_a_call_whose_worker_is_gone_is_woken(watch: CallWatch, workers: Workers) -> None:
    lost, well = Call("tcp://b"), Call("tcp://a")
    with watch.over(lost), watch.over(well):
        time.sleep(1.25 * LOOK)
        assert not lost.attention.is_set()
        workers.found = {"tcp://a": "cpu"}
        assert lost.attention.wait(SOON)
        assert not well.attention.is_set()


def test_a_call_that_ended_without_a_word_is_woken(watch: CallWatch) -> None:
    unheard, well = Call(), Call()
    with watch.over(unheard), watch.over(well):
        unheard.ended = True
        assert unheard.attention.wait(SOON)
        assert not well.attention.is_set()


def test_all_are_woken_when_the_cluster_is_lost(watch: CallWatch, workers: Workers) -> None:
    calls = [Call("tcp://a"), Call("tcp://b")]
    workers.found = None
    with watch.over(calls[0]), watch.over(calls[1]):
        assert all(call.attention.wait(SOON) for call in calls)


def test_who_lives_is_looked_up_once_for_all_calls(watch: CallWatch, workers: Workers) -> None:
    calls = [Call() for _ in range(50)]
    for call in calls:
        watch.over(call).__enter__()
    began = time.monotonic()
    time.sleep(2.5 * LOOK)
    assert workers.asked <= (time.monotonic() - began) / LOOK + 2


def test_a_call_that_has_ended_is_not_woken(watch: CallWatch) -> None:
    ended = Call(until=0.0)
    with watch.over(Call()):
        with watch.over(ended):
            pass
        ended.attention.clear()
        time.sleep(1.5 * LOOK)
        assert not ended.attention.is_set()


def test_closing_wakes_everyone(watch: CallWatch) -> None:
    call = Call()
    with watch.over(call):
        watch.close()
        assert call.attention.wait(SOON)


def test_who_is_told_that_something_happened_looks_at_once(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "LOOK", 600.0)
    watch, lost = CallWatch(workers), Call("tcp://b")
    with watch.over(lost):
        workers.found = {"tcp://a": "cpu"}
        watch.look_now()
        assert lost.attention.wait(SOON)
    watch.close()
