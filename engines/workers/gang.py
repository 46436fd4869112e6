"""The gang: the workers of a pool as the ranks of one engine, which live and die together.

If a rank fails, dies or does not answer in time, its peers may be blocked in a collective that can
never end. So the whole gang is killed, process trees and all, and the next `form` starts a new
generation on fresh processes. Restoring the engines' state is the caller's: it knows the snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, Generic, NoReturn, ParamSpec, TypeVar

from engines.failures import (
    CallCancelled,
    CallDeadline,
    ClusterLost,
    GangFailed,
    GangLost,
    InfrastructureError,
    OutOfMemory,
    WorkerLost,
)
from engines.workers import host
from engines.workers.calls import PendingCall, start, start_build, value_of
from engines.workers.cluster import Cluster, Member, raise_if_set
from engines.workers.engine import (
    BuildReport,
    Call,
    CallId,
    EngineSpec,
    Moved,
    Ranked,
    join_of,
)
from engines.workers.transport import SLICE

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Ranked, covariant=True)  # the contract of the ranks
P = ParamSpec("P")  # what a method of theirs takes
R = TypeVar("R")  # what it returns

SETTLE = 2.0  # seconds in which, after one rank failed, the others may show the real cause
ASIDE_TIMEOUT = 60.0  # seconds for the small things that only rank 0 does
JOIN_PHASES = 4  # parts of `join`: leave, store, Gloo or NCCL, model
MEETING_TIMEOUT = 60.0  # seconds for each phase of a meeting, at most
# What counts as the machinery's: an engine's RuntimeError or OSError is a broken collective, say.
MACHINERY = (InfrastructureError, RuntimeError, OSError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One formed rank."""

    member: Member
    build: BuildReport


