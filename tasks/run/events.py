"""What a run says to the outside: one record for each fact, and who hears it.

The run and its tasks tell; the terminal, the dashboard, MLflow and whatever else shows a run listen
(tasks/reporting/listeners.py puts them together), and nothing here knows them.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from prefect.logging import get_run_logger

from storage.evaluations.results import EvaluationResult
from storage.objects.errors import StoreUnavailable
from storage.runs.commit_log import Commit
from storage.runs.curves import History
from storage.tracking.machine_samples import MachineSample
from tasks.results import Metrics, Scored
from tasks.run.attempts import Attempt
from tasks.run.facts import RunFacts
from tasks.run.machinery import Machinery, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A fact of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitEvent(Event):
    """A fact that a commit holds, so that nothing has to wait until all have heard of it."""

    record: Commit


@dataclass(frozen=True, kw_only=True, slots=True)
class Note(Event):
    """A line for a person."""

    text: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersAsked(Event):
    """The run asks for its workers: its first word."""

    starts: Callable[[], Mapping[str, str]]  # worker -> what the start of its engine is at, now


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStarted(Event):
    """The engines of a role stand."""

    waiting: tuple[str, ...]  # names of the roles whose engines are starting still


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginesReady(Event):
    """All engines stand and have their weights. Told within the flow run."""

    last: Commit | None  # of the step before the next one; a fork's may be its parent's
    snapshot: bool  # whether the trainers' state after it is stored


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBegan(Event):
    """A flow run has the run: it begins, or goes on."""

    steps: int  # asked for
    head: int  # the last committed step
    fresh: int  # rows that had not been seen and are drawn first
    last: Commit | None  # of the step before the next one
    at_work: Callable[[], Work]  # what its engines are doing now
    look: Callable[[], Machinery | None]  # how workers, queues and the store are now
    # What the machines of its workers are doing now, but for the flow's own; takes seconds at most.
    machines: Callable[[], Sequence[MachineSample]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBegan(Event):
    """A step begins."""

    step: int
    shards: int  # that it samples at first


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundBegan(Event):
    """A step samples another round."""

    step: int
    shards: int  # more of them


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSampled(Event):
    """A shard of a step is sampled, or left."""

    step: int
    tokens: int  # drawn for it


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardsScored(Event):
    """Shards of a step have their rewards."""

    step: int
    shards: int  # how many


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsPublished(Event):
    """The engines that sample are about to load a policy version."""

    version: int
    nbytes: int  # of its files


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptBegan(Event):
    """A stage's call goes out; told in the thread that makes it."""

    attempt: Attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFailed(Event):
    """A stage's call failed; it may be tried again."""

    attempt: Attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded(Event):
    """A stage's call ended, well or badly; told in the thread that made it."""

    attempt: Attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReplayed(Event):
    """The trainer applies a stored step's update again."""

    step: int
    last: int  # the last one that it applies


@dataclass(frozen=True, kw_only=True, slots=True)
class RebuiltOtherwise(Event):
    """Stored updates came out otherwise by rounding; the trainer took the published weights."""

    version: int
    tensors: int  # that differed


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommitted(CommitEvent):
    """A step is a part of the run."""

    metrics: Metrics  # as they were measured; of the record's, what is no finite number is None
    scored: list[Scored]
    attempts: list[Attempt]  # in the order in which they ended
    snapshot: bool  # whether the trainers' state after it is stored


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotStored(CommitEvent):
    """The trainers' state after a step is stored, which nobody knew to be the last when it ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackFillBegan(Event):
    """Versions of a run of the past are about to be evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackFillEnded(Event):
    """They are, or the back-fill has failed; its engines have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionEvaluated(Event):
    """A suite's result of a policy version."""

    result: EvaluationResult
    version: int  # the run's number of it


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsEnded(Event):
    """The run makes no further step."""

    history: History  # what is shown of each step
    curves: bytes  # PNG of it
    timeline: bytes  # PNG: what each engine did in the last steps (tasks/run/life_cycle.py)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRolledBack(Event):
    """The run has ended, and another one goes on from an earlier step of it."""

    step: int  # after which it ended
    back_to: int
    guard: str  # name of what decided so
    child: str  # the run that goes on
    number: int  # of the rollback
    fresh: int  # rows that the run had not seen and drew first


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished(Event):
    """The run has done everything that it was asked for."""

    step: int
    cost: Metrics  # cost/…, up to now


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStopped(Event):
    """The flow run leaves the run before it is finished: a person stopped it, or it failed."""

    step: int  # the last one that is committed


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded(Event):
    """The flow run leaves the run, whether it is finished or not."""

    step: int  # the last one that is committed


