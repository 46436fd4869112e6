"""What a team's deployment.yaml and the words of `refrain deploy` make of the deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.deployments import read_deployments
from configs.overrides import ConfigError
from tasks.launch.registration import PREFECT_FILE, RECIPE, Deployments, deployments

TEAM = """
settings: {tracking.uri: "http://mlflow:5000"}
deployments:
  - name: nightly
    schedules: [{cron: "0 2 * * *", timezone: Europe/Berlin}]
    tags: [team-a]
  - name: sums
    flow: grpo
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
    assert found.curves == {"tiny": "http://m:5000"}
    # What takes no recipe has them as those of the run that it works on, or not at all.
    assert entry(found, "evaluate")["parameters"]["config"]["settings"] == words
    assert entry(found, "prune")["parameters"] == {"config": {"days": 30}}
    assert found.warnings() == [
        "Deployment prune has no tracking.uri, cluster.no_workers_timeout: left out there."
    ]


def config_of(found: Deployments, name: str) -> dict[str, Any]:
    return dict(entry(found, name)["parameters"]["config"])


@pytest.mark.parametrize(
    ("name", "words", "config"),
    [
        ("prune", ["days=7", "flows=[grpo, mine]"], {"days": 7, "flows": ["grpo", "mine"]}),
        ("resume", ["steps=40", "store.uri=s3://b/x", "rollout.max_sequences=8"],
         {"steps": 40, "store": {"uri": "s3://b/x"}, "settings": ["rollout.max_sequences=8"]}),
        # Of a critic, which only some flows have; of a source of another kind than the usual one.
        ("resume", ["critic.learning_rate=1e-5", "data.source.path=x.jsonl"],
         {"settings": ["critic.learning_rate=1e-5", "data.source.path=x.jsonl"]}),
        ("evaluate", ["versions=all", "tracking.uri=http://m:5000"],
         {"suites": ["rg_chain_sum"], "versions": "all", "settings": ["tracking.uri=http://m:5000"]}),
    ],
)  # fmt: skip
def test_what_takes_no_recipe_has_settings_too(
    name: str, words: list[str], config: dict[str, Any]
) -> None:
    assert config_of(deployments(PREFECT_FILE, [name], words, None), name) == config


@pytest.mark.parametrize(
    ("name", "word", "said"),
    [
        (
            "prune",
            "dyas=7",
            r"Deployment prune: dyas: there is no such setting\. Did you mean days\?",
        ),
        ("prune", "tracking.uri=http://m", "Deployment prune: tracking: there is no such setting"),
        ("prune", "days=-1", "Deployment prune: days = -1: input should be greater"),
        ("resume", "stepz=3", "Deployment resume: stepz: there is no such setting"),
        (
            "resume",
            "rollout.temprature=1",
            "Deployment resume: rollout.temprature: there is no such",
        ),
        (
            "evaluate",
            "tracking.url=x",
            "Deployment evaluate: tracking.url: there is no such setting",
        ),
        ("evaluate", "store.url=x", "Deployment evaluate: store.url: there is no such setting"),
    ],
)
def test_what_it_does_not_have_is_refused(name: str, word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        deployments(PREFECT_FILE, [name], [word], None)


def test_settings_of_all_go_where_they_belong(tmp_path: Path) -> None:
    upkeep = "[{name: prune}, {name: evaluate}, {name: resume}, {name: weekly, flow: prune}]"
    found = team(tmp_path, f"settings: {{days: 7, tracking.uri: u}}\ndeployments: {upkeep}")
    assert config_of(found, "prune") == {"days": 7} == config_of(found, "weekly")
    assert config_of(found, "resume") == {"settings": ["tracking.uri=u"]}
    assert found.left_out == {
        "prune": ["tracking.uri=u"],
        "evaluate": ["days=7"],
        "resume": ["days=7"],
        "weekly": ["tracking.uri=u"],
    }
    runs = team(tmp_path, "settings: {steps: 9}\ndeployments: [{name: tiny}, {name: resume}]")
    assert settings(runs, "tiny")["steps"] == "9"
    assert config_of(runs, "resume") == {}, "it is no number of steps for whatever run"
    assert runs.warnings()[0] == "Deployment resume has no steps: left out there."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "settings: {dyas: 3}\ndeployments: [{name: prune}, {name: evaluate}]",
            "dyas: none of these",
        ),
        (
            "deployments: [{name: prune, settings: {dyas: 7}}]",
            "Deployment prune: dyas: there is no",
        ),
        (
            "deployments: [{name: prune, parameters: {config: {dyas: 7}}}]",
            "prune: dyas: there is no",
        ),
        ("deployments: [{name: tiny, parameters: {config: {steps: 7}}}]", "Give settings instead"),
        ("deployments: [{name: a, flow: prune, recipe: tiny}]", "takes no settings of a run"),
    ],
)
def test_a_file_with_settings_that_nothing_has_is_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        team(tmp_path, text)


