"""The commands that look at a stored run, on one finished tiny run and a fork of it."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    temporary_settings,
)

from configs.overrides import ConfigError
from configs.storage import StoreConfig
from engines.models.checkpoints import load_tokenizer
from engines.workers.inspection import NotReached, WorkerView
from flows import audit, export, inspect, lineage, profile, replay, rescore, samples
from storage.objects import documents
from storage.objects.store import Store
from storage.runs.commit_log import head, read_commit
from storage.runs.live import read_live, workers_ended, write_live
from storage.runs.run_lease import RunLease
from storage.runs.run_store import RUN_FORMAT, RunStore, origin_of
from tasks.commands import inspect as commands_inspect
from tasks.commands.command import Request
from tasks.reporting.artifacts import key
from tasks.run.beginning import origin_of_fork
from tasks.run.run_record import settings_of
from tests.flows.conftest import ROOT, settings_for

pytestmark = pytest.mark.cluster

REWARDS = '''
def brevity(prompts, completions, **columns):
    """Shorter is better."""
    return [1.0 / (1 + len(text)) for text in completions]
'''


@dataclass
class World:
    """A folder with a finished run of three steps and a fork of it after the first."""

    folder: Path
    parent: RunStore
    child: RunStore
    while_running: dict[str, Any]  # what `inspect --json` said in the middle of the run


def command(folder: Path, module: str, *words: str, api: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("PREFECT_API_URL", None)
    if api:
        environment |= settings_for(api)
    return subprocess.Popen(
        [sys.executable, "-m", f"flows.{module}", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    return out


@pytest.fixture(scope="module")
def world(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "my_rewards.py").write_text(REWARDS)
    store = Store(f"file://{folder}/.refrain/store")
    process = command(folder, "grpo", "tiny", "name=whole", api=prefect_api)
    try:
        parent = RunStore(store, _begun(process, store))
        seen: dict[str, Any] = {"state": "running", "tasks": [], "workers": []}
        own = settings_for(prefect_api)  # as whoever uses a team's server has them
        with temporary_settings(
            {
                PREFECT_API_URL: own["PREFECT_API_URL"],
                PREFECT_API_AUTH_STRING: own["PREFECT_API_AUTH_STRING"],
            }
        ):
            while seen["state"] == "running" and not (seen["tasks"] and seen["workers"]):
                seen = looked_at(parent)  # between two steps there is no task
        finished(process)
        process = command(
            folder, "grpo", "--fork", f"{parent.run}@1", "name=child", api=prefect_api
        )
        finished(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    (child,) = [name for name in store.children() if name.startswith("child")]
    return World(folder, parent, RunStore(store, child), seen)


def looked_at(run: RunStore) -> dict[str, Any]:
    """What `inspect --json` would print, without the seconds that a process takes to start."""
    request = Request(
        files=run,
        store=StoreConfig(),
        cluster=(),
        arguments=argparse.Namespace(steps=10, size=True),
    )
    answered = commands_inspect.answer(request)
    return dict(answered.record, good=answered.good)


def _begun(process: subprocess.Popen[str], store: Store) -> str:
    """The name of the run that is being made, once its workers can be looked at."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        for name in store.children():
            if store.exists(f"{name}/live.json"):
                return name
        time.sleep(0.05)
    raise AssertionError(process.communicate()[0])


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Call a command in this process: exit code, output, errors."""
    monkeypatch.chdir(world.folder)
    monkeypatch.syspath_prepend(str(world.folder))

    def call(main: Callable[[], int], *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["command", *words])
        code = main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_a_fork_repeats_its_parents_steps_to_the_bit(world: World) -> None:
    parents, children = (
        [read_commit(run, step).version_out.digest for step in (2, 3)]
        for run in (world.parent, world.child)
    )
    assert parents == children
    first = read_commit(world.child, 2)
    assert first.version_in.key == f"{world.parent.run}/weights/v000001"  # shared, not copied
    assert (
        first.parent_run,
        first.refs["samples"].fetch_numpy(world.child.store, "sample_id")[0][0],
    ) == (world.parent.run, 16)
    assert first.ledger.drawn == 8
    assert not world.child.store.exists(f"{world.child.run}/weights/v000001/manifest.json")


def test_the_fork_is_on_record_in_mlflow(world: World) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{world.folder}/.refrain/mlflow.db")
    pages = client.search_runs([client.get_experiment_by_name("refrain").experiment_id])
    tags = {page.data.tags["refrain.run"]: page.data.tags for page in pages}
    ids = {page.data.tags["refrain.run"]: page.info.run_id for page in pages}
    child = tags[world.child.run]
    assert child["mlflow.parentRunId"] == ids[world.parent.run]
    assert (child["refrain.forked_from"], child["refrain.forked_at"]) == (world.parent.run, "1")
    last = read_commit(world.parent, 3)
    version = client.get_model_version_by_alias("whole", "latest")
    assert version.tags["refrain.sampled_with"] == last.version_in.digest
    assert version.tags["refrain.reward_code"] in last.reward_code
    assert tags[world.parent.run]["refrain.digest.last"] == last.version_out.digest


def test_audit(world: World, ask: Ask) -> None:
    for run in (world.parent, world.child):
        code, out, err = ask(audit.main, run.run, "--strict")
        assert (code, err) == (0, ""), out
        assert "All is good." in out
    code, out, _ = ask(audit.main, world.child.run, "--json")
    record = json.loads(out)
    assert record["origin"] == f"{world.parent.run}@1"
    assert [step["drawn"] for step in record["steps"]] == [8, 12]
    assert record["orphans"] == record["problems"] == []


def test_audit_of_a_damaged_run(world: World, ask: Ask, tmp_path: Path) -> None:
    shutil.copytree(world.folder / ".refrain/store", tmp_path / "store")
    run, where = world.parent.run, f"store.uri=file://{tmp_path}/store"
    (tmp_path / f"store/{run}/steps/000002/rollout/9-late.safetensors").write_bytes(b"late")
    code, out, _ = ask(audit.main, run, where)
    assert (code, "1 orphan(s), which nothing names:" in out) == (0, True)
    assert ask(audit.main, run, where, "--strict")[0] == 1
    (shard,) = (tmp_path / f"store/{run}/steps/000002/rollout").glob("1-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, out, _ = ask(audit.main, run, where, "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, problem["kind"], problem["step"]) == (1, "batch", 2)
    assert shard.name in problem["message"]
    code, _, err = ask(audit.main, run, "cluster.kind=local")
    assert (code, "there is no such setting" in err) == (2, True)


def test_export(world: World, ask: Ask, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    code, out, err = ask(export.main, world.child.run, "--to", str(tmp_path / "it"), "--json")
    last = read_commit(world.parent, 3).version_out  # the fork repeated it
    assert (code, err, json.loads(out)["digest"]) == (0, "", last.digest)
    AutoModelForCausalLM.from_pretrained(tmp_path / "it")
    code, _, err = ask(export.main, world.child.run, "--to", str(tmp_path / "it"))
    assert (code, "is there already" in err) == (2, True)
    words = ("--to", str(tmp_path / "one"), "--version")
    assert ask(export.main, world.child.run, *words, "1")[0] == 0  # the parent's
    code, _, err = ask(export.main, world.child.run, *words, "4")
    assert (code, "Name one from 1 to 3" in err) == (2, True)


def test_lineage(world: World, ask: Ask) -> None:
    code, out, _ = ask(lineage.main, world.child.run, "--version", "2", "--json")
    record = json.loads(out)
    assert code == 0
    assert [(step["run"], step["step"]) for step in record["steps"]] == [
        (world.child.run, 2),
        (world.parent.run, 1),
    ]
    (functions,) = record["reward_code"].values()
    assert functions[0]["settings"]["path"] == "engines.rewards.builtin:share_of_digits"
    assert functions[0]["source"].startswith("sha256:")
    sample = record["samples"][3]
    assert sample["weights_digest"] == read_commit(world.parent, 1).version_out.digest
    assert sample["spans"][0]["version"] == 1
    assert (sample["worker"], sample["attempt"]) == ("rollout-0", 1)
    code, out, _ = ask(lineage.main, world.child.run, "--sample", "3", "--json")  # the parent's
    assert json.loads(out)["run"] == world.parent.run
    row = str(sample["prompt_row"])
    code, out, _ = ask(lineage.main, world.child.run, "--prompt", row, "--json")
    assert sample["sample"] in [one["sample"] for one in json.loads(out)["samples"]]
    code, out, _ = ask(lineage.main, world.parent.run, "--sample", "17")
    assert code == 0
    assert "rollout-0, attempt 1" in out
    code, _, err = ask(lineage.main, world.parent.run, "--version", "9")
    assert (code, err) == (
        2,
        f"Run {world.parent.run} has no policy version 9. Name one from 0 to 3.\n",
    )


def test_replay(world: World, ask: Ask) -> None:
    code, out, err = ask(replay.main, world.child.run, "2", "--json")
    record = json.loads(out)
    assert (code, record["equal"], record["replayed_from_version"]) == (0, True, 1), err
    assert record["replayed"] == read_commit(world.parent, 2).version_out.digest
    metrics = record["metrics"]["train/loss"]
    assert metrics["committed"] == metrics["replayed"]
    assert (record["demanded"], record["tolerance"], record["share_of_way"]) == ("bits", None, None)
    assert "both were made on a CPU" in record["why"]
    code, _, err = ask(replay.main, world.child.run, "4")
    assert code == 2
    assert "has no committed step 4. Name one from 1 to 3." in err


@pytest.mark.slow
def test_a_profile_of_an_update(world: World, ask: Ask, tmp_path: Path) -> None:
    run, trace = world.child.run, tmp_path / "trace.json.gz"
    before = set(world.child.store.list(run))
    code, out, err = ask(profile.main, run, "2", "--to", str(trace), "--json")
    assert code == 0, err
    record = json.loads(out)
    assert record["tokens"] == read_commit(world.parent, 2).metrics["train/tokens"]
    seconds = sum(one["seconds"] for one in record["operations"])
    assert seconds == pytest.approx(sum(record["groups"].values()))
    assert {"matrix products", "attention", "log-probs"} < set(record["groups"])
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(one.get("name") == "aten::mm" for one in events)
    assert set(world.child.store.list(run)) == before
    code, _, err = ask(profile.main, run, "2", "--to", str(trace))
    assert (code, "trace.json.gz is there already. Name a new file" in err) == (2, True)


@pytest.mark.slow
def test_a_replay_by_other_ranks_is_held_to_a_tolerance(
    world: World, ask: Ask, tmp_path: Path
) -> None:
    words = ("cluster.pools.train.workers=2", "--json")
    code, out, err = ask(replay.main, world.parent.run, "3", *words)
    record = json.loads(out)
    assert (code, record["demanded"], record["equal"]) == (0, "tolerance", False), err
    assert record["why"] == "numbers of ranks differ, 1 and 2"
    assert 0 < record["share_of_way"] < record["tolerance"] / 10
    # Another setting is no rounding.
    shutil.copytree(world.folder / ".refrain/store", tmp_path / "store")
    other = RunStore(Store(f"file://{tmp_path}/store"), world.parent.run)
    changed = other.read_run()
    changed["config"]["train"]["learning_rate"] *= 1.25
    other.store.write(other.run_json_key, documents.encode(RUN_FORMAT, changed))
    code, out, _ = ask(replay.main, other.run, "3", f"store.uri=file://{tmp_path}/store", words[0])
    assert code == 1
    assert "The tolerance is not kept: of the way from version" in out


def test_replay_says_what_differs(world: World, ask: Ask, tmp_path: Path) -> None:
    shutil.copytree(world.folder / ".refrain/store", tmp_path / "store")
    other = RunStore(Store(f"file://{tmp_path}/store"), world.parent.run)
    record = other.read_run()
    record["config"]["train"]["learning_rate"] = 1e-3
    other.store.write(other.run_json_key, documents.encode(RUN_FORMAT, record))
    code, out, _ = ask(replay.main, other.run, "3", f"store.uri=file://{tmp_path}/store")
    assert code == 1
    assert "tensors differ, first model.embed_tokens.weight: by at most 0.00" in out


def test_rescore(world: World, ask: Ask) -> None:
    before = set(world.parent.store.list(world.parent.run))
    words = (world.parent.run, "--reward", "my_rewards:brevity", "--steps", "2-3")
    code, out, err = ask(rescore.main, *words, "--json")
    assert code == 0, err
    record = json.loads(out)
    assert list(record["steps"]) == ["2", "3"]
    assert record["all"]["samples"] == 32
    added = set(world.parent.store.list(world.parent.run)) - before
    assert set(record["objects"]) < added
    assert all("/rescored/" in key for key in added)
    code, out, _ = ask(rescore.main, *words)
    assert "brevity" in out
    assert set(world.parent.store.list(world.parent.run)) - before == added  # found again
    assert ask(audit.main, world.parent.run, "--strict")[0] == 0
    for bad, said in (("nowhere:brevity", "there is no module"), ("brevity", "names no function")):
        code, _, err = ask(rescore.main, world.parent.run, "--reward", bad)
        assert code == 2
        assert said in err


def test_inspect(world: World, ask: Ask) -> None:
    seen = world.while_running
    assert seen["state"] == "running"
    assert seen["good"]
    workers = {one["name"]: one for one in seen["workers"]}
    assert set(workers) == {"cpu-0", "rollout-0", "train-0"}
    assert "reward" in workers["cpu-0"]["status"]["engines"] or seen["steps_committed"] == 0
    assert workers["train-0"]["status"]["traffic"]["bytes_written"] >= 0
    assert seen["tasks"]
    code, out, _ = ask(inspect.main, world.parent.run, "--json")
    record = json.loads(out)
    assert (code, record["state"], record["steps_committed"]) == (0, "finished", 3)
    assert record["committed"][2]["workers"]["rollout-0"] == 2
    assert record["committed"][2]["weight_bytes"] > 100_000
    assert record["committed"][2]["bytes_written"] > record["committed"][2]["weight_bytes"]
    assert "is finished: 3 of 3 steps" in ask(inspect.main, world.child.run)[1]


def test_inspect_of_a_run_that_has_ended_its_workers(
    world: World, ask: Ask, tmp_path: Path
) -> None:
    """Its process is still at work: it waits for a person, or leaves its last notes."""
    shutil.copytree(world.folder / ".refrain/store", tmp_path / "store")
    run = RunStore(Store(f"file://{tmp_path}/store"), world.parent.run)
    where = f"store.uri=file://{tmp_path}/store"
    lease = RunLease.acquire(run, "test")
    live = read_live(run)
    assert live is not None and live.ended
    write_live(run, live.model_copy(update={"epoch": lease.epoch, "prefect": None}))
    code, out, err = ask(inspect.main, run.run, where)
    assert (code, err) == (0, "")
    assert "Its workers have ended." in out

    write_live(run, live.model_copy(update={"epoch": lease.epoch, "prefect": None, "ended": False}))
    code, out, _ = ask(inspect.main, run.run, where)
    assert (code, f"The Dask scheduler at {live.scheduler} does not answer" in out) == (1, True)


def test_inspect_while_a_run_ends_its_workers(
    world: World, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(world.folder / ".refrain/store", tmp_path / "store")
    run = RunStore(Store(f"file://{tmp_path}/store"), world.parent.run)
    lease = RunLease.acquire(run, "test")
    live = read_live(run)
    assert live is not None
    write_live(run, live.model_copy(update={"epoch": lease.epoch, "prefect": None, "ended": False}))

    def gone(*_: object) -> list[WorkerView]:
        workers_ended(run)  # after the command had read what the run has on record
        raise NotReached("gone")

    monkeypatch.setattr(commands_inspect, "look", gone)
    code, out, _ = ask(inspect.main, run.run, f"store.uri=file://{tmp_path}/store")
    assert (code, "Its workers have ended." in out, "gone" in out) == (0, True, False)


def test_samples(world: World, ask: Ask) -> None:
    name = world.parent.run
    code, out, err = ask(samples.main, f"{name}@2", "--best", "--limit", "16", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    rewards = [one["reward"] for one in found]
    assert len(rewards) == 16
    assert rewards == sorted(rewards, reverse=True)
    commit = read_commit(world.parent, 2)
    tokenizer = load_tokenizer(Path(world.parent.store.url(commit.version_out.key)[7:]))
    ids = commit.refs["samples"].fetch_list(world.parent.store, "response_ids")
    order = commit.refs["samples"].fetch_numpy(world.parent.store, "sample_id")[0].tolist()
    for one in found:
        assert one["response"] == tokenizer.decode(ids[order.index(one["sample"])])
        assert one["prompt"].strip().endswith("=")
        assert (one["step"], one["worker"]) == (2, "rollout-0")
    worst = json.loads(ask(samples.main, f"{name}@2", "--worst", "--limit", "1", "--json")[1])
    assert worst[0]["reward"] == rewards[-1]
    group = json.loads(ask(samples.main, name, "--group", "9", "--limit", "9", "--json")[1])
    assert [one["group"] for one in group] == [9] * 4
    assert {one["step"] for one in group} == {3}  # the last, where no step is named
    code, out, _ = ask(samples.main, world.child.run)
    assert code == 0
    assert "4 of 16 samples of step 3" in out and "wrote" in out
    for words, said in (
        ((f"{name}@7",), "has no committed step 7. Name one from 1 to 3."),
        ((f"{name}@x",), "names no step. Write RUN@STEP"),
        ((name, "--failed"), "Step 3 has no sample whose scoring failed."),
        ((name, "--group", "99"), "has no sample of group 99. Its groups are 8 to 11."),
        ((f"{world.child.run}@1",), "has no committed step 1. Name one from 2 to 3."),
    ):
        code, _, err = ask(samples.main, *words)
        assert (code, said in err) == (2, True), err


def test_samples_are_on_the_dashboard(world: World, prefect_api: str) -> None:
    wanted = {"artifacts": {"key": {"any_": [key(world.parent.run, "samples")]}}}
    answer = httpx.post(f"{prefect_api}/artifacts/filter", json=wanted).raise_for_status()
    assert len(answer.json()) == 3  # of each step
    for one in answer.json():
        assert one["data"].count("wrote:") == 3
        assert f"refrain samples {world.parent.run}@" in one["data"]


def test_a_run_that_is_not_there(world: World, ask: Ask) -> None:
    code, _, err = ask(audit.main, f"{world.parent.run[:-1]}x")
    assert code == 2
    assert f"Did you mean {world.parent.run}" in err
    code, _, err = ask(audit.main, world.parent.run, "store.ury=x")
    assert (code, "Did you mean store.uri?" in err) == (2, True)


def test_what_a_fork_may_change(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.folder)
    config = settings_of(world.parent).model_copy(update={"steps": 5})
    name = world.parent.run
    mine = "flows.grpo:grpo"
    origin = origin_of_fork(config, f"{name}@2", mine)
    assert (origin.at, origin.cursor, origin.first_group) == (2, True, 8)
    assert origin_of_fork(config, name, mine).step == 3
    larger = config.model_copy(update={"group_size": 2})
    assert origin_of_fork(larger, f"{name}@2", mine).first_group == 16  # sample ids stay distinct
    other = config.model_copy(update={"data": config.data.model_copy(update={"seed": 9})})
    assert not origin_of_fork(other, f"{name}@2", mine).cursor
    wide = config.model_copy(update={"model": config.model.model_copy(update={"layers": 3})})
    for bad, fork, said in (
        (wide, f"{name}@2", "was trained from another model"),
        (config, f"{name}@9", "has no committed step 9: its last is 3"),
        (config, "nobody@1", "There is no run nobody in"),
        (config, f"{name}@two", "names no step. Write RUN@STEP"),
        (config.model_copy(update={"steps": 2}), f"{name}@2", "Set steps to 3 or more"),
    ):
        with pytest.raises(ConfigError, match=said):
            origin_of_fork(bad, fork, mine)
    with pytest.raises(ConfigError, match=f"Fork it by: refrain grpo --fork {name}@2"):
        origin_of_fork(config, f"{name}@2", "flows.ppo:ppo")
    assert origin_of(world.child) is not None
    assert head(world.child) == 3


@pytest.mark.parametrize(
    "name", ["audit", "export", "inspect", "lineage", "replay", "rescore", "samples"]
)
def test_help_imports_nothing_heavy(name: str) -> None:
    text = f"import sys; from flows import {name}; sys.argv = ['x', '--help']; {name}.main()"
    probe = (
        f"import sys\ntry:\n    exec({text!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'prefect', 'distributed', 'mlflow', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"refrain {name}" in done.stdout
