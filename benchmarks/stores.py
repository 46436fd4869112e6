"""Empty stores to measure on: a folder, a bucket of moto's server, one that can be taken away."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.s3_proxy import S3Proxy, Weather

BUCKET = "measured"


@contextlib.contextmanager
def place(s3: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """Address and options of an empty store; s3: on moto's server, a process of its own."""
    if not s3:
        with tempfile.TemporaryDirectory(prefix="measured-") as folder:
            yield f"file://{folder}/store", {}
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/moto-api/"):
                break
            time.sleep(0.1)
        import boto3

        boto3.client("s3", endpoint_url=url).create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}", {"endpoint_url": url}
    finally:
        server.terminate()
        server.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outages:
    """A bucket that a run reaches through a proxy, which resets every connection for a while."""

    uri: str
    options: dict[str, object]  # by which it is there all the time
    proxy: S3Proxy
    seconds: float  # that an outage lasts

    def begin(self) -> None:
        """The bucket is gone; a thread brings it back."""
        self.proxy.weather.down = True
        threading.Timer(self.seconds, self.end).start()

    def end(self) -> None:
        """The bucket is there again."""
        self.proxy.weather.down = False

    def settings(self, folder: str) -> tuple[str, ...]:
        """Of a run whose store is a folder in the bucket."""
        return (
            f"store.uri={self.uri}/{folder}",
            f"store.options={{endpoint_url: '{self.proxy.url}'}}",
        )


@contextlib.contextmanager
def outages(seconds: float) -> Iterator[Outages]:
    """Such a bucket, empty."""
    with (
        place(s3=True) as (uri, options),
        S3Proxy(str(options["endpoint_url"]), Weather()) as proxy,
    ):
        yield Outages(uri=uri, options=options, proxy=proxy, seconds=seconds)
