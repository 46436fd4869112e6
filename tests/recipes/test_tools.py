"""The tools of recipes, called as a model calls them: in a process of environments, by the recipe's settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.episodes import EpisodesConfig
from configs.recipe import load_recipe
from engines.environments.sessions import Environments
from flows.recipe import settings_of
from tests.engines.environments.playing import begin, call
from tests.recipes.stand_ins import AUTHORS, flow, rows


@pytest.fixture
def environments(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Environments]:
    """Those of a recipe, whose name is the parameter."""
    name = request.param
    config = load_recipe(settings_of(flow(name)), name, rows(name, tmp_path))
    assert isinstance(config.episodes, EpisodesConfig)
    made = Environments(config.episodes.model_copy(update={"processes": 1}))
    yield made
    made.close()


def answer(environments: Environments, tool: str, **arguments: Any) -> str:
    """What a call of a tool is answered."""
    outcome = begin(environments).act(environments, "…", [call(tool, **arguments)])
    assert outcome.failed is None and not outcome.done
    (result,) = outcome.results
    return result


@pytest.mark.parametrize("environments", ["calculator"], indirect=True)
def test_the_calculator(environments: Environments) -> None:
    assert answer(environments, "calculate", expression="(3 + 4) * 2") == "14"
    assert answer(environments, "calculate", expression="apples").startswith("Error: ValueError")


@pytest.mark.parametrize("environments", ["search"], indirect=True)
def test_the_search_engine(environments: Environments) -> None:
    found = answer(environments, "search", query="first program")
    assert found.startswith("[1] Programming\nAda Lovelace wrote the first program.")


@pytest.mark.parametrize("environments", ["python-agent"], indirect=True)
def test_the_python_interpreter(environments: Environments) -> None:
    assert answer(environments, "run_python", code="print(2**10)") == "1024"
    assert "ZeroDivisionError" in answer(environments, "run_python", code="1 / 0")


@pytest.mark.parametrize("environments", ["alphabet-sort"], indirect=True)
def test_the_sorting_of_names(environments: Environments) -> None:
    names = json.dumps([name.replace(" ", "") for name in AUTHORS])
    [opening] = environments.opening([{"names": names}], [7])
    assert "Sort these names by" in opening.observation
    episode = begin(environments, names=names)
    outcomes = [episode.act(environments, "no list") for _ in range(3)]
    assert [one.done for one in outcomes] == [False, False, True]
    assert episode.finish(environments).reward == 0.0
