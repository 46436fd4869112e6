"""A run as Prometheus reads it: names and labels, the file, the port, the push gateway."""

from __future__ import annotations

import http.server
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from configs.overrides import ConfigError
from engines.workers.pool import PoolLoad
from engines.workers.worker_metrics import DiskSpace, GpuState, WorkerMetrics
from storage.objects.usage import Latency, Usage
from tasks.reporting.prometheus import MOST_METRICS, LiveMetrics, push, write_metrics
from tasks.run.events import (
    AttemptBegan,
    AttemptEnded,
    Event,
    Listeners,
    Note,
    RunBegan,
    RunEnded,
    ShardSampled,
    StepCommitted,
)
from tasks.run.machinery import Machinery, PoolState, RoleLoad, Work
from tests.ports import free_port
from tests.tasks.reporting.test_listeners import facts_in

UNITS = ("_seconds", "_bytes", "_ratio", "_joules", "_watts", "_celsius")
COMMON = {"run": "r", "flow": "grpo", "recipe": "tiny"}


def live(folder: Path, **tracking: Any) -> tuple[LiveMetrics, list[Event]]:
    """The metrics of a run, and what they tell it."""
    facts, told = facts_in(folder), list[Event]()
    tracking = {"metrics_folder": str(folder / "metrics"), "metrics_every": 0.05, **tracking}
    config = facts.config.model_copy(
        update={"tracking": facts.config.tracking.model_copy(update=tracking)}
    )
    return LiveMetrics(replace(facts, config=config), told.append), told


def worker(process: str = "a:1", **fields: Any) -> WorkerMetrics:
    usual: dict[str, Any] = {
        "host": process.partition(":")[0],
        "process": process,
        "calls": 2,
        "cpu_seconds": 5.0,
        "memory": 1000,
        "usage": Usage(requests=3, bytes_read=10, bytes_written=4),
        "latencies": {"read": Latency(counts=(2, *[0] * 9, 1), seconds=70.5, failures=1)},
        "gpus": (),
        "temporary": DiskSpace(free=1, size=4),
    }
    return WorkerMetrics(**{**usual, **fields})


def machinery(**workers: WorkerMetrics) -> Machinery:
    return Machinery(
        pools=[PoolState(name="rollout", roles=("rollout", "ref"), wanted=2, live=len(workers))],
        loads=[
            RoleLoad(role="rollout", pool="rollout", load=PoolLoad(slots=8, calls=5, waiting=3))
        ],
        workers={name.replace("_", "-"): ("rollout", one) for name, one in workers.items()},
        flow=worker("flow:1"),
        disks={"store": DiskSpace(free=30, size=100)},
    )


def began(look: Callable[[], Machinery | None]) -> RunBegan:
    return RunBegan(steps=9, head=0, fresh=0, last=None, at_work=Work, look=look, machines=list)


def commit(step: int, **metrics: float) -> Any:
    ledger = SimpleNamespace(trained=6 * step, filtered=2, dropped={"reward": 1})
    return SimpleNamespace(step=step, committed_at=1e9 + step, metrics=metrics, ledger=ledger)


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Name -> labels and value of each sample."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, []).append((dict(one.labels), one.value))
    return found


