"""An episode as its driver keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engines.environments.protocol import Outcome
from engines.environments.sessions import Environments, GivenTurns, PastTurn, Turn, digest_of


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


class AgentEpisode:
    """An agent's episode as its driver keeps it: the turns that it was given, by their names."""

    def __init__(
        self, environments: Environments, name: str, row: dict[str, Any], seed: int
    ) -> None:
        self.environments, self.name, self.row, self.seed = environments, name, row, seed
        self.turns: dict[str, Mapping[str, Any]] = {}
        [self.outcome] = environments.act([self.given])

    @property
    def given(self) -> GivenTurns:
        turns = {name: lambda turn=turn: turn for name, turn in self.turns.items()}
        return GivenTurns(episode=self.name, row=self.row, seed=self.seed, turns=turns)

    @property
    def waiting(self) -> list[dict[str, Any]]:
        return requests(self.outcome)

    def answer(self, *texts: str, calls: Any = None) -> Outcome:
        """Answer the requests that wait, in the order of their names."""
        for request, text in zip(self.waiting, texts, strict=True):
            self.turns[request["name"]] = turn_of(request["name"], text, calls)
        [self.outcome] = self.environments.act([self.given])
        return self.outcome

    def act(self, environments: Environments, text: str = "", calls: Any = None) -> Outcome:
        return self.answer(text, calls=calls)

    def finish(self, environments: Environments) -> Outcome:
        [outcome] = environments.finish([self.given])
        return outcome


def turn_of(name: str, text: str, calls: Any = None, **more: Any) -> dict[str, Any]:
    """A turn as an agent is given it."""
    nothing: dict[str, Any] = {"cut": False, "prompt_ids": [], "ids": [], "logprobs": []}
    return {"name": name, "text": text, "calls": calls or (), **nothing, **more}


def requests(outcome: Outcome) -> list[dict[str, Any]]:
    """The requests that wait."""
    assert outcome.failed is None, outcome.failed
    found: list[dict[str, Any]] = json.loads(outcome.observation)["requests"]
    return found


def new_messages(request: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """What is new in a request after the turn that it goes on from."""
    found: list[dict[str, Any]] = request["messages"]
    return found[-request["new"] :]


def begin_agent(
    environments: Environments, name: str = "one", seed: int = 7, **row: Any
) -> AgentEpisode:
    return AgentEpisode(environments, name, row, seed)


def begin(environments: Environments, name: str = "one", seed: int = 7, **row: Any) -> Episode:
    [opening] = environments.opening([row], [seed])
    return Episode(name, row, seed, opening)


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments}
