"""The main job, end to end, on the tiny recipe: real engines, workers, Prefect and MLflow."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from storage.batches.columns import SampleStatus
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import DATA_SUFFIX, RunStore
from storage.tracking.metric_meanings import meaning_of
from tasks.reporting.artifacts import key, lineage
from tasks.run.run_record import settings_of
from tests.faults.planted import Faults
from tests.flows.conftest import AFTER_STEP_3, Launch, Launched, starting
from tests.traced import attempts_of

pytestmark = pytest.mark.cluster


def flow_runs(api: str, run: str) -> list[dict]:
    """The step flow runs of a run's newest flow run."""
    (parent,) = httpx.post(
        f"{api}/flow_runs/filter",
        json={"flow_runs": {"name": {"like_": run}}, "sort": "START_TIME_DESC", "limit": 1},
    ).json()
    return httpx.post(
        f"{api}/flow_runs/filter",
        json={
            "flow_runs": {"parent_flow_run_id": {"any_": [parent["id"]]}},
            "sort": "START_TIME_ASC",
        },
    ).json()


@pytest.fixture(scope="module")
def whole(
    prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Launched, str]]:
    """A run of three steps on the server of this process, and what it printed."""
    with starting(tmp_path_factory.mktemp("whole"), prefect_api) as start:
        run = start("tiny", "name=whole", "algorithm.kl.coefficient=0.01")
        code, out = run.end()
        assert code == 0, out
        yield run, out


def test_a_run_leaves_commits_weights_curves_and_a_dashboard(
    whole: tuple[Launched, str], prefect_api: str
) -> None:
    run, out = whole
    assert len(re.findall(r"^step \d/3  reward ", out, re.MULTILINE)) == 3, out
    assert "Traceback" not in out
    assert "WARN" not in out.upper(), out

    commits = run.commits()
    assert [commit.step for commit in commits] == [1, 2, 3]
    for commit in commits:
        assert commit.version_in.version == commit.step - 1
        assert commit.version_out.version == commit.step
        assert len(commit.refs["samples"]) == 16
        for ref in commit.refs.values():
            ref.verify(run.files.store)
        data = commit.refs["batch"].fetch(run.files.store)
        spans = data["weight_spans"].unbind()
        assert all(span.tolist()[0::3] == [commit.step - 1] for span in spans)
        assert set(data["weights_digest"].tolist()) == {commit.version_in.digest}
        assert commit.metrics["train/kl_ref"] == pytest.approx(0, abs=0.2)
        assert "staleness/bound" not in commit.metrics, "of a run without overlap"
        assert [name for name in commit.metrics if meaning_of(name) is None] == []
    assert commits[-1].ledger.drawn == commits[-1].ledger.trained == 12

    from transformers import AutoModelForCausalLM

    folder = run.files.store.url(commits[-1].version_out.key).removeprefix("file://")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 2
    assert (run.folder / ".refrain/store" / run.files.run / "progress.png").stat().st_size > 10_000

    steps = flow_runs(prefect_api, run.files.run)
    assert [step["name"] for step in steps] == ["step 1", "step 2", "step 3"]
    assert {step["state_type"] for step in steps} == {"COMPLETED"}
    assert [step["tags"] for step in steps] == [["step 1"], ["step 2"], ["step 3"]]
    names = {
        task["name"]
        for task in httpx.post(
            f"{prefect_api}/task_runs/filter",
            json={"flow_runs": {"id": {"any_": [steps[1]["id"]]}}, "limit": 100},
        ).json()
    }
    assert {"rollout 1/2", "rollout 2/2", "reward 1/2", "reward 2/2"} <= names
    artifacts = httpx.post(
        f"{prefect_api}/artifacts/filter",
        json={"flow_runs": {"id": {"any_": [steps[1]["id"]]}}},
    ).json()
    assert {artifact["type"] for artifact in artifacts} == {"table", "markdown"}

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.folder}/.refrain/mlflow.db")
    page, history = logged(run)
    assert page.info.status == "FINISHED"
    assert [point.step for point in history] == [1, 2, 3]
    assert client.get_model_version_by_alias("whole", "latest").tags["refrain.version"] == "3"
    assert run.children() == []


def artifacts_of(run: RunStore, prefect_api: str, what: str) -> list[Any]:
    """The data of an artifact of each step, ascending."""
    wanted = {"artifacts": {"key": {"any_": [key(run.run, what)]}}}
    found = httpx.post(f"{prefect_api}/artifacts/filter", json=wanted).raise_for_status().json()
    return [one["data"] for one in sorted(found, key=lambda one: one["created"])]


def test_the_page_of_each_step_is_made_again_from_its_commit_alone(
    whole: tuple[Launched, str], prefect_api: str
) -> None:
    seen = whole[0].files
    run: Any = SimpleNamespace(
        name=seen.run,
        store=seen.store,
        origin=None,
        config=settings_of(seen),
    )
    commits = [read_commit(seen, step) for step in (1, 2, 3)]
    pages = [lineage(run, commit, attempts_of(commit)) for commit in commits]
    assert artifacts_of(seen, prefect_api, "lineage") == pages