@dataclass(frozen=True, kw_only=True, slots=True)
class RunClosing(Event):
    """Engines and workers are about to be ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunClosed(Event):
    """Engines and workers have ended: the run's last word."""

    error: BaseException | None  # that ended it
    stopped: bool = False  # by a person: the error is a wait that was ended


E = TypeVar("E", bound=Event)
C = TypeVar("C", bound=CommitEvent)


class Listeners:
    """Who hears what a run says, each in the order in which they were added.

    At once: in the thread that tells, which waits, so a listener is quick; what it raises, the teller
    gets, and the run ends with it.
    Later: in the background, while the next step goes on. There a store that is away is a warning,
    for nothing of a committed step can be lost; any other failure is raised at the next commit.
    """

    def __init__(self) -> None:
        self._at_once: dict[type[Event], list[Callable[[Any], object]]] = {}
        self._later: dict[type[Event], list[Callable[[Any], object]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._last: Future[None] | None = None  # what is told there last

    def on(self, event: type[E], hear: Callable[[E], object]) -> None:
        """Have `hear` called at once with each event of this type."""
        self._at_once.setdefault(event, []).append(hear)

    def later(self, event: type[C], hear: Callable[[C], object]) -> None:
        """Have `hear` called in the background with each event of this type."""
        self._later.setdefault(event, []).append(hear)

    def tell(self, event: Event, last: Callable[[], object] = lambda: None) -> None:
        """Let all hear it who listen; `last` is done once they have heard of a commit."""
        for hear in self._at_once.get(type(event), ()):
            hear(event)
        if isinstance(event, CommitEvent):
            if self._last is not None and self._last.done() and not self._last.cancelled():
                self._last.result()
            run = contextvars.copy_context().run  # its flow run
            self._last = self._thread.submit(run, self._tell_later, event, last)

    def _tell_later(self, event: CommitEvent, last: Callable[[], object]) -> None:
        try:
            for hear in self._later.get(type(event), ()):
                hear(event)
            last()
        except StoreUnavailable as error:  # what is left over goes after the next step
            get_run_logger().warning(
                "Step %d is committed; showing it and tidying up after it did not go to the end: %s",
                event.record.step,
                error,
            )

    def drain(self) -> None:
        """Wait until all have heard what was told."""
        if self._last is not None:
            self._last.result()

    def stop(self) -> None:
        """Let nobody hear what has not begun to be heard."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class Tracking(Protocol):
    """What the run asks the server that tracks it, from where the engines are ready on."""

    @property
    def registered(self) -> Mapping[int, str | None]:
        """Policy version -> its number in the registry, None of one that waits to be registered."""

    def retained(self) -> Collection[int]:
        """The registered policy versions that retention leaves."""

    def let_go(self, versions: Collection[int]) -> Collection[int]:
        """Those of these policy versions that may be removed now."""

    def removed(self, versions: Collection[int]) -> None:
        """Have the registry say that the files of these policy versions are gone."""

    @property
    def model_name(self) -> str:
        """Name of the run's model in the registry."""

    @property
    def link(self) -> str:
        """Where a person sees the run."""

    def tag(self, name: str, value: str) -> None:
        """Write a tag on the run's page."""

    def register(self, commit: Commit) -> str:
        """Put the policy version that a step made into the registry; its number there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reports:
    """See the module's docstring."""

    listeners: Listeners
    tracking: Tracking


Reporting: TypeAlias = Callable[[RunFacts], Reports]
