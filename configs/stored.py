"""Settings as earlier versions of Refrain stored them in run.json, read as those of today."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

# Functions of ours that recipes name by import path and that have moved.
MOVED = {"engines.scorers:share_of_digits": "engines.rewards.builtin:share_of_digits"}
# What a run does that began before there was a setting, where today's default does something else.
BEFORE: dict[str, dict[str, Any]] = {"store": {"keep_registered": None}}


def upgraded_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run that was stored by version 1 of run.json."""
    new = renamed_settings(settings)
    new.get("rollout", {}).pop("shards_in_flight", None)  # cluster.pools.NAME.slots bounds them
    for function in new.get("rewards", {}).get("functions", []):
        if function.get("path") in MOVED:
            function["path"] = MOVED[function["path"]]
    return new


def renamed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as version 2 of run.json has them: what has another name or form by now has that, and
    what an older Refrain could not set is as it was then."""
    new = copy.deepcopy(dict(settings))
    if "staleness_guard" in new:
        guard = new.pop("staleness_guard")
        new.setdefault("guards", [])
        if guard is not None:
            new["guards"].append(_guard_of(guard))
    data = new.get("data", {})
    if "shuffle" in data:
        shuffle = data.pop("shuffle")
        data.setdefault("order", "shuffled" if shuffle else "sequential")
    for group, values in BEFORE.items():
        if group in new:
            new[group] = {**values, **new[group]}
    return new


def _guard_of(guard: Mapping[str, Any]) -> dict[str, Any]:
    """The guard of overlapping steps, which was the only one, with a bound that has its side."""
    side = "below" if guard["metric"].endswith("effective_sample_size") else "above"
    rest = {name: guard[name] for name in ("metric", "action", "patience") if name in guard}
    return {"name": "staleness", "action": "synchronous", **rest, side: guard["bound"]}
