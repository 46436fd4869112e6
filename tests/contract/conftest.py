"""Stores that the contract suite runs against: local files, memory, and a real S3 endpoint."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.store import Store

BUCKET = "refrain-tests"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Address of an S3 server over HTTP, on a free port of this machine."""
    moto_server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    saved = dict(os.environ)
    os.environ.update(
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
        NO_PROXY="127.0.0.1",
    )
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    import boto3

    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
    yield endpoint
    server.stop()
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    name = uuid.uuid4().hex[:8]
    if request.param == "file":
        return Store(f"file://{tmp_path}/store")
    if request.param == "memory":
        return Store(f"memory://{name}")
    endpoint = request.getfixturevalue("s3_endpoint")
    return Store(f"s3://{BUCKET}/{name}", {"endpoint_url": endpoint})
