"""The table of live workers: one look for all who ask, until the scheduler tells of a change."""

from __future__ import annotations

import threading

from engines.workers.cluster import ListedWorker, WorkerTable, why_gone


class Scheduler:
    """Lists what it has, and counts how often it is asked."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.asked = 0
        self.frozen = threading.Event()
        self.frozen.set()

    def list(self) -> list[ListedWorker]:
        self.asked += 1
        found = [
            ListedWorker(
                name=name,
                address=f"tcp://{name}",
                pools=(name.partition("-")[0],),
                ready=True,
                processing=0,
            )
            for name in self.names
        ]
        self.frozen.wait(10)
        return found


def test_a_thousand_readers_ask_once_and_a_change_makes_them_ask_again() -> None:
    scheduler = Scheduler("rollout-10", "rollout-2", "cpu-0", "stranger-0")
    table = WorkerTable(["rollout", "cpu"], scheduler.list)
    for _ in range(1000):
        assert list(table.look().pools["rollout"]) == ["rollout-2", "rollout-10"]
    assert scheduler.asked == 1
    assert list(table.look().addresses["rollout"].items()) == [
        ("rollout-2", "tcp://rollout-2"),
        ("rollout-10", "tcp://rollout-10"),
    ]
    assert set(table.look().members) == {"cpu-0", "rollout-2", "rollout-10"}
    table.heard((0.0, {"action": "run-function"}))
    assert table.known() is not None
    scheduler.names.remove("rollout-2")
    table.heard((0.0, {"action": "remove-worker", "worker": "tcp://rollout-2"}))
    assert table.known() is None
    assert list(table.look().pools["rollout"]) == ["rollout-10"]
    assert (scheduler.asked, table.name_of("tcp://rollout-2")) == (2, "rollout-2")
    assert table.look(0.0) and scheduler.asked == 3


def test_a_change_during_a_look_is_not_missed() -> None:
    scheduler = Scheduler("rollout-0")
    table = WorkerTable(["rollout"], scheduler.list)
    scheduler.frozen.clear()
    looking = threading.Thread(target=table.look)
    looking.start()
    while scheduler.asked == 0:
        threading.Event().wait(0.01)
    scheduler.names.clear()
    table.heard((0.0, {"action": "remove-worker", "worker": "tcp://rollout-0"}))
    scheduler.frozen.set()
    looking.join(10)
    assert table.known() is None, "what was being listed may be from before"
    assert table.look().members == {}


def test_how_a_worker_was_lost_goes_by_its_silence() -> None:
    table = WorkerTable(["rollout"], Scheduler("rollout-0", "rollout-1").list)
    table.look()
    assert table.cause_of("tcp://rollout-0") is None and table.last_loss("rollout") == ""
    gone = {"action": "remove-worker", "worker": "tcp://rollout-0", "silence": 0.4}
    table.heard((0.0, gone))
    assert table.cause_of("tcp://rollout-0") == why_gone(0.4)
    assert "its process ended" in why_gone(0.4)
    table.heard((0.0, {**gone, "worker": "tcp://rollout-1", "silence": 31.2}))
    assert table.last_loss("rollout") == (
        "rollout-1: nothing was heard of it for 31 s: its host or the link to it is down, or its "
        "process hung"
    )
