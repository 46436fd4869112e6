"""What all of a run cost: its steps, what followed them, and evaluations made afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storage.evaluations.results import evaluations_of
from storage.runs.commit_log import head, read_outline
from storage.runs.live import read_end
from storage.runs.run_store import RunStore, start_of
from storage.tracking.cost import DEVICE_HOURS_SO_FAR, MONEY_SO_FAR


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCost:
    """Devices, and money where a pool has a price."""

    device_hours: float
    money: float | None  # in cluster.currency

    def __sub__(self, other: DeviceCost) -> DeviceCost:
        money = None if self.money is None else self.money - (other.money or 0.0)
        return DeviceCost(device_hours=self.device_hours - other.device_hours, money=money)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCost:
    """The parts of a run's cost."""

    steps: DeviceCost  # up to the last commit; of a fork its parent's steps too
    after: DeviceCost  # what followed it, up to the run's end: the last evaluation, the promotion
    back_fills: DeviceCost  # calls of evaluations that were made afterwards on this run's behalf

    @property
    def device_hours(self) -> float:
        """In all."""
        return sum(part.device_hours for part in (self.steps, self.after, self.back_fills))

    @property
    def money(self) -> float | None:
        """In all; None where no pool has a price."""
        return total(part.money for part in (self.steps, self.after, self.back_fills))


def cost_of_run(run: RunStore) -> RunCost | None:
    """None before the first commit, and of a run of an older Refrain.

    Raises ObjectMissing, ObjectDamaged.
    """
    last = head(run)
    if last is None or last <= start_of(run):
        return None
    metrics = read_outline(run, last).metrics
    if metrics.get(DEVICE_HOURS_SO_FAR) is None:
        return None
    steps, end = _so_far(metrics), read_end(run)
    ended = end is not None and end.step == last and bool(end.cost)
    whole = _so_far(end.cost) if end is not None and ended else steps
    later = {
        result.key: result.cost
        for result in evaluations_of(run)
        if result.back_fill and result.asked_by == run.run
    }.values()
    hours = sum(cost.get("device_hours", 0.0) for cost in later)
    money = total(cost.get("money") for cost in later)
    return RunCost(
        steps=steps, after=whole - steps, back_fills=DeviceCost(device_hours=hours, money=money)
    )


def _so_far(metrics: Mapping[str, float | None]) -> DeviceCost:
    return DeviceCost(
        device_hours=metrics.get(DEVICE_HOURS_SO_FAR) or 0.0, money=metrics.get(MONEY_SO_FAR)
    )


def total(values: Iterable[float | None]) -> float | None:
    """The sum of those that are known; None of none."""
    amounts = [value for value in values if value is not None]
    return sum(amounts) if amounts else None
