"""The main job on an S3 endpoint: one setting changed, and no credential in anything it leaves."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

import httpx
import pytest

from storage.objects.store import Store
from tests.contract.conftest import BUCKET, Endpoint, s3_server  # noqa: F401
from tests.flows.conftest import Launch

pytestmark = pytest.mark.cluster

SECRET = "planted-secret-3d1f"


@pytest.mark.slow
def test_a_run_on_s3_goes_on_after_a_stop_and_leaks_no_credential(
    launch: Launch,
    s3_server: Endpoint,  # noqa: F811
    prefect_api: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    uri = f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}"
    run = launch("tiny", "name=on-s3", "steps=1", f"store.uri={uri}")
    run.store_uri = uri
    code, first = run.end()
    assert code == 0, first
    assert f"checkpoint  {uri}/" in first
    name = run.files.run

    s3_server.requests.clear()
    resumed = launch("--resume", name, "steps=2", f"store.uri={uri}")
    resumed.store_uri = uri
    code, second = resumed.end()
    assert code == 0, second
    assert re.findall(r"^step (\d)/2", second, re.MULTILINE) == ["2"]
    asked = len(s3_server.requests)

    commits = resumed.commits()
    assert [commit.step for commit in commits] == [1, 2]
    for commit in commits:
        for ref in commit.refs.values():
            ref.verify(run.files.store)
        keys = ("requests", "bytes_read", "bytes_written")
        counted = {key: commit.metrics[f"store/{key}"] or 0 for key in keys}
        assert counted["requests"] > 20
        assert counted["bytes_written"] > 100_000  # a policy version
        assert counted["bytes_read"] > 100_000
    # The counts of the flow and the workers add up to what the endpoint saw, but for what comes
    # before the first look and after the last.
    assert 0.5 < commits[-1].metrics["store/requests"] / asked <= 1, asked

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/.refrain/mlflow.db")
    (page,) = client.search_runs([client.get_experiment_by_name("refrain").experiment_id])
    history = client.get_metric_history(page.info.run_id, "store/requests")
    assert [point.step for point in history] == [1, 2]

    planted = SECRET.encode()
    store = Store(uri)
    for key in store.list():
        assert planted not in store.read(key), key
    for folder, _, names in os.walk(tmp_path):
        for one in names:
            assert planted not in Path(folder, one).read_bytes(), one
    assert SECRET not in first + second
    for what in ("flow_runs", "artifacts", "logs"):
        answer = httpx.post(f"{prefect_api}/{what}/filter", json={"limit": 200})
        assert answer.is_success
        assert SECRET not in answer.text
