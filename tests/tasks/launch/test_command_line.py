"""--help and a refused setting answer without what takes seconds to import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from configs.recipe_files import recipe_names
from flows.__main__ import commands, main
from storage.objects.store import Store
from storage.runs.run_store import RunStore

FLOWS = Path(__file__).parents[3] / "flows"
COMMANDS = list(commands())
FLOWS_THAT_TRAIN = {"grpo", "ppo", "dapo", "tree", "srpo", "distill"} & set(COMMANDS)
HEAVY = ["prefect", "distributed", "torch", "transformers", "mlflow", "vllm"]
RUN = """
import runpy, sys
sys.argv[1:] = {words}
try:
    runpy.run_module("flows.{command}", run_name="__main__", alter_sys=True)
finally:
    print(",".join(name for name in {heavy} if name in sys.modules), file=sys.stderr)
"""


def answer(folder: Path, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command; the last line of its standard error names the heavy packages imported."""
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(words=list(words), command=command, heavy=HEAVY)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(FLOWS.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1] == "", "nothing heavy is imported"
    return done


@pytest.mark.parametrize("command", COMMANDS)
def test_help_answers_at_once(command: str, tmp_path: Path) -> None:
    done = answer(tmp_path, command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")


def test_help_on_a_topic_answers_at_once(tmp_path: Path) -> None:
    done = answer(tmp_path, "grpo", "--help", "train.epochs")
    assert (done.returncode, done.stdout.split()[0]) == (0, "train.epochs")
    done = answer(tmp_path, "grpo", "tiny", "--help", "nothing.of.this")
    assert (done.returncode, done.stderr.split(".")[0]) == (2, "nothing")


def test_a_command_has_one_form_wherever_it_is_named() -> None:
    """`python -m flows.NAME` goes on working; people are told of `refrain NAME` alone."""
    root = FLOWS.parent
    folders = ("configs", "engines", "examples", "flows", "storage", "tasks")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert len(files) > 400
    named = {path for path in files if "python -m flows." in path.read_text()}
    assert named == {root / "flows/__main__.py"}, "which says that it is the same"


@pytest.mark.parametrize("words", [[], ["steps=3"], ["--check"]])
def test_a_flow_asks_for_a_recipe(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grpo", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Name a recipe, or a YAML file: refrain grpo RECIPE")
    assert all(name in said for name in recipe_names())


def test_the_command_alone_shows_flows_recipes_and_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["refrain"])
    assert main() == 0
    train, recipes, others = capsys.readouterr().out.split("\n\n")[1:]
    shown = [line.split()[0] for line in [*train.splitlines()[1:], *others.splitlines()[1:]]]
    assert sorted(shown) == sorted(COMMANDS)
    assert [line.split()[0] for line in train.splitlines()[1:]] == sorted(FLOWS_THAT_TRAIN)
    assert [line.split()[0] for line in recipes.splitlines()[1:]] == recipe_names()


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("grpo", "steps=x"),
        ("ppo", "critic.epochs=0"),
        ("grpo", "train.micro_batch_tokens=16"),
        ("grpo", "model.heads=3"),
        ("grpo", "cluster.pools.train.gpus=2"),
    ],
)
def test_a_refused_setting_answers_at_once(command: str, word: str, tmp_path: Path) -> None:
    done = answer(tmp_path, command, "tiny", word)
    assert done.returncode == 2
    assert word.partition("=")[0] in done.stderr
    assert not list(tmp_path.iterdir()), "nothing was started"


def test_a_resumed_run_is_checked_at_once_too(tmp_path: Path) -> None:
    """Its settings are read before the imports that go on beside the other checks."""
    config = load_recipe(GRPOConfig, "tiny", [])
    files = RunStore(Store(f"file://{tmp_path}/.refrain/store"), "mine")
    files.write_run({"flow": "flows.grpo:grpo", "config": config.model_dump(mode="json")})
    done = answer(tmp_path, "grpo", "--resume", "mine", "steps=x")
    assert (done.returncode, "steps" in done.stderr) == (2, True)
    done = answer(tmp_path, "ppo", "--resume", "mine")
    assert (done.returncode, "flows.grpo" in done.stderr) == (2, True)
    done = answer(tmp_path, "grpo", "--resume", "steps=3")
    said = "--resume steps=3: no run has such a name. refrain runs lists them."
    assert (done.returncode, done.stderr.strip()) == (2, said)
    done = answer(tmp_path, "grpo", "--resume", "nobody")
    assert (done.returncode, "There is no run nobody" in done.stderr) == (2, True)


SLOW_CPU = """
import sys
import configs.resolving
configs.resolving.cpu_multiplies_bfloat16 = lambda: False
from configs.grpo import GRPOConfig
from tasks.launch.command_line import main
for words in {commands}:
    assert main("flows.grpo:grpo", GRPOConfig, words.split("|")) == 0
"""


def test_a_check_says_what_was_decided_and_what_was_decided_for_another_cpu(tmp_path: Path) -> None:
    open_format = "rollout={engine: transformers, max_new_tokens: 16, dtype: bfloat16}"
    begun = load_recipe(GRPOConfig, "tiny", [open_format])
    files = RunStore(Store(f"file://{tmp_path}/.refrain/store"), "mine")
    files.write_run({"flow": "flows.grpo:grpo", "config": begun.model_dump(mode="json")})
    commands = [
        f"tiny|--check|{open_format.replace(', dtype: bfloat16', '')}",
        "--resume|mine|--check",
    ]
    done = subprocess.run(
        [sys.executable, "-c", SLOW_CPU.format(commands=commands)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(FLOWS.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    new, resumed = done.stdout.split("and a run would start.")[:2]
    decided = "Decided for this machine\n  rollout.dtype = float32: this CPU is slow in bfloat16\n"
    assert decided in new
    assert "bfloat16 is what the run has" not in new
    assert "Decided for this machine" not in resumed
    assert "Warnings\n  rollout.dtype = bfloat16 is what the run has" in resumed
