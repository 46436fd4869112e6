"""A user's class or functions as an environment, and the choice among the kinds of environments.

The class keeps the contract of TRL's `environment_factory`, functions that of its `tools`. Runs in
the process of the environments: only the standard library is imported.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.imports import imported, is_file
from engines.environments.agents import load_agent
from engines.environments.contract import (
    Given,
    Loaded,
    NotAllowed,
    digest_of,
    of_players,
    told,
)
from engines.environments.library_adapters import load_gymnasium, load_textarena
from engines.environments.openenv_adapter import load_openenv
from engines.environments.protocol import EnvironmentReady, EnvironmentStart, ToolCall
from engines.environments.tools import called, schema, tools_of
from engines.processes.user_code import give_way, installed


def load(start: EnvironmentStart) -> Loaded:
    """The environment that is asked for; ValueError in one sentence, or what its own code raises."""
    if start.workspace is not None:
        from engines.environments.coding.adapter import load_workspace

        return load_workspace(start, user_code(start.path) if start.path else None)
    if start.kind == "class":
        return load_class(start)
    if start.kind == "tools":
        return load_tools(start)
    if start.kind == "agent":
        return load_agent(start, user_code(start.path))
    codec = user_code(start.path) if start.path else None
    make = {
        "gymnasium": load_gymnasium,
        "textarena": load_textarena,
        "openenv": load_openenv,
    }
    return make[start.kind](start, codec)


def user_code(path: str) -> Callable[..., Any]:
    """The class or function at an import path; ValueError if there is none."""
    place = path.rpartition(":")[0]
    if is_file(place):
        give_way(place)
    found = imported(path)
    if not callable(found):
        raise ValueError(f"{path} is a {type(found).__name__}, no class or function")
    return found


def load_class(start: EnvironmentStart) -> Loaded:
    """A user's class, of which one is made to see what it has."""
    factory = user_code(start.path)

    def make() -> ClassAdapter | PlayersAdapter:
        environment = factory(**start.params)
        if start.players > 1:
            return PlayersAdapter(environment, start.players)
        return ClassAdapter(environment, start.frames)

    adapter = make()
    adapter.close()
    place = start.path.rpartition(":")[0]
    ready = EnvironmentReady(
        digest=digest_of([factory, type(adapter.environment)]),
        packages=installed([] if is_file(place) else [place.partition(".")[0]]),
        tools=[schema(name, tool) for name, tool in adapter.tools.items()],
    )
    return Loaded(make=make, ready=ready)


def load_tools(start: EnvironmentStart) -> Loaded:
    """A user's functions as tools, by their names."""
    names = [path.rpartition(":")[2].rpartition(".")[2] for path in start.functions]
    found = [user_code(path) for path in start.functions]
    tools = dict(zip(names, found, strict=True))
    if len(tools) < len(found):
        raise ValueError(f"two of the tools {', '.join(names)} have one name. Rename a function")
    places = [path.rpartition(":")[0] for path in start.functions]
    packages = [place.partition(".")[0] for place in places if not is_file(place)]
    ready = EnvironmentReady(
        digest=digest_of(found),
        packages=installed(packages),
        tools=[schema(name, tool) for name, tool in tools.items()],
    )
    return Loaded(make=lambda: ToolsAdapter(tools), ready=ready)