def test_the_table_of_shards_is_in_the_columns_of_the_samples(
    whole: tuple[Launched, str], prefect_api: str
) -> None:
    seen = whole[0].files
    store, commit = seen.store, read_commit(seen, 2)
    table = json.loads(artifacts_of(seen, prefect_api, "shards")[1])
    samples, first = commit.refs["samples"], 0
    assert sum(row["samples"] for row in table) == len(samples) > 0
    for row in table:
        own = samples.rows(first, first + row["samples"])
        first += row["samples"]
        spans, _ = own.fetch_numpy(store, "weight_spans")
        marker = next(one for one in own.objects if "/rollout/" in one)
        record = seen.finished(marker)
        assert record is not None and marker.endswith(DATA_SUFFIX)
        seconds = record["stats"]["seconds"]  # type: ignore[index]
        tokens = int(own.lengths(store, "response_ids").sum())
        status = own.fetch_numpy(store, "status")[0]
        assert row == {
            "shard": row["shard"],
            "worker": one_of(own.fetch_list(store, "worker")),
            "attempt": one_of(own.fetch_list(store, "attempt")),
            "samples": len(own),
            "tokens": tokens,
            "tokens/s": round(tokens / seconds, 1),
            "seconds": round(seconds, 2),
            "truncated": int((status == SampleStatus.TRUNCATED).sum()),
            "scoring failed": int(np.isnan(own.fetch_numpy(store, "reward")[0]).sum()),
            "policy version": int(spans.reshape(-1, 3)[:, 0].max()),
            "weights held": one_of(own.fetch_list(store, "weights_digest")),
        }


def one_of(values: list[Any]) -> Any:
    """The one value that all of them are."""
    (value,) = set(values)
    return value


def digests(files: RunStore) -> list[str]:
    """Of the policy versions that the steps made."""
    return [
        read_commit(files, step).version_out.digest for step in range(1, (head(files) or 0) + 1)
    ]


def logged(run: Launched) -> tuple[Any, list[Any]]:
    """The run's page in MLflow, and the mean rewards that stand there."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.folder}/.refrain/mlflow.db")
    pages = client.search_runs([client.get_experiment_by_name("refrain").experiment_id])
    (page,) = (page for page in pages if page.info.run_name == run.files.run)
    return page, client.get_metric_history(page.info.run_id, "reward/mean")


def wait_for_step(run: Launched, step: int, timeout: float = 180) -> None:
    """Return when a step is committed."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if run.process.poll() is not None:
            raise AssertionError(run.end()[1])
        if (
            any(Path(run.folder, ".refrain/store").glob("*/HEAD"))
            and (head(run.files) or 0) >= step
        ):
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not committed in {timeout} s")


def gone(run: Launched, seconds: float) -> bool:
    """Whether every process of the run ends within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not run.children():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_after_an_interrupt(launch: Launch, number: signal.Signals) -> None:
    run = launch("tiny", "steps=1000", embedded=number is signal.SIGKILL)
    wait_for_step(run, 1)
    assert len(run.children()) >= 4
    run.process.send_signal(number)
    assert gone(run, 30), run.children()
    code, out = run.end(timeout=20)
    if number is not signal.SIGKILL:
        assert code == 130, out
        assert f"--resume {run.files.run}" in out
        assert "Traceback" not in out, out


def test_a_run_killed_and_resumed_ends_with_the_same_weights(
    launch: Launch, undisturbed: RunStore, tmp_path: Path
) -> None:
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [AFTER_STEP_3])
    broken = launch("tiny", "steps=4", environment=faults.environment)
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    name = broken.files.run
    resumed = launch("--resume", name)
    code, out = resumed.end()
    assert code == 0, out
    assert re.findall(r"^step (\d)/4", out, re.MULTILINE) == ["4"]
    assert digests(resumed.files) == digests(undisturbed)[:4]
    costs = [read_commit(resumed.files, step).metrics for step in range(1, 5)]
    assert [cost["cost/device_seconds/train/starting"] > 0 for cost in costs] == [
        True, False, False, True,
    ], "the first step of each flow has the start of its workers"  # fmt: skip
    hours = [cost["cost/so_far/device_hours"] for cost in costs]
    assert hours == pytest.approx(np.cumsum([cost["cost/device_hours"] for cost in costs]).tolist())
    # Each step once, also the one that was committed a moment before its writer died.
    page, history = logged(resumed)
    assert page.info.status == "FINISHED"
    assert [point.step for point in history] == [1, 2, 3, 4]

    code, out = launch("--resume", name).end()
    assert code == 2
    assert "is finished: 4 of 4 steps are committed" in out


@pytest.mark.slow
def test_roles_share_a_pool(launch: Launch) -> None:
    run = launch(
        "tiny",
        "steps=2",
        "cluster.pools.train.slots=6",
        "cluster.roles.rollout=train",
        "cluster.roles.reward=train",
    )
    code, out = run.end()
    assert code == 0, out
    assert len(run.commits()) == 2
