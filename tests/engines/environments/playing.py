"""An episode as its driver keeps it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engines.environments.protocol import Outcome
from engines.environments.sessions import Environments, PastTurn, Turn, digest_of


class Episode:
    """One episode as its driver keeps it."""

    def __init__(self, name: str, row: dict[str, Any], seed: int, opening: Outcome) -> None:
        assert opening.failed is None, opening.failed
        said = digest_of(opening.observation)
        self.turn = Turn(
            episode=name, row=row, seed=seed, opening=said, past=(), text="", calls=None
        )

    def next(self, text: str = "", calls: Any = None) -> Turn:
        return replace(self.turn, text=text, calls=calls)

    def act(self, environments: Environments, text: str = "", calls: Any = None) -> Outcome:
        turn = self.next(text, calls)
        [outcome] = environments.act([turn])
        self.answered(turn, outcome)
        return outcome

    def finish(self, environments: Environments) -> Outcome:
        [outcome] = environments.finish([self.turn])
        return outcome

    def answered(self, turn: Turn, outcome: Outcome) -> None:
        one = PastTurn(text=turn.text, calls=turn.calls, digest=digest_of(outcome.observation))
        self.turn = replace(self.turn, past=(*turn.past, one))


def begin(environments: Environments, name: str = "one", seed: int = 7, **row: Any) -> Episode:
    [opening] = environments.opening([row], [seed])
    return Episode(name, row, seed, opening)


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments}
