"""A run that goes on where the code that scores or plays was changed says so, and marks the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.commit_log import Commit
from storage.runs.curves import shown
from storage.runs.run_store import RunStore
from tasks.run.meaning_changes import CODE_FILES as FIELD
from tasks.run.meaning_changes import code_files, code_metrics, code_sentence, marked
from tests.tasks.run.test_meaning_changes import commit

REWARD = "def short(prompts, completions, **columns):\n    return [1.0 for _ in completions]\n"


@pytest.fixture
def files() -> RunStore:
    return RunStore(Store("memory://code"), "r")


@pytest.fixture
def scored(tmp_path: Path) -> tuple[Path, GRPOConfig]:
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    function = f"{{kind: function, path: '{file}:short'}}"
    return file, load_recipe(GRPOConfig, "tiny", [f"rewards.functions=[{function}]"])


def after(step: int, config: GRPOConfig) -> Commit:
    return commit(step).model_copy(update={"code_files": code_files(config)})


def test_a_changed_reward_is_told_once_and_its_step_marked(
    files: RunStore, scored: tuple[Path, GRPOConfig]
) -> None:
    file, config = scored
    last = after(4, config)
    assert code_sentence(files, config, last, "r") is None
    assert code_metrics(files, last, code_files(config)) == {}
    file.write_text(REWARD.replace("1.0", "0.0"))
    said = code_sentence(files, config, last, "r")
    assert said is not None
    assert "The code of short has changed since step 4: from step 5 on, which is marked" in said
    assert "refrain rescore r --reward short" in said
    metrics = code_metrics(files, last, code_files(config))
    assert metrics == {"meaning_changed/code_of_short": 1.0}
    assert shown(metrics) == metrics
    assert marked(metrics) == "code_of_short 1"
    again = after(5, config)
    assert code_sentence(files, config, again, "r") is None
    assert code_metrics(files, again, code_files(config)) == {}


def test_a_run_of_an_older_refrain_has_digests_of_its_rewards(
    files: RunStore, scored: tuple[Path, GRPOConfig]
) -> None:
    file, config = scored
    (digest,) = code_files(config).values()
    record = {"0123": [{"name": "short", "module": digest}, {"name": "math", "module": ""}]}
    last = commit(2).model_copy(update={"reward_code": record})
    assert code_sentence(files, config, last, "r") is None
    file.write_text("# another\n" + REWARD)
    assert "since step 2" in (code_sentence(files, config, last, "r") or "")
    assert code_metrics(files, last, code_files(config)) == {"meaning_changed/code_of_short": 1.0}


def test_before_the_first_step_run_json_says_what_it_was(
    files: RunStore, scored: tuple[Path, GRPOConfig]
) -> None:
    file, config = scored
    files.write_run({FIELD: code_files(config)})
    assert code_sentence(files, config, None, "r") is None
    file.write_text(REWARD + "\n")
    assert "since the run began" in (code_sentence(files, config, None, "r") or "")


def test_modules_environments_and_what_is_gone(
    files: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "played"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it is not imported')\n")
    (package / "game.py").write_text("class Game: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_recipe(
        GRPOConfig,
        "tiny",
        [
            "episodes.environment={kind: class, path: 'played.game:Game'}",
            "rewards.functions=[{kind: environment}]",
        ],
    )
    last = after(1, config)
    assert list(last.code_files) == ["environment Game"]
    (package / "game.py").write_text("class Game: pass\n")
    said = code_sentence(files, config, last, "r")
    assert said is not None
    assert "The code of environment Game has changed since step 1" in said
    assert "rescore" not in said, "episodes are not played again by it"
    (package / "game.py").unlink()
    assert code_files(config) == {}
    assert code_sentence(files, config, last, "r") is None
