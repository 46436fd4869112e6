"""The runs of a store, a line for each."""

from __future__ import annotations

import datetime
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from configs.overrides import ConfigError
from configs.terminal_text import bytes_text
from storage.objects.errors import StoreError
from storage.objects.store import Store
from storage.runs.commit_log import Outline, head, read_outline
from storage.runs.live import is_done, read_end, read_live, state_of
from storage.runs.run_lease import holder_of
from storage.runs.run_store import RUN_NAME, RunStore, origin_of, start_of
from tasks.commands.command import Answer, StoreRequest, heading, table, text
from tasks.run.run_record import flow_of, settings_of

if TYPE_CHECKING:
    from rich.console import RenderableType

AT_ONCE = 8  # runs whose objects are listed
BEGUN = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}$")  # of a run's name, as new_name has it


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRun:
    """A run as the list has it."""

    run: str
    flow: str = ""  # package.module:function that makes it
    state: str  # running, finished, stopped, rolled back …, or why it cannot be read
    step: int = 0  # last committed one
    steps: int | None = None  # that it was asked for
    reward: float | None = None  # mean, of the last step
    begun: float | None = None  # seconds since 1970, by its name
    committed: float | None = None  # when its last step was
    origin: str | None = None  # RUN@STEP where it began
    host: str | None = None  # machine of the flow that works on it, or did last
    bytes: int | None = None  # in the store; None: not asked for

    @property
    def at_work(self) -> float:
        """When it was at work last, as far as that is known."""
        return max(self.committed or 0.0, self.begun or 0.0)


def answer(request: StoreRequest) -> Answer:
    """List them. Raises ConfigError for a store that holds none."""
    if request.arguments.last < 0:
        raise ConfigError(f"--last {request.arguments.last} is no number of runs. 0 is all.")
    store = Store(request.store.uri, request.store.options)
    names = [
        name
        for name in store.children()
        if RUN_NAME.fullmatch(name) and store.exists(RunStore(store, name).run_json_key)
    ]
    runs = sorted(map(_listed, [RunStore(store, name) for name in names]), key=lambda run: run.run)
    runs.sort(key=lambda run: -run.at_work)
    listed = runs[: request.arguments.last or None]
    sizes = not request.arguments.no_sizes
    if sizes:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            listed = list(threads.map(lambda run: _sized(store, run), listed))
    record = {"store": store.uri, "runs": len(runs), "listed": [asdict(run) for run in listed]}
    return Answer(record=record, shown=_shown(store, runs, listed, sizes))


def _listed(files: RunStore) -> ListedRun:
    begun = _begun(files.run)
    try:
        config, origin = settings_of(files), origin_of(files)
        step = head(files)
        last = None if step is None else read_outline(files, step)
        done = step or start_of(files)
        finished, end = is_done(files, done), read_end(files)
        back = None if end is None or not finished else end.rolled_back
        live = read_live(files)
        return ListedRun(
            run=files.run,
            flow=flow_of(files),
            state=state_of(bool(holder_of(files)), finished, back),
            step=done,
            steps=config.steps if last is None else _asked(last, config.steps),
            reward=None if last is None else last.metrics.get("reward/mean"),
            begun=begun,
            committed=None if last is None else last.committed_at,
            origin=None if origin is None else str(origin),
            host=None if live is None else live.host,
        )
    except (StoreError, ConfigError, ValueError) as error:
        first = " ".join(str(error).split())
        return ListedRun(run=files.run, state=f"cannot be read: {first[:200]}", begun=begun)


def _asked(last: Outline, steps: int) -> int:
    """The steps of a run that was perhaps given others since it began."""
    now = last.update.get("steps")
    return now if isinstance(now, int) else steps


def _begun(name: str) -> float | None:
    begin = BEGUN.search(name)
    if begin is None:
        return None
    try:
        begun = datetime.datetime.strptime(begin[1], "%Y%m%d-%H%M%S")
    except ValueError:  # digits of a name that a person gave
        return None
    return begun.replace(tzinfo=datetime.UTC).timestamp()


def _sized(store: Store, run: ListedRun) -> ListedRun:
    sizes = store.sizes(store.list(run.run))
    return ListedRun(**{**asdict(run), "bytes": sum(sizes.values())})


def _shown(
    store: Store, all_runs: list[ListedRun], listed: list[ListedRun], sizes: bool
) -> list[RenderableType]:
    if not all_runs:
        return [text(f"There is no run in {store.uri}.")]
    lines = table(
        "run",
        "state",
        "steps",
        "reward",
        "age",
        "last step",
        *(["size"] if sizes else []),
        "where",
        "from",
        right=("steps", "reward", "size"),
    )
    for run in listed:
        steps = f"{run.step}" if run.steps is None else f"{run.step}/{run.steps}"
        lines.add_row(
            run.run,
            text(run.state),
            steps,
            "" if run.reward is None else f"{run.reward:.3f}",
            "" if run.begun is None else _since(run.begun),
            "" if run.committed is None else f"{_since(run.committed)} ago",
            *([bytes_text(run.bytes or 0)] if sizes else []),
            run.host or "",
            run.origin or "",
        )
    more = f", {len(listed)} of them here" if len(listed) < len(all_runs) else ""
    runs = "1 run" if len(all_runs) == 1 else f"{len(all_runs)} runs"
    return [heading(f"{runs} in {store.uri}{more}"), lines]


def _since(then: float) -> str:
    """How long ago a moment is, for people."""
    seconds = max(0, int(datetime.datetime.now(datetime.UTC).timestamp() - then))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
