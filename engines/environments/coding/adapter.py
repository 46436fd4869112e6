"""Workspaces as environments: with tools for the model, or handed to an agent."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from configs.coding import WorkspaceConfig
from engines.environments.agents import load_agent
from engines.environments.coding import judging, sandbox_files, testing
from engines.environments.coding.workspace import Workspace
from engines.environments.contract import Given, Loaded, Lost, digest_of
from engines.environments.protocol import EnvironmentReady, EnvironmentStart, ToolCall
from engines.environments.tools import called, schema, tools_of
from engines.sandboxes.protocol import SandboxFailed


class WorkspaceTools:
    """What the model may do in a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._failed: SandboxFailed | None = None

    def bash(self, command: str) -> str:
        """Run a command in the folder of the repository. Each one begins there anew; files stay.

        Args:
            command: for bash, without any network.
        """
        return self._workspace.bash(command)

    def read_file(self, path: str) -> str:
        """Read a file.

        Args:
            path: in the repository.
        """
        return self._workspace.read(path)

    def write_file(self, path: str, text: str) -> str:
        """Write a file, in the place of what was there.

        Args:
            path: in the repository.
            text: all of the file.
        """
        self._workspace.write(path, text)
        return f"{path} has been written."

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text that stands once in a file.

        Args:
            path: in the repository.
            old: the text to replace, with enough around it that it stands there once.
            new: what comes in its place.
        """
        self._workspace.edit(path, old, new)
        return f"{path} has been changed."


class WorkspaceAdapter:
    """An episode with these tools: it has ended once a turn calls none, and then the tests run."""

    def __init__(self, settings: WorkspaceConfig) -> None:
        self._settings = settings
        self._workspace: Workspace | None = None

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        """Open the workspace; the row's problem says all."""
        with losses():
            self._workspace = Workspace(self._settings, row)
        return Given(observation=None)

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        """Do what the turn calls for."""
        assert self._workspace is not None, "it was reset"
        failures: list[SandboxFailed] = []
        tools = {
            name: _told(tool, failures)
            for name, tool in tools_of(WorkspaceTools(self._workspace)).items()
        }
        results = tuple(called(tools, call, lambda result: result) for call in calls or ())
        if failures:  # `called` takes it for the model's mistake
            raise Lost(f"the sandbox of the workspace failed: {failures[0]}")
        return Given(observation=None, done=not calls, results=results)

    def finish(self) -> Given:
        """Run the tests."""
        assert self._workspace is not None, "it was reset"
        with losses():
            return Given(observation=None, reward=self._workspace.reward())

    def close(self) -> None:
        """End the sandbox."""
        if self._workspace is not None:
            self._workspace.close()


def _told(tool: Callable[..., str], failures: list[SandboxFailed]) -> Callable[..., str]:
    def tell(**arguments: Any) -> str:
        try:
            return tool(**arguments)
        except SandboxFailed as error:
            failures.append(error)
            raise

    return tell


@contextlib.contextmanager
def losses() -> Iterator[None]:
    """Raise Lost where a sandbox failed in the body: the episode has failed, and has no reward."""
    try:
        yield
    except SandboxFailed as error:
        raise Lost(f"the sandbox of the workspace failed: {error}") from None


def load_workspace(start: EnvironmentStart, agent: Callable[..., Any] | None) -> Loaded:
    """Workspaces with tools, or for an agent that takes one by the argument `workspace`.

    ValueError where the agent takes none.
    """
    settings = WorkspaceConfig.model_validate(start.workspace)
    code: list[Callable[..., Any]] = [Workspace, judging.judged, sandbox_files.put, testing.main]
    if agent is None:
        tools = tools_of(WorkspaceTools.__new__(WorkspaceTools))
        ready = EnvironmentReady(
            digest=digest_of([*code, WorkspaceTools]),
            packages={},
            tools=[schema(name, tool) for name, tool in tools.items()],
        )
        return Loaded(make=lambda: WorkspaceAdapter(settings), ready=ready)
    given = inspect.signature(agent).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in given.values())
    if "workspace" not in given and not takes_all:
        raise ValueError(
            f"the agent {start.path} takes no argument workspace, and episodes.workspace is set. "
            "Let it take workspace, or set episodes.workspace = null"
        )

    def taken(workspace: Workspace, offered: Mapping[str, Any]) -> dict[str, Any]:
        found = {**offered, "workspace": workspace}
        return {name: value for name, value in found.items() if takes_all or name in given}

    def play(**offered: Any) -> Any:
        with losses(), contextlib.closing(Workspace(settings, offered)) as workspace:
            return agent(**taken(workspace, offered))

    async def play_async(**offered: Any) -> Any:
        with losses():
            opened = await asyncio.to_thread(Workspace, settings, offered)
            with contextlib.closing(opened) as workspace:
                return await agent(**taken(workspace, offered))

    loaded = load_agent(start, play_async if inspect.iscoroutinefunction(agent) else play)
    return replace(loaded, ready=replace(loaded.ready, digest=digest_of([*code, agent])))
