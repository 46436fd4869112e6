"""References of a data set that do not score themselves are named, and no more than that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.data import DataConfig, FileSource
from configs.rewards import ChoiceReward, MathReward, Reward, RewardsConfig
from engines.rewards.checks import check_rewards, unread_references
from storage.prompts.datasets import open_source
from tests.engines.rewards.math_references import EQUIVALENTS


def told(folder: Path, reward: Reward, references: list[str]) -> list[str]:
    file = folder / "rows.jsonl"
    rows = [{"question": "?", "answer": one} for one in references]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source=FileSource(path=str(file)), template="plain")
    source, rewards = open_source(data.source), RewardsConfig(functions=(reward,))
    check_rewards(rewards, data, source)  # refuses nothing
    return unread_references(rewards, source)


def test_references_of_every_kind_are_read(tmp_path: Path) -> None:
    assert told(tmp_path, MathReward(answer_after=None), list(EQUIVALENTS)) == []
    assert told(tmp_path, MathReward(), ["1 + 1 = 2\n#### 2", "#### 1,200"]) == []
    assert told(tmp_path, ChoiceReward(), ["A", "(b)", r"\text{C}", "D. Paris"]) == []


@pytest.mark.parametrize(
    ("reward", "references", "odd"),
    [
        (MathReward(answer_after=None), ["3", r"\frac{1}{", "4"], ["Row 1: '\\\\frac{1}{'"]),
        (MathReward(answer_after=None), ["3", r"\begin{tabular}{c}1\end{tabular}"], ["Row 1"]),
        (MathReward(), ["no marker, #### ", "#### 3"], ["Row 0"]),
        (ChoiceReward(), ["A", "42", "B", ""], ["Row 1: '42'; Row 3: ''"]),
        (ChoiceReward(), ["x y"] * 9, ["9 of 9", "Row 4", "and 4 more"]),
    ],
)
def test_odd_ones_are_named(
    tmp_path: Path, reward: Reward, references: list[str], odd: list[str]
) -> None:
    (sentence,) = told(tmp_path, reward, references)
    assert sentence.startswith(f"{reward.label}: ")
    assert "(column answer) do not score themselves" in sentence
    for part in odd:
        assert part in sentence
