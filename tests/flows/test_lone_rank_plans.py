"""A run keeps the way in which one rank's rows come into micro-batches, and so does a fork of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from storage.objects import documents
from storage.objects.store import Store
from storage.runs.run_store import RUN_FORMAT, RunStore
from tests.flows.conftest import Launch

pytestmark = pytest.mark.cluster

# Three groups for two micro-batches: a plan that balances cuts one.
SHAPE = ("prompts_per_step=3", "group_size=8", "rollout.max_new_tokens=48")
WORDS = ("tiny", "steps=2", *SHAPE, "train.micro_batch_tokens=1000")


def replayed(folder: Path, *words: str) -> dict[str, object]:
    command = [sys.executable, "-m", "flows.replay", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_replay_plans_as_the_run_did(launch: Launch, tmp_path: Path) -> None:
    run = launch(*WORDS)
    code, out = run.end()
    assert code == 0, out
    assert run.files.constant("lone_rank_plans") == "whole_groups"
    assert replayed(tmp_path, run.files.run, "2")["equal"]

    # Taken for one of an older Refrain, it is replayed by plans that it did not have.
    shutil.copytree(tmp_path / ".refrain/store", tmp_path / "older")
    uri = f"file://{tmp_path}/older"
    older = RunStore(Store(uri), run.files.run)
    record = older.read_run()
    del record["lone_rank_plans"]
    older.store.write(older.run_json_key, documents.encode(RUN_FORMAT, record))
    other = replayed(tmp_path, older.run, "2", f"store.uri={uri}")
    assert (other["demanded"], other["equal"]) == ("bits", False)

    code, out = launch("--fork", f"{older.run}@1", "steps=2", f"store.uri={uri}").end()
    assert code == 0, out
    runs = {one for one in older.store.children() if not one.startswith("_")}
    (child_run,) = runs - {older.run}
    assert RunStore(older.store, child_run).constant("lone_rank_plans") == "balanced"
    assert replayed(tmp_path, child_run, "2", f"store.uri={uri}")["equal"]