class ToolsAdapter:
    """Functions as tools; an episode has nothing else to it, and no reward of its own."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        self.tools = tools

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        return Given(observation=None)

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        results = tuple(called(self.tools, call, _finished) for call in calls or ())
        return Given(observation=None, done=not calls, results=results)

    def finish(self) -> Given:
        return Given(observation=None)

    def close(self) -> None:
        """Functions hold nothing."""


class ClassAdapter:
    """One object of a user's class: with tools, or with step(text) and then without.

    frames: whether its frame() goes with what it answers.
    """

    def __init__(self, environment: Any, frames: bool = False) -> None:
        self.environment = environment
        _check_methods(environment)
        self._frames = frames
        if frames and not callable(getattr(environment, "frame", None)):
            raise ValueError(
                f"{type(environment).__name__} has no method frame(), which returns an array of "
                "what there is to see"
            )
        self._takes_text = hasattr(environment, "step")
        if self._takes_text and not _takes(environment.step, 1):
            raise ValueError(
                f"step of {type(environment).__name__} does not take (text) alone. For "
                "step(text, player) set episodes.players to the number of players"
            )
        besides = "frame" if frames else ""
        self.tools = {} if self._takes_text else tools_of(environment, besides)
        if not self._takes_text and not self.tools:
            raise ValueError(
                f"{type(environment).__name__} has neither tools, which are public methods, nor a "
                "method step(text)"
            )

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        said = _reset(self.environment, row, {"seed": seed})
        return Given(observation=said, done=self._done(), frame=self._frame())

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        if self._takes_text:
            observation, reward, done = _step(_finished(self.environment.step(text)))
            results: tuple[str, ...] = ()
        else:
            results = tuple(called(self.tools, call, _finished) for call in calls or ())
            observation, reward, done = None, None, not calls
        done = done or self._done()
        return Given(
            observation=observation,
            reward=reward,
            done=done,
            results=results,
            frame=self._frame(),
        )

    def finish(self) -> Given:
        if not hasattr(self.environment, "get_reward"):
            return Given(observation=None)
        return Given(observation=None, reward=_finished(self.environment.get_reward()))

    def close(self) -> None:
        _close(self.environment)

    def _frame(self) -> Any:
        return _finished(self.environment.frame()) if self._frames else None

    def _done(self) -> bool:
        done = getattr(self.environment, "done", False)
        return not callable(done) and bool(done)


class PlayersAdapter:
    """One object of a user's class for several players, who take turns: with step(text, player).

    reset(**row) returns what each player is told first, as a list, and player 0 begins; or a player
    and that list. step returns who is next and what that one is told, or with them rewards of the
    players and whether it is done. get_reward() gives those at the end, if there are any.
    """

    tools: Mapping[str, Callable[..., Any]] = {}

    def __init__(self, environment: Any, players: int) -> None:
        self.environment = environment
        self._players = players
        self._next = 0
        _check_methods(environment)
        if not hasattr(environment, "step") or not _takes(environment.step, 2):
            raise ValueError(
                f"{type(environment).__name__} has no method step(text, player), which "
                f"episodes.players = {players} takes"
            )

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        said = _reset(self.environment, row, {"seed": seed, "players": self._players})
        self._next, texts = said if isinstance(said, tuple) and len(said) == 2 else (0, said)
        if not isinstance(texts, list) or len(texts) != self._players:
            raise NotAllowed(
                f"the environment's reset returned {texts!r:.60}; for {self._players} players it "
                "returns a list of what each is told, or who begins and that list"
            )
        return Given(observation=told(self._next, texts, self._players))

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        found = _finished(self.environment.step(text, self._next))
        if not isinstance(found, tuple) or len(found) not in (2, 4):
            raise NotAllowed(
                f"the environment's step returned {found!r:.60}; for several players it returns who "
                "is next and what that one is told, or the four of these, rewards and done"
            )
        player, said, rewards, done = found if len(found) == 4 else (*found, None, False)
        given = of_players(rewards, self._players)
        if done:
            return Given(observation=None, rewards=given, done=True)
        self._next = player
        return Given(observation=told(player, [said], self._players), rewards=given)

    def finish(self) -> Given:
        if not hasattr(self.environment, "get_reward"):
            return Given(observation=None)
        rewards = _finished(self.environment.get_reward())
        return Given(observation=None, rewards=of_players(rewards, self._players))

    def close(self) -> None:
        _close(self.environment)


def _check_methods(environment: Any) -> None:
    """ValueError unless what an environment has by these names are methods, and it has a reset."""
    for name in ("reset", "step", "get_reward", "close"):
        if not callable(getattr(environment, name, _nothing)):
            raise ValueError(f"{name} of {type(environment).__name__} is no method")
    if not hasattr(environment, "reset"):
        raise ValueError(f"{type(environment).__name__} has no method reset")


def _reset(environment: Any, row: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
    """Reset with the row as far as it is taken, and by name with what is offered besides."""
    parameters = inspect.signature(environment.reset).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {k: v for k, v in row.items() if takes_all or k in parameters}
    for name, value in offered.items():
        if name in parameters:
            arguments.setdefault(name, value)
    return _finished(environment.reset(**arguments))


def _takes(method: Callable[..., Any], count: int) -> bool:
    """Whether a method can be called with so many values."""
    try:
        inspect.signature(method).bind(*[None] * count)
    except TypeError:
        return False
    return True


def _close(environment: Any) -> None:
    if hasattr(environment, "close"):
        _finished(environment.close())


def _nothing() -> None:
    """Stands for a method that is not there."""


def _step(result: Any) -> tuple[Any, Any, bool]:
    """What step(text) returned: an observation, or with it a reward and whether it is done."""
    if not isinstance(result, tuple):
        return result, None, False
    if len(result) != 3:
        raise NotAllowed(
            f"the environment's step returned {len(result)} values; it returns a text, or the "
            "three of observation, reward and done"
        )
    observation, reward, done = result
    return observation, reward, bool(done)


def _finished(result: Any) -> Any:
    """A result; awaited first if it can be, in the one event loop of the process."""
    if not inspect.isawaitable(result):
        return result
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0].run_until_complete(_awaited(result))


async def _awaited(result: Any) -> Any:
    return await result


_loops: list[asyncio.AbstractEventLoop] = []  # one at most: what awaits in it stays usable
