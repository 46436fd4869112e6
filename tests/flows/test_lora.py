"""Runs that train an adapter: committed, audited, made again, broken, forked, gone on from, exported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.objects.store import Store
from storage.runs.adapters import base_keys
from storage.runs.run_store import RunStore
from storage.runs.weights import open_manifest
from tests.faults.ledger import committed
from tests.faults.planted import Faults
from tests.faults.test_matrix import FLOW
from tests.flows.conftest import Launch, Launched

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

WORDS = ("tiny", "lora.rank=4", "algorithm.kl.coefficient=0.01", "store.snapshot_every=2")


def named(run: Launched, name: str) -> RunStore:
    """The run in the store whose name begins with `name`."""
    store = Store(run.store_uri)
    (found,) = (one for one in store.children() if one.startswith(name))
    return RunStore(store, found)


def ended(run: Launched) -> Launched:
    code, out = run.end()
    assert code == 0, out
    return run


def digests(files: RunStore, after: int = 0) -> list[str]:
    return [one.version_out.digest for one in committed(files) if one.step > after]


def command(run: Launched, name: str, *words: str) -> dict[str, Any]:
    """What a command says of a run in the same folder."""
    done = subprocess.run(
        [sys.executable, "-m", f"flows.{name}", *words, "--json"],
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(
            torch.tensor([[4, 9, 14, 19, 24, 30]])
        ).logits
    return out


@pytest.mark.slow
def test_a_run_stores_one_base_and_small_versions_and_exports_both(launch: Launch) -> None:
    run = ended(launch(*WORDS, "steps=2"))
    files = run.files
    (base,) = base_keys(files)
    for commit in committed(files):
        manifest = open_manifest(files.store, commit.version_out)
        assert manifest.adapter is not None and manifest.base is not None
        assert manifest.base.key == base
        assert commit.version_out.nbytes < open_manifest(files.store, manifest.base).nbytes / 5
        assert commit.metrics["weights/probe_error"] < 1e-5
    assert len(set(digests(files))) == 2
    assert "ref_logprobs" in commit.refs["batch"].names
    audited = command(run, "audit", files.run, "--strict")
    assert audited["good"] and audited["versions"] >= 2
    told = command(run, "export", files.run, "--to", "whole")
    assert told["version"] == 2
    command(run, "export", files.run, "--to", "adapter", "--adapter")
    before = logits(Path(files.store.url(base).removeprefix("file://")))
    whole = logits(run.folder / "whole")
    assert (whole - before).abs().max() > 1e-3
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(files.store.url(base).removeprefix("file://"))
    adapted = peft.PeftModel.from_pretrained(model, run.folder / "adapter")
    with torch.no_grad():
        found = adapted(torch.tensor([[4, 9, 14, 19, 24, 30]])).logits
    torch.testing.assert_close(found, whole, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_every_update_is_made_again_to_the_bit_and_a_fork_repeats_it(launch: Launch) -> None:
    run = ended(launch(*WORDS, "steps=4", "name=whole"))
    name = run.files.run
    for step in (2, 3):
        assert command(run, "replay", name, str(step))["equal"]
    ended(launch("--fork", f"{name}@3", "name=child"))
    whole, child = named(run, "whole"), named(run, "child")
    assert digests(child, 3) == digests(whole, 3)
    assert base_keys(child) == []  # it shares its parent's
    assert command(run, "audit", child.run, "--strict")["good"]
    code, out = launch("--fork", f"{name}@3", "name=other", "lora.rank=8").end()
    assert code == 2 and "Set lora to the former" in out


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["update", "commit", "committed"])
def test_a_killed_run_goes_on_to_the_same_weights(
    launch: Launch, tmp_path: Path, moment: str
) -> None:
    words = (*WORDS, "steps=4", "cluster.pools.train.workers=2")
    whole = ended(launch(*words, "name=whole"))
    kills = [replace(FLOW[moment], id=f"{moment}-{nth}", nth=nth) for nth in (3, 1)]
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", kills)
    code, out = launch(*words, "name=broken", environment=faults.environment).end()
    assert code == -9, out
    broken = named(whole, "broken")
    for _ in range(2):
        code, out = launch("--resume", broken.run, environment=faults.environment).end()
        if code == 0:
            break
        assert code == -9, out
    assert code == 0, out
    assert faults.missed == []
    assert digests(broken) == digests(named(whole, "whole"))
    assert command(whole, "audit", broken.run, "--strict")["good"]


@pytest.mark.slow
@pytest.mark.parametrize("before", ["lora.rank=4", "lora=null"])
def test_a_run_goes_on_from_the_weights_of_another_below_a_new_adapter(
    launch: Launch, before: str
) -> None:
    """And is resumed from its own snapshot, which has the adapter alone."""
    first = ended(launch("tiny", before, "steps=2", "name=first"))
    words = ["continue_from=" + first.files.run, "continue_data=restart", "lora.rank=2"]
    ended(launch("tiny", *words, "name=child", "steps=2"))
    child = named(first, "child")
    assert len(base_keys(child)) == 1
    ended(launch("--resume", child.run, "steps=3"))
    assert command(first, "replay", child.run, "3")["equal"]
    assert command(first, "replay", child.run, "1")["equal"]
    assert command(first, "audit", child.run, "--strict")["good"]
    ended(launch("--fork", f"{child.run}@2", "name=grandchild", "steps=3"))
    assert digests(named(first, "grandchild"), 2) == digests(child, 2)


@pytest.mark.slow
def test_a_trainers_state_goes_on_only_with_its_own_adapters(launch: Launch) -> None:
    first = ended(launch(*WORDS, "steps=2", "name=first"))
    words = [f"continue_from={first.files.run}", "continue_state=trainer", "continue_data=restart"]
    code, out = launch("tiny", *words, "name=other").end()
    assert code == 2 and "Set lora to the former" in out
    ended(launch(*WORDS, *words, "name=child", "steps=1"))
    child = named(first, "child")
    (commit,) = committed(child)
    assert commit.version_in.digest == digests(named(first, "first"))[-1]
    assert base_keys(child) == []


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_samples_with_merged_weights(launch: Launch) -> None:
    pytest.importorskip("vllm")
    run = ended(launch(*WORDS, "steps=3", "rollout.engine=vllm"))
    for commit in committed(run.files):
        assert commit.metrics["weights/probe_error"] < 1e-4
        assert commit.metrics["train/rollout_mismatch_max"] < 1e-4
    assert command(run, "audit", run.files.run, "--strict")["good"]


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_samples_with_adapters_beside_their_base(launch: Launch, tmp_path: Path) -> None:
    """Killed in a step and resumed; what it trained on and under which weights is all there."""
    pytest.importorskip("vllm")
    words = (*WORDS, "steps=4", "rollout.engine=vllm", "lora.serving=adapter", "name=beside")
    kill = replace(FLOW["update"], id="update-3", nth=3)
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [kill])
    run = launch(*words, environment=faults.environment)
    code, out = run.end()
    assert code == -9, out
    files = named(run, "beside")
    ended(launch("--resume", files.run))
    assert faults.missed == []
    for commit in committed(files):
        manifest = open_manifest(files.store, commit.version_out)
        assert manifest.base is not None
        assert (
            commit.metrics["weights/bytes"] < open_manifest(files.store, manifest.base).nbytes / 5
        )
        assert commit.metrics["weights/probe_error"] < 1e-4
        assert commit.metrics["train/rollout_mismatch_max"] < 1e-4
    assert command(run, "replay", files.run, "3")["equal"]
    assert command(run, "audit", files.run, "--strict")["good"]
