"""The pages to begin with, as a reader follows them: their files in an empty folder, their commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.commit_log import Commit, head, read_commit
from storage.runs.run_store import RunStore
from tests.examples.pages import DOCS, blocks_of, commands_of, files_of
from tests.flows.conftest import ROOT, settings_for

PAGES = ("own-reward.md", "own-environment.md", "own-agent.md", "own-algorithm.md", "one-gpu.md")
WORDS = 250  # of a page at most

# In place of a GPU and of a model from the hub: settings of the recipe, and of going on with its run.
ON_A_CPU = (
    "model={kind: random, layers: 2, hidden_size: 64, heads: 2, max_positions: 1024}",
    "rollout={engine: transformers, dtype: float32, max_new_tokens: 16, shards: 2}",
    "train={compute_dtype: float32, micro_batch_tokens: 1024}",
    "cluster={pools: {train: {threads: 1}, rollout: {threads: 1, slots: 3}, cpu: {threads: 1}}}",
    "group_size=4",
    "steps=2",
)
FEWER_STEPS = "steps=3"


class Reader:
    """Somebody who does what a page says, in an empty folder.

    additions: by how a command begins, more words of it.
    """

    def __init__(self, folder: Path, prefect_api: str) -> None:
        self.folder, self.run = folder, ""
        self.additions: dict[str, Sequence[str]] = {}
        programs = folder.parent / "programs"
        programs.mkdir()
        start = "import sys; from flows.__main__ import main; sys.exit(main())"
        for name, words in (("python", ()), ("refrain", ("-P", "-c", start))):
            command = shlex.join([sys.executable, *words])
            (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (programs / name).chmod(0o755)
        self._variables = {
            **os.environ,
            **settings_for(prefect_api),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def follow(self, page: str) -> str:
        """Write the page's files, and run its blocks of commands; returns what these printed."""
        for name, text in files_of(page).items():
            (self.folder / name).write_text(text)
        printed = ""
        for block in blocks_of(page, "sh"):
            for command in re.findall(r"(?:.*\\\n)*.+", block):
                printed += self._run(command)
        return printed

    def _run(self, command: str) -> str:
        command = command.replace("RUN", self.run or "RUN")
        for beginning, words in self.additions.items():
            if command.startswith(beginning):
                written, redirected, file = command.partition(" > ")
                command = f"{written} {shlex.join(words)}{redirected}{file}"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert "Traceback" not in done.stdout, done.stdout
        if found := re.search(r"^Run (\S+): ", done.stdout, re.MULTILINE):
            self.run = found[1]
        return done.stdout

    @property
    def store(self) -> Store:
        return Store(f"file://{self.folder}/.refrain/store")

    def commits(self) -> list[Commit]:
        """Of the run that the commands made."""
        files = RunStore(self.store, self.run)
        return [read_commit(files, step) for step in range(1, (head(files) or 0) + 1)]

    def rewards(self) -> list[float]:
        """Of all samples of all steps, as the reward function or the environment gave them."""
        samples = [commit.refs["samples"] for commit in self.commits()]
        return [float(x) for ref in samples for x in ref.fetch_numpy(self.store, "reward")[0]]


@pytest.fixture
def reader(tmp_path: Path, prefect_api: str) -> Reader:
    folder = tmp_path / "empty"
    folder.mkdir()
    return Reader(folder, prefect_api)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_has_a_whole_example(page: str) -> None:
    assert len((DOCS / page).read_text().split()) <= WORDS
    assert files_of(page)
    assert blocks_of(page, "sh")


@pytest.mark.cluster
@pytest.mark.slow
def test_own_reward(reader: Reader) -> None:
    printed = reader.follow("own-reward.md")
    assert "(exact " in printed
    first, second = reader.commits()
    rows = [json.loads(line) for line in files_of("own-reward.md")["train.jsonl"].splitlines()]
    for commit in (first, second):
        asked = commit.refs["prompts"].fetch_list(reader.store, "row")
        assert sorted(map(json.dumps, asked)) == sorted(map(json.dumps, rows))
        assert f"{reader.folder}/my_rewards.py:exact" in json.dumps(commit.reward_code)
    assert set(reader.rewards()) <= {0.0, 1.0}


@pytest.mark.cluster
@pytest.mark.slow
def test_own_environment(reader: Reader) -> None:
    printed = reader.follow("own-environment.md")
    assert "was answered" in printed
    assert len(reader.commits()) == 2
    hands = [21 * reward for reward in reader.rewards()]
    assert hands == pytest.approx([round(hand) for hand in hands], abs=1e-5)
    assert all(0 <= hand <= 21.01 for hand in hands)
    assert len(set(hands)) > 2
    assert any((commit.metrics["episode/turns_mean"] or 0) > 1 for commit in reader.commits())


@pytest.mark.cluster
@pytest.mark.slow
def test_own_agent(reader: Reader) -> None:
    printed = reader.follow("own-agent.md")
    assert "Check:" in printed
    assert len(reader.commits()) == 2
    assert set(reader.rewards()) <= {0.0, 1.0}
    for commit in reader.commits():
        assert commit.metrics["episode/turns_mean"] == 2


@pytest.mark.cluster
@pytest.mark.slow
def test_own_algorithm(reader: Reader) -> None:
    reader.follow("own-algorithm.md")
    commits = reader.commits()
    assert len(commits) == 3
    record = RunStore(reader.store, reader.run).read_run()
    assert record is not None
    assert record["flow"] == "my_flow:best"
    for commit in commits:
        batch = commit.refs["batch"]
        groups, _ = batch.fetch_numpy(reader.store, "group_id")
        assert len(set(groups.tolist())) == len(groups) == 4  # the best of each group
        rewards, _ = batch.fetch_numpy(reader.store, "reward")
        advantages, _ = batch.fetch_numpy(reader.store, "advantages")
        assert set(advantages) <= {np.float32(reward - 0.5) for reward in rewards}
        assert "method.py:quadratic" in json.dumps(commit.algorithm)


def test_the_settings_for_a_gpu_are_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand on the page; nothing is started."""
    monkeypatch.chdir(tmp_path)
    for name, text in files_of("one-gpu.md").items():
        Path(name).write_text(text)
    command, check, *_ = commands_of("one-gpu.md", "sh")
    _, _, recipe, *words = shlex.split(command.partition(" > ")[0].replace("\\\n", " "))
    config = load_recipe(GRPOConfig, recipe, words)
    assert config.cluster.pools["gpu"].gpus == 1
    assert config.rollout.engine == "vllm"
    assert check == "refrain grpo mine.yaml --check"


@pytest.mark.cluster
@pytest.mark.slow
def test_one_gpu(reader: Reader) -> None:
    """With a tiny model on a CPU in the place of the GPU."""
    reader.additions = {"refrain recipe": ON_A_CPU, "refrain grpo --resume": [FEWER_STEPS]}
    printed = reader.follow("one-gpu.md")
    assert "mine: the settings are good, and a run would start." in printed
    assert len(reader.commits()) == 3
    assert (reader.folder / "my-model/config.json").is_file()
    assert list((reader.folder / "my-model").glob("*.safetensors"))
    assert set(reader.rewards()) <= {0.0, 1.0}
