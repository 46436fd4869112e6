"""One writer per run: refusal, takeover, fencing."""

import contextlib
import subprocess
import sys
import threading
import time

import psutil
import pytest

from storage.objects import documents
from storage.objects.errors import StoreUnavailable
from storage.runs import run_lease
from storage.runs.run_lease import (
    FORMAT,
    RUN_OUT,
    LeaseHeld,
    LeaseHolder,
    LeaseLost,
    LeaseWatch,
    RunLease,
    _host,
    acquire_patiently,
)
from storage.runs.run_store import RunStore


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lease_document(holder: LeaseHolder) -> bytes:
    return documents.encode(FORMAT, holder.model_dump(mode="json"))


def test_a_second_writer_is_refused_by_name(run: RunStore, clock: Clock) -> None:
    lease = RunLease.acquire(run, "grpo-first", ttl=60, clock=clock)
    assert lease.epoch == 1
    clock.now += 59
    with pytest.raises(
        LeaseHeld,
        match=r"Run run is being written by grpo-first \(process \d+ on .*for the next 1 s",
    ):
        RunLease.acquire(run, "grpo-second", ttl=60, clock=clock)
    lease.check()


def test_renewing_holds_on(run: RunStore, clock: Clock) -> None:
    lease = RunLease.acquire(run, "first", ttl=60, clock=clock)
    for _ in range(5):
        clock.now += 50
        lease.renew()
    with pytest.raises(LeaseHeld):
        RunLease.acquire(run, "second", ttl=60, clock=clock)


def test_a_released_run_is_free_at_once(run: RunStore, clock: Clock) -> None:
    first = RunLease.acquire(run, "first", ttl=60, clock=clock)
    first.release()
    first.release()
    assert RunLease.acquire(run, "second", ttl=60, clock=clock).epoch == 2
    with pytest.raises(LeaseLost, match="was released"):
        first.check()


def test_an_expired_lease_is_taken_over_and_fenced(run: RunStore, clock: Clock) -> None:
    first = RunLease.acquire(run, "first", ttl=60, clock=clock)
    clock.now += 65  # within the grace
    with pytest.raises(LeaseHeld):
        RunLease.acquire(run, "second", ttl=60, clock=clock)
    clock.now += 2
    second = RunLease.acquire(run, "second", ttl=60, clock=clock)
    assert second.epoch == first.epoch + 1
    for use in (first.check, first.renew, first.check):
        with pytest.raises(
            LeaseLost, match=r"was taken over by second \(epoch 2\).*must not write"
        ):
            use()
    first.release()  # leaves the second's lease alone
    second.check()


def test_a_lease_that_ran_out_does_not_pass(run: RunStore, clock: Clock) -> None:
    lease = RunLease.acquire(run, "first", ttl=60, clock=clock)
    clock.now += 61
    with pytest.raises(LeaseLost, match="has run out"):
        lease.check()


def test_a_dead_process_is_not_waited_for(run: RunStore, clock: Clock) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        started = psutil.Process(process.pid).create_time()
    holder = LeaseHolder(
        owner="dead", host=_host(), pid=process.pid, started=started, nonce="n", epoch=7,
        ttl=60, expires=clock.now + 60,
    )  # fmt: skip
    run.store.write(run.lease_key, lease_document(holder))
    assert RunLease.acquire(run, "next", ttl=60, clock=clock).epoch == 8
    elsewhere = holder.model_copy(update={"host": "another machine", "epoch": 9})
    run.store.write(run.lease_key, lease_document(elsewhere))
    with pytest.raises(LeaseHeld, match="another machine"):
        RunLease.acquire(run, "next", ttl=60, clock=clock)


def test_a_reused_pid_is_another_process(run: RunStore, clock: Clock) -> None:
    alive = psutil.Process()
    holder = LeaseHolder(
        owner="old", host=_host(), pid=alive.pid, started=alive.create_time() - 500, nonce="n",
        epoch=1, ttl=60, expires=clock.now + 60,
    )  # fmt: skip
    run.store.write(run.lease_key, lease_document(holder))
    assert RunLease.acquire(run, "next", ttl=60, clock=clock).epoch == 2