def shown(metrics: LiveMetrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    return samples(generate_latest(metrics.registry).decode())


def with_everything(folder: Path) -> LiveMetrics:
    """A run that has had each event, and workers that have each thing."""
    metrics, _ = live(folder)
    listeners = Listeners()
    metrics.events.listen(listeners)
    own = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Tokens.", ["engine"], registry=own).labels("0").inc(7)
    for name in ("vllm:time_to_first_token_seconds", "vllm:request_params_n"):
        Histogram(name, "Some.", ["engine"], registry=own).labels("0").observe(1)
    gpu = GpuState(
        index=0, uuid="GPU-1", utilization=0.5, memory_used=2.0, memory_total=8.0, power=300.0,
        temperature=60.0, joules=9.0,
    )  # fmt: skip
    listeners.tell(began(lambda: None))
    attempt: Any = SimpleNamespace(
        stage="rollout", started=1.0, ended=4.0, error="WorkerLost: gone"
    )
    listeners.tell(AttemptBegan(attempt=attempt))
    listeners.tell(AttemptBegan(attempt=attempt))
    listeners.tell(AttemptEnded(attempt=attempt))
    listeners.tell(ShardSampled(step=1, tokens=40))
    cause = SimpleNamespace(function="exact", samples=2)
    scored: Any = [SimpleNamespace(ref=range(8), failures=3, causes=(cause,))]
    record = commit(1, **{"reward/mean": 0.5, "time/step": 12.0})
    committed = StepCommitted(
        record=record, metrics=record.metrics, scored=scored, attempts=[], snapshot=False
    )
    for hear in listeners._at_once[StepCommitted]:
        hear(committed)
    engines = {"rollout": tuple(own.collect())}
    seen = machinery(rollout_0=worker("b:7", gpus=(gpu,), engines=engines), rollout_1=worker())
    metrics.machinery.update(seen, 1e9 + 2)
    return metrics


def test_what_happens_is_counted(tmp_path: Path) -> None:
    found = shown(with_everything(tmp_path))

    def value(name: str, **labels: str) -> float:
        (only,) = [v for have, v in found[name] if labels.items() <= have.items()]
        return only

    assert value("refrain_run_active") == 1
    assert value("refrain_steps_total") == 1
    assert value("refrain_target_steps") == 3  # of the recipe
    assert value("refrain_last_commit_timestamp_seconds") == 1e9 + 1
    assert value("refrain_metric", metric="reward/mean") == 0.5
    assert value("refrain_step_duration_seconds_bucket", le="20.0") == 1
    assert value("refrain_step_duration_seconds_bucket", le="10.0") == 0
    assert value("refrain_stage_duration_seconds_sum", stage="rollout") == 3
    assert value("refrain_stage_calls_in_progress", stage="rollout") == 1
    assert value("refrain_stage_failures_total", stage="rollout", error="WorkerLost") == 1
    assert value("refrain_sampled_tokens_total") == 40
    assert value("refrain_samples_total") == 8
    assert value("refrain_reward_failures_total") == 3
    assert value("refrain_reward_function_failures_total", function="exact") == 2
    assert value("refrain_prompts_total", outcome="trained") == 6
    assert value("refrain_update_timestamp_seconds") == 1e9 + 2
    assert value("refrain_workers", pool="rollout", role="rollout+ref") == 2
    assert value("refrain_slots") == 8
    assert value("refrain_slots_in_use") == 5
    assert value("refrain_queued_calls", role="rollout") == 3
    assert value("refrain_worker_memory_bytes", worker="rollout-0", host="b") == 1000
    assert value("refrain_gpu_utilization_ratio", gpu="GPU-1", worker="rollout-0") == 0.5
    assert value("refrain_gpu_energy_joules_total", role="rollout+ref") == 9
    assert value("refrain_disk_free_bytes", place="store") == 30
    assert value("refrain_disk_free_bytes", place="temporary", host="b") == 1
    latency = "refrain_store_operation_duration_seconds"
    assert value(f"{latency}_bucket", host="b", le="0.001") == 2
    assert value(f"{latency}_count", host="b") == 3
    assert value(f"{latency}_sum", host="b") == 70.5
    assert value("refrain_store_operation_failures_total", host="b") == 1
    assert value("refrain_store_read_bytes_total", host="a", pool="rollout") == 10
    assert value("vllm:prompt_tokens_total", worker="rollout-0", role="rollout", engine="0") == 7
    assert value("vllm:time_to_first_token_seconds_count") == 1
    assert "vllm:request_params_n_count" not in found, "one of many histograms that nobody asks for"


def test_names_and_labels_are_as_prometheus_asks(tmp_path: Path) -> None:
    text = generate_latest(with_everything(tmp_path).registry).decode()
    families = [
        one for one in text_string_to_metric_families(text) if one.name.startswith("refrain_")
    ]
    assert len(families) > 35
    for family in families:
        assert re.fullmatch("refrain_[a-z_]+", family.name)
        assert family.documentation.endswith("."), family.name
        assert not family.name.endswith(("_total", "_count", "_created", "_milliseconds"))
        if "duration" in family.name or "timestamp" in family.name:
            assert family.name.endswith("_seconds")
        if family.type == "histogram":
            assert family.name.endswith(UNITS)
        for one in family.samples:
            assert COMMON.items() <= one.labels.items(), one
            assert one.labels["host"], one
            assert not one.name.endswith("_created")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (apt: prometheus)")
def test_promtool_finds_nothing_wrong_with_them(tmp_path: Path) -> None:
    text = generate_latest(with_everything(tmp_path).registry)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
    )
    said = [line for line in done.stderr.decode().splitlines() if not line.startswith("vllm:")]
    assert said == []


