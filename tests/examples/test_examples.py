"""Every command of docs/extending.md, run in a folder with copies of examples/."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from configs.data import DataConfig, FunctionSource
from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from engines.data.chat_template import prompt_of
from engines.environments.adapters import ClassAdapter
from engines.environments.tools import schema
from engines.episodes.tool_calls import tool_calls
from engines.rewards.protocol import TrainerState
from engines.rewards.runner import RewardRunner
from storage.prompts.datasets import open_source
from storage.runs.commit_log import Commit, read_commit
from tests.examples.pages import commands_of
from tests.flows.conftest import ROOT, Launch, Launched

EXAMPLES = ROOT / "examples"
HINTS = ("higher", "lower")


def documented() -> list[list[str]]:
    """The words of each command that stands in a block of docs/extending.md, in order.

    `refrain NAME` is `python -m flows.NAME`; the first word is the module.
    """
    found = []
    for command in commands_of("extending.md"):
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        module = f"flows.{words[1]}" if words[0] == "refrain" else words[2]
        found.append([module, *words[3 if words[0] == "python" else 2 :]])
    return found


def copied(folder: Path) -> None:
    for file in EXAMPLES.iterdir():
        if file.is_file():
            shutil.copy(file, folder)


def done(launch: Launch, command: list[str], run: str = "") -> tuple[Launched, str]:
    """A documented command with a run's name for RUN, which has to end well."""
    module, *words = (word.replace("RUN", run) for word in command)
    launched = launch(*words, module=module)
    code, out = launched.end()
    assert code == 0, out
    assert "Traceback" not in out, out
    return launched, out


def said(folder: Path, command: list[str], run: str) -> str:
    """What a documented command about a run prints; it has to end well."""
    module, *words = (word.replace("RUN", run) for word in command)
    asked = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert asked.returncode == 0, asked.stdout
    return asked.stdout


@pytest.mark.cluster
@pytest.mark.slow
def test_own_prompts_reward_estimator_and_loss(launch: Launch, tmp_path: Path) -> None:
    copied(tmp_path)
    train, lineage, rescore = (one for one in documented() if one[0] != "my_flow")
    assert train[:2] == ["flows.grpo", "own.yaml"]
    run, _ = done(launch, train)
    commits = run.commits()
    assert len(commits) == 2
    for commit in commits:
        check_step(run, commit)
    name = run.files.run
    assert "extra right_number/numbers" in said(tmp_path, lineage, name)
    assert f"{name}: its reward -> brevity" in said(tmp_path, rescore, name)

    (tmp_path / "prompts.py").write_text(
        (tmp_path / "prompts.py").read_text().replace("randint(1, 9)", "randint(2, 9)")
    )
    again = launch("--resume", name, "steps=3")
    code, out = again.end()
    assert code != 0, out
    assert "The data has changed since this order began" in out
    assert len(again.commits()) == 2


def check_step(run: Launched, commit: Commit) -> None:
    """The user's four functions made the step, and its commit says so."""
    store, samples = run.files.store, commit.refs["samples"]
    advantage, loss = commit.algorithm["advantage"], commit.algorithm["loss"]
    assert advantage["path"] == f"{run.folder}/estimator.py:above_median"  # type: ignore[index,call-overload]
    assert loss["path"] == f"{run.folder}/loss.py:quadratic"  # type: ignore[index,call-overload]
    assert commit.metrics["train/penalty"] is not None
    assert commit.metrics["progress"] == (commit.step - 1) / 2
    numbers = samples.fetch_list(store, "extra/right_number/numbers")
    assert commit.metrics["share_with_a_number"] == pytest.approx(np.mean(list(map(bool, numbers))))
    rows = commit.refs["prompts"].fetch_list(store, "row")
    assert all(row["question"].endswith(" = ") for row in rows)
    rewards = samples.fetch_numpy(store, "score/right_number")[0].reshape(len(rows), -1)
    answered = np.array([row["answer"] is not None for row in rows])
    assert np.isfinite(rewards[answered]).all()
    assert np.isnan(rewards[~answered]).all()


