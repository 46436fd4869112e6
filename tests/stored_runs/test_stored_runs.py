"""Runs that older code stored: they are read, checked and gone on with by today's.

f941b39.tar.xz has runs of `tiny` by the code of that commit (NAME/RUN, as in a store): of every flow,
with overlapping steps, LoRA, differences, episodes, elastic training, a fork, and such as were killed
in the middle of a step. Two are whole, grpo-killed (its fourth step has prompts and rollouts) and lora;
of the others weights, trainer states and batches are left out.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from flows.runs import main as main_of_runs
from storage.audit.audit import audit
from storage.objects.store import Store
from storage.runs.commit_log import head, history
from storage.runs.run_store import RunStore
from tasks.run.run_record import settings_of
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
        config = settings_of(run)
        assert config.name == ("distill" if name == "teacher" else name)
        assert config.store.keep_registered is None, "it kept them all"
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


def listed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str, str]:
    """What `refrain runs` says of a store: exit code, output, errors."""
    monkeypatch.setattr(sys, "argv", ["runs", f"store.uri=file://{folder}", *words])
    code = main_of_runs()
    said = capsys.readouterr()
    return code, said.out, said.err


def test_runs_are_listed(
    unpacked: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(unpacked / "grpo", tmp_path / "store")
    (killed,) = runs(unpacked, "grpo-killed")
    shutil.copytree(unpacked / "grpo-killed" / killed.run, tmp_path / "store" / killed.run)
    broken = tmp_path / "store" / "broken-20261127-000000-0000"
    broken.mkdir()
    (broken / "run.json").write_text("{")

    code, out, _ = listed(tmp_path / "store", capsys, monkeypatch, "--json")
    record = json.loads(out)
    found = {one["run"]: one for one in record["listed"]}
    assert (code, record["runs"], len(found)) == (0, 4, 4)
    for files in runs(tmp_path, "store"):
        one = found[files.run]
        if files.run == broken.name:
            assert one["state"].startswith("cannot be read: ")
            continue
        last = next(iter(history(files)))
        assert one["step"] == last.step
        assert one["reward"] == last.metrics["reward/mean"]
        assert 0 < one["committed"] - one["begun"] < 600
        kept = [path for path in (tmp_path / "store" / files.run).rglob("*") if path.is_file()]
        # Locks of this machine, and what a killed writer had begun, are no objects of the store.
        sizes = (path.stat().st_size for path in kept if not path.name.startswith("."))
        assert one["bytes"] == sum(sizes)
    states = {one["run"].rsplit("-", 3)[0]: one["state"] for one in record["listed"]}
    assert (states["grpo"], states["grpo-killed"]) == ("finished", "stopped")
    assert [one["origin"] is None for one in record["listed"]].count(False) == 1
    assert record["listed"][0]["run"] == broken.name  # begun last, by its name

    code, out, _ = listed(tmp_path / "store", capsys, monkeypatch, "--last", "1")
    assert code == 0
    assert "4 runs in" in out and "1 of them here" in out and killed.run not in out
    for column in ("state", "steps", "reward", "age", "last step", "size", "where", "from"):
        assert column in out
    code, out, _ = listed(tmp_path / "store", capsys, monkeypatch, "--json", "--no-sizes")
    assert {one["bytes"] for one in json.loads(out)["listed"]} == {None}
    assert listed(tmp_path / "none", capsys, monkeypatch)[1].startswith("There is no run in")
    code, _, err = listed(tmp_path / "store", capsys, monkeypatch, "--last", "-1")
    assert (code, err) == (2, "--last -1 is no number of runs. 0 is all.\n")
