"""What a GPU machine is asked to show runs in small here, so that it will run there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu import CHECKS, MEASUREMENTS, SIZES, line, main, outcome
from benchmarks.gpu_job import Job, plan, settings_for
from benchmarks.gpu_trace import Seen, busy
from tests.contract.rollout.world import until

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_part_runs_in_small(tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    words = ["--small", "--json", str(result)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(result.read_text())["parts"]
    assert [part["part"] for part in parts] == [*CHECKS, *MEASUREMENTS]
    assert all(part["metrics"] for part in parts)
    found = {part["part"]: part["metrics"] for part in parts}
    assert found["update"]["plan_gib"] > 0
    assert found["lora"]["moved_nats"] > 5 * found["lora"]["transformers_merged_gap_nats"]
    paths = found["sync_paths"]
    assert paths["difference_mbytes"] < paths["whole_mbytes"]
    assert len(done.stdout.splitlines()) == 1 + len(parts)


@pytest.mark.slow
def test_what_moves_bytes_runs_in_small(tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    words = ["--shape", "small", "--json", str(result), "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_move", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in result.read_text().splitlines()]
    assert done.stdout == result.read_text()
    assert {line.get("part") for line in lines[1:]} == {"optimizer", "versions", "disk"}
    checks = [line for line in lines if "attested" in line]
    assert len(checks) == 3
    assert all(line["attested"] and line["equal"] and line["digests"] == 1 for line in checks)
    (before,) = [line for line in lines if "equal_weights" in line]
    assert before["equal_weights"]
    assert before["equal_moments"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"]


@pytest.mark.slow
def test_a_part_that_ends_badly_is_told_and_hurts_no_other(tmp_path: Path) -> None:
    found = outcome("no such part", "small", tmp_path, limit=60.0)
    assert found["failed"].startswith("1: KeyError: 'no such part'")
    assert line(found).startswith("FAILED  no such part small (")


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    found = outcome("logprobs", "small", tmp_path, limit=0.2)
    assert found["failed"].startswith("no end in 0 s")


@pytest.mark.parametrize("shape", SIZES)
def test_every_shape_fits_a_device_of_80_gb_by_the_plan(tmp_path: Path, shape: str) -> None:
    samples, prompt, response = SIZES[shape]
    job = Job(shape=shape, folder=tmp_path, samples=samples, prompt=prompt, response=response)
    device = int(79.2 * 2**30)  # what torch says of an H100
    found = settings_for(job, device)
    assert plan(job, found, on_gpu=True).peak < 78 * 2**30
    assert (found.optimizer_device == "host") == (shape == "7b")
    with pytest.raises(ValueError, match="Leave it out of --shapes"):
        settings_for(job, 2**20)


@pytest.mark.slow
def test_told_to_end_it_ends_its_part(tmp_path: Path) -> None:
    words = ["--small", "--parts", "logprobs", "--folder", str(tmp_path)]
    benchmark = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu", *words], cwd=ROOT)
    until(lambda: (tmp_path / "logprobs-small.log").exists(), "its part has begun", 100.0)
    until(lambda: bool(psutil.Process(benchmark.pid).children()), "its part runs", 30.0)
    part = psutil.Process(benchmark.pid).children()[0]
    benchmark.terminate()
    assert benchmark.wait(30) == 143
    assert psutil.wait_procs([part], timeout=10.0)[0] == [part]


def test_a_folder_with_earlier_results_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "update-small.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["--small", "--parts", "update", "--folder", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err


def lines(module: str, folder: Path, *words: str) -> list[dict[str, Any]]:
    """What a benchmark says in small."""
    result = folder / "found.jsonl"
    command = [sys.executable, "-m", module, "--folder", str(folder), "--json", str(result)]
    command += ["--seconds", "400", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = result.read_text().splitlines()
    assert found == done.stdout.splitlines()
    return [json.loads(line) for line in found]


@pytest.mark.slow
@pytest.mark.vllm
def test_sampling_is_measured_beside_vllms_own_in_small(tmp_path: Path) -> None:
    found = lines("benchmarks.gpu_sampling", tmp_path, "--shape", "small")
    assert not [one for one in found if "failed" in one]
    measured = [one["measurement"] for one in found]
    assert (measured.count("llm"), measured.count("ours")) == (3, 3)
    ratios = {(one["rows"], one["shards"]) for one in found if one["measurement"] == "ours_to_llm"}
    assert ratios == {(8, 1), (16, 1), (8, 8)}


@pytest.mark.slow
@pytest.mark.vllm
def test_each_step_of_a_flow_is_told_in_small(tmp_path: Path) -> None:
    found = lines("benchmarks.gpu_flow", tmp_path, "--small", "--steps", "4", "--trace")
    steps = [one for one in found if one["measurement"] == "flow_step"]
    assert [one["step"] for one in steps] == [1, 2, 3, 4]
    for one in steps:
        assert {"rollout", "reward", "advantage", "update", "weight_sync"} <= set(one["stages"])
        assert one["tokens"] == 4 * 4 * 16
        assert one["weights"]["publish_seconds"] > 0
    assert found[-1]["steps"] == 4
    assert "failed" not in found[-1]
    traced = found[-2]
    assert traced["measurement"] == "flow_trace"
    assert 0 < traced["busy"] <= 1, "processors' operations, here"
    # vLLM computes in a process of its own, the trainer in its worker.
    assert sum(number > 100 for number in traced["events_by_process"]) >= 2


def test_kernels_of_several_processes_count_once() -> None:
    one = Seen(begin=0.0, end=20.0, spans=[(5.0, 12.0), (18.0, 19.0)], events=9)
    other = Seen(begin=4.0, end=30.0, spans=[(8.0, 14.0), (21.0, 22.0)], events=3)
    assert busy([one, other], 10.0, 20.0) == pytest.approx(0.5)
    assert busy([one], 10.0, 20.0) == pytest.approx(0.3)
    assert busy([one, other], 3.0, 20.0) is None, "one of them had not begun to look"
    assert busy([one, other], 10.0, 21.0) is None
    assert busy([], 10.0, 20.0) is None
