"""What `refrain worker` does: check the settings, and hold workers of a pool on this machine."""

from __future__ import annotations

import time
from pathlib import Path

from configs.overrides import ConfigError
from configs.run import RunConfig
from configs.terminal_text import print_text
from engines.clusters.own_workers import serve


def hold(config: RunConfig, pool: str, count: int, name: str, logs: Path) -> int:
    """Hold so many workers of a pool until Ctrl-C or SIGTERM; returns the exit code.

    ConfigError, or ValueError, in one sentence, for what is wrong with the settings or does not fit
    this machine. `name`: of the machine, which must be another on each.
    """
    cluster = config.cluster
    if cluster.kind != "address":
        raise ConfigError(
            f"cluster.kind = {cluster.kind}, and its workers are started by the run. For workers "
            "that runs join, set cluster.kind=address and cluster.address=tcp://HOST:PORT."
        )
    if pool not in cluster.pools:
        raise ConfigError(f"{pool} is no pool. Name one of {', '.join(sorted(cluster.pools))}.")
    if count < 1:
        raise ConfigError(f"--workers = {count}, and it is a number of workers. Give 1 or more.")
    names = [f"{pool}-{name}-{number}" for number in range(count)]
    print_text(
        f"Workers {names[0]} to {names[-1]} for {cluster.address}; their logs are in {logs}."
        if count > 1
        else f"Worker {names[0]} for {cluster.address}; its log is {logs / names[0]}.log.",
        flush=True,
    )
    serve(cluster, pool, names, logs, _tell)
    return 0


def _tell(sentence: str) -> None:
    print_text(f"{time.strftime('%H:%M:%S')} {sentence}", error=True, flush=True)
