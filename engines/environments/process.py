"""Environments in a process of their own (engines/processes/child_process.py)."""

from __future__ import annotations

from typing import Any

from configs.episodes import (
    AgentEnvironment,
    ClassEnvironment,
    EpisodesConfig,
    GymnasiumEnvironment,
    NoEnvironment,
    OpenEnvEnvironment,
    ToolsEnvironment,
    WorkspaceEnvironment,
)
from engines.environments.protocol import Call, EnvironmentReady, EnvironmentStart, Reply, unpacked
from engines.processes.child_process import ChildProcess, Program
from engines.processes.user_code import packed

GIB = 2**30


class EnvironmentProcess(ChildProcess[EnvironmentReady, Call, Reply]):
    """A process that loads one environment, and holds sessions of it."""

    def __init__(self, config: EpisodesConfig, frames: bool = False) -> None:
        start = start_message(config, frames)
        program = Program(
            main="engines.environments.child:main",
            python=config.python,
            # Else a set of texts has another order in each process, and an episode that is played
            # again takes another course.
            environ={"PYTHONHASHSEED": "0"},
        )
        super().__init__(f"environment {start.name}", program, packed(start), unpacked)


def start_message(config: EpisodesConfig, frames: bool = False) -> EnvironmentStart:
    """The first message to a process of environments: what it loads, and how it plays.

    frames: whether what episodes see goes with the answers.
    """
    environment = config.environment
    path, id = "", ""
    params: dict[str, Any] = {}
    functions: tuple[str, ...] = ()
    assert not isinstance(environment, NoEnvironment), "it has no process"
    if not isinstance(environment, ToolsEnvironment | WorkspaceEnvironment):
        params = dict(environment.params)
    match environment:
        case ToolsEnvironment():
            functions = environment.functions
            name = ", ".join(functions)
        case WorkspaceEnvironment():
            name = environment.kind
        case ClassEnvironment() | AgentEnvironment():
            name = path = environment.path
        case GymnasiumEnvironment():
            name = id = environment.id
            path = environment.codec or ""
        case OpenEnvEnvironment():
            name = id = environment.url
            path = environment.codec or ""
        case _:
            name = id = environment.id
    return EnvironmentStart(
        name=name,
        kind=environment.kind,
        path=path,
        id=id,
        params=params,
        memory=int(config.memory_gib * GIB),
        players=config.players,
        frames=frames,
        functions=functions,
        workspace=None if config.workspaces is None else config.workspaces.model_dump(mode="json"),
    )
