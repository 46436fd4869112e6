"""A user's class as an environment, and the choice among the kinds of environments.

The class keeps the contract of TRL's `environment_factory`. Runs in the process of the
environments: only the standard library is imported.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.imports import imported, is_file
from engines.environments.agents import load_agent
from engines.environments.contract import Given, Loaded, NotAllowed, digest_of
from engines.environments.library_adapters import load_gymnasium, load_textarena
from engines.environments.openenv_adapter import load_openenv
from engines.environments.protocol import Ready, Start, ToolCall
from engines.environments.tools import called, schema, tools_of
from engines.processes.user_code import give_way, installed


def load(start: Start) -> Loaded:
    """The environment that is asked for; ValueError in one sentence, or what its own code raises."""
    if start.kind == "class":
        return load_class(start)
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


def load_class(start: Start) -> Loaded:
    """A user's class, of which one is made to see what it has."""
    factory = user_code(start.path)
    adapter = ClassAdapter(factory(**start.params))
    adapter.close()
    place = start.path.rpartition(":")[0]
    ready = Ready(
        digest=digest_of([factory, type(adapter.environment)]),
        packages=installed([] if is_file(place) else [place.partition(".")[0]]),
        tools=[schema(name, tool) for name, tool in adapter.tools.items()],
    )
    return Loaded(make=lambda: ClassAdapter(factory(**start.params)), ready=ready)


class ClassAdapter:
    """One object of a user's class: with tools, or with step(text) and then without."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        for name in ("reset", "step", "get_reward", "close"):
            if not callable(getattr(environment, name, _nothing)):
                raise ValueError(f"{name} of {type(environment).__name__} is no method")
        if not hasattr(environment, "reset"):
            raise ValueError(f"{type(environment).__name__} has no method reset")
        self._takes_text = hasattr(environment, "step")
        self.tools = {} if self._takes_text else tools_of(environment)
        if not self._takes_text and not self.tools:
            raise ValueError(
                f"{type(environment).__name__} has neither tools, which are public methods, nor a "
                "method step(text)"
            )

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        parameters = inspect.signature(self.environment.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        arguments = {k: v for k, v in row.items() if takes_all or k in parameters}
        if "seed" in parameters:
            arguments.setdefault("seed", seed)
        return Given(observation=_finished(self.environment.reset(**arguments)), done=self._done())

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        if self._takes_text:
            observation, reward, done = _step(_finished(self.environment.step(text)))
            results: tuple[str, ...] = ()
        else:
            results = tuple(called(self.tools, call, _finished) for call in calls or ())
            observation, reward, done = None, None, not calls
        done = done or self._done()
        return Given(observation=observation, reward=reward, done=done, results=results)

    def finish(self) -> Given:
        if not hasattr(self.environment, "get_reward"):
            return Given(observation=None)
        return Given(observation=None, reward=_finished(self.environment.get_reward()))

    def close(self) -> None:
        if hasattr(self.environment, "close"):
            _finished(self.environment.close())

    def _done(self) -> bool:
        done = getattr(self.environment, "done", False)
        return not callable(done) and bool(done)


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