class Gang(Generic[E]):
    """The ranks of one role. Calls of gangs on one pool take turns."""

    def __init__(
        self,
        cluster: Cluster,
        pool: str,
        role: str,
        spec: EngineSpec[E],
        deadline: float,
        *,
        start_timeout: float,
        world: int | None = None,
    ) -> None:
        """`deadline`: seconds that a call may take; `start_timeout`: seconds that building may take,
        and the meeting with the load of the model. `world`: ranks, if not one on each of the pool's
        workers.
        """
        self.cluster = cluster
        self.pool = pool
        self.role = role
        self.spec = spec
        self.deadline = deadline
        self.start_timeout = start_timeout
        self.generation = 0
        self.world = cluster.config.pools[pool].workers if world is None else world
        self._ranks: tuple[Rank, ...] = ()
        self._asleep = False  # whether the ranks have given their devices' memory back

    @property
    def formed(self) -> bool:
        """Whether every rank still is the process that was formed."""
        if not self._ranks:
            return False
        live = self.cluster.workers(self.pool)
        return all(live.get(rank.member.name) == rank.member.address for rank in self._ranks)

    def form(self, cancel: threading.Event | None = None) -> None:
        """Build the engine on every rank and have them meet: a new generation.

        Raises NoWorkers, GangLost, GangFailed or OutOfMemory; after any of them, `form` can be
        tried again.
        """
        with self._turn(cancel):
            # Within the turn: the gang before may have failed, and taken the workers with it.
            self.cluster.wait(self.pool, self.world, cancel=cancel)
            self._ranks, self._asleep = (), False
            self.generation += 1
            members = list(self.cluster.staying(self.pool).values())[: self.world]
            members.sort(key=lambda member: member.host)  # neighbours in rank are so in the network
            if len(members) < self.world:
                raise GangLost(0, self.pool, "its workers left while it was formed")
            builds = self._all(
                members,
                lambda rank, wake: start_build(
                    self.cluster, members[rank].address, self.role, self.spec, wake
                ),
                self.start_timeout,
                cancel,
            )
            self._join(members, cancel)
            self._ranks = tuple(
                Rank(member=member, build=report)
                for member, report in zip(members, builds, strict=True)
            )

    def _join(self, members: Sequence[Member], cancel: threading.Event | None) -> None:
        """Have the ranks meet at a free port of rank 0's host."""
        meeting = members[0].host
        port = self._all(
            members[:1],
            lambda rank, wake: PendingCall(
                self.cluster,
                members[rank].address,
                f"{self.role}.free-port",
                host.free_port,
                meeting,
                slot=False,
                wake=wake,
            ),
            ASIDE_TIMEOUT,
            cancel,
            of=members,
        )[0]
        limit = self.start_timeout

        def joins(rank: int, wake: threading.Event) -> PendingCall[object]:
            call = Call.of(
                self.role,
                Ranked.join,
                None,
                rank=rank,
                world=self.world,
                host=meeting,
                port=port,
                generation=self.generation,
                timeout=min(MEETING_TIMEOUT, limit / JOIN_PHASES),
            )
            return start(self.cluster, members[rank].address, call, deadline=limit, wake=wake)

        self._all(members, joins, limit, cancel)

    def call(
        self,
        method: Callable[Concatenate[E, P], R],
        call_id: CallId | None = None,
        cancel: threading.Event | None = None,
        /,
        *nothing: P.args,
        **arguments: P.kwargs,
    ) -> R:
        """Call a method of the contract on every rank; its arguments are given by name.

        Returns rank 0's result, or those of all joined as the contract says.

        Raises GangLost (form again, restore, retry), GangFailed (it would fail again; its __cause__
        is the rank's exception) or OutOfMemory, all with the gang's workers killed; CallCancelled,
        likewise.
        """
        self.spec.check_offers(method.__name__)  # on the ranks it would end the gang
        with self._turn(cancel):
            call = Call.of(self.role, method, call_id, *nothing, **arguments)
            return join_of(method)(self._on_every_rank(call, cancel))

    @contextlib.contextmanager
    def _turn(self, cancel: threading.Event | None) -> Iterator[None]:
        """The pool's devices, where roles share them, and its turn among the gangs."""
        with self.cluster.devices.held(self, cancel), self.cluster.turn(self.pool, cancel):
            yield

    def sleep(self, cancel: threading.Event | None = None) -> Moved:
        """Have the ranks put what they hold into the hosts' memory; who fails in it is killed."""
        return self._move(Call.of(self.role, Ranked.offload, None), True, cancel)

    def wake(self, cancel: threading.Event | None = None) -> Moved:
        """Have it brought back, if it was put away. Raises as `call` does."""
        return self._move(Call.of(self.role, Ranked.onload, None), False, cancel)

    def _move(self, call: Call[Moved], asleep: bool, cancel: threading.Event | None) -> Moved:
        with self.cluster.turn(self.pool, cancel):
            if self._asleep == asleep or not self.formed:
                return Moved()
            self._asleep = asleep
            try:
                return Moved.together(self._on_every_rank(call, cancel))
            except InfrastructureError as error:
                if not asleep:
                    raise
                # Its processes are gone, and so is what they held: it is formed anew.
                logger.warning("The gang of %s failed while it went to sleep: %s", self.role, error)
                return Moved()

    def _on_every_rank(self, call: Call[R], cancel: threading.Event | None) -> list[R]:
        """What a call returned on each rank."""
        if not self.formed:
            self._ranks = ()
            raise GangLost(0, self.pool, "the gang is not formed, or its workers were restarted")
        ranks = self._ranks
        return self._all(
            [rank.member for rank in ranks],
            lambda rank, wake: start(
                self.cluster,
                ranks[rank].member.address,
                call.at(ranks[rank].build.incarnation),
                deadline=self.deadline,
                wake=wake,
            ),
            self.deadline,
            cancel,
        )

    def _all(
        self,
        members: Sequence[Member],
        begin: Callable[[int, threading.Event], PendingCall[R]],
        deadline: float,
        cancel: threading.Event | None,
        of: Sequence[Member] | None = None,
    ) -> list[R]:
        """Begin something on every rank and wait for all; end the gang if one fails.

        `of`: the whole gang, where only some ranks have something to do.
        """
        wake = threading.Event()
        values: dict[int, R] = {}
        errors: dict[int, Exception] = {}  # in the order in which they happened
        started: dict[int, PendingCall[R]] = {}
        try:
            for rank in range(len(members)):
                started[rank] = begin(rank, wake)
            until: float | None = None
            while len(values) + len(errors) < len(started):
                wake.wait(SLICE)
                wake.clear()
                raise_if_set(cancel)
                for rank in started.keys() - values.keys() - errors.keys():
                    _take(started[rank], rank, deadline, values, errors)
                if errors:
                    until = until or time.monotonic() + SETTLE
                    if time.monotonic() >= until:
                        break
        except WorkerLost as error:  # before its rank could even begin
            errors[len(started)] = error
        except CallCancelled:
            self._tear_down(of or members)
            raise
        finally:
            for call in started.values():
                call.drop()
        if errors:
            self._tear_down(of or members)
            self._fail(members, errors)
        return [values[rank] for rank in range(len(members))]

    def _tear_down(self, members: Sequence[Member]) -> None:
        """Kill every rank; a call that is blocked in a collective cannot be ended otherwise."""
        self._ranks = ()
        with contextlib.suppress(ClusterLost, TimeoutError):
            self.cluster.kill(member.address for member in members)

    def _fail(self, members: Sequence[Member], errors: Mapping[int, Exception]) -> NoReturn:
        """Raise the gang's failure; a dead rank explains the errors of its peers."""
        for error in errors.values():
            # The peers of a rank that ran out of memory fail too, or hang; it says why itself.
            if isinstance(error, ClusterLost | OutOfMemory):
                raise error
        for kind in (WorkerLost, CallDeadline, InfrastructureError, Exception):
            for rank, error in errors.items():
                if isinstance(error, kind):
                    failure = GangLost if isinstance(error, MACHINERY) else GangFailed
                    raise failure(rank, members[rank].name, str(error)) from error
        raise AssertionError("a gang failed without an error")


def _take(
    call: PendingCall[R],
    rank: int,
    deadline: float,
    values: dict[int, R],
    errors: dict[int, Exception],
) -> None:
    """Record how a rank's part ended, if it has: the boundary where errors are gathered."""
    try:
        if call.ended(deadline):
            where = f"by {call.label} on rank {rank} (worker {call.worker})"
            values[rank] = value_of(call.result(), where)
    except Exception as error:
        errors[rank] = error
