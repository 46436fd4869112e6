"""One exporter for all runs of a machine, as Prometheus reads it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, generate_latest

from tasks.reporting.exporter import RunFiles
from tests.ports import free_port
from tests.tasks.reporting.test_prometheus import samples

ROOT = Path(__file__).parents[3]


def leave(folder: Path, run: str, steps: int, age: float = 0.0) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{run}.prom"
    path.write_text(
        "# HELP refrain_steps_total Committed steps.\n# TYPE refrain_steps_total counter\n"
        f'refrain_steps_total{{run="{run}"}} {steps}\n'
    )
    os.utime(path, (time.time() - age,) * 2)
    return path


def told(*folders: Path, keep: float = 3600.0) -> dict[str, float]:
    """Steps by run, and the exporter's own numbers."""
    registry = CollectorRegistry()
    registry.register(RunFiles(folders, keep))
    text = generate_latest(registry).decode()
    assert text.count("# TYPE refrain_steps_total counter") <= 1, "a family is told once"
    return {
        labels.get("run", name.removeprefix("refrain_exporter_")): value
        for name, found in samples(text).items()
        for labels, value in found
    }


def test_runs_of_several_folders_are_told_together(tmp_path: Path) -> None:
    leave(tmp_path / "ann", "a", 3)
    leave(tmp_path / "ann", "b", 4, age=120.0)  # over, or dead: its series go on
    leave(tmp_path / "bob", "c", 5)
    found = told(tmp_path / "ann", tmp_path / "bob", tmp_path / "nowhere")
    assert found == {"a": 3, "b": 4, "c": 5, "runs": 3, "unreadable_files": 0}


def test_of_a_run_with_two_files_the_newest_counts(tmp_path: Path) -> None:
    leave(tmp_path / "ann", "a", 3, age=60.0)
    leave(tmp_path / "bob", "a", 5)
    assert told(tmp_path / "ann", tmp_path / "bob")["a"] == 5
    assert told(tmp_path / "bob", tmp_path / "ann")["a"] == 5


def test_what_is_old_or_broken_is_left_out(tmp_path: Path) -> None:
    leave(tmp_path, "a", 3)
    leave(tmp_path, "b", 4, age=7200.0)
    (tmp_path / "c.prom").write_text("refrain_steps_total{run= what")
    (tmp_path / ".c-123").write_text("half")
    assert told(tmp_path) == {"a": 3, "runs": 1, "unreadable_files": 1}
    assert told(tmp_path, keep=10_000.0)["b"] == 4


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flows.exporter", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    leave(tmp_path, "a", 3)
    port = free_port()
    process = start(str(tmp_path), "--port", str(port))
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line == f"http://127.0.0.1:{port}/metrics tells of the runs in {tmp_path}\n"
        assert samples(httpx.get(line.split()[0]).text)["refrain_steps_total"] == [
            ({"run": "a"}, 3)
        ]
        leave(tmp_path, "a", 4)
        assert samples(httpx.get(line.split()[0]).text)["refrain_steps_total"] == [
            ({"run": "a"}, 4)
        ]
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(str(tmp_path), "--port", str(port))
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == f"refrain exporter cannot listen at 127.0.0.1:{port} (Address already in use).\n"
