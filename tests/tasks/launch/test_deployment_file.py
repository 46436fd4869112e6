"""What a team's deployment.yaml and the words of `refrain deploy` make of the deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.deployments import read_deployments
from configs.overrides import ConfigError
from tasks.launch.deployment_file import RECIPE, Deployments, deployments
from tasks.launch.registration import PREFECT_FILE

TEAM = """
settings: {tracking.uri: "http://mlflow:5000"}
deployments:
  - name: nightly
    schedules: [{cron: "0 2 * * *", timezone: Europe/Berlin}]
    tags: [team-a]
  - name: sums
    flow: ppo
    recipe: tiny
    settings: {steps: 7, store.uri: "s3://bucket/x", rollout.stop: [a, b]}
    concurrency_limit: {limit: 2, collision_strategy: CANCEL_NEW}
    parameters: {resume: null}
  - name: evaluate
    parameters: {config: {suites: [gsm8k], versions: all}}
"""


def team(folder: Path, text: str = TEAM, *words: str, names: tuple[str, ...] = ()) -> Deployments:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return deployments(PREFECT_FILE, names, words, read_deployments(path))


def entry(found: Deployments, name: str) -> dict[str, Any]:
    (one,) = [one for one in found.file["deployments"] if one["name"] == name]
    return dict(one)


def settings(found: Deployments, name: str) -> dict[str, Any]:
    return dict(entry(found, name)["build"][0][RECIPE]["settings"])


def test_words_are_settings_of_all_that_come() -> None:
    words = ["tracking.uri=http://m:5000", "cluster.no_workers_timeout=9"]
    found = deployments(PREFECT_FILE, ["tiny", "evaluate", "prune"], words, None)
    assert found.names == ["tiny", "evaluate", "prune"]
    assert settings(found, "tiny")["tracking.uri"] == "http://m:5000"
    assert found.curves == {"tiny": "http://m:5000"} and found.warnings() == []
    # What takes no recipe has them as those of the run that it works on, or not at all.
    assert entry(found, "evaluate")["parameters"]["config"]["settings"] == words
    assert entry(found, "prune")["parameters"] == {"config": {"days": 30}}


def test_those_that_come_say_that_nobody_sees_their_curves() -> None:
    (said,) = deployments(PREFECT_FILE, ["tiny", "tiny-dapo"], [], None).warnings()
    assert "Curves of tiny, tiny-dapo go to sqlite:///.refrain/mlflow.db" in said
    assert "tracking.uri=http://" in said


def test_a_team_changes_those_that_come_and_has_its_own(tmp_path: Path) -> None:
    found = team(tmp_path)
    assert found.names == ["nightly", "sums", "evaluate"]
    nightly = entry(found, "nightly")
    assert (nightly["tags"], nightly["schedules"][0]["cron"]) == (["team-a"], "0 2 * * *")
    assert nightly["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW", "as it comes"
    assert settings(found, "nightly")["promotion.alias"] == "champion"
    assert settings(found, "nightly")["tracking.uri"] == "http://mlflow:5000"
    sums = entry(found, "sums")
    assert sums["entrypoint"] == "flows.ppo.ppo" and sums["concurrency_limit"]["limit"] == 2
    assert sums["parameters"] == {"config": "{{ recipe.config }}", "resume": None}
    assert settings(found, "sums")["rollout.stop"] == '["a", "b"]'
    config = entry(found, "evaluate")["parameters"]["config"]
    assert config["suites"] == ["gsm8k"] and config["settings"] == [
        "tracking.uri=http://mlflow:5000"
    ]


def test_words_come_after_the_file(tmp_path: Path) -> None:
    found = team(tmp_path, TEAM, "steps=9", names=("sums",))
    assert found.names == ["sums"] and settings(found, "sums")["steps"] == "9"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("deployments: []", "deployments is empty"),
        ("deployments: [{name: a, shedules: []}]", "shedules: there is no such setting"),
        ("deployments: [{name: a}, {name: a}]", "two deployments of the name a"),
        ("deployments: [{name: a, recipe: none-such}]", "There is no recipe none-such"),
        ("settings: {stepz: 3}\ndeployments: [{name: tiny}]", "Deployment tiny: stepz"),
        (
            "deployments: [{name: prune, settings: {steps: 3}}]",
            "Deployment prune: its flow flows.prune:prune takes no setting steps. It takes: days",
        ),
        ("deployments: [{name: prune, settings: {days: -3}}]", "Deployment prune: days = -3"),
        ("deployments: [{name: resume, settings: {steps: 0}}]", "Deployment resume: steps = 0"),
        ("deployments: [{name: resume, settings: {store.urj: x}}]", "store.urj: there is no such"),
        ("- a", "holds no settings: its top level"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_in_a_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        team(tmp_path, text)


def test_settings_of_deployments_without_a_recipe_arrive(tmp_path: Path) -> None:
    text = """
settings: {tracking.uri: "http://mlflow:5000", steps: 9}
deployments:
  - {name: prune, settings: {days: 7}}
  - {name: resume, settings: {steps: 40, guards: []}}
  - {name: evaluate, settings: {rollout.max_sequences: 8}}
"""
    found = team(tmp_path, text, "store.uri=s3://bucket/x")
    of = {name: entry(found, name)["parameters"]["config"] for name in found.names}
    assert of["prune"] == {"days": 7}, "it has neither steps nor a store"
    assert of["resume"] == {
        "store": {"uri": "s3://bucket/x"},
        "steps": 40,
        "settings": ["tracking.uri=http://mlflow:5000", "guards=[]"],
    }
    assert of["evaluate"]["settings"][-1] == "rollout.max_sequences=8"
    days = deployments(PREFECT_FILE, ["prune"], ["days=3"], None)
    assert entry(days, "prune")["parameters"]["config"] == {"days": 3}


def test_a_word_that_nothing_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"days=3 is no setting of evaluate, resume"):
        deployments(PREFECT_FILE, ["evaluate", "resume"], ["days=3", "cluster.kind=local"], None)


def test_a_name_that_no_deployment_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no deployment tinny\. Did you mean tiny\?"):
        deployments(PREFECT_FILE, ["tinny"], [], None)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no file .*none\.yaml"):
        read_deployments(tmp_path / "none.yaml")


def test_a_page_says_that_those_who_wait_are_in_no_queue() -> None:
    found = deployments(PREFECT_FILE, ["tiny", "nightly"], [], None)
    assert "Runs at once: 1. Others wait, and not in a queue" in entry(found, "tiny")["description"]
    assert "queue" not in entry(found, "nightly")["description"], "a second one is left out"


def test_a_date_in_the_file_is_a_text(tmp_path: Path) -> None:
    text = "deployments: [{name: tiny, settings: {tracking.experiment: 2026-11-29}}]"
    found = settings(team(tmp_path, text), "tiny")
    assert found["tracking.experiment"] == "2026-11-29"
