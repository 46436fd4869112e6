"""The commands and settings of docs/cluster.md and docs/scheduled-retraining.md, as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from configs.grpo import GRPOConfig
from configs.recipe import load_recipe, read_recipe
from engines.clusters.kubernetes import worker_group
from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore, origin_of
from tasks.launch import kubernetes
from tests.engines.conftest import left_after
from tests.flows.conftest import ROOT, settings_for
from tests.ports import free_port

CLUSTER = (ROOT / "docs/cluster.md").read_text()
NIGHTS = (ROOT / "docs/scheduled-retraining.md").read_text()
RECIPE = "gsm8k-multinode"  # with every pool that the page's settings name


def blocks(page: str, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands(page: str, beginning: str, language: str = "") -> list[str]:
    lines = "".join(blocks(page, language)).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(beginning)]


def values(folder: Path, kind: str) -> list[str]:
    """The words of the page's settings for one kind of cluster."""
    (block,) = (text for text in blocks(CLUSTER, "yaml") if f"{kind}:" in text)
    (folder / "page.yaml").write_text(block)
    return kubernetes.words_of(str(folder / "page.yaml"))


def test_settings_for_slurm_are_good(tmp_path: Path) -> None:
    words = [*values(tmp_path, "slurm"), "cluster.address=null"]
    cluster = read_recipe(GRPOConfig, RECIPE, words).cluster
    assert cluster.kind == "slurm"
    assert cluster.slurm.pools["train"].workers_per_job == 8
    assert cluster.slurm.handover < (cluster.slurm.time_limit or 0)


def test_the_command_for_ssh_is_good() -> None:
    (command,) = commands(CLUSTER, "refrain grpo RECIPE cluster.kind=ssh")
    config = load_recipe(GRPOConfig, "tiny", shlex.split(command)[3:])
    assert config.cluster.ssh.hosts == ["gpu1", "gpu2"]


def test_the_command_for_kubernetes_is_good(tmp_path: Path) -> None:
    """With the values of the checkout, and the page's settings of pods."""
    (command,) = commands(CLUSTER, "refrain kubernetes render")
    _, _, _, recipe, _, _, _, name, *words = shlex.split(command.partition("|")[0])
    common = kubernetes.words_of(str(kubernetes.INFRA / "values.yaml"))
    words = [*common, *values(tmp_path, "kubernetes"), *words]
    config = read_recipe(GRPOConfig, recipe, words)
    made = {one["kind"]: one for one in kubernetes.render(config, "flows.grpo", name)}
    assert made["Job"]["metadata"]["name"] == name == "sums-1"
    group = worker_group(config.cluster, name, "train", {})
    pod = group["spec"]["worker"]["spec"]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["hostNetwork"] is True
    assert pod["terminationGracePeriodSeconds"] == 900


def environment(folder: Path, api: str) -> dict[str, str]:
    """Variables with which `refrain` and `python` are those of the tests."""
    programs = folder / "programs"
    programs.mkdir()
    start = "import sys; from flows.__main__ import main; sys.exit(main())"
    for name, words in (("python", []), ("refrain", ["-P", "-c", start])):
        (programs / name).write_text(
            f'#!/bin/sh\nexec {shlex.join([sys.executable, *words])} "$@"\n'
        )
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        **settings_for(api),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def going(command: str, folder: Path, variables: dict[str, str]) -> Iterator[None]:
    """A command that goes on until it is told to end."""
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=variables, start_new_session=True
    )
    try:
        yield
    finally:
        pids = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
        process.wait(30)
        assert left_after(10, pids) == []


def done(command: str, folder: Path, variables: dict[str, str]) -> str:
    """What a command printed that ended well."""
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def runs_of(store: Store) -> set[str]:
    return {name for name in store.children() if not name.startswith("_")}


@pytest.mark.cluster
@pytest.mark.slow
def test_workers_that_stay(tmp_path: Path, prefect_api: str) -> None:
    """On loopback, and with a folder of the test in the place of the shared one."""
    variables, port = environment(tmp_path, prefect_api), str(free_port())
    block = next(text for text in blocks(CLUSTER) if "engines.clusters.scheduler" in text)
    block = block.replace("10.0.0.1", "127.0.0.1").replace("8786", port)
    settings, *lasting, run = block.replace("/shared", f"{tmp_path}/shared").splitlines()
    assert len(lasting) == 4
    with ExitStack() as stack:
        for command in lasting:
            stack.enter_context(going(f"{settings}; exec {command}", tmp_path, variables))
        printed = done(f"{settings}; {run}", tmp_path, variables)
    assert "2 steps are committed" in printed
    store = Store(f"file://{tmp_path}/shared/refrain")
    (name,) = runs_of(store)
    attempts = read_commit(RunStore(store, name), 2).attempts
    (sampled,) = {one["worker"] for one in attempts if one["stage"] == "rollout"}
    assert sampled in {log.stem for log in (tmp_path / ".refrain/workers").glob("rollout-*.log")}


@pytest.mark.cluster
@pytest.mark.slow
def test_three_nights(tmp_path: Path, prefect_api: str) -> None:
    """The first makes the champion, the second finds nothing new, the third goes on from it."""
    variables = environment(tmp_path, prefect_api)
    files = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", NIGHTS, re.MULTILINE | re.DOTALL)
    for name, text in files:
        (tmp_path / name).write_text(text)
    assert {name for name, _ in files} == {"rows.jsonl", "held_out.jsonl", "night.sh"}
    first, nothing, grow, again = "".join(blocks(NIGHTS, "sh")).splitlines()
    done(first, tmp_path, variables)
    assert "Nothing new to train on: all 4 rows" in done(nothing, tmp_path, variables)
    store = Store(f"file://{tmp_path}/.refrain/store")
    (champion,) = runs_of(store)
    done(grow, tmp_path, variables)
    assert "1 rows not seen before come first" in done(again, tmp_path, variables)
    (newest,) = runs_of(store) - {champion}
    files_of_newest = RunStore(store, newest)
    assert str(origin_of(files_of_newest)).startswith(f"{champion}@2")
    assert head(files_of_newest) == 2
