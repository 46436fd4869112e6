"""The form of a deployment as Prefect's own page shows it, with its database on SQLite and Postgres."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.configs.test_form import in_order
from tests.deploy.conftest import Make, Platform
from tests.deploy.test_browser import Browser, browser
from tests.flows.test_servers import need_drivers, postgres

__all__ = ["browser"]  # a fixture
pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FIRST = ["Model", "Data", "Rewards", "Steps", "Train"]


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(
    request: pytest.FixtureRequest, make_platform: Make, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    """Prefect's server on such a database, with the deployments tiny and resume."""
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        if request.param == "postgres":
            need_drivers()
            variables = stack.enter_context(postgres(tmp_path_factory.mktemp("pg")))
        platform = make_platform(database=variables.get("PREFECT_SERVER_DATABASE_CONNECTION_URL"))
        try:
            done = platform.deploy("tiny", "resume")
            assert done.returncode == 0, done.stderr
            yield platform
        finally:
            platform.stop()


def test_the_database_gives_the_order_back(server: Platform) -> None:
    schema = server.deployment("tiny")["parameter_openapi_schema"]
    groups: dict[str, Any] = {
        name: found["properties"]
        for name, found in schema["definitions"].items()
        if "properties" in found
    }
    assert in_order(schema["properties"]) == ["resume", "fork", "config"]
    assert in_order(groups["GRPOConfig"])[:5] == ["model", "data", "rewards", "steps", "train"]
    assert in_order(groups["TrainConfig"])[:1] == ["learning_rate"]
    loss = groups["AlgorithmConfig"]["loss"]["properties"]
    assert in_order(loss)[:3] == ["kind", "clip_low", "clip_high"]
    (random,) = (one for one in groups["GRPOConfig"]["model"]["anyOf"] if one["title"] == "random")
    assert in_order(random["properties"])[:3] == ["kind", "layers", "hidden_size"]


def labels(page: Any) -> list[str]:
    """What stands at the form's fields, in their order."""
    found = page.locator(".schema-form-property__label").all_inner_texts()
    return [text.removesuffix(" (Optional)") for text in found]


def test_the_page_shows_it_and_takes_a_run(server: Platform, browser: Browser) -> None:
    identity = server.deployment("tiny")["id"]
    page = browser.page
    browser.open(f"{server.dashboard}/deployments/deployment/{identity}/run", "Prompts per step")
    shown = labels(page)
    assert shown[:3] == ["resume", "fork", "config"]
    places = [shown.index(name) for name in FIRST]
    assert places == sorted(places)
    assert shown[shown.index("Train") + 1] == "Learning rate"
    assert shown.index("Prompts per step") > shown.index("Learning rate")
    # A reward is fields, its kind a drop-down; so is the loss. Both were JSON.
    rewards = shown[shown.index("Rewards") : shown.index("Steps")]
    assert rewards[:2] == ["Rewards", "Reward functions"] or "Kind" in rewards, rewards
    assert {"Kind", "Weight", "Path", "Answer column"} <= set(rewards)
    loss = shown[shown.index("Loss") :]
    assert loss[1:4] == ["Kind", "Clip low", "Clip high"]
    browser.picture("form", 1700)

    # As it is, nothing is refused: what is empty is not sent.
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(f"**/deployments/deployment/{identity}?tab=Runs", timeout=60_000)
    (made,) = server.flow_runs_of(identity)
    asked = made["parameters"]["config"]
    given = server.config("tiny")
    assert asked["rewards"]["functions"] == given["rewards"]["functions"]
    assert asked["algorithm"] == given["algorithm"]
    assert asked["train"] == given["train"]
    assert browser.errors == []
