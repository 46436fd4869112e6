"""That coding tasks have a workspace, and a workspace coding tasks and the time that it takes."""

from collections.abc import Iterable

from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _parts(config: RunConfig) -> Iterable[str]:
    """Names of the tasks with a workspace; of one task none."""
    return [name for name, played in config.played.items() if played.workspaces is not None]


def _source_kind(config: RunConfig, name: str) -> str:
    return (config.data.tasks[name] if name else config.data).source.kind


def _answer_seconds(config: RunConfig, name: str) -> float:
    workspace = config.played[name].workspaces
    assert workspace is not None, "it is one of _parts"
    return workspace.answer_seconds


def _of(name: str) -> str:
    return f"The task {name}: " if name else ""


CODING: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: (
            config.episodes is None
            or config.episodes.workspace is None
            or any(one.workspaces is not None for one in config.played.values())
        ),
        says=lambda config: (
            "episodes.workspace is for episodes.environment.kind = workspace or agent, and there is "
            "none of these. Set one, or episodes.workspace = null."
        ),
    ),
    of_each(
        _parts,
        needs=lambda config, name: _source_kind(config, name) == "coding",
        says=lambda config, name: (
            f"{_of(name)}a workspace has the repository of a row, and rows of the source kind "
            f"{_source_kind(config, name)} have none. Set the source's kind = coding; or, of an "
            "agent, episodes.workspace = null."
        ),
    ),
    of_each(
        _parts,
        needs=lambda config, name: (
            config.played[name].turn_timeout >= _answer_seconds(config, name)
        ),
        says=lambda config, name: (
            f"{_of(name)}turn_timeout = {config.played[name].turn_timeout:g} s is shorter than an "
            f"answer of a workspace may take, {_answer_seconds(config, name):g} s by "
            "episodes.workspace.test_timeout and its sandbox.timeout. Set it higher, or these lower."
        ),
    ),
)