def test_those_that_come_say_that_nobody_sees_their_curves() -> None:
    (said,) = deployments(PREFECT_FILE, ["tiny", "smollm2-arithmetic"], [], None).warnings()
    assert "Curves of tiny, smollm2-arithmetic go to sqlite:///.refrain/mlflow.db" in said
    assert "tracking.uri=http://" in said


def test_a_team_changes_those_that_come_and_has_its_own(tmp_path: Path) -> None:
    found = team(tmp_path)
    assert found.names == ["nightly", "sums", "evaluate"]
    nightly = entry(found, "nightly")
    assert (nightly["tags"], nightly["schedules"][0]["cron"]) == (["team-a"], "0 2 * * *")
    assert nightly["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW", "as it comes"
    assert settings(found, "nightly")["continue_from"] == "models:/smollm2-arithmetic@champion"
    assert settings(found, "nightly")["tracking.uri"] == "http://mlflow:5000"
    sums = entry(found, "sums")
    assert sums["entrypoint"] == "flows.grpo.grpo" and sums["concurrency_limit"]["limit"] == 2
    assert sums["parameters"] == {"config": "{{ recipe.config }}", "resume": None}
    assert settings(found, "sums")["rollout.stop"] == '["a", "b"]'
    config = entry(found, "evaluate")["parameters"]["config"]
    assert config["suites"] == ["gsm8k"] and config["settings"] == [
        "tracking.uri=http://mlflow:5000"
    ]


def test_words_come_after_the_file(tmp_path: Path) -> None:
    found = team(tmp_path, TEAM, "steps=9", names=("sums",))
    assert found.names == ["sums"] and settings(found, "sums")["steps"] == "9"
    text = """
settings: {store.uri: "s3://team"}
deployments:
  - {name: tiny, settings: {store.uri: "s3://own"}}
  - {name: resume, settings: {store.uri: "s3://own"}}
  - {name: evaluate}
"""

    def places(*words: str) -> list[str]:
        found = team(tmp_path, text, *words)
        without = [config_of(found, name)["store"]["uri"] for name in ("resume", "evaluate")]
        return [settings(found, "tiny")["store.uri"], *without]

    assert places() == ["s3://own", "s3://own", "s3://team"]
    assert places("store.uri=s3://words") == ["s3://words"] * 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("deployments: []", "deployments is empty"),
        ("deployments: [{name: a, shedules: []}]", "shedules: there is no such setting"),
        ("deployments: [{name: a}, {name: a}]", "two deployments of the name a"),
        ("deployments: [{name: a, recipe: none-such}]", "There is no recipe none-such"),
        ("settings: {stepz: 3}\ndeployments: [{name: tiny}]", "Deployment tiny: stepz"),
        (
            "deployments: [{name: tiny, parameters: {resum: r1}}]",
            r"tiny: parameters\.resum: its flow",
        ),
        (
            "deployments: [{name: prune, parameters: {days: 7}}]",
            r"such parameter\. It has config\.",
        ),
        ("- a", "holds no settings: its top level"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_in_a_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        team(tmp_path, text)


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
