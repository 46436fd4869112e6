"""vLLM's processes die with the process that started them, whenever and however that dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import psutil
import pytest

from configs.rollout import OWN_ENGINE_ARGS
from engines.processes.process_tree import exit_code, kill_all, session
from engines.rollout.contract import EngineDead
from engines.rollout.engine import RolloutEngine
from engines.rollout.vllm_arguments import engine_arguments
from engines.rollout.vllm_engine import VllmEngine
from tests.contract.rollout.world import LONG, SHORT, World, begun, until

pytestmark = pytest.mark.vllm


@pytest.fixture
def owner(world: World) -> Iterator[subprocess.Popen[str]]:
    """A process that builds a vLLM engine; whatever is left of its session is killed afterwards."""
    pytest.importorskip("vllm")
    command = [sys.executable, "-m", "tests.contract.rollout.child", str(world.folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        kill_all(session(process.pid))


@pytest.mark.slow
def test_vllm_dies_with_its_owner(
    owner: subprocess.Popen[str], built: Callable[[str], RolloutEngine], world: World
) -> None:
    told = _hear(owner, "drawn")
    (pid,) = told["pids"]
    # The owner's engine has never held another version than 1. One that has samples the same.
    engine = built("vllm")
    engine.sync(world.weights[0])
    engine.sync(world.weights[1])
    result = engine.generate(world.request(world.prompts(), SHORT))
    assert world.column(result, "response_ids") == told["drawn"]
    assert psutil.pid_exists(pid)
    os.kill(owner.pid, signal.SIGKILL)
    until(lambda: not _left(owner.pid), "the end of vLLM's process", 5)


@pytest.mark.slow
def test_vllm_dies_with_an_owner_killed_during_its_start(owner: subprocess.Popen[str]) -> None:
    assert _hear(owner, "children")["children"]
    os.kill(owner.pid, signal.SIGKILL)
    # Nothing of Refrain runs in the child before it has imported vLLM.
    until(lambda: not _left(owner.pid), "the end of vLLM's process", 120)


def _hear(owner: subprocess.Popen[str], key: str) -> dict[str, list]:
    """What the owner says about `key`."""
    assert owner.stdout is not None
    for line in owner.stdout:
        if key in (told := json.loads(line)):
            return told
    raise AssertionError(f"the owner ended with {owner.wait()} before it told {key}")


def _left(leader: int) -> list[int]:
    return [process.pid for process in session(leader) if process.pid != leader]


def test_a_killed_vllm_fails_what_is_in_flight_with_the_cause(
    built: Callable[[str], RolloutEngine], world: World, threads: ThreadPoolExecutor
) -> None:
    engine = built("vllm")
    engine.sync(world.weights[0])
    shard = begun(engine, threads, world.request(world.prompts(), LONG))
    (pid,) = engine.status().pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match=f"process {pid} was killed by SIGKILL"):
        shard.result(30)
    assert engine.status().state == "dead"
    for call in (
        lambda: engine.generate(world.request(world.prompts(), SHORT)),
        lambda: engine.sync(world.weights[1]),
        lambda: engine.score([[5, 6]], [1]),
        engine.cancel,
    ):
        with pytest.raises(EngineDead, match="SIGKILL"):
            call()
    engine.close()
    engine.close()
    assert engine.status().pids == ()


@pytest.mark.parametrize("eager", [True, False])
def test_its_processes_alone_compile_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """A trainer may have the same worker, and compile its layers there."""
    pytest.importorskip("vllm")
    ran: list[str] = []

    class Started(RuntimeError):
        """In the place of vLLM."""

    def start(*given: object) -> None:
        show = "import os; print(os.environ.get('TORCHDYNAMO_DISABLE'))"
        ran.append(subprocess.check_output([sys.executable, "-c", show], text=True).strip())
        raise Started

    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.from_engine_args", start)
    spec = world.spec("vllm")
    rollout = spec.rollout.model_copy(update={"enforce_eager": eager})
    before = dict(os.environ)
    with pytest.raises(EngineDead):
        VllmEngine(spec.model_copy(update={"rollout": rollout}))
    assert ran == ["1" if eager else "None"]
    assert os.environ.get("TORCHDYNAMO_DISABLE") == before.get("TORCHDYNAMO_DISABLE")


def test_the_exit_code_is_known_when_another_thread_asked_the_kernel_first() -> None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    process.kill()
    assert process.pid is not None
    _, status = os.waitpid(process.pid, 0)  # the other thread has the code ...
    assert process.exitcode is None

    def write_down() -> None:  # ... and is not yet run again
        process._popen.returncode = os.waitstatus_to_exitcode(status)  # type: ignore[attr-defined]

    writes = threading.Timer(0.1, write_down)
    writes.start()
    assert exit_code(process) == -signal.SIGKILL
    writes.join()


def test_further_arguments_reach_vllm(world: World) -> None:
    pytest.importorskip("vllm")
    spec = world.spec("vllm")
    arguments = engine_arguments(spec, world.directory)
    assert spec.rollout.engine_args == {"max_num_batched_tokens": 2048}
    assert arguments.max_num_batched_tokens == 2048
    assert arguments.load_format == "dummy"
    assert OWN_ENGINE_ARGS.keys() <= {each.name for each in fields(arguments)}
