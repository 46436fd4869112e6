"""A reward function as written for TRL, in a folder that has packages called as ours, trains `tiny`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from storage.runs.commit_log import Commit
from tests.flows.conftest import ROOT, Launch, Launched

pytestmark = pytest.mark.cluster

FILES = {
    "graded.py": """
import configs
from tasks.grading import digits

calls = []

async def graded(prompts, completions, completion_ids, answer, trainer_state,
                 log_extra=None, log_metric=None, **kwargs):
    calls.append(len(completions))
    share = [digits(text) for text in completions]
    log_extra("said", completions)
    log_extra("parsed", [{"digits": one, "ids": len(ids)} for one, ids in zip(share, completion_ids)])
    if len(calls) % 2:
        log_extra("odd call", answer)
    log_metric("pass@1", sum(share) / len(share))
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    log_metric("epoch", trainer_state.epoch)
    log_metric("reward/mean", 7)
    return [one * configs.FACTOR for one in share]
""",
    "configs/__init__.py": "FACTOR = 2.0",
    "tasks/__init__.py": "",
    "tasks/grading.py": """
def digits(text):
    return sum(c.isdigit() for c in text) / max(len(text), 1)
""",
}
# As the command `refrain` and python -P have it: the working folder is not where modules come from.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


@pytest.fixture
def finished(launch: Launch) -> Launched:
    run = launch(
        "tiny",
        "steps=2",
        "rewards.functions.0.path=graded.py:graded",
        environment=SAFE_PATH,
        files=FILES,
    )
    code, out = run.end()
    assert code == 0, out
    assert "WARN" not in out.upper(), out
    return run


@pytest.mark.slow
def test_what_a_function_is_told_and_what_it_logs(finished: Launched) -> None:
    commits = finished.commits()
    assert [commit.metrics["progress"] for commit in commits] == [0.0, 0.5]
    assert [commit.metrics["epoch"] for commit in commits] == [0.0, 4 / 64]
    for commit in commits:
        check_columns(finished, commit)
        assert commit.metrics["log_metric/reward/mean"] == 7  # a name of ours stays ours
        assert commit.metrics["reward/mean"] == pytest.approx(2 * commit.metrics["pass@1"])
    check_page(finished, commits)
    check_lineage(finished)


def check_columns(run: Launched, commit: Commit) -> None:
    """The samples have what was logged of them, and so have those that train."""
    store, samples = run.files.store, commit.refs["samples"]
    rewards = samples.fetch_numpy(store, "reward")[0]
    lengths = samples.lengths(store, "response_ids")
    parsed = samples.fetch_list(store, "extra/graded/parsed")
    assert [one["ids"] for one in parsed] == lengths.tolist()
    assert [2 * one["digits"] for one in parsed] == pytest.approx(rewards.tolist())
    assert commit.metrics["pass@1"] == pytest.approx(np.mean([one["digits"] for one in parsed]))
    assert all(isinstance(one, str) for one in samples.fetch_list(store, "extra/graded/said"))
    odd = samples.fetch_list(store, "extra/graded/odd call")  # one shard of the two
    assert [isinstance(one, str) for one in odd].count(True) == 8
    assert odd.count(None) == 8
    batch = commit.refs["batch"]
    order = samples.fetch_numpy(store, "sample_id")[0].tolist()
    trained = [parsed[order.index(id)] for id in batch.fetch_numpy(store, "sample_id")[0]]
    assert batch.fetch_list(store, "extra/graded/parsed") == trained
    (code,) = commit.reward_code.values()
    assert code[0]["settings"]["path"] == f"{run.folder}/graded.py:graded"
    assert code[0]["source"] and code[0]["module"]


def check_page(run: Launched, commits: list[Commit]) -> None:
    """MLflow shows the same figures."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.folder}/.refrain/mlflow.db")
    (page,) = client.search_runs([client.get_experiment_by_name("refrain").experiment_id])
    for name, shown in (("progress", "progress"), ("pass@1", "pass_1")):
        history = client.get_metric_history(page.info.run_id, shown)
        assert [point.value for point in history] == [one.metrics[name] for one in commits]


def check_lineage(run: Launched) -> None:
    """A sample's lineage shows what was logged of it."""
    environment = {**os.environ, **SAFE_PATH, "PYTHONPATH": str(ROOT)}
    out = {
        words: subprocess.run(
            [sys.executable, "-m", "flows.lineage", run.files.run, "--sample", "3", *words],
            cwd=run.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=True,
        ).stdout
        for words in ((), ("--json",))
    }
    extras = json.loads(out["--json",])["extras"]
    assert set(extras) == {"graded/said", "graded/parsed", "graded/odd call"}
    assert "extra graded/parsed" in out[()] and repr(extras["graded/parsed"]) in out[()]