@pytest.mark.parametrize("recipe", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_loads(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)  # their files are named from there
    kind = GRPOConfig
    if "\nencoder:" in recipe.read_text():
        kind = pytest.importorskip("configs.srpo").SRPOConfig
    assert load_recipe(kind, str(recipe)).steps > 0


def test_the_calculator_is_a_tool() -> None:
    made = runpy.run_path(str(EXAMPLES / "calculator.py"))["Calculator"]()
    environment = ClassAdapter(made)
    (tool,) = (schema(name, tool) for name, tool in environment.tools.items())
    assert tool["function"]["parameters"]["required"] == ["expression"]
    environment.reset({"question": "12 + 30 = ?"}, seed=0)

    def said(expression: str) -> str:
        call = {"name": "calculate", "arguments": {"expression": expression}}
        (result,) = environment.act("", [call]).results
        return result

    assert said("12 + 30") == "42"
    assert said("-(2 - 30) * 4") == "112"
    assert "only whole numbers" in said("__import__('os').getpid()")
    assert "only whole numbers" in said("9 ** 99999")
    assert "too large" in said("*".join(["99999"] * 9))
    assert "SyntaxError" in said("12 +") or "invalid syntax" in said("12 +")
    assert environment.act("42", None).done


def test_a_calculator_that_is_wrong_says_any_number() -> None:
    wrong = runpy.run_path(str(EXAMPLES / "calculator.py"))["Calculator"](wrong=True)
    wrong.reset(seed=3)
    said = [wrong.calculate("12 + 30") for _ in range(4)]
    wrong.reset(seed=3)
    assert [wrong.calculate("12 + 30") for _ in range(4)] == said, (
        "the same when it is played again"
    )
    assert len(set(said)) == 4


def test_sums_are_asked_after_two_that_were_worked_out() -> None:
    made = runpy.run_path(str(EXAMPLES / "calculator.py"))
    first, second = made["rows"](size=2)
    assert first["question"][-1]["content"] != second["question"][-1]["content"]
    for shown in (first["question"][:4], first["question"][4:8]):
        problem, call, result, answer = (one["content"] for one in shown)
        (made_call,) = tool_calls(call)
        assert made_call.arguments["expression"] in problem
        assert made["Calculator"]().calculate(**made_call.arguments) == result == answer


def test_prices_are_asked_after_two_that_were_looked_up() -> None:
    made = runpy.run_path(str(EXAMPLES / "tools.py"))
    assert schema("price", made["price"])["function"]["parameters"]["required"] == ["item"]
    for row in made["rows"](size=20):
        chat = row["question"]
        for asked, call, result, answer in (chat[:4], chat[4:8]):
            (made_call,) = tool_calls(call["content"])
            assert f" {made_call.arguments['item']} " in asked["content"]
            assert str(made["price"](**made_call.arguments)) == result["content"]
            assert answer["content"] == result["content"]
        item = chat[-1]["content"].split()[3]
        assert chat[-1]["content"] == f"What does the {item} cost?"
        assert row["answer"] == str(made["price"](item))
        assert all(row["answer"] not in message["content"] for message in chat), "nor guessed"
    with pytest.raises(ValueError, match="'gold' is not sold here"):
        made["price"]("gold")


CALLED = "<tool_call>{}</tool_call>\nuser\n-42\nassistant\n"


@pytest.mark.parametrize(
    ("last", "reward"),
    [("-42", 1), ("It is -42.", 1), ("ok", 0), ("42", 0), ("-42 or 1", 0)],
    ids=lambda value: str(value),
)
def test_the_last_number_of_the_last_turn_is_the_answer(last: str, reward: float) -> None:
    """A tool that said it, before a model that did not, earns nothing."""
    right = runpy.run_path(str(EXAMPLES / "calculator.py"))["right"]
    for text in (last, f"{CALLED}{last}"):
        assert right([""], [[{"role": "assistant", "content": text}]], answer=["-42"]) == [reward]


@pytest.mark.parametrize("name", ["calculator", "tools", "guess_the_number"])
def test_rewards_of_a_recipe_score_what_its_prompts_are_answered_with(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats are answered with messages, and strings with strings."""
    monkeypatch.chdir(EXAMPLES)
    config = load_recipe(GRPOConfig, f"{name}.yaml")
    (row,) = open_source(config.data.source).rows([0])
    functions = [one for one in config.rewards.functions if one.kind == "function"]
    rewards = config.rewards.model_copy(update={"functions": tuple(functions)})
    assert functions
    with RewardRunner(rewards, config.data) as runner:
        scores = runner.score(
            [prompt_of(row, config.data)], [f"{CALLED}{row.get('answer')}"], [row]
        )
    assert scores.failures == ()
    assert scores.rewards[0] == (0 if name == "guess_the_number" else pytest.approx(1))


def test_a_game_is_shown_before_it_says_its_rules() -> None:
    (row,) = runpy.run_path(str(EXAMPLES / "guess_the_number.py"))["rows"](size=1)
    source = FunctionSource(path=f"{EXAMPLES}/guess_the_number.py:rows")
    chat = prompt_of(row, DataConfig(source=source), "[GAME] Enter your guess.")
    assert [one["role"] for one in chat] == ["user", "assistant"] * 6 + ["user"]
    assert chat[-1]["content"] == "You win. A new game:\n\n[GAME] Enter your guess."


def test_guesses_are_held_against_the_hints() -> None:
    follows_hints = runpy.run_path(str(EXAMPLES / "guess_the_number.py"))["follows_hints"]
    higher, lower = (f"\nuser\n[GAME] The target number is {it}.\nassistant\n" for it in HINTS)
    left: list[float] = []

    def share(*said: str) -> float | None:
        completion = [{"role": "assistant", "content": "".join(said)}]
        (found,) = follows_hints([], [completion], log_metric=lambda _, value: left.append(value))
        return cast("float | None", found)

    assert share("[10]", higher, "[15]", lower, "[14]") == 1.0
    assert left == [10 / 20, 4 / 20]
    assert share("[10]", lower, "[12]", lower, "[9]") == 0.5, "12 is above 9, and 9 is below 10"
    refused = "\nuser\n[GAME] You attempted an invalid move.\nassistant\n"
    assert share("[10]", lower, "[0]", refused, "[-5]", refused, "[10]") == 0.0
    assert share("[20]") is None
    assert share("[30]", refused, "[3]") is None, "a move that is not valid brings no hint"


def test_any_prize_says_nothing_of_the_game() -> None:
    """The same for the same episode of a step, in any order; another one in the next step."""
    any_prize = runpy.run_path(str(EXAMPLES / "guess_the_number.py"))["any_prize"]
    said = [[{"role": "assistant", "content": f"[{number}]"}] for number in range(200)]

    def prizes(step: int, order: int = 1) -> list[float]:
        state = TrainerState(global_step=step)
        return any_prize([""] * 200, said[::order], trainer_state=state)[::order]

    assert prizes(1) == prizes(1, order=-1)
    assert abs(np.corrcoef(prizes(1), prizes(2))[0, 1]) < 0.3
    assert abs(np.mean(prizes(1)) - 0.5) < 0.1


@pytest.mark.slow
@pytest.mark.cluster
def test_own_flow(launch: Launch, tmp_path: Path) -> None:
    copied(tmp_path)
    train, resume = (one for one in documented() if one[0] == "my_flow")
    run, out = done(launch, train)
    name = run.files.run
    assert f"{name}: 2 steps are committed" in out
    done(launch, resume, name)
    commits = run.commits()
    assert [commit.step for commit in commits] == [1, 2, 3]
    for commit in commits:
        store, batch = run.files.store, commit.refs["batch"]
        groups, _ = batch.fetch_numpy(store, "group_id")
        assert len(set(groups.tolist())) == len(groups) == 4  # the best of each group of 4
        advantages, _ = batch.fetch_numpy(store, "advantages")
        assert set(advantages.tolist()) == {1.0}
    assert len({commit.version_out.digest for commit in commits}) == 3
    record = run.files.read_run()
    assert record is not None
    assert record["flow"] == "my_flow:raft"
    assert read_commit(run.files, 3).parent == 2


def test_the_flow_of_the_example_is_short() -> None:
    """docs/extending.md says about 40 lines: what is not docstring, blank or import."""
    text = re.sub(r'""".*?"""', "", (EXAMPLES / "my_flow.py").read_text(), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith(("from ", "import "))]) <= 40
