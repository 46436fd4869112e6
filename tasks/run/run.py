"""A run in the flow process: its store, its workers and engines, and where it stands."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import numpy as np
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL

from configs.algorithm.algorithm import AlgorithmConfig
from configs.environment import user
from configs.grpo import GRPOConfig
from engines.algorithms.kl_controller import adapted_coefficient
from engines.rollout.contract import Sampling
from engines.workers.messages import CallId
from storage.objects.store import Store
from storage.prompts.cursor import Cursor
from storage.prompts.open_source import open_source
from storage.runs.commit_log import Commit, Ledger, head, read_commit
from storage.runs.forks import pin, shared_weights
from storage.runs.live import Live, write_end, write_live
from storage.runs.origins import FIELD, Origin, origin_of, parent_of
from storage.runs.orphans import clear
from storage.runs.retention import sweep
from storage.runs.run_lease import RunLease
from storage.runs.run_store import RunStore
from storage.runs.seen_rows import write_rows, write_seen
from storage.runs.weights import WeightsRef
from tasks.reporting import events
from tasks.reporting.artifacts import show_curves, show_run, show_steps
from tasks.reporting.attempts import Attempt
from tasks.reporting.flow_run import flow_run_id, flow_run_url
from tasks.reporting.mlflow_page import RunTracker
from tasks.reporting.progress import Progress, Terminal
from tasks.results import RunSummary
from tasks.run.background import Background
from tasks.run.continue_from import beginning, first_cursor, fresh_rows
from tasks.run.engines import Engines
from tasks.run.forking import origin_of_fork, parent_config
from tasks.run.interruption import dashboard_ends, set_closes, signals_end
from tasks.run.preflight import check, installed
from tasks.run.resuming import check_resumable
from tasks.run.store_usage import StoreUsage

_prepared: ContextVar[Run | None] = ContextVar("prepared_run", default=None)


class Run:
    """What the tasks of a run share: refs, clients and counters, never tensors."""

    def __init__(
        self,
        config: GRPOConfig,
        terminal: Terminal,
        resume: str | None,
        origin: Origin | None = None,
        seen: np.ndarray | None = None,
    ) -> None:
        """`origin`: where a new run begins, if not with the model's own weights.

        `seen`: digests of the rows that earlier runs have drawn, if it goes on from one of them.
        """
        self.config = config
        self.terminal = terminal
        self.name = resume or new_name(config.name)
        self.store = Store(
            config.store.uri, config.store.options, cache_bytes=config.store.cache_mib << 20
        )
        self.files = RunStore(self.store, self.name)
        self.source = open_source(config.data.source)
        if resume is not None:
            check_resumable(self.files, config)
            origin = origin_of(self.files)
        self.origin = origin
        self.start = 0 if origin is None else origin.at  # the version that the run begins with
        self.held = RunLease.acquire(self.files, f"{user()}'s flow")
        self.held.keep()
        self.epoch = self.held.epoch
        # Only now: until a moment ago another flow may have been committing.
        own = head(self.files) if resume is not None else None
        self.head = own or self.start
        self.last: Commit | None = None  # of the step before the next one, which a fork inherits
        if seen is not None:
            write_seen(self.files, seen)
        self.cursor = first_cursor(self.files, config, self.source, origin)
        self.ledger = Ledger()
        self._stand_at(own)
        if resume is not None:
            clear(self.files, self.head)
        else:
            self.files.write_run(self._record())
            if origin is not None:
                pin(self.files, origin)
        self.sampled_with: WeightsRef | None = None  # policy version of the step under way
        self.cancelled = threading.Event()  # ends every wait
        self.stopped = False  # by a person: Ctrl-C, SIGTERM or the dashboard; known once closed
        self.attempts: list[Attempt] = []
        self.progress = Progress(terminal, config.steps)
        self._probe: tuple[list[list[int]], list[int]] | None = None
        self.background = Background()
        self.tracker = RunTracker(self)
        self.store_usage = StoreUsage()
        self.engines = Engines(self)

    def _stand_at(self, own: int | None) -> None:
        """Take cursor, ledger and the last commit from the run's own past, or from its parent's."""
        if own is not None:
            self.last = read_commit(self.files, own)
            self.cursor, self.ledger = Cursor.from_json(self.last.cursor), self.last.ledger
        elif self.origin is not None and self.origin.fork:
            self.last = read_commit(parent_of(self.files, self.origin), self.origin.step)
            self.ledger = self.last.ledger.settled()
        self.fresh = fresh_rows(self.files, self.cursor, self.source)

    def _record(self) -> dict[str, object]:
        """What run.json says."""
        record: dict[str, object] = {
            "config": self.config.model_dump(mode="json"),
            "code": code_version(),
        }
        if self.origin is not None:
            record[FIELD] = self.origin.model_dump(mode="json")
        return record

    @property
    def shared_weights(self) -> WeightsRef | None:
        """The parent's policy version that this run samples with first, without a copy."""
        if self.origin is None or not self.origin.fork:
            return None
        same = parent_config(self.files, self.origin).rollout.dtype == self.config.rollout.dtype
        return shared_weights(self.files) if same else None

    def first_group(self, step: int) -> int:
        """Number of a step's first group of prompts; no two steps of a run or fork share one."""
        before = 0 if self.origin is None else self.origin.first_group
        return before + (step - 1 - self.start) * self.config.prompts_per_step

    def steps_left(self) -> range:
        """The steps that are not committed yet, counted from 1."""
        return range(self.head + 1, self.config.steps + 1)

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
        before = AlgorithmConfig.model_validate(self.last.algorithm).kl.coefficient
        measured = self.last.metrics.get("train/kl_ref") or self.last.metrics.get(
            "advantage/kl_ref"
        )
        coefficient = adapted_coefficient(
            before,
            measured or 0.0,
            target=recipe.kl.target,
            horizon=recipe.kl.horizon,
            samples=self.config.samples_per_step,
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
        return self.needs_ref or self.needs_old

    @property
    def needs_ref(self) -> bool:
        """Whether the algorithm compares with the frozen reference."""
        return self.config.algorithm.needs_reference

    @property
    def needs_old(self) -> bool:
        """Whether old_logprobs are computed on their own, before the update."""
        train = self.config.train
        if train.recompute_old_logprobs == "auto":
            several = train.epochs * train.mini_batches > 1
            return several or self.config.algorithm.needs_stored_logprobs
        return train.recompute_old_logprobs

    @property
    def needs_baselines(self) -> bool:
        """Whether each prompt is also completed greedily, to compare the samples with."""
        return self.config.algorithm.needs_baselines

    @property
    def sampling(self) -> Sampling:
        """How the samples that train are drawn."""
        return Sampling.of(self.config.rollout, self.config.group_size)

    def announce(self) -> None:
        """Tell those who look at the run from outside where it goes on."""
        flow = flow_run_id()
        made = self.engines.temporary_certificates
        live = Live(
            scheduler=self.engines.scheduler,
            prefect=PREFECT_API_URL.value(),
            flow_run=None if flow is None else str(flow),
            epoch=self.epoch,
            certificates=None if made is None else made.model_dump(),
        )
        write_live(self.files, live)

    def begin(self, step: int) -> None:
        """A step starts, with the policy version that the rollout engines hold now."""
        self.sampled_with = self.engines.rollouts.weights
        self.progress.step(step, self.config.rollout.shards)

    def snapshot_due(self, step: int) -> bool:
        """Whether the trainer's state is stored after a step."""
        return step % self.config.store.snapshot_every == 0 or step == self.config.steps

    def attempts_of(self, step: int) -> list[Attempt]:
        """What was tried for a step, in the order in which it ended."""
        return [attempt for attempt in self.attempts if attempt.step == step]

    def probe(self) -> tuple[list[list[int]], list[int]]:
        """Token ids of a few short sequences, and where each one's response begins."""
        if self._probe is None:
            self._probe = self.engines.scorers.call("probe", self.call_id(self.head, "probe"))
        return self._probe

    def advance(self, record: Commit) -> None:
        """A step is committed: the next one draws and trains from here."""
        self.head = record.step
        self.last = record
        self.ledger = record.ledger
        self.cursor = Cursor.from_json(record.cursor)
        for trainer in self.engines.trained:
            trainer.committed(record.step)
        self.attempts = [attempt for attempt in self.attempts if attempt.step > record.step]

    def tidy(self) -> None:
        """Remove policy versions, batches and snapshots that the settings do not keep."""
        keep = self.config.store
        removed = sweep(
            self.files,
            keep_versions=keep.keep_versions,
            keep_steps=keep.keep_steps,
            keep_snapshots=keep.keep_snapshots,
            tagged=self.tracker.registered,
        )
        if removed:
            get_run_logger().info("Removed by store.keep_*: %s", ", ".join(removed))

    def close(self, error: BaseException | None = None) -> None:
        """End engines, workers and the hold on the run; whatever fails, the rest is ended too."""
        self.stopped = self.cancelled.is_set()
        with contextlib.ExitStack() as stack:
            stack.callback(self.held.release)
            stack.callback(self.tracker.finish, error)
            stack.callback(self.background.stop)
            stack.callback(self.engines.close)
            self.cancelled.set()

    def summary(self) -> RunSummary:
        """Where everything is; also leaves the curves in MLflow and on the dashboard.

        The last thing that a run does: from now on it is done.
        """
        self.background.drain()
        clear(self.files, self.head)
        self._keep_rows()
        image = self.tracker.plot()
        if image is not None:
            show_curves(self, image)
            show_steps(self, self.tracker.history)
            self.files.store.write(self.plot_key, image)
        self.tracker.finish(None)
        write_end(self.files, self.head)
        return RunSummary(
            run=self.name,
            steps=self.head,
            checkpoint=self.last_weights,
            dashboard=flow_run_url() or "",
            tracking=self.tracker.link,
            plot=self.store.url(self.plot_key),
        )

    def _keep_rows(self) -> None:
        """Keep which rows the data had, unless they changed meanwhile, for runs that go on."""
        if open_source(self.config.data.source).digest == self.source.digest:
            write_rows(self.files, self.source)

    @property
    def plot_key(self) -> str:
        """Where the curves are in the store."""
        return f"{self.name}/progress.png"


def new_name(family: str) -> str:
    """A name for a new run: family, UTC time, and four characters against coincidence."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return f"{family}-{now}-{secrets.token_hex(2)}"


def code_version() -> str:
    """Version of Refrain that runs."""
    return installed("refrain-rl") or "a checkout that is not installed"


@contextlib.contextmanager
def prepared(
    config: GRPOConfig,
    terminal: Terminal,
    resume: str | None = None,
    fork: str | None = None,
    last_words: Callable[[Run], object] = lambda run: None,
) -> Iterator[Run]:
    """Start a run's engines in the background; a flow called in the body takes the run over.

    So engines start while the Prefect server does. `fork`: RUN@STEP where a new run begins.
    `last_words` are said before a process that cannot be stopped in order ends itself.
    """
    origin, seen = None, None
    if fork is not None:
        origin = origin_of_fork(config, fork)
    elif resume is None and config.continue_from is not None:
        origin, seen = beginning(config)
    run = Run(config, terminal, resume, origin, seen)
    token = _prepared.set(run)
    failure: BaseException | None = None
    with signals_end(run.cancelled, lambda: last_words(run)):
        try:
            with set_closes(run.cancelled, run.engines.close), terminal.live():
                run.engines.launch()
                yield run
        except BaseException as error:
            failure = error
            raise
        finally:
            _prepared.reset(token)
            run.close(failure)


@contextlib.contextmanager
def open_run(
    config: GRPOConfig, resume: str | None = None, fork: str | None = None
) -> Iterator[Run]:
    """The run that `prepared` started for this flow, or else a new one that ends with the body."""
    with contextlib.ExitStack() as stack:
        run = _prepared.get()
        if run is None:  # started by a worker, not by tasks/launch
            check(config)
            run = stack.enter_context(prepared(config, Terminal(), resume, fork))
        stack.enter_context(dashboard_ends(run.cancelled, flow_run_id()))
        events.emit(events.RUN_STARTED, run.name, steps=config.steps)
        stack.callback(lambda: events.emit(events.RUN_ENDED, run.name, step=run.head))
        show_run(run)
        stack.enter_context(run.progress.looking(run.engines.drawn_tokens))
        yield run