def test_of_many_one_gets_the_run(run: RunStore) -> None:
    held: list[int] = []
    start = threading.Barrier(6)

    def work(number: int) -> None:
        start.wait()
        with contextlib.suppress(LeaseHeld):
            held.append(RunLease.acquire(run, f"writer {number}", ttl=60).epoch)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held == [1]


def test_a_context_renews_itself_and_lets_go(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLease.acquire(run, "first", ttl=0.6) as lease:
        tries = 0
        replace = type(run.store).replace

        def failing_once(*args: object) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise StoreUnavailable("for a moment")
            replace(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(type(run.store), "replace", failing_once)
        time.sleep(1.5)
        lease.check()
        assert tries >= 4
    assert RunLease.acquire(run, "second", ttl=60).epoch == 2
    assert "run-lease" not in [thread.name for thread in threading.enumerate()]


def test_who_takes_over_knows_whether_the_holder_before_died(run: RunStore, clock: Clock) -> None:
    first = RunLease.acquire(run, "first", ttl=60, clock=clock)
    assert first.died is None
    clock.now += 20
    first.renew()
    clock.now += 1000  # it is not heard of again
    second = RunLease.acquire(run, "second", ttl=60, clock=clock)
    assert second.died is not None
    assert (second.died.owner, second.died.last_seen) == ("first", 1020.0)
    second.release()
    third = RunLease.acquire(run, "third", ttl=60, clock=clock)
    assert third.died is None, "the second ended in order"


class World:
    """Two machines: what the second one sees while it waits, its clock so many seconds ahead."""

    def __init__(self, run: RunStore, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
        self.seconds, self.dies = 0.0, 0.0
        self._ahead = ahead
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(run_lease, "_host", lambda: "another machine")
            self.first = RunLease.acquire(run, "first", ttl=60, clock=lambda: 1e6 + self.seconds)
        self._watch = LeaseWatch(run, lambda: 1e6 + self.seconds + ahead, lambda: self.seconds)
        self._run = run

    def _sleep(self, seconds: float) -> None:
        self.seconds += seconds
        assert self.seconds < 300, "it waits for ever"
        if self.seconds <= self.dies and self.seconds % 20 == 0:
            self.first.renew()

    def second(self) -> RunLease:
        return acquire_patiently(self._run, "second", watch=self._watch, sleep=self._sleep)


@pytest.mark.parametrize("ahead", [0.0, 300.0, -300.0])
@pytest.mark.parametrize("dies", [0.0, 50.0, 60.0])
def test_a_holder_on_another_machine_is_waited_for_by_what_is_seen(
    run: RunStore, monkeypatch: pytest.MonkeyPatch, ahead: float, dies: float
) -> None:
    """Whatever the clocks say: until it has been silent for its ttl, and no longer."""
    world = World(run, monkeypatch, ahead)
    world.dies = dies
    assert world.second().epoch == 2
    last = dies - dies % 20
    assert last + 66 < world.seconds < last + 70


@pytest.mark.parametrize("ahead", [0.0, 300.0, -300.0])
def test_one_that_lives_is_left_alone(
    run: RunStore, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    world = World(run, monkeypatch, ahead)
    world.dies = 1000.0
    with pytest.raises(LeaseHeld, match=r"is being written by first .*renews its lease"):
        world.second()
    assert RUN_OUT <= world.seconds < RUN_OUT + 21
    world.first.renew()


def test_one_that_ran_out_long_ago_or_let_go_is_not_waited_for(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(run, monkeypatch, ahead=2 * 3600.0)
    assert world.second().epoch == 2 and world.seconds == 0
    run.store.delete([run.lease_key])
    world = World(run, monkeypatch, ahead=-300.0)
    world.first.release()
    assert world.second().epoch == 2 and world.seconds == 0


def test_who_takes_a_run_at_once_watches_a_lease_that_ran_out_by_the_clock_alone(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(run, monkeypatch, ahead=300.0)

    def take() -> RunLease:
        return RunLease.acquire(
            run, "second", clock=lambda: 1e6 + world.seconds + 300.0, sleep=world._sleep
        )

    world.dies = 1000.0
    with pytest.raises(LeaseHeld, match="renews its lease, though by the clock here it ran out"):
        take()
    assert world.seconds == 20
    world.first.renew()
    world.dies = 0.0
    assert take().epoch == 2
    assert world.seconds == 50, "half of the ttl without a renewal"
