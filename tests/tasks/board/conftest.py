"""Runs that the board is tried with: one that an older Refrain stored, and a step that wants no good."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from storage.audit.samples import tokenizer_of
from storage.batches.writing import write_batch
from storage.evaluations.results import EvaluationResult, note, write_result
from storage.objects.store import Store
from storage.runs.commit_log import commit, read_commit, version_weights
from storage.runs.run_store import RunStore
from tests.contract.conftest import s3, s3_server, s3_store

__all__ = ["s3", "s3_server", "s3_store"]

ARCHIVE = Path(__file__).parents[2] / "stored_runs/f941b39.tar.xz"
HOSTILE = '<script>document.title="owned"</script><img src=x onerror="document.title=1"> 7'


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def only_run(folder: Path) -> RunStore:
    store = Store(f"file://{folder}")
    return RunStore(store, store.children()[0])


@pytest.fixture
def stored(unpacked: Path, tmp_path: Path) -> RunStore:
    """Three steps, the fourth under way when it was killed; a copy of its own."""
    return only_run(Path(shutil.copytree(unpacked / "grpo-killed", tmp_path / "store")))


@pytest.fixture
def hostile(stored: RunStore) -> RunStore:
    """The same with a fourth step, in whose batch the first sample is a page's script."""
    last = read_commit(stored, 3)
    words = tokenizer_of(stored, (last.version_out,))
    samples = last.refs["samples"]
    ids = [one.tolist() for one in samples.fetch_list(stored.store, "response_ids")]
    ids[0] = words.encode(HOSTILE, add_special_tokens=False).ids
    assert words.decode(ids[0]) == HOSTILE
    episode = np.array([1, 1, 2, 2, 2, *[1] * (len(ids[1]) - 5)], np.uint8)  # two turns of a policy
    frames = np.zeros((len(ids), 4, 4, 3), np.uint8)
    whole: dict[str, object] = {
        "author": [
            episode if row == 1 else np.ones(len(one), np.uint8) for row, one in enumerate(ids)
        ],
        "opening_frame": frames,
        "response_ids": ids,
        "response_mask": [np.ones(len(one), np.uint8) for one in ids],
        "rollout_logprobs": [np.full(len(one), -2.0, np.float32) for one in ids],
        "weight_spans": [[2, 0, 4, 3, 4, len(one)] for one in ids],
    }
    written = write_batch(stored.store, f"{stored.run}/steps/4/hostile.safetensors", whole)
    samples = samples.with_columns(written)
    trained: dict[str, object] = {
        "old_logprobs": [np.full(len(one), -1.5, np.float32) for one in ids],
        "advantages": [np.linspace(-1, 1, len(one)).astype(np.float32) for one in ids],
    }
    key = f"{stored.run}/steps/4/trained.safetensors"
    batch = samples.with_columns(write_batch(stored.store, key, trained))
    step = {"step": 4, "parent": 3, "refs": {**last.refs, "samples": samples, "batch": batch}}
    commit(stored, last.model_copy(update=step))
    return stored


def evaluated(run: RunStore, version: int, step: int) -> None:
    """As if a suite had been asked of a version, with the samples of a step for its answers."""
    commit, key = read_commit(run, step), f"_evaluations/{version}/result-1.json"
    result = EvaluationResult(
        key=key,
        suite="sums",
        weights=version_weights(run, version),
        engine="transformers",
        on="rows",
        metrics={"reward": 0.25, "failed": 0.0},
        asked=4,
        samples=commit.refs["samples"],
        prompts=commit.refs["prompts"],
        right_from=1.0,
        seconds=0.1,
        asked_by=run.run,
    )
    write_result(run.store, key, result)
    note(run, "sums", version, key)
