"""What a step cost: seconds of each pool's devices by stage, idle and lost ones, joules and money.

Made when a step is committed, and kept among its metrics as cost/…; docs/cost.md has their table.
A device is a GPU; of a pool without GPUs it is a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from storage.objects.documents import JsonValue

HOUR = 3600.0  # seconds
SECONDS = "cost/device_seconds"  # metric names; SECONDS/POOL/WHAT
HELD, IDLE, LOST, STARTING = "held", "idle", "lost", "starting"  # what is no stage
IDLE_SHARE = "cost/idle_share"  # IDLE_SHARE/POOL
CPU_SECONDS, JOULES, BUSY = "cost/cpu_seconds", "cost/joules", "cost/gpu_busy"  # …/POOL
DEVICE_HOURS, MONEY = "cost/device_hours", "cost/money"
SO_FAR = "cost/so_far/"
DEVICE_HOURS_SO_FAR, MONEY_SO_FAR = f"{SO_FAR}device_hours", f"{SO_FAR}money"
JOULES_SO_FAR = f"{SO_FAR}joules"
SECONDS_PER_SAMPLE, MONEY_PER_SAMPLE = "cost/per_sample/device_seconds", "cost/per_sample/money"
JOULES_PER_SAMPLE = "cost/per_sample/joules"

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Devices of one pool."""

    workers: int
    gpus: int = 0  # of each worker
    price_per_hour: float | None = None  # of each device

    @property
    def per_worker(self) -> int:
        """Devices of a worker."""
        return self.gpus or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """What a pool's processes used between two commits."""

    cpu_seconds: float = 0.0
    joules: float | None = None  # of its GPUs; None: no driver told
    busy: float | None = None  # share of the time in which they had a kernel to run; likewise


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The time that a step is charged: since the commit before, or since the start of workers."""

    begin: float  # seconds since 1970
    end: float
    launched: bool  # whether it begins with the start of workers and engines
    died: float = 0.0  # seconds that a flow before this one went on after its last commit, and died


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptCost:
    """An attempt as far as it costs something."""

    stage: str
    started: float  # seconds since 1970
    failed: bool
    worker_seconds: Mapping[str, float] = field(default_factory=dict)  # by pool

    @classmethod
    def of(cls, attempt: Mapping[str, JsonValue]) -> AttemptCost:
        """As a commit has it; an older Refrain did not count worker-seconds."""
        by_pool = cast("Mapping[str, float]", attempt.get("worker_seconds") or {})
        return cls(
            stage=str(attempt["stage"]),
            started=float(str(attempt["started"])),
            failed=bool(attempt.get("error")),
            worker_seconds=by_pool,
        )


def window_of(
    launched: float,
    committed: float | None,
    now: float,
    died: tuple[float, float | None] | None = None,
) -> Window:
    """The window of a step that is committed now.

    Windows follow each other without a gap while one flow runs. `launched`: when this flow asked for
    workers; `committed`: when the step before was, by whatever flow; `died`: when the flow before
    began and was last seen, if it died.
    """
    fresh = committed is None or committed <= launched
    went_on = 0.0
    if fresh and died is not None and died[1] is not None:
        went_on = max(0.0, died[1] - max(died[0], committed or 0.0))
    begin = launched if fresh else cast("float", committed)
    return Window(begin=begin, end=now, launched=fresh, died=went_on)


def device_seconds(calls: Iterable[AttemptCost], pools: Mapping[str, Pool]) -> dict[str, Metrics]:
    """Pool -> stage -> device-seconds of the calls; those of failed calls together under LOST."""
    by_pool: dict[str, Metrics] = {name: {} for name in pools}
    for call in calls:
        for name, seconds in call.worker_seconds.items():
            if name in pools:
                what = LOST if call.failed else call.stage
                devices = pools[name].per_worker
                by_pool[name][what] = by_pool[name].get(what, 0.0) + seconds * devices
    return by_pool


def calls_cost(worker_seconds: Mapping[str, float], pools: Mapping[str, Pool]) -> Metrics:
    """What calls alone come to, without what is idle beside them.

    device_seconds/POOL, device_hours of the pools that count, and money where one has a price.
    worker_seconds: by pool.
    """
    seconds = {
        name: amount * pools[name].per_worker
        for name, amount in worker_seconds.items()
        if name in pools
    }
    metrics: Metrics = {f"device_seconds/{name}": amount for name, amount in seconds.items()}
    metrics["device_hours"] = sum(seconds.get(name, 0.0) for name in counted(pools)) / HOUR
    prices = {n: p.price_per_hour for n, p in pools.items() if p.price_per_hour is not None}
    if prices:
        metrics["money"] = sum(seconds.get(n, 0.0) * price for n, price in prices.items()) / HOUR
    return metrics


def step_cost(
    calls: Sequence[AttemptCost],
    window: Window,
    pools: Mapping[str, Pool],
    used: Mapping[str, Used],
    before: Mapping[str, float | None],
    samples: int,
) -> Metrics:
    """The metrics cost/… of a step.

    Of each pool, in device-seconds: held = the stages + lost + starting + idle. Where steps overlap,
    a step's calls may lie before its window: idle is then below 0 for one step and as much too high
    for another, and right in the sum.

    Args:
        calls: the step's attempts, the failed ones too.
        before: the metrics of the commit before, whose cost so far is added to.
        samples: those that the step scored.
    """
    metrics: Metrics = {}
    first = min((call.started for call in calls), default=window.end)
    starting = max(0.0, min(first, window.end) - window.begin) if window.launched else 0.0
    for name, stages in device_seconds(calls, pools).items():
        devices = pools[name].workers * pools[name].per_worker
        total = devices * (window.end - window.begin + window.died)
        parts = {STARTING: devices * starting, **stages}
        parts[LOST] = parts.get(LOST, 0.0) + devices * window.died
        parts |= {HELD: total, IDLE: total - sum(parts.values())}
        metrics |= {f"{SECONDS}/{name}/{what}": seconds for what, seconds in parts.items()}
        metrics[f"{IDLE_SHARE}/{name}"] = parts[IDLE] / max(total, 1e-9)
    for name, process in used.items():
        metrics[f"{CPU_SECONDS}/{name}"] = process.cpu_seconds
        if process.joules is not None:
            metrics[f"{JOULES}/{name}"] = process.joules
        if process.busy is not None:
            metrics[f"{BUSY}/{name}"] = process.busy
    return metrics | _totals(metrics, pools, before, samples)


def _totals(
    metrics: Mapping[str, float],
    pools: Mapping[str, Pool],
    before: Mapping[str, float | None],
    samples: int,
) -> Metrics:
    """Hours, money and joules of a step, of everything up to it, and of a sample."""
    hours = {name: metrics[f"{SECONDS}/{name}/{HELD}"] / HOUR for name in pools}
    step: Metrics = {DEVICE_HOURS: sum(hours[name] for name in counted(pools))}
    total = {DEVICE_HOURS_SO_FAR: step[DEVICE_HOURS]}
    each = {SECONDS_PER_SAMPLE: step[DEVICE_HOURS] * HOUR}
    prices = {n: p.price_per_hour for n, p in pools.items() if p.price_per_hour is not None}
    if prices:
        step[MONEY] = sum(hours[name] * price for name, price in prices.items())
        total[MONEY_SO_FAR] = each[MONEY_PER_SAMPLE] = step[MONEY]
    joules = [value for name, value in metrics.items() if name.startswith(f"{JOULES}/")]
    if joules:
        total[JOULES_SO_FAR] = each[JOULES_PER_SAMPLE] = sum(joules)
    step |= {name: (before.get(name) or 0.0) + value for name, value in total.items()}
    return step | {name: value / samples for name, value in each.items() if samples}


def counted(pools: Mapping[str, Pool]) -> list[str]:
    """Pools whose devices make the device-hours: those with GPUs, and where none has any, all."""
    with_gpus = [name for name, pool in pools.items() if pool.gpus]
    return with_gpus or list(pools)
