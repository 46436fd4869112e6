"""Rows without an environment beside others that have one: their answer is the whole episode."""

from __future__ import annotations

from collections.abc import Sequence

from configs.episodes import EpisodesConfig, NoEnvironment
from engines.environments.protocol import EnvironmentReady, Outcome
from engines.environments.sessions import Asked, Environments, Tokenizer
from storage.objects.documents import Row


class OneTurn:
    """What the owner of environments asks of them (`Environments`), without any process."""

    def start(self) -> EnvironmentReady:
        """There is nothing to load."""
        return EnvironmentReady(digest="", packages={}, tools=())

    def opening(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[Outcome]:
        """Nothing is said before the first turn of N rows."""
        return [Outcome() for _ in rows]

    def act(self, turns: Sequence[Asked]) -> list[Outcome]:
        """With one turn each of N episodes is over."""
        return [Outcome(done=True) for _ in turns]

    def finish(self, turns: Sequence[Asked]) -> list[Outcome]:
        """There is no reward of an environment."""
        return [Outcome() for _ in turns]

    def close(self) -> None:
        """There is nothing to end."""


def open_environments(
    config: EpisodesConfig, frames: bool = False, tokenizer: Tokenizer | None = None
) -> Environments | OneTurn:
    """The environments of these settings; see `Environments`."""
    if isinstance(config.environment, NoEnvironment):
        return OneTurn()
    return Environments(config, frames=frames, tokenizer=tokenizer)
