"""The whole flow with vLLM, and what it leaves, in a vLLM of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.contract.rollout.world import until
from tests.flows.conftest import Launched, starting

pytestmark = pytest.mark.vllm

UPDATES = 4
PLAIN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
(answer,) = llm.generate({"prompt_token_ids": json.loads(sys.argv[2])}, params, use_tqdm=False)
print("tokens:", json.dumps(list(answer.outputs[0].token_ids)))
"""


@pytest.fixture(scope="module")
def finished(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A run with vLLM, which leaves nothing in the folder for temporary files."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a short name: sockets are made in it
    with starting(tmp_path_factory.mktemp("vllm"), prefect_api) as start:
        run = start(
            "tiny",
            f"steps={UPDATES}",
            "rollout.engine=vllm",
            "name=whole",
            environment={"TMPDIR": str(temporary)},
        )
        code, out = run.end()
        left = {path.name for path in temporary.iterdir()}
        shutil.rmtree(temporary)
        assert left <= {f"torchinductor_{os.getuid()}"}  # for the next run
        assert code == 0, out
        assert "WARN" not in out.upper(), out
        yield run


def test_a_run_on_vllm_stays_with_the_trainer(finished: Launched) -> None:
    commits = finished.commits()
    assert len(commits) == UPDATES
    for commit in commits:  # float32 on both sides, so what differs is the order of sums
        assert commit.metrics["train/rollout_mismatch"] < 1e-3
        assert commit.metrics["weights/probe_error"] < 1e-3
    norms = [commit.metrics["train/grad_norm"] for commit in commits]
    assert max(norms) > 1e-3  # the weights did move


@pytest.mark.slow
def test_its_front_end_in_a_process_of_its_own_may_die(
    finished: Launched, prefect_api: str, tmp_path: Path
) -> None:
    """The same bits, and the worker, which trains too, stays."""
    with starting(tmp_path, prefect_api) as start:
        run = start(
            "tiny",
            f"steps={UPDATES}",
            "rollout.engine=vllm",
            "rollout.own_process=true",
            "cluster.roles.rollout=train",
            "cluster.pools.train.slots=3",
            "name=apart",
        )
        until(lambda: steps_of(run) >= 2, "the second commit")
        assert steps_of(run) < UPDATES, "it had ended before it could be disturbed"
        workers, (front,) = named(run, "refrain train-0"), named(run, "refrain vLLM")
        front.kill()
        until(lambda: len(named(run, "refrain vLLM")) == 1, "another front end")
        assert named(run, "refrain train-0") == workers
        code, out = run.end()
        assert code == 0, out
    assert [one.version_out.digest for one in run.commits()] == [
        one.version_out.digest for one in finished.commits()
    ]


def steps_of(run: Launched) -> int:
    """Steps committed; 0 before there is a store."""
    try:
        return len(run.commits())
    except (ValueError, OSError):
        return 0


def named(run: Launched, name: str) -> list[psutil.Process]:
    """Processes of a run with this name in `ps`, those that have ended left out."""
    dead = psutil.STATUS_ZOMBIE
    return [one for one in run.children() if one.name() == name and one.status() != dead]


@pytest.mark.slow
def test_its_checkpoint_loads_into_a_vllm_of_its_own(finished: Launched) -> None:
    key = finished.commits()[-1].version_out.key
    folder = finished.files.store.url(key).removeprefix("file://")
    prompt = [5, 6, 7, 8, 9, 10]
    assert plain_vllm(folder, prompt) == plain_transformers(folder, prompt)


def plain_vllm(folder: str, prompt: list[int]) -> list[int]:
    """Eight greedy tokens of a checkpoint in vLLM, with none of our code."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_VLLM, folder, json.dumps(prompt)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("tokens: "))
    return json.loads(line.removeprefix("tokens: "))


def plain_transformers(folder: str, prompt: list[int]) -> list[int]:
    """The same by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([prompt])
    for _ in range(8):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens[0, len(prompt) :].tolist()
