"""The deployment elsewhere: batches on an S3 endpoint, Prefect's database on Postgres."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from storage.objects.store import Store
from storage.runs.commit_log import head
from storage.runs.run_store import RunStore
from tests.contract.conftest import BUCKET, Endpoint, s3_server  # noqa: F401
from tests.deploy.conftest import API, Make, Platform
from tests.deploy.test_deployment import wait_for_a_step
from tests.flows.test_servers import need_drivers, postgres

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def run_and_cancel(platform: Platform, **changes: object) -> None:
    """One run to its end, and one that is cancelled after a step."""
    done = platform.submit("tiny", platform.config("tiny", steps=2, **changes)).json()
    platform.wait(done["id"], "COMPLETED")
    long = platform.submit("tiny", platform.config("tiny", steps=1000, **changes)).json()
    wait_for_a_step(platform, long["id"])
    API.post(
        f"{platform.api}/flow_runs/{long['id']}/set_state",
        json={"state": {"type": "CANCELLING"}},
    ).raise_for_status()
    platform.wait(long["id"], "CANCELLED", timeout=60)
    assert platform.children() == []


def test_on_an_s3_endpoint(
    make_platform: Make,
    s3_server: Endpoint,  # noqa: F811
) -> None:
    platform = make_platform()
    assert platform.deploy("tiny").returncode == 0
    platform.start_worker(AWS_ENDPOINT_URL=s3_server.url)
    uri = f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}"
    run_and_cancel(platform, **{"store.uri": uri})
    store = Store(uri, {"endpoint_url": s3_server.url})
    steps = [head(RunStore(store, name)) or 0 for name in store.children()]
    assert 2 in steps and len(steps) == 2
    said = API.post(f"{platform.api}/logs/filter", json={"limit": 200}).text
    assert "AWS_SECRET" not in said


def test_with_postgres(make_platform: Make, tmp_path: Path) -> None:
    folder = tmp_path / "pg"
    folder.mkdir()
    need_drivers()
    with postgres(folder) as names:
        platform = make_platform(database=names["PREFECT_SERVER_DATABASE_CONNECTION_URL"])
        try:
            assert platform.deploy("tiny").returncode == 0
            platform.start_worker()
            run_and_cancel(platform)
        finally:
            platform.stop()
