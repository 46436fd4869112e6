"""That coding tasks have a workspace, and a workspace coding tasks and the time that it takes."""

from collections.abc import Iterable

from configs.coding import CodingSource
from configs.data import DataConfig
from configs.episodes import EpisodesConfig
from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _workspaces(config: RunConfig) -> Iterable[tuple[EpisodesConfig, DataConfig]]:
    """Episodes with a workspace, of each task, and its rows."""
    data = config.data.tasks or {"": config.data}
    played = ((one, data[name]) for name, one in config.played.items())
    return [(one, rows) for one, rows in played if one.workspaces is not None]


def _answer_seconds(episodes: EpisodesConfig) -> float:
    assert episodes.workspaces is not None
    return episodes.workspaces.answer_seconds


CODING: tuple[Rule[RunConfig], ...] = (
    of_each(
        _workspaces,
        needs=lambda config, one: one[0].environment.kind in ("workspace", "agent"),
        says=lambda config, one: (
            "episodes.workspace is for episodes.environment.kind = workspace or agent, and that is "
            f"{one[0].environment.kind}. Set one of them, or episodes.workspace = null."
        ),
    ),
    of_each(
        _workspaces,
        needs=lambda config, one: isinstance(one[1].source, CodingSource),
        says=lambda config, one: (
            "episodes.workspace opens the repository of a row, and data.source.kind = "
            f"{one[1].source.kind} has rows without. Set data.source.kind = coding, or "
            "episodes.workspace = null."
        ),
    ),
    of_each(
        _workspaces,
        needs=lambda config, one: one[0].turn_timeout >= _answer_seconds(one[0]),
        says=lambda config, one: (
            f"episodes.turn_timeout = {one[0].turn_timeout:g} s is shorter than an answer of the "
            f"workspace may take, {_answer_seconds(one[0]):g} s by episodes.workspace.test_timeout "
            "and its sandbox.timeout. Set episodes.turn_timeout higher, or these lower."
        ),
    ),
)
