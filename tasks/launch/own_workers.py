"""What `refrain worker` does: check the settings, and hold workers of a pool on this machine."""

from __future__ import annotations

import re
import time
from pathlib import Path

from configs.credentials import credential_sentence
from configs.overrides import ConfigError
from configs.rules.every_run import address_sentence
from configs.run import RunConfig
from configs.terminal_text import print_text
from engines.clusters.own_workers import check_machine, serve

NAME = re.compile(r"[A-Za-z0-9._-]+")


def check(config: RunConfig, pool: str, count: int, name: str) -> None:
    """ConfigError, or ValueError, in one sentence, where such workers cannot be on this machine.

    `name`: of the machine, which must be another on each.
    """
    cluster = config.cluster
    if cluster.kind != "address":
        raise ConfigError(
            f"cluster.kind = {cluster.kind}, and its workers are started by the run. For workers "
            "that runs join, set cluster.kind=address and cluster.address=tcp://HOST:PORT."
        )
    if fault := address_sentence(config) or credential_sentence(config):
        raise ConfigError(fault)
    if pool not in cluster.pools:
        raise ConfigError(f"{pool} is no pool. Name one of {', '.join(sorted(cluster.pools))}.")
    if count < 1:
        raise ConfigError(f"--workers = {count}, and it is a number of workers. Give 1 or more.")
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--name = {name} is no name of workers, whose logs are called so. Use letters, digits, "
            "'.', '_' and '-'."
        )
    check_machine(cluster, pool, count)


def hold(config: RunConfig, pool: str, count: int, name: str, logs: Path) -> int:
    """Hold so many workers of a pool until Ctrl-C or SIGTERM; returns the exit code.

    Raises what `check` raises.
    """
    check(config, pool, count, name)
    cluster = config.cluster
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
