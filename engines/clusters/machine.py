"""What a machine behind SSH offers: `python -m engines.clusters.machine` prints it as JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
from importlib.metadata import version

from engines.workers.placement import this_node


def description() -> dict[str, object]:
    """This machine, and the versions that have to be the same on every one."""
    return {"node": dataclasses.asdict(this_node()), "versions": versions()}


def versions() -> dict[str, str]:
    """What pickled calls and Dask's messages depend on."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "distributed": version("distributed"),
    }


if __name__ == "__main__":
    print(json.dumps(description()))
