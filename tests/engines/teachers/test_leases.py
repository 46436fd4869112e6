"""Places: who has one, who loses it, and which flow of a run may ask."""

from __future__ import annotations

import pytest

from engines.teachers.messages import PlaceLease, ServiceRefused
from engines.teachers.service import CONFLICT, FULL, GONE, Places
from tests.engines.teachers.test_fair_queue import Clock


def lease(run: str, epoch: int = 1, store: str = "file:///s") -> PlaceLease:
    return PlaceLease(run=run, store=store, epoch=epoch, tokenizer="t", rows=7)


def test_a_run_that_is_not_heard_of_frees_its_place() -> None:
    clock = Clock()
    leases = Places(2, 60.0, clock)
    assert leases.renew(lease("a"))
    assert leases.renew(lease("b"))
    with pytest.raises(
        ServiceRefused, match=r"places = 2, all taken by other runs \(a, b\)"
    ) as full:
        leases.renew(lease("c"))
    assert full.value.status == FULL
    clock.now = 50.0
    assert not leases.renew(lease("a"))
    clock.now = 61.0
    assert leases.ended() == ["file:///s/b"]
    assert leases.renew(lease("c"))
    with pytest.raises(ServiceRefused) as gone:
        leases.place_of("file:///s/b", 1)
    assert gone.value.status == GONE
    leases.place_of("file:///s/a", 1)  # asking keeps a place too
    clock.now = 120.0
    assert leases.ended() == []


def test_a_newer_flow_of_a_run_takes_its_place_and_the_older_one_is_refused() -> None:
    leases = Places(1, 60.0, Clock())
    leases.renew(lease("a", 1)) and leases.renew(lease("a", 2))
    for ask in (lambda: leases.renew(lease("a", 1)), lambda: leases.place_of("file:///s/a", 1)):
        with pytest.raises(
            ServiceRefused, match="a flow with epoch 2 has taken the run a over"
        ) as stale:
            ask()
        assert stale.value.status == CONFLICT
    assert not leases.release("file:///s/a", 1)
    assert leases.release("file:///s/a", 2)
    assert leases.all == {}


def test_runs_of_one_name_in_two_stores_are_two() -> None:
    leases = Places(2, 60.0, Clock())
    assert leases.renew(lease("a")) and leases.renew(lease("a", store="file:///t"))
    assert len(leases.all) == 2
