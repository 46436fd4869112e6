"""That coding tasks have a workspace, and a workspace coding tasks and the time that it takes."""

from collections.abc import Iterable

from configs.coding import CodingSource
from configs.data import DataConfig
from configs.episodes import EpisodesConfig
from configs.rules.rule import Rule, of_each
from configs.run import RunConfig


def _workspaces(config: RunConfig) -> Iterable[EpisodesConfig]:
    played = config.episodes
    return [] if played is None or played.workspace is None else [played]


def _data(config: RunConfig) -> list[DataConfig]:
    return [*config.data.tasks.values()] or [config.data]


def _answer_seconds(episodes: EpisodesConfig) -> float:
    assert episodes.workspace is not None
    return episodes.workspace.answer_seconds


CODING: tuple[Rule[RunConfig], ...] = (
    of_each(
        _workspaces,
        needs=lambda config, episodes: episodes.environment.kind in ("workspace", "agent"),
        says=lambda config, episodes: (
            "episodes.workspace is for episodes.environment.kind = workspace or agent, and that is "
            f"{episodes.environment.kind}. Set one of them, or episodes.workspace = null."
        ),
    ),
    of_each(
        _workspaces,
        needs=lambda config, episodes: all(
            isinstance(one.source, CodingSource) for one in _data(config)
        ),
        says=lambda config, episodes: (
            "episodes.workspace opens the repository of a row, and data.source.kind = "
            f"{config.data.source.kind} has rows without. Set data.source.kind = coding, or "
            "episodes.workspace = null."
        ),
    ),
    of_each(
        _workspaces,
        needs=lambda config, episodes: episodes.turn_timeout >= _answer_seconds(episodes),
        says=lambda config, episodes: (
            f"episodes.turn_timeout = {episodes.turn_timeout:g} s is shorter than an answer of the "
            f"workspace may take, {_answer_seconds(episodes):g} s by episodes.workspace.test_timeout "
            "and its sandbox.timeout. Set episodes.turn_timeout higher, or these lower."
        ),
    ),
)
