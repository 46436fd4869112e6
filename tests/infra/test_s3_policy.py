"""The rights of infra/s3-policy.json are enough for a store, and no more, by moto's IAM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from storage.objects.store import Store
from tests.ports import free_port

pytestmark = pytest.mark.slow

POLICY = Path(__file__).parents[2] / "infra" / "s3-policy.json"
USER = "refrain"  # and its bucket
PART = 6 * 2**20  # bytes; above it an upload has several parts


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """An S3 server that looks at rights once it is told to."""
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    port = free_port()
    with (tmp_path / "moto.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
            env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "1000000"},
        )
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{url}/moto-api/", trust_env=False)
                break
            except httpx.HTTPError:
                assert server.poll() is None and time.monotonic() < end
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(20)


def test_a_store_does_all_that_it_does_and_nothing_else_is_allowed(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3
    from botocore.exceptions import ClientError

    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    first = {"aws_access_key_id": "first", "aws_secret_access_key": "first"}
    iam = boto3.client("iam", endpoint_url=endpoint, **first)
    everything = boto3.client("s3", endpoint_url=endpoint, **first)
    for bucket in (USER, "mlflow"):
        everything.create_bucket(Bucket=bucket)
    everything.put_object(Bucket="mlflow", Key="model", Body=b"of others")
    iam.create_user(UserName=USER)
    # The variable is the server's to fill in (AWS and MinIO do); moto knows none.
    policy = json.loads(POLICY.read_text().replace("${aws:username}", USER))
    # Of a request for several objects S3 asks for the right on each, moto for that on their bucket.
    several = {"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": f"arn:aws:s3:::{USER}"}
    policy["Statement"].append(several)
    iam.put_user_policy(UserName=USER, PolicyName="own", PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName=USER)["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    httpx.post(f"{endpoint}/moto-api/reset-auth", content="0", trust_env=False).raise_for_status()

    store = Store(f"s3://{USER}/runs", {"endpoint_url": endpoint})
    store.check_writable()
    store.write("run/small", b"x")
    store.write("run/large", bytes(2 * PART))
    with store.write_stream("run/stream") as stream:
        stream.write(bytes(2 * PART))
    assert store.create("run/once", b"1")
    assert not store.create("run/once", b"2")
    store.replace("run/once", b"3", b"1")
    assert store.read("run/once") == b"3"
    assert store.size("run/stream") == 2 * PART
    assert set(store.list("run")) == {f"run/{one}" for one in ("large", "once", "small", "stream")}
    store.delete(["run/small", "run/large", "run/stream", "run/once"])
    store.delete_unfinished("run")
    assert not list(store.list("run"))

    own = boto3.client("s3", endpoint_url=endpoint)
    for refused in (
        lambda: own.get_object(Bucket="mlflow", Key="model"),
        lambda: own.put_object(Bucket="mlflow", Key="model", Body=b"mine"),
        lambda: own.list_objects_v2(Bucket="mlflow"),
        lambda: own.put_bucket_policy(Bucket=USER, Policy=json.dumps({})),
        lambda: own.delete_bucket(Bucket=USER),
        lambda: own.create_bucket(Bucket="another"),
        own.list_buckets,
    ):
        with pytest.raises(ClientError, match="AccessDenied|Access Denied|not authorized"):
            refused()
