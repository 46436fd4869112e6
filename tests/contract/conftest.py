"""Stores that the contract suite runs against: local files, memory, and a real S3 endpoint."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from storage.objects.store import Store

BUCKET = "refrain-tests"
KINDS = ("file", "memory", "s3")


@dataclass
class Fault:
    """Answer the next `times` requests of a method whose path holds `part` with an error."""

    method: str
    part: str
    times: int
    status: str = "503 Slow Down"
    after: bool = False  # carry the request out first: only its answer is lost


@dataclass
class Endpoint:
    """An S3 server over HTTP, what it was asked, and what it shall fail at."""

    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    lock: threading.Lock = field(default_factory=threading.Lock)
    unconditional: bool = False  # ignore If-None-Match and If-Match, as some stores do

    def wrap(self, app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        conditional = threading.Lock()

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            with self.lock:
                self.requests.append((method, path, environ.get("HTTP_RANGE", "")))
                fault = self._fault(method, path)
                if self.unconditional:
                    environ.pop("HTTP_IF_NONE_MATCH", None)
                    environ.pop("HTTP_IF_MATCH", None)
            if fault is None or fault.after:
                # moto looks and then writes; S3 does both at once.
                with conditional if method in ("PUT", "POST") else threading.Lock():
                    found = app(environ, start if fault is None else lambda *_: None)
                if fault is None:
                    return found
                b"".join(found)
            start(fault.status, [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"]

        return answer

    def _fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and fault.method == method and fault.part in path:
                fault.times -= 1
                return fault
        return None


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Endpoint]:
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.moto_server.threaded_moto_server")
    endpoint = Endpoint()
    application = server_module.DomainDispatcherApplication
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(
            server_module,
            "DomainDispatcherApplication",
            lambda create: endpoint.wrap(application(create)),
        )
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request otherwise
        server = server_module.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        endpoint.url = f"http://{host}:{port}"
        import boto3

        boto3.client("s3", endpoint_url=endpoint.url).create_bucket(Bucket=BUCKET)
        yield endpoint
        server.stop()


@pytest.fixture
def s3(s3_server: Endpoint) -> Iterator[Endpoint]:
    """The S3 server, which fails at nothing after the test."""
    s3_server.requests.clear()
    yield s3_server
    s3_server.faults.clear()


@pytest.fixture
def s3_store(s3: Endpoint) -> Store:
    """An empty prefix of a bucket."""
    return Store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}", {"endpoint_url": s3.url})


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "file":
        return Store(f"file://{tmp_path}/store")
    if request.param == "memory":
        return Store(f"memory://{uuid.uuid4().hex[:8]}")
    return request.getfixturevalue("s3_store")
