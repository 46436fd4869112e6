"""A recipe that uses no feature imports none of their code, and each feature's record is found."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from tasks.run import features
from tasks.run.features import FEATURES, Feature, features_of
from tests.without_feature import FEATURES as ROOMS

# Where the flow's process imports everything that a run of `tiny` needs.
CODE = """
import json, sys
import flows.grpo
import tasks.launch.command_line, tasks.reporting.listeners
from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from tasks.run.features import features_of
from tasks.run.preflight import check_settings
config = load_recipe(GRPOConfig, "tiny")
assert features_of(config) == []
check_settings(config)
print(json.dumps(sorted(sys.modules)))
"""


def rooms() -> set[str]:
    """Modules and packages of all features, but for their settings, which are everybody's form."""
    paths = [
        path
        for one in ROOMS.values()
        for path in one.rooms
        if path.startswith(("engines/", "tasks/", "storage/"))
    ]
    return {path.removesuffix(".py").replace("/", ".") for path in paths}


def test_a_plain_run_imports_no_feature() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120
    )
    imported = json.loads(done.stdout.splitlines()[-1])
    own = rooms()
    assert len(own) > 20
    inside = [one for one in imported for room in own if one == room or one.startswith(f"{room}.")]
    assert inside == []


@pytest.mark.parametrize("name", FEATURES)
def test_every_record_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(features=(name,))
    (found,) = features_of(config)
    assert isinstance(found, Feature)


def test_a_feature_without_a_record_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(features=("cahce", *FEATURES))
    with pytest.raises(LookupError, match="The settings use cahce, and there is no such feature"):
        features_of(config)


def test_one_feature_of_a_run_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = Feature(draw=lambda run, step: None)
    monkeypatch.setattr(features, "FEATURES", {"one": "a:A", "another": "b:B"})
    monkeypatch.setattr(features, "_record", lambda path: drawing)
    config: Any = SimpleNamespace(features=("one", "another"))
    with pytest.raises(AssertionError, match="two features of a run have the hook draw"):
        features_of(config)


def test_guards_that_were_taken_out_still_have_what_a_commit_decided() -> None:
    config = load_recipe(GRPOConfig, "tiny")
    none: Any = SimpleNamespace(carried=[], last=SimpleNamespace(guards=[]))
    decided: Any = SimpleNamespace(carried=["a group"], last=SimpleNamespace(guards=["verdict"]))
    assert features_of(config, none) == []
    assert len(features_of(config, decided)) == 2
