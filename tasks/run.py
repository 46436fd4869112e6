"""A run in the flow process: its store, its workers and engines, and where it stands."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Iterator
from contextvars import ContextVar

from configs.grpo import GRPOConfig
from engines.lease import Lease
from storage.commits import Commit, head, read_commit
from storage.cursor import Cursor
from storage.prompts import open_source
from storage.runs import RunStore
from storage.store import Store
from tasks.engines import Engines
from tasks.holding import Holding
from tasks.progress import Progress
from tasks.results import Metrics
from tasks.resuming import check_resumable
from tasks.retries import Attempt
from tasks.terminal import Terminal
from tasks.tracking import RunTracker

_prepared: ContextVar[Run | None] = ContextVar("prepared_run", default=None)


class Run:
    """What the tasks of a run share: refs, clients and counters, never tensors."""

    def __init__(self, config: GRPOConfig, terminal: Terminal, resume: str | None) -> None:
        self.config = config
        self.terminal = terminal
        self.name = resume or new_name(config.name)
        self.store = Store(config.store.uri, config.store.options)
        self.files = RunStore(self.store, self.name)
        self.source = open_source(config.data.source)
        if resume is not None:
            check_resumable(self.files, config)
        self.head = head(self.files) or 0 if resume is not None else 0
        self.last: Commit | None = read_commit(self.files, self.head) if self.head else None
        self.cursor = (
            Cursor.from_json(self.last.cursor) if self.last else Cursor.start(config.data, self.source)
        )
        self.holding = Holding(self.files)
        self.epoch = self.holding.epoch
        if resume is None:
            self.files.write_run(config.model_dump(mode="json"))
        self.cancelled = threading.Event()
        self.attempts: list[Attempt] = []
        self.history: list[Metrics] = []
        self.progress = Progress(terminal, config.steps)
        self.tracker = RunTracker(self)
        self.engines = Engines(self)

    def steps_left(self) -> range:
        """The steps that are not committed yet, counted from 1."""
        return range(self.head + 1, self.config.steps + 1)

    def lease(self, step: int, call: str) -> Lease:
        """The right to make a call of a step on this run's behalf."""
        return Lease(run=self.name, epoch=self.epoch, step=step, call=call)

    @property
    def needs_logprobs(self) -> bool:
        """Whether a step asks the train engines for log-probs before the update."""
        return self.needs_ref or self.needs_old

    @property
    def needs_ref(self) -> bool:
        """Whether the algorithm compares with the frozen reference."""
        return self.config.algorithm.kl.coefficient > 0

    @property
    def needs_old(self) -> bool:
        """Whether old_logprobs are computed on their own, before the update."""
        train, kl = self.config.train, self.config.algorithm.kl
        if train.recompute_old_logprobs == "auto":
            in_reward = kl.coefficient > 0 and kl.placement == "reward"
            return in_reward or train.epochs * train.mini_batches > 1
        return train.recompute_old_logprobs

    def close(self) -> None:
        """End engines, workers and the hold on the run; whatever fails, the rest is ended too."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.holding.release)
            stack.callback(self.tracker.close)
            stack.callback(self.engines.close)
            self.cancelled.set()


def new_name(family: str) -> str:
    """A name for a new run: family, UTC time, and four characters against coincidence."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return f"{family}-{now}-{secrets.token_hex(2)}"


@contextlib.contextmanager
def prepared(config: GRPOConfig, terminal: Terminal, resume: str | None = None) -> Iterator[Run]:
    """Start a run's engines in the background; a flow called in the body takes the run over.

    So engines start while the Prefect server does.
    """
    run = Run(config, terminal, resume)
    token = _prepared.set(run)
    try:
        run.engines.launch()
        with terminal.live():
            yield run
    finally:
        _prepared.reset(token)
        run.close()


@contextlib.contextmanager
def open_run(config: GRPOConfig, resume: str | None = None) -> Iterator[Run]:
    """The run that `prepared` started for this flow, or else a new one that ends with the body."""
    waiting = _prepared.get()
    if waiting is not None:
        yield waiting
        return
    with prepared(config, Terminal(), resume) as run:
        yield run
