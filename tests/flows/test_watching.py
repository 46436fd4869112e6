"""A real run as a real Prometheus and a collector of traces see it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.collector import collector
from tests.flows.conftest import ROOT, Launch
from tests.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs apt's prometheus"),
]
STEPS = 4
Ask = Callable[[str], list[tuple[dict[str, str], float]]]


@contextmanager
def process(*words: str, cwd: Path) -> Iterator[None]:
    started = subprocess.Popen(words, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(30)


@contextmanager
def prometheus(folder: Path) -> Iterator[Ask]:
    """One that reads an exporter of a folder's runs every second, by our rules: how it is asked."""
    exporter, port = free_port(), free_port()
    settings = (ROOT / "infra/prometheus.yaml").read_text()
    settings = settings.replace("15s", "1s").replace("127.0.0.1:9464", f"127.0.0.1:{exporter}")
    settings = settings.replace("alerts.yaml", str(ROOT / "infra/alerts.yaml"))
    (folder / "prometheus.yaml").write_text(settings)

    def ask(query: str) -> list[tuple[dict[str, str], float]]:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query})
        found: list[Any] = answer.raise_for_status().json()["data"]["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    command = [sys.executable, "-m", "flows.exporter", str(folder / ".refrain/metrics")]
    data = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb"]
    with (
        process(*command, "--port", str(exporter), cwd=ROOT),
        process("prometheus", *data, f"--web.listen-address=127.0.0.1:{port}", cwd=folder),
    ):
        until = time.monotonic() + 120
        while True:
            try:
                if ask("up") and ask("up")[0][1] == 1:
                    break
            except httpx.HTTPError:
                pass
            assert time.monotonic() < until
            time.sleep(0.5)
        yield ask


def test_a_run_is_seen_while_it_lives_and_afterwards(launch: Launch, tmp_path: Path) -> None:
    with prometheus(tmp_path) as ask, collector() as got:
        run = launch(
            "tiny",
            f"steps={STEPS}",
            "tracking.metrics_every=1",
            f"tracking.otlp_endpoint={got.address}",
        )
        code, out = run.end(800)
        assert code == 0, out
        time.sleep(3)  # a scrape
        name = run.files.run
        assert ask("refrain_steps_total")[0][1] == STEPS
        (active,) = ask("refrain_run_active")
        common = {"run": name, "flow": "grpo", "recipe": "tiny", "job": "refrain"}
        assert common.items() <= active[0].items() and active[1] == 0
        assert ask("refrain_step_duration_seconds_count")[0][1] == STEPS
        assert {one["stage"] for one, _ in ask("refrain_stage_duration_seconds_count")} >= {
            "rollout", "reward", "update", "weight_sync",
        }  # fmt: skip
        operations = {
            one["operation"] for one, _ in ask("refrain_store_operation_duration_seconds_count")
        }
        assert {"read", "write", "create"} <= operations
        assert ask('refrain_metric{metric="reward/mean"}')
        assert ask("ALERTS") == []
        # While it lived, as Prometheus remembers it.
        before = ask(
            "count_over_time((refrain_workers unless on (run) refrain_steps_total)[15m:1s])"
        )
        assert {labels["pool"] for labels, _ in before} == {"cpu", "rollout", "train"}
        assert ask("max_over_time(refrain_run_active[15m])")[0][1] == 1
        roles = {labels["role"] for labels, _ in ask("refrain_slots > 0")}
        workers = {labels["worker"] for labels, _ in ask("refrain_worker_memory_bytes > 1e6")}
        assert roles >= {"rollout", "reward"}
        assert workers >= {"train-0", "rollout-0", "cpu-0"}
        assert ask('rate(refrain_store_written_bytes_total{pool="rollout"}[15m]) > 0')
    check_traces(got.spans, STEPS)


def check_traces(spans: list[Any], steps: int) -> None:
    """A trace for each step, whole: stages below the step, calls of workers below stages."""
    by_id = {one.id: one for one in spans}
    roots = [one for one in spans if one.name == "step"]
    assert sorted(one.facts["refrain.step"] for one in roots) == list(range(1, steps + 1))
    assert not any(one.failed for one in spans)
    flow = {one.pid for one in roots}
    assert len(flow) == 1
    for root in roots:
        stages = [one for one in spans if one.parent == root.id]
        assert {one.name for one in stages} >= {"rollout", "reward", "update", "weight_sync"}
        assert all(one.trace == root.trace for one in stages)
        calls = [one for one in spans if one.parent in {stage.id for stage in stages}]
        assert {one.name for one in calls} >= {"rollout.generate", "reward.score", "actor.update"}
        assert all(one.trace == root.trace and one.pid not in flow for one in calls)
        assert all(by_id[one.parent].seconds >= one.seconds - 0.05 for one in calls)
