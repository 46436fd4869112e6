"""A served version, seen by a client: which one answers, what an alias that moves changes, what stays.

With the server of vLLM itself.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from mlflow import MlflowClient

from storage.runs.commit_log import version_weights
from tests.flows.conftest import ROOT, Launch
from tests.ports import free_port

pytestmark = [
    pytest.mark.cluster, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900),
]  # fmt: skip

ALIAS = "models:/served@champion"
START = 400.0  # seconds that a server may take on a busy machine
GOES = 30.0  # seconds in which everything of it ends


class Server:
    """`refrain serve` in a folder, what it says, and all that it started."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.log, self.port = folder, folder / "serve.log", free_port()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.serve", *words, f"port={self.port}", "look_every=1"],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def says(self, text: str) -> str:
        """All that it has said, once the text is among it."""
        return until(lambda: self._said(text), f"{text!r} of {self.log.read_text()}", START)

    def _said(self, text: str) -> str:
        said = self.log.read_text()
        assert self.process.poll() is None or text in said, said
        return said if text in said else ""

    def ask(self, model: str = ALIAS) -> list[float]:
        """Log-probs of the likeliest next tokens of a prompt."""
        answer = httpx.post(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json={
                "model": model,
                "prompt": "12 + 12 = ",
                "max_tokens": 8,
                "temperature": 0,
                "logprobs": 1,
            },
            headers=self.key(),
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        found: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        return found

    def models(self) -> list[str]:
        """Names by which it may be asked."""
        url = f"http://127.0.0.1:{self.port}/v1/models"
        answer = httpx.get(url, headers=self.key(), timeout=60).json()
        return [one["id"] for one in answer["data"]]

    def key(self) -> dict[str, str]:
        """The header that shows the key."""
        key = (self.folder / ".refrain/served/key").read_text().strip()
        return {"Authorization": f"Bearer {key}"}

    def alive(self) -> list[str]:
        """Command lines of processes that work in its folder."""
        found = []
        for process in psutil.process_iter(["cwd", "cmdline", "status"]):
            ended = process.info["status"] == psutil.STATUS_ZOMBIE
            if process.info["cwd"] == str(self.folder) and not ended:
                found.append(" ".join(process.info["cmdline"] or []))
        return found


def until(look: Callable[[], str], what: str, timeout: float) -> str:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.5)
    raise AssertionError(f"not within {timeout:g} s: {what}")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server on what is stored in the test's folder; it is killed at the end."""
    started: list[Server] = []

    def start(*words: str) -> Server:
        started.append(Server(tmp_path, *words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


def test_an_alias_that_moves_is_followed_and_nothing_stays_behind(
    launch: Launch, serve: Callable[..., Server], tmp_path: Path
) -> None:
    run = launch("tiny", "steps=2", "name=served", "store.snapshot_every=1").whole().files
    client = MlflowClient(f"sqlite:///{tmp_path}/.refrain/mlflow.db")
    numbers = {
        one.tags["refrain.version"]: one.version
        for one in client.search_model_versions("name = 'served'")
    }
    client.set_registered_model_alias("served", "champion", numbers["1"])

    server = serve(ALIAS, "--follow")
    digests = [version_weights(run, version).digest for version in (1, 2)]
    assert digests[0] != digests[1]
    server.says(f"Serving {run.run}@1, {digests[0]}")
    assert set(server.models()) == {ALIAS, f"{run.run}@1"}
    for path in ("/v1/models", "/v1/completions", "/invocations", "/tokenize", "/metrics", "/load"):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            url = f"http://127.0.0.1:{server.port}{path}"
            assert httpx.post(url, headers=headers, json={}).status_code == 401, path
    before = server.ask()
    assert server.ask() == server.ask(f"{run.run}@1") == before, "the same weights answer alike"
    folders = {path.name for path in (tmp_path / ".refrain/served").iterdir() if path.is_dir()}
    assert len(folders) == 1

    client.set_registered_model_alias("served", "champion", numbers["2"])
    said = server.says(f"Serving {run.run}@2, {digests[1]}")
    assert f"Version {run.run}@2 is next" in said
    assert set(server.models()) == {ALIAS, f"{run.run}@2"}
    after = server.ask()
    assert after != before, "other weights answer"

    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    until(lambda: str(not server.alive() or ""), f"the end of {server.alive()}", GOES)
    assert len(re.findall(r"^Serving ", server.log.read_text(), re.MULTILINE)) == 2
    with pytest.raises(httpx.ConnectError):
        server.ask()

    # By its number, and killed: vLLM's processes end with the command.
    again = serve(f"{run.run}@1")
    again.says(f"Serving {run.run}@1, {digests[0]}")
    assert again.ask(f"{run.run}@1") == pytest.approx(before, abs=1e-5), "as it was served before"
    assert len(again.alive()) > 1
    again.process.send_signal(signal.SIGKILL)
    again.process.wait()
    until(lambda: str(not again.alive() or ""), f"the end of {again.alive()}", GOES)
