"""The rollout engines of a run, and which policy version each of them really holds.

Weights are set for the pool; an engine loads them when it is next used, or at once in `sync`. Each
load is checked (engines/rollout/weight_probe.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, Literal, ParamSpec

from engines.failures import InfrastructureError, WorkerLost
from engines.rollout.contract import (
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    Sampler,
    SyncMode,
    SyncReport,
)
from engines.rollout.weight_probe import CheckedLoad, Probe, check_report, check_scores
from engines.weight_transfer.offer import TransferOffer
from engines.workers.calls import control, stop
from engines.workers.cluster import Cluster
from engines.workers.engine import Call, CallId, EngineSpec, Moved
from engines.workers.pool import Assignment, EnginePool
from storage.runs.weights import WeightsRef

logger = logging.getLogger(__name__)

P = ParamSpec("P")  # what a method takes

CUT_AT_ONCE = 32  # engines that are told at a time to end a step's shards
LOOKED_AT = 8  # engines that are asked at a time how far they are


class RolloutPool(EnginePool[Sampler]):
    """Engines that sample, each at the current policy version before it gets a shard."""

    def __init__(
        self,
        cluster: Cluster,
        pool: str,
        spec: EngineSpec[Sampler],
        *,
        run: str,
        epoch: int,
        deadline: float,
        start_timeout: float,
        tolerance: float,
        mode: SyncMode = "idle",
        sleep_level: int = 2,
        cancel: threading.Event | None = None,
        role: Literal["rollout", "opponent", "evaluation"] = "rollout",
        at_once: int | None = None,
    ) -> None:
        """`mode`: what becomes of shards in flight when new weights are loaded.

        `sleep_level`: rollout.sleep_level. `role`: opponents hold one version all the time. `at_once`
        as in EnginePool.
        """
        super().__init__(
            cluster,
            pool,
            role,
            spec,
            deadline=deadline,
            start_timeout=start_timeout,
            cancel=cancel,
            at_once=at_once,
        )
        self.run = run
        self.epoch = epoch
        self.tolerance = tolerance  # nats per token
        self.mode = mode
        self.sleep_level = sleep_level
        self._weights: WeightsRef | None = None
        # By number, the versions that were current and that a step may still be sampled with.
        self.synced: dict[int, WeightsRef] = {}
        self._probe: Probe | None = None
        self._loaded: dict[str, str] = {}  # address -> digest of the weights it holds
        self._sampling: dict[str, tuple[RolloutRequest, str]] = {}  # by out_key: with its address
        # Step that is not committed -> its shards that do not end as they stand.
        self._cut: dict[int, frozenset[int]] = {}
        self._drawn: dict[str, int] = {}  # worker -> tokens, at the last look at it
        self._looks = 0

    @property
    def weights(self) -> WeightsRef:
        """The policy version that samples now."""
        assert self._weights is not None, "no weights were synced"
        return self._weights

    def forget(self, address: str) -> None:
        """As in EnginePool; the weights are loaded anew too."""
        super().forget(address)
        self._loaded.pop(address, None)

    def generate(self, request: RolloutRequest, assignment: Assignment) -> RolloutResult | None:
        """Sample a shard on one of the engines; None where it was cut before one took it."""
        call = f"generate-{request.shard}-{request.attempt}-{request.out_key}"  # a turn has its own
        call_id = self._call_id(request.step, call)
        turn = (request.step, request.shard)
        with (
            self.cluster.devices.held(self, self.cancel),
            self.next_free(assignment, turn, lambda: self._is_cut(request)) as worker,
        ):
            if worker is None:
                return None
            name, address = worker
            with self._lock:
                if self._is_cut(request):
                    return None
                self._sampling[request.out_key] = (request, address)
            try:
                request_of_worker = dataclasses.replace(request, worker=name)
                return self.submit(
                    address,
                    Call.of(self.role, Sampler.generate, call_id, request=request_of_worker),
                )
            finally:
                with self._lock:
                    del self._sampling[request.out_key]

    def cut(self, step: int, keep: Collection[int] = ()) -> None:
        """End a step's shards as they stand, those that come later too, but not the shards `keep`.

        Those on an engine return what they have, those that wait for one are not begun.
        """
        with self._lock:
            self._cut[step] = frozenset(keep)
            on: dict[str, list[str]] = {}
            for request, address in self._sampling.values():
                if self._is_cut(request):
                    on.setdefault(address, []).append(request.out_key)
        self._slots.wake()

        def end(address: str, keys: list[str]) -> None:
            # One that is gone has no shard to end: it is tried again, and then not begun.
            with contextlib.suppress(InfrastructureError, TimeoutError):
                call = Call.of(self.role, Sampler.cut, None, out_keys=keys)
                control(self.cluster, address, call)

        with ThreadPoolExecutor(CUT_AT_ONCE) as threads:
            list(threads.map(end, on.keys(), on.values()))

    def committed(self, step: int, oldest: int) -> None:
        """A step is committed: forget what neither it nor those before it ask for again.

        oldest: the first version with which a later step may be sampled.
        """
        with self._lock:
            for before in [number for number in self._cut if number <= step]:
                del self._cut[before]
            for version in [number for number in self.synced if number < oldest]:
                del self.synced[version]

    def _is_cut(self, request: RolloutRequest) -> bool:
        cut = self._cut.get(request.step)
        return request.may_be_cut and cut is not None and request.shard not in cut

    def sync(
        self,
        weights: WeightsRef,
        probe: Probe | None,
        offered: Callable[[int], TransferOffer] | None = None,
    ) -> dict[str, CheckedLoad]:
        """Load a version into every live engine; returns worker name -> report.

        probe: None where no trainer holds the version: the digest alone is compared then. offered:
        has a trainer send it to so many processes; engines that are used later load it from the
        store.

        A worker that fails for infrastructure's sake loads the version when it is next used. If all
        fail, the last failure is raised.
        """
        self.use(weights, probe)
        with self.cluster.devices.held(self, self.cancel):
            return self._sync_all(offered)

    def use(self, weights: WeightsRef, probe: Probe | None = None) -> None:
        """Have every engine load a version when it is next used."""
        self._weights, self._probe = weights, probe
        with self._lock:
            self.synced[weights.version] = weights

    def _sync_all(self, offered: Callable[[int], TransferOffer] | None) -> dict[str, CheckedLoad]:
        workers = self.live()
        failures: list[InfrastructureError] = []

        def built(name: str) -> None:
            try:
                super(RolloutPool, self).ready(name, workers[name])
            except InfrastructureError as error:
                failures.append(error)

        new = [name for name, address in workers.items() if address not in self._ready]
        if new:
            with ThreadPoolExecutor(len(new)) as threads:
                list(threads.map(built, new))
        ready = {name: address for name, address in workers.items() if address in self._ready}
        reports: dict[str, CheckedLoad] = {}
        offer = offered(len(ready) * self._receivers) if offered is not None and ready else None
        for name, loaded in self.submit_to_all(ready, self._load_call(offer)).items():
            if isinstance(loaded, InfrastructureError):
                failures.append(loaded)
            else:
                reports[name] = self._checked(name, workers[name], loaded)
        if not reports:
            raise failures[-1]
        return reports

    def ready(self, name: str, address: str) -> None:
        """Build the worker's engine unless it is there, and bring it to the current weights."""
        super().ready(name, address)
        if self._weights is not None and self._loaded.get(address) != self.weights.digest:
            with self._locks[address]:
                if self._loaded.get(address) != self.weights.digest:
                    self._load(name, address)

    def start(self) -> list[str]:
        """As in EnginePool; where roles share devices, once they are these engines'."""
        with self.cluster.devices.held(self, self.cancel):
            return super().start()

    def sleep(self, cancel: threading.Event | None = None) -> Moved:
        """Have every engine give its device's memory back; one that cannot is ended."""
        found = self._aside(Sampler.sleep, level=self.sleep_level)
        for address, moved in found.items():
            if isinstance(moved, InfrastructureError):  # it is closed, or its worker is gone
                logger.warning("An engine failed while it went to sleep: %s", moved)
                self._end(address)
        return _together(found)

    def wake(self, cancel: threading.Event | None = None) -> Moved:
        """Give every engine its memory again; one that cannot take it is built when it is next used.

        One whose weights are not attested to be those it went to sleep with loads them anew then.
        """
        self._loaded.clear()
        found = self._aside(Sampler.wake)
        for address, moved in found.items():
            if isinstance(moved, InfrastructureError):
                logger.warning("An engine failed while it woke: %s", moved)
            elif moved.digest:
                self._loaded[address] = moved.digest
        return _together(found)

    def _aside(
        self,
        method: Callable[Concatenate[Sampler, P], Moved],
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> dict[str, Moved | InfrastructureError]:
        """Something on every engine that was built, at once; by address."""
        ready = {name: address for address, name in self._ready.items()}
        call_id = CallId(run=self.run, epoch=self.epoch, step=0, call=uuid.uuid4().hex)
        call = Call.of(self.role, method, call_id, *nothing, **arguments)
        results = self.submit_to_all(ready, call)
        return {ready[name]: moved for name, moved in results.items()}

    def _end(self, address: str) -> None:
        """See to it that a worker has no engine; kill it if it cannot be asked."""
        try:
            stop(self.cluster, address, self.role)
        except WorkerLost:
            return
        except (InfrastructureError, TimeoutError):
            self.cluster.kill([address])

    def tokens(self, timeout: float = 1.0) -> dict[str, int]:
        """Worker -> tokens that its engine has drawn since it was built, those in flight among them.

        For a look from outside: asks at most LOOKED_AT workers, the others stay as they were at an
        earlier look. A worker that does not answer within `timeout` seconds is left out, and so is
        one that is gone.
        """
        ready = list(self._ready.items())
        first = self._looks * LOOKED_AT % max(1, len(ready))
        self._looks += 1
        for address, name in (ready[first:] + ready[:first])[:LOOKED_AT]:
            with contextlib.suppress(InfrastructureError, TimeoutError):
                call = Call.of(self.role, Sampler.status, None)
                self._drawn[name] = control(self.cluster, address, call, timeout=timeout).tokens
        there = set(self._ready.values())
        self._drawn = {name: count for name, count in self._drawn.items() if name in there}
        return dict(self._drawn)

    def _load(self, name: str, address: str) -> CheckedLoad:
        # Shards in flight may fill all slots.
        return self._checked(name, address, self.submit(address, self._load_call(), slot=False))

    @property
    def _receivers(self) -> int:
        """Processes of an engine that take its weights."""
        payload = self.spec.payload
        assert isinstance(payload, RolloutSpec)
        return payload.rollout.processes

    def _load_call(
        self, offer: TransferOffer | None = None
    ) -> Call[tuple[SyncReport, list[list[float]]]]:
        """The load of the current weights; what is scored is the probe, if there is one.

        An engine that has loaded them takes up another offer all the same: its trainer waits for it.
        """
        probe = self._probe
        digest = self.weights.digest.rpartition(":")[
            2
        ]  # a version may be made anew with other bits
        taking = "" if offer is None else f"-{uuid.uuid4().hex[:8]}"
        return Call.of(
            self.role,
            Sampler.sync_and_score,
            self._call_id(self.weights.version, f"sync-{digest[:12]}{taking}"),
            weights=self.weights,
            mode=self.mode,
            token_ids=[] if probe is None else probe.tokens,
            prompt_lengths=[] if probe is None else probe.prompt_lengths,
            offer=offer,
        )

    def _checked(
        self, name: str, address: str, loaded: tuple[SyncReport, list[list[float]]]
    ) -> CheckedLoad:
        """What an engine's load returned, if it holds the weights now; else WeightMismatch."""
        weights, probe = self.weights, self._probe
        report, scores = loaded
        check_report(name, report, weights)
        error = math.nan
        if probe is not None:
            error = check_scores(name, weights.version, scores, probe, self.tolerance)
        self._loaded[address] = weights.digest
        return CheckedLoad(report=report, logprob_error=error)

    def _call_id(self, step: int, call: str) -> CallId:
        return CallId(run=self.run, epoch=self.epoch, step=step, call=f"{self.role}-{call}")


def _together(found: Mapping[str, Moved | InfrastructureError]) -> Moved:
    return Moved.together(result for result in found.values() if isinstance(result, Moved))
