"""Runs that older code stored: they are read, checked and gone on with by today's.

f941b39.tar.xz has runs of `tiny` by the code of that commit (NAME/RUN, as in a store): of every flow,
with overlapping steps, LoRA, differences, episodes, elastic training, a fork, and such as were killed
in the middle of a step. Two are whole, grpo-killed (its fourth step has prompts and rollouts) and lora;
of the others weights, trainer states and batches are left out.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from storage.audit.audit import audit
from storage.objects.store import Store
from storage.runs.commit_log import head, history
from storage.runs.run_store import RunStore
from tasks.run.recorded_flow import settings_of
from tests.flows.conftest import Launch

ARCHIVE = Path(__file__).parent / "f941b39.tar.xz"
NAMES = [
    "dapo",
    "delta",
    "elastic",
    "episodes",
    "episodes-killed",
    "grpo",
    "grpo-killed",
    "kl",
    "lora",
    "overlap",
    "overlap-killed",
    "ppo",
    "ppo-killed",
    "srpo",
    "teacher",
    "tree",
]
# The versions that grpo-killed made, and those that a run of the same settings made without a kill.
DIGESTS = [
    "xxh3:d93c6a72a71756fa89cae9f9ed572b17",
    "xxh3:528da0dea065dcf5dfa6a7ce0b8bed0a",
    "xxh3:5940fbdb7126b9287850a8feb50cb64c",
    "xxh3:8043900a6c7d2c373a57f47c1e10d250",
    "xxh3:6977ec33353d3a26c7cca2c4ffcedffe",
    "xxh3:25f9e10b847df769bc7140c3b6cd0ab6",
]


def same_bits() -> bool:
    """Whether this machine adds as that of the stored runs: an Intel CPU with AVX-512."""
    kind = Path("/proc/cpuinfo").read_text()
    capability = torch.backends.cpu.get_cpu_capability()
    return "GenuineIntel" in kind and capability == "AVX512" and torch.__version__[:4] == "2.13"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def runs(folder: Path, name: str) -> list[RunStore]:
    store = Store(f"file://{folder}/{name}")
    return [RunStore(store, run) for run in store.children()]


@pytest.mark.parametrize("name", NAMES)
def test_settings_and_commits_are_read(unpacked: Path, name: str) -> None:
    """Whatever is refused of new settings by now: a stored run began when it was allowed."""
    found = runs(unpacked, name)
    assert len(found) == (2 if name == "grpo" else 1)
    for run in found:
        assert settings_of(run).name == ("distill" if name == "teacher" else name)
        commits = list(history(run))
        assert commits[0].step == head(run)
        assert all(commit.version_out.version == commit.step for commit in commits)


@pytest.mark.parametrize("name", ["grpo-killed", "lora"])
def test_all_that_their_records_vouch_for_is_there(unpacked: Path, name: str) -> None:
    (run,) = runs(unpacked, name)
    assert audit(run).problems == []


@pytest.mark.cluster
def test_a_run_that_was_killed_goes_on_where_it_was(
    unpacked: Path, launch: Launch, tmp_path: Path
) -> None:
    """With the shards of its fourth step that were finished, to the weights that were due."""
    (old,) = runs(unpacked, "grpo-killed")
    shutil.copytree(unpacked / "grpo-killed" / old.run, tmp_path / ".refrain" / "store" / old.run)
    step = old.store.list(f"{old.run}/steps/000004/rollout")
    finished = {key for key in step if key.endswith(".safetensors")}
    assert len(finished) == 2
    run = launch("--resume", old.run).whole()
    commits = run.commits()
    assert [commit.step for commit in commits] == [1, 2, 3, 4, 5, 6]
    assert finished <= commits[3].refs["samples"].objects
    if same_bits():
        assert [commit.version_out.digest for commit in commits] == DIGESTS
    assert audit(run.files).problems == []
