"""A recipe with comments says the same as the recipe, and what each setting is."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.commented_recipe import commented_recipe
from configs.overrides import ConfigError
from configs.recipe import read_recipe
from configs.recipe_files import FOLDER, about_recipes, flow_of, recipe_names
from flows.recipe import flows, settings_of

OWN = {
    "dapo-math-17k": "dapo",
    "distill-7b-1.5b": "distill",
    "tiny-dapo": "dapo",
    "tiny-srpo": "srpo",
}


def written(folder: Path, recipe: str, *words: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(commented_recipe(recipe, words, flows(), settings_of))
    return path


@pytest.mark.parametrize("name", recipe_names())
def test_it_is_the_recipe(name: str, tmp_path: Path) -> None:
    flow = OWN.get(name, "grpo")
    mine = written(tmp_path, name)
    assert f"# This file: refrain {flow} FILE\n" in mine.read_text()
    assert flow_of(FOLDER / f"{name}.yaml") in (flow, None)
    assert read_recipe(settings_of(flow), str(mine)) == read_recipe(settings_of(flow), name)


def test_changes_and_comments(tmp_path: Path) -> None:
    words = ["steps=9", "guards=[{name: a, metric: train/loss, above: 2.0}]", "lora={rank: 4}"]
    mine = written(tmp_path, "tiny", *words)
    assert read_recipe(settings_of("grpo"), str(mine)) == read_recipe(
        settings_of("grpo"), "tiny", words
    )
    lines = mine.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith(("#", "kind:", "- kind:")):
            above = lines[number - 1].lstrip()
            named = line.strip() in ("train:", "rollout:", "cpu:")  # names of pools
            assert above.startswith("#") or named, line
    assert "# RL steps of the run.\nsteps: 9\n" in mine.read_text()
    assert max(map(len, lines)) <= 110


def test_each_recipe_is_told_in_a_line() -> None:
    found = about_recipes()
    assert list(found) == recipe_names()
    assert all(20 < len(what) < 110 and "\n" not in what for what in found.values())


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [("nope", [], "There is no recipe nope"), ("tiny", ["steps=x"], "steps = 'x'")],
)
def test_what_is_no_recipe_is_refused(recipe: str, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        commented_recipe(recipe, words, flows(), settings_of)
