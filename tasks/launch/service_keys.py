"""Keys of services: what makes one good enough."""

from __future__ import annotations

from configs.overrides import ConfigError
from engines.processes.key_guard import SHORTEST_KEY


def check_key(variable: str, key: str) -> None:
    """ConfigError where a service's key can be guessed."""
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"The key in {variable} has {len(key)} characters, so it can be guessed. Use "
            f"{SHORTEST_KEY} or more, such as those of: openssl rand -hex 32."
        )
