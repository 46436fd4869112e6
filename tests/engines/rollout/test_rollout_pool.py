"""What the flow's view of the rollout engines remembers of the steps behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engines.failures import WeightMismatch
from engines.rollout.contract import RolloutRequest, SyncReport
from engines.rollout.rollout_pool import RolloutPool
from engines.rollout.weight_probe import CheckedLoad, Probe
from engines.workers.devices import DeviceTurns
from engines.workers.engine import Call, CallId
from storage.runs.weights import WeightsRef

WORKERS = {"rollout-0": "tcp://a:1", "rollout-1": "tcp://b:1"}
PROBE = Probe(tokens=[[1, 2]], prompt_lengths=[1], expected=lambda: [[0.0]])


class Pool(RolloutPool):
    """Two workers that load whatever they are told to."""

    def live(self) -> dict[str, str]:
        return WORKERS

    def submit_to_all(self, workers: Any, call: Call[Any]) -> Any:
        return dict.fromkeys(workers)

    def _checked(self, name: str, address: str, found: Any) -> CheckedLoad:
        return CheckedLoad(report=cast("SyncReport", None), logprob_error=0.0)


@pytest.fixture
def pool() -> Pool:
    cluster: Any = SimpleNamespace(
        devices=DeviceTurns(False),
        config=SimpleNamespace(pools={"gpu": SimpleNamespace(slots=1)}),
        table=SimpleNamespace(outdate=lambda: None),
        known_workers=lambda pool: None,
    )
    made = Pool(
        cluster,
        "gpu",
        cast("Any", None),
        run="run",
        epoch=1,
        deadline=1.0,
        start_timeout=1.0,
        tolerance=0.1,
    )
    made._ready = {address: name for name, address in WORKERS.items()}
    return made


def weights(version: int) -> WeightsRef:
    return WeightsRef(version=version, key=f"run/weights/{version}", digest=f"{version}", nbytes=1)


def request(step: int, shard: int) -> RolloutRequest:
    return cast("RolloutRequest", SimpleNamespace(step=step, shard=shard, may_be_cut=True))


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_what_no_later_step_asks_for_is_forgotten(pool: Pool, max_staleness: int) -> None:
    """A thousand steps, of which max_staleness + 1 are under way at once."""
    pool.sync(weights(0), PROBE)
    for step in range(1, 1001):
        for ahead in range(max_staleness + 1):
            pool.cut(step + ahead, keep=[2])
        pool.sync(weights(step), PROBE)
        oldest = max(step - max_staleness, 0)
        pool.committed(step, oldest)
        assert len(pool.synced) <= max_staleness + 1
        assert len(pool._cut) <= max_staleness
        # What a later step may ask for is there.
        assert sorted(pool.synced) == list(range(oldest, step + 1))
        assert not pool._is_cut(request(step + max_staleness + 1, 1))
        for ahead in range(1, max_staleness + 1):
            assert pool._is_cut(request(step + ahead, 1))
            assert not pool._is_cut(request(step + ahead, 2))


def test_a_worker_that_is_gone_is_not_counted(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engines.rollout.rollout_pool.control",
        lambda cluster, address, call, timeout: SimpleNamespace(tokens=7),
    )
    assert pool.tokens() == {"rollout-0": 7, "rollout-1": 7}
    pool.forget(WORKERS["rollout-0"])
    assert pool.tokens() == {"rollout-1": 7}


def test_without_a_probe_the_digest_alone_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An opponent's version, which no trainer holds; its calls are not those of the policy's."""
    cluster: Any = SimpleNamespace(
        devices=DeviceTurns(False),
        config=SimpleNamespace(pools={"gpu": SimpleNamespace(slots=1)}),
        table=SimpleNamespace(outdate=lambda: None),
        known_workers=lambda pool: None,
    )
    given = cast("Any", None)
    times = {"deadline": 1.0, "start_timeout": 1.0, "tolerance": 0.1}
    pool = RolloutPool(cluster, "gpu", given, run="run", epoch=1, role="opponent", **times)
    pool._ready = {address: name for name, address in WORKERS.items()}
    calls: list[tuple[str, str]] = []
    digests = iter(["5", "5", "6", "5"])

    def report() -> SyncReport:
        numbers = {"tensors": 1, "nbytes": 1, "seconds": 0.0, "load_seconds": 0.0}
        return SyncReport(version=5, digest=next(digests), **numbers)  # type: ignore[arg-type]

    def submit_to_all(workers: Any, call: Call[Any]) -> Any:
        assert call.id is not None and call.arguments["token_ids"] == []
        calls.append((call.method, call.id.call))
        return {name: (report(), []) for name in workers}

    monkeypatch.setattr(pool, "live", lambda: WORKERS)
    monkeypatch.setattr(pool, "submit_to_all", submit_to_all)
    loaded = pool.sync(weights(5), probe=None)
    assert sorted(loaded) == sorted(WORKERS)
    assert calls == [("sync_and_score", "opponent-sync-5")]  # one message for all
    with pytest.raises(WeightMismatch, match="reports version 5 with digest 6"):
        pool.sync(weights(5), probe=None)


def test_each_offer_of_one_version_is_taken_up(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task is tried again, and the trainer waits for engines that had loaded it already."""
    ids: list[CallId] = []

    def submit_to_all(workers: Any, call: Call[Any]) -> Any:
        assert call.id is not None
        ids.append(call.id)
        return dict.fromkeys(workers)

    monkeypatch.setattr(Pool, "_receivers", 2)  # of each engine
    monkeypatch.setattr(pool, "submit_to_all", submit_to_all)
    receivers: list[int] = []

    def offered(count: int) -> Any:
        receivers.append(count)
        return SimpleNamespace()

    for offers in (offered, offered, None, None):
        pool.sync(weights(3), PROBE, offers)
    assert receivers == [4, 4]
    assert len({*ids[:3]}) == 3
    assert ids[2] == ids[3], "a worker makes a call with no offer once"