def test_a_reward_function_that_names_thousands_of_metrics_makes_no_more_series(
    tmp_path: Path,
) -> None:
    metrics, _ = live(tmp_path)
    metrics.events.committed(commit(1, **{f"m{n}": 1.0 for n in range(MOST_METRICS + 20)}))
    metrics.events.committed(commit(2, **{f"n{n}": 1.0 for n in range(MOST_METRICS + 7)}))
    found = shown(metrics)
    assert len(found["refrain_metric"]) == MOST_METRICS
    assert found["refrain_metrics_left_out"][0][1] == 7
    assert all(labels["metric"].startswith("n") for labels, _ in found["refrain_metric"])


def test_counts_go_on_over_a_worker_that_dies(tmp_path: Path) -> None:
    metrics, _ = live(tmp_path)

    def read() -> float:
        name = "refrain_store_read_bytes_total"
        return sum(v for labels, v in shown(metrics)[name] if labels["pool"] == "rollout")

    metrics.machinery.update(machinery(rollout_0=worker("a:1", usage=Usage(bytes_read=10))), 1.0)
    metrics.machinery.update(machinery(rollout_0=worker("a:1", usage=Usage(bytes_read=15))), 2.0)
    assert read() == 15
    metrics.machinery.update(machinery(), 3.0)
    assert read() == 15
    assert "refrain_worker_calls" not in shown(metrics), "of workers that there are"
    metrics.machinery.update(machinery(rollout_0=worker("a:2", usage=Usage(bytes_read=4))), 4.0)
    assert read() == 19


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_run_leaves_a_file_that_says_whether_it_lives(tmp_path: Path) -> None:
    metrics, told = live(tmp_path)
    listeners = Listeners()
    metrics.listen(listeners)
    looks: list[Machinery | None] = [None, machinery(rollout_0=worker())]  # then none answers

    def look() -> Machinery | None:
        if not looks:
            raise TimeoutError("a worker does not answer")
        return looks.pop(0)

    listeners.tell(began(look))
    path = tmp_path / "metrics" / "r.prom"
    wait_for(lambda: not looks and path.exists() and "refrain_workers" in path.read_text())
    found = samples(path.read_text())
    assert found["refrain_run_active"][0][1] == 1
    before = found["refrain_update_timestamp_seconds"][0][1]
    wait_for(lambda: samples(path.read_text())["refrain_update_timestamp_seconds"][0][1] > before)
    listeners.tell(RunEnded(step=3))
    found = samples(path.read_text())
    assert found["refrain_run_active"][0][1] == 0
    assert found["refrain_workers"], "as they were last seen"
    assert [one.name for one in path.parent.iterdir()] == ["r.prom"]
    assert told == []


def test_a_look_that_takes_long_holds_no_event(tmp_path: Path) -> None:
    metrics, _ = live(tmp_path)
    listeners, over = Listeners(), threading.Event()
    metrics.listen(listeners)

    def look() -> Machinery | None:
        over.wait(30)
        return None

    before = time.monotonic()
    listeners.tell(began(look))
    listeners.tell(ShardSampled(step=1, tokens=4))
    assert time.monotonic() - before < 2
    over.set()
    listeners.tell(RunEnded(step=0))


