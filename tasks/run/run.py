"""A run as its tasks know it: what it is, where it stands (clock.py), and the services that it has.

How a run comes about is in opening.py, and how it starts and ends in life_cycle.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from pydantic.json_schema import SkipJsonSchema

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.distillation import recorded_algorithm
from configs.grpo import GRPOConfig
from engines.algorithms.kl_controller import adapted_coefficient
from engines.data.contract import Scorer
from engines.rollout.contract import Sampling
from engines.workers.devices import DeviceTime
from engines.workers.engine import CallId
from storage.prompts.cursor import Cursor
from storage.runs.commit_log import Commit, version_weights
from storage.runs.run_lease import RunLease
from storage.runs.weights import WeightsRef
from tasks.run.attempts import AttemptLog
from tasks.run.beginning import fresh_rows
from tasks.run.clock import Clock, Gate, RowTracker, StepHistory
from tasks.run.engines import Engines
from tasks.run.episode_driver import EpisodeDriver
from tasks.run.events import Event, Reporting
from tasks.run.facts import DiskWarnings, OpenedRun, Position, RunFacts
from tasks.run.features import features_of
from tasks.run.meaning_changes import code_files, code_metrics, meaning_metrics
from tasks.run.roles import ROLLOUT, SCORER
from tasks.run.run_record import parent_config
from tasks.run.shard_driver import ShardDriver, task_runs


class Run:
    """What the tasks of a run share: refs, clients and counters, never tensors.

    With slots and no dataclass: Prefect shows what it finds in a parameter on the dashboard, and
    looks through the fields of dataclasses for futures, at every task.
    """

    __slots__ = (
        "_probe", "attempts", "cancelled", "cancelled_there", "clock", "closed", "code_files",
        "config", "device_time", "disk", "engines", "episodes", "epoch", "evaluated", "features",
        "files", "flow", "fresh", "history", "lease", "listeners", "marks", "measured", "name",
        "origin", "reporting", "shards", "source", "start", "stopped", "store", "tracking",
    )  # fmt: skip

    def __init__(
        self, opened: OpenedRun, lease: RunLease, position: Position, reporting: Reporting
    ) -> None:
        """`reporting`: who is told of it, and asked."""
        facts = RunFacts(
            name=opened.name,
            flow=opened.flow,
            config=opened.config,
            files=opened.files,
            source=opened.source.as_recorded(position.cursor.digest),
            origin=opened.origin,
            start=opened.start,
            epoch=lease.epoch,
        )
        self.name, self.flow, self.config = facts.name, facts.flow, facts.config
        self.code_files = code_files(opened.config)  # as this flow began: workers load them now
        self.source, self.files, self.store = facts.source, facts.files, facts.store
        self.origin, self.start, self.epoch = facts.origin, facts.start, facts.epoch
        self.lease = lease
        self.features = features_of(opened.config, position)
        trackers = (feature.rows(opened, position) for feature in self.features)
        self.clock = Clock(opened, position, next(filter(None, trackers), RowTracker()))
        self.cancelled = self.clock.gate.cancelled  # ends every wait
        self.cancelled_there = threading.Event()  # on the dashboard, by a person
        # The unseen rows that come first, in their order in the data.
        self.fresh = fresh_rows(position.cursor, opened.source, opened.seen)
        # Metrics of versions that were measured after their step's commit, such as evaluations: they
        # are judged with the step that is committed next.
        self.measured: dict[str, float] = {}
        # Metrics that mark the next step, where it is the first under other meanings or other code.
        self.marks: dict[str, float] = {}
        if position.last is not None:
            self.marks |= meaning_metrics(position.last, opened.config)
            self.marks |= code_metrics(opened.files, position.last, self.code_files)
        self.evaluated: set[int] = set()  # versions that wait for no evaluation any more
        self.stopped = False  # by a person: Ctrl-C, SIGTERM or the dashboard; known once it ended
        self.closed = False  # its engines are ended, and its hold on the store
        self.attempts = AttemptLog()
        self.device_time = DeviceTime()  # which attempts hold which workers
        self.history = StepHistory(opened.files, opened.start, position.head)
        reports = reporting(facts)
        self.reporting = reporting  # a run that goes on with it has it too
        self.listeners, self.tracking = reports.listeners, reports.tracking
        self.shards = _shards_of(opened.config)
        self.disk = DiskWarnings(opened.files.store.local_folder, opened.config.steps)
        self.episodes = EpisodeDriver(opened.config.episodes, self.cancelled)
        self.engines = Engines(self)
        self._probe: tuple[list[list[int]], list[int]] | None = None

    def tell(self, event: Event, last: Callable[[], object] = lambda: None) -> None:
        """Let those hear a fact of it who listen; `last` is done once they have heard of a commit."""
        self.listeners.tell(event, last)

    @property
    def gate(self) -> Gate:
        """What its steps wait for."""
        return self.clock.gate

    @property
    def head(self) -> int:
        """The last committed step; before the first, the version that the run begins with."""
        return self.clock.position.head

    @property
    def last(self) -> Commit | None:
        """The commit of the step before the next one, which a fork inherits."""
        return self.clock.position.last

    @property
    def cursor(self) -> Cursor:
        """Where the next step draws."""
        return self.clock.position.cursor

    def usable_weights(self, step: int) -> list[WeightsRef]:
        """The policy versions with which a step may be sampled, the current one first.

        The others are those that max_staleness allows: a flow that died may have finished shards
        under them.
        """
        pool = self.engines[ROLLOUT]
        current = pool.weights
        return [current] + [
            pool.synced.get(version) or version_weights(self.files, version)
            for version in range(current.version - 1, self.clock.oldest_version(step) - 1, -1)
        ]

    def to_be_evaluated(self) -> set[int]:
        """Committed versions whose evaluation beside the steps is due and has not ended."""
        evaluation = self.config.evaluation
        if evaluation is None or not self.config.evaluates_aside:
            return set()
        versions = range(self.start, self.head + 1)
        return {
            version for version in versions if evaluation.due(version, self.start)
        } - self.evaluated

    @property
    def after(self) -> int:
        """The number under which calls after the last step are made."""
        return self.head + 1

    @property
    def last_weights(self) -> str:
        """Address of the last policy version."""
        assert self.last is not None
        return self.store.url(self.last.version_out.key)

    def call_id(self, step: int, call: str) -> CallId:
        """A call of a step on this run's behalf."""
        return CallId(run=self.name, epoch=self.epoch, step=step, call=call)

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The algorithm of the step under way: the recipe's, with the adapted KL coefficient."""
        recipe = self.config.algorithm
        if recipe.kl.controller == "fixed" or self.last is None or self._forks_kl:
            return recipe
        before = recorded_algorithm(self.last.algorithm).kl.coefficient
        measured = self.last.metrics.get("train/kl_ref") or self.last.metrics.get(
            "advantage/kl_ref"
        )
        if measured is None and not len(self.last.refs["batch"]):  # it made no update
            return recipe.model_copy(
                update={"kl": recipe.kl.model_copy(update={"coefficient": before})}
            )
        coefficient = adapted_coefficient(
            before,
            measured or 0.0,
            target=recipe.kl.target,
            horizon=recipe.kl.horizon,
            samples=self.config.trained_per_step,
        )
        kl = recipe.kl.model_copy(update={"coefficient": coefficient})
        return recipe.model_copy(update={"kl": kl})

    @property
    def _forks_kl(self) -> bool:
        """Whether the step is the first of a fork that has KL settings of its own."""
        if self.origin is None or self.head > self.start:
            return False
        return parent_config(self.files, self.origin).algorithm.kl != self.config.algorithm.kl

    @property
    def needs_logprobs(self) -> bool:
        """Whether a step asks the train engines for log-probs before the update."""
        return self.config.algorithm.needs_reference or self.needs_old

    @property
    def needs_old(self) -> bool:
        """Whether old_logprobs are computed on their own, before the update."""
        train = self.config.train
        if train.recompute_old_logprobs == "auto":
            several = train.epochs * train.mini_batches > 1
            several = several and self.config.algorithm.proximal == "recompute"
            return several or self.config.algorithm.needs_stored_logprobs
        return train.recompute_old_logprobs

    @property
    def needs_baselines(self) -> bool:
        """Whether each prompt is also completed greedily, to compare the samples with."""
        return self.config.algorithm.needs_baselines

    @property
    def sampling(self) -> Sampling:
        """How the samples that train are drawn."""
        config = self.config
        sampling = Sampling.of(config.rollout, config.group_size, config.longest_turn)
        return replace(sampling, routed_experts=config.train.router_replay)

    def probe(self) -> tuple[list[list[int]], list[int]]:
        """Token ids of a few short sequences, and where each one's response begins."""
        if self._probe is None:
            self._probe = self.engines[SCORER].call(Scorer.probe, self.call_id(self.head, "probe"))
        return self._probe

    def advance(self, record: Commit) -> None:
        """A step is committed: the next one draws and trains from here."""
        self.clock.advance(record)
        self.history.add(record)
        self.marks = {}
        for trainer in self.engines.trained:
            trainer.committed(record.step)
        self.attempts.committed(record.step)
        self.engines[ROLLOUT].committed(record.step, self.clock.oldest_version(record.step + 1))
        self.shards.committed(record.step)
        self.gate.committed(record.step)


def _shards_of(config: GRPOConfig) -> ShardDriver:
    """Drives as many shards as the rollout engines take, and some that wait for a free one."""
    pools, roles = config.cluster.pools, config.cluster.roles
    engines, most = pools[roles.rollout], task_runs(pools[roles.reward], config.sharded_stages)
    return ShardDriver(engines.workers * engines.slots + most, most)


# The flow's parameter by which the command line hands over a run that it has started, so that engines
# start while the Prefect server does. A deployment's form does not show it: there it is None.
StartedRun = Annotated[Run | None, SkipJsonSchema()]
