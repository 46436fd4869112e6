"""What --help says of settings: some, a group, one, all."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.help_topics import COMMON, common_settings, help_on
from configs.overrides import ConfigError
from configs.settings_help import fields

NAMES = [name for name, *_ in fields(GRPOConfig)]


def heads(text: str) -> list[str]:
    """The names of settings that a text tells of."""
    return [
        line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2] != " "
    ]


def test_the_settings_that_people_change_are_there_and_few() -> None:
    assert [name for name in COMMON if name not in NAMES] == []
    assert 25 <= len(COMMON) <= 40
    text = common_settings(GRPOConfig, "refrain grpo")
    assert [name for name in COMMON if name not in heads(text)] == []
    assert len(text.splitlines()) < 110
    assert "refrain grpo --help GROUP" in text and "train" in text.splitlines()[-4]


@pytest.mark.parametrize(
    ("topic", "first", "others"),
    [
        ("steps", "steps", []),
        ("rollout", "rollout.engine", ["rollout.temperature", "rollout.deadline"]),
        ("cluster.pools.rollout.gpus", "cluster.pools.NAME.gpus", []),
        ("rewards.functions.3.weight", "rewards.functions.0.weight", []),
        ("data.source", "data.source", ["data.source.kind", "data.source.task"]),
    ],
)
def test_a_topic_is_a_setting_or_a_group(topic: str, first: str, others: list[str]) -> None:
    found = heads(help_on(GRPOConfig, topic))
    assert found[0] == first
    assert [name for name in others if name not in found] == []
    assert {name.split(".")[0] for name in found} == {topic.split(".")[0]}


def test_all_are_every_one() -> None:
    assert len(heads(help_on(GRPOConfig, "all"))) >= len(NAMES)


@pytest.mark.parametrize(
    ("topic", "meant"),
    [
        ("tran", "train"),
        ("learning_rate", "train.learning_rate"),
        ("rolout.engine", "rollout.engine"),
    ],
)
def test_another_word_is_no_setting(topic: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{topic} is no setting.*Did you mean {meant}\?"):
        help_on(GRPOConfig, topic)