def test_without_the_settings_nothing_is_opened_or_written(tmp_path: Path) -> None:
    metrics, _ = live(tmp_path, metrics_every=0.0)
    listeners = Listeners()
    metrics.listen(listeners)

    def look() -> Machinery | None:
        raise AssertionError("looked")

    threads = threading.active_count()
    listeners.tell(began(look))
    assert threading.active_count() == threads
    listeners.tell(RunEnded(step=0))
    assert list(tmp_path.iterdir()) == []


def test_a_port_is_there_while_the_run_lives(tmp_path: Path) -> None:
    port = free_port()
    metrics, _ = live(tmp_path, prometheus_port=port)
    with metrics.served():
        metrics.events.committed(commit(2, **{"reward/mean": 0.75}))
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").raise_for_status().text
    assert samples(text)["refrain_steps_total"][0][1] == 2
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        metrics, _ = live(tmp_path, prometheus_port=port)
        with (
            pytest.raises(ConfigError, match=f"prometheus_port = {port} cannot be opened"),
            metrics.served(),
        ):
            pass


@contextmanager
def gateway(status: int) -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    """A server that takes what is pushed: its address, and path, login and body of each push."""
    pushed: list[tuple[str, str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            pushed.append((self.path, self.headers.get("Authorization", ""), body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", pushed
    finally:
        server.shutdown()
        server.server_close()


def test_a_push_gateway_gets_the_same_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFRAIN_PUSH_GATEWAY_USER", "ann")
    monkeypatch.setenv("REFRAIN_PUSH_GATEWAY_PASSWORD", "x")
    with gateway(200) as (address, pushed):
        metrics, told = live(tmp_path, push_gateway=address)
        with metrics.looking(lambda: machinery(rollout_0=worker())):
            wait_for(lambda: pushed)
    path, login, body = pushed[0]
    assert path == "/metrics/job/refrain/run/r"
    assert login == "Basic YW5uOng="
    assert samples(body.decode())["refrain_workers"][0][1] == 1
    assert told == []


@pytest.mark.skipif(
    shutil.which("prometheus-pushgateway") is None, reason="needs apt's prometheus-pushgateway"
)
@pytest.mark.slow
def test_a_real_push_gateway_takes_and_tells_them(tmp_path: Path) -> None:
    port, metrics = free_port(), with_everything(tmp_path)
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        ["prometheus-pushgateway", f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def pushed() -> bool:
        try:
            push(address, "r", metrics.registry)
        except OSError:  # it starts
            return False
        return True

    try:
        wait_for(pushed, 60)
        found = samples(httpx.get(f"{address}/metrics").raise_for_status().text)
    finally:
        process.terminate()
        process.wait(20)
    mine, theirs = (
        shown(metrics),
        {name: rows for name, rows in found.items() if name in shown(metrics)},
    )
    assert theirs.keys() == mine.keys()
    (labels, value) = theirs["refrain_steps_total"][0]
    assert COMMON.items() <= labels.items() and labels["job"] == "refrain" and value == 1


def test_what_cannot_be_pushed_or_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("no folder")
    with gateway(503) as (address, pushed):
        metrics, told = live(tmp_path, push_gateway=address)
        with metrics.looking(lambda: None):
            wait_for(lambda: len(pushed) > 2)
    notes = [one.text for one in told if isinstance(one, Note) and one.warning]
    assert len(notes) == len(told) == 2
    assert "cannot be written to tracking.metrics_folder" in notes[0]
    assert f"tracking.push_gateway = {address} does not take the metrics" in notes[1]


def test_whoever_may_list_the_folder_may_read_the_files(tmp_path: Path) -> None:
    metrics, _ = live(tmp_path)
    for mode, expected in ((0o700, 0o600), (0o750, 0o640), (0o2775, 0o644)):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        path = write_metrics(folder, "r", metrics.registry)
        assert path.stat().st_mode & 0o777 == expected
