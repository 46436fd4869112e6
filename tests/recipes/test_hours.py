"""The hours in recipes and in docs/recipes.md are those of the cost model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.recipe_hours import TOKENS, hours, text
from configs.recipe_files import FOLDER, about_recipes, remarks
from tests.recipes.stand_ins import of_hub

PAGE = Path(__file__).parents[2] / "docs/recipes.md"


@pytest.mark.parametrize("name", sorted(TOKENS))
def test_recipe_and_page_have_the_models_hours(name: str) -> None:
    model, _ = hours(name)
    head = " ".join(remarks(FOLDER / f"{name}.yaml"))
    assert f"by the cost model {text(model)} h." in head
    (line,) = re.findall(rf"^\| `{re.escape(name)}` \|.*$", PAGE.read_text(), re.MULTILINE)
    assert line.split("|")[-3].strip() == text(model)


def test_every_recipe_of_the_hub_is_in_the_table() -> None:
    assert set(TOKENS) == set(of_hub()) - {"gsm8k-multinode"}
    assert set(TOKENS) <= about_recipes().keys()


def test_more_tokens_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    short, _ = hours("gsm8k-qwen2.5")
    monkeypatch.setitem(TOKENS, "gsm8k-qwen2.5", (120, 500))
    assert hours("gsm8k-qwen2.5")[0] > 1.5 * short
