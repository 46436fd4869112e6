"""Mixtures of experts on the task of `tiny`: killed, resumed, replayed to the bit, exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.families import make
from tests.flows.conftest import AFTER_STEP_3, ROOT, Launch, ends_alike, starting

# With what each has of its own. The other engine that samples is vLLM, which takes it on a CPU.
FAMILIES = {
    "Qwen3.5-MoE": ["train.router_aux_loss_coef=0.01"],
    "Qwen3-Next": ["train.router_replay=true"],
    "gpt-oss": ["train.router_dtype=float32"],
    "GLM 4 MoE": ["train.router_bias_update_rate=0.01"],
    "DeepSeek V3": ["train.router_bias_update_rate=0.01", "cluster.pools.train.workers=2"],
    "Qwen3-MoE": ["train.expert_parallel=2", "cluster.pools.train.workers=2"],
    "Mixtral": ["rollout.engine=vllm"],
    "OLMoE": ["lora.rank=4", "lora.target_parameters=all-experts"],
}


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_is_killed_resumed_replayed_and_exported(
    family: str, launch: Launch, prefect_api: str, tmp_path: Path
) -> None:
    directory = make(family, tmp_path.parent / f"{tmp_path.name}-model")
    words = ["tiny", f"model.path={directory}", "steps=4", *FAMILIES[family]]
    undisturbed = tmp_path.parent / f"{tmp_path.name}-undisturbed"
    undisturbed.mkdir()
    with starting(undisturbed, prefect_api) as start:
        whole = start(*words).whole()
        ends_alike(whole, launch, tmp_path.parent / f"{tmp_path.name}-f", words, AFTER_STEP_3)

    metrics = whole.commits()[-1].metrics
    assert 0 < metrics["router/entropy"] < 1.4  # of four experts at most log 4
    assert 0.25 <= metrics["router/busiest_share"] <= 0.5  # two of four for each token
    for said in (["flows.replay", whole.files.run, "4"], ["flows.export", whole.files.run]):
        to = ["--to", str(undisturbed / "export")] if said[0] == "flows.export" else ["--json"]
        done = subprocess.run(
            [sys.executable, "-m", *said, *to],
            cwd=undisturbed,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout
        if said[0] == "flows.replay":
            assert json.loads(done.stdout)["equal"]
    (exported,) = (undisturbed / "export").glob("*.safetensors")
    assert load_file(exported).keys() == load_file(directory / "model.safetensors").keys()


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE", "GLM 4 MoE", "OLMoE"])
def test_vllm_stays_with_the_trainer_over_ten_updates(
    family: str, prefect_api: str, tmp_path: Path
) -> None:
    """Each version's experts are those that tokens are sampled with, to the dense models' bounds."""
    directory = make(family, tmp_path / "model")
    words = ["tiny", f"model.path={directory}", "steps=10", "rollout.engine=vllm"]
    with starting(tmp_path, prefect_api) as start:
        commits = start(*words).whole().commits()
    assert [commit.step for commit in commits] == list(range(1, 11))
    for commit in commits:
        assert commit.metrics["train/rollout_mismatch"] < 1e-3
