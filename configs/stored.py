"""Settings as earlier versions of Refrain stored them in run.json, read as those of today."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

# Functions of ours that recipes name by import path and that have moved.
MOVED = {"engines.scorers:share_of_digits": "engines.rewards.builtin:share_of_digits"}


def upgraded_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run that was stored by version 1 of run.json."""
    new = copy.deepcopy(dict(settings))
    new.get("rollout", {}).pop("shards_in_flight", None)  # cluster.pools.NAME.slots bounds them
    for function in new.get("rewards", {}).get("functions", []):
        if function.get("path") in MOVED:
            function["path"] = MOVED[function["path"]]
    return new
