"""What a rollback changes in a run's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from configs.grpo import GRPOConfig
from configs.guards import GuardConfig
from configs.overrides import ConfigError, change
from storage.runs.commit_log import Commit, GuardRecord
from storage.runs.run_store import Origin
from tasks.markdown import cell, escaped
from tasks.run.clock import BOUND

# Settings that a run keeps when it goes back to an earlier step.
FIXED = ("continue_from", "guards", "lora", "max_rollbacks", "model", "name", "store")


def check_rollbacks(config: GRPOConfig) -> None:
    """Whether the settings to which guards would change a run can be those of a fork; ConfigError."""
    for guard in config.guards:
        if guard.action != "rollback":
            continue
        where, settings = f"guards: rollback.change of {guard.label}", guard.rollback.change
        if fixed := sorted(key for key in settings if key.partition(".")[0] in FIXED):
            raise ConfigError(
                f"{where} has {fixed[0]}, which a run that goes back keeps. Remove it; a new run can "
                "have another."
            )
        plain = config.model_dump(mode="json")
        try:
            change(type(config), plain, settings_after(plain, settings))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error


def settings_after(settings: Mapping[str, Any], change: Mapping[str, Any]) -> list[str]:
    """What a rollback changes in a run's plain settings, as words key=value; ValueError if it cannot.

    A factor is applied to the value that is there: x0.1 of a learning rate of 1e-6 gives 1e-7.
    """
    return [f"{key}={_worded(settings, key, value)}" for key, value in change.items()]


def _worded(settings: Mapping[str, Any], key: str, value: Any) -> str:
    factor = _factor(value)
    if factor is None:
        return "null" if value is None else str(value)
    place: Any = settings
    for part in key.split("."):
        if isinstance(place, list) and part.isdigit() and int(part) < len(place):
            place = place[int(part)]
        else:
            place = place.get(part) if isinstance(place, Mapping) else None
    if isinstance(place, bool) or not isinstance(place, int | float):
        raise ValueError(
            f"guards: rollback.change has {key}: {value}, and {key} = {place} is no number to "
            "multiply. Give a value."
        )
    return f"{round(place * factor)}" if isinstance(place, int) else f"{place * factor:.12g}"


def _factor(value: Any) -> float | None:
    """0.1 of x0.1; None of what is no factor."""
    if not isinstance(value, str) or not value.startswith("x"):
        return None
    try:
        return float(value[1:])
    except ValueError:
        return None


def verdicts(
    config: GRPOConfig,
    step: int,
    last: Commit | None,
    start: int,
    max_staleness: int,
    rollbacks: int,
    metrics: Mapping[str, float],
) -> list[GuardRecord]:
    """What every guard says of a step that is about to be committed; at most one of them acts last.

    Args:
        config: of the run.
        step: the step.
        last: the commit before; None where there is none.
        start: the version that the run begins with; up to there the steps are of an earlier run.
        max_staleness: in force until now; at 0 a guard whose action is synchronous has no work left.
        rollbacks: how often guards have taken the run back so far.
        metrics: of the step.
    """
    before = {} if last is None else {record.guard: record for record in last.guards}
    records = []
    for guard in config.guards:
        if guard.action == "synchronous" and max_staleness == 0:
            continue
        earlier = before.get(guard.label)
        earlier = anew(earlier, step > start + 1) if earlier is not None else None
        record = judge(guard, earlier, metrics.get(guard.metric))
        records.append(_with_action(config, guard, step, rollbacks, record))
    return one_end(records)


def anew(record: GuardRecord, own_window: bool) -> GuardRecord:
    """Where a guard stands before the next step: its mean stays, counts may begin anew.

    They do in a fork (`own_window`: false), and where the guard had stopped the run: a person resumed
    it.
    """
    if own_window and record.action not in ("stop", "rollback"):
        return record
    return record.model_copy(update={"beyond": 0, "within": 0, "armed": True})


def judge(guard: GuardConfig, before: GuardRecord | None, value: float | None) -> GuardRecord:
    """A guard's verdict on a step.

    It acts at the last of `patience` steps in a row beyond the bound, and after that not before as
    many in a row were within it. The running mean is of the values within the bound, each with the
    weight 1 / min(seen, window), so that what is beyond it does not move it.

    Args:
        guard: its settings.
        before: its record of the step before; None: this is the first.
        value: of the metric; None where the step has none, which leaves everything as it is.
    """
    old = before or GuardRecord(guard=guard.label, metric=guard.metric, value=None, threshold=None)
    reference = old.mean if old.seen >= guard.window else None
    threshold = guard.threshold(reference)
    finite = value is not None and math.isfinite(value)
    update: dict[str, object] = {
        "metric": guard.metric,
        "value": value if finite else None,
        "threshold": threshold,
        "crossed": False,
        "action": None,
        "back_to": None,
        "change": [],
    }
    if value is None or (threshold is None and not finite):
        return old.model_copy(update=update)
    if threshold is not None and guard.crossed_by(value, threshold):
        beyond = old.beyond + 1
        acts = old.armed and beyond >= guard.patience
        update |= {"crossed": True, "beyond": beyond, "within": 0, "armed": old.armed and not acts}
        update |= {"action": guard.action if acts else None}
        return old.model_copy(update=update)
    steps, within = old.seen + 1, old.within + 1
    mean = value if old.mean is None else old.mean + (value - old.mean) / min(steps, guard.window)
    armed = old.armed or within >= guard.patience
    update |= {"beyond": 0, "within": within, "armed": armed, "mean": mean, "seen": steps}
    return old.model_copy(update=update)


def _with_action(
    config: GRPOConfig, guard: GuardConfig, step: int, rollbacks: int, record: GuardRecord
) -> GuardRecord:
    """The record with what its action comes to: after the last step, or with no rollback left."""
    last = step == config.steps
    if record.action in ("stop", "synchronous") and last:  # no step is left to overlap, or to make
        return record.model_copy(update={"action": None})
    if record.action != "rollback":
        return record
    back_to = max(1, step - guard.rollback.steps)
    if rollbacks >= config.max_rollbacks or back_to >= step:
        return record.model_copy(update={"action": None if last else "stop"})
    change = settings_after(config.model_dump(mode="json"), guard.rollback.change)
    return record.model_copy(update={"back_to": back_to, "change": change})


def one_end(records: Sequence[GuardRecord]) -> list[GuardRecord]:
    """At most one guard ends the branch: the rollback that goes back furthest, or else a stop.

    Of the others the record stays, with its count, and the action warn.
    """
    ends = [record for record in records if record.action in ("stop", "rollback")]
    if len(ends) < 2:
        return list(records)
    back = [end for end in ends if end.back_to is not None]
    verdict = min(back, key=lambda record: record.back_to or 0) if back else ends[0]
    warned: dict[str, object] = {"action": "warn", "back_to": None, "change": []}
    return [
        record.model_copy(update=warned) if record in ends and record is not verdict else record
        for record in records
    ]


def rollbacks(origin: Origin | None) -> int:
    """How often guards have taken a run that began so, and those that it goes on with, back."""
    cause = None if origin is None else origin.rollback
    return 0 if cause is None else cause.number


def pending_rollback(last: Commit | None) -> GuardRecord | None:
    """The rollback that a commit decided on; None where it did not."""
    pending = [] if last is None else [guard for guard in last.guards if guard.action == "rollback"]
    return pending[0] if pending else None


def bound_in_force(config: GRPOConfig, last: Commit | None) -> int:
    """max_staleness for the steps after a commit of this run; None: before its first.

    What a guard has lowered stays so for as long as there is one whose action that is.
    """
    lowers = any(guard.action == "synchronous" for guard in config.guards)
    bound = None if last is None or not lowers else last.metrics.get(BOUND)
    return config.max_staleness if bound is None else min(int(bound), config.max_staleness)


def guard_sentence(record: GuardRecord, step: int) -> str:
    """What a guard found after a step, as a sentence."""
    often = "" if record.beyond < 2 else f" for {record.beyond} steps in a row by now"
    if record.value is None or record.threshold is None:
        return (
            f"Guard {record.guard}: {record.metric} of step {step} was no finite number, which is "
            f"beyond every bound{often}."
        )
    side = "above" if record.value > record.threshold else "below"
    mean = "" if record.mean is None or record.seen == 0 else f" (running mean {record.mean:.4g})"
    return (
        f"Guard {record.guard}: {record.metric} of step {step} was {record.value:.4g}, {side} "
        f"{record.threshold:.4g}{mean}{often}."
    )


DOES = {"warn": "warns", "synchronous": "ends the overlap of steps", "stop": "stops the run"}


def guard_table(commit: Commit) -> list[str]:
    """Markdown lines: what every guard of the run found in a step; none where it has none."""
    if not commit.guards:
        return []
    lines = ["", "#### Guards", "", "| guard | metric | value | bound | beyond, steps in a row | |"]
    lines.append("|---|---|---|---|---|---|")
    for guard in commit.guards:
        value, bound = _shown(guard.value), _shown(guard.threshold)
        lines.append(
            f"| {escaped(guard.guard)} | {cell(guard.metric)} | {value} | {bound} "
            f"| {guard.beyond} | {_does(guard)} |"
        )
    return lines


def _does(record: GuardRecord) -> str:
    if record.action == "rollback":
        changes = "".join(f", {cell(word)}" for word in record.change)
        return f"**goes back to step {record.back_to}{changes}**"
    return "" if record.action is None else f"**{DOES[record.action]}**"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
