"""An engine in a process of its own: calls, errors, counts, and every way in which it can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from engines.failures import InfrastructureError
from engines.start_progress import StartProgress, heard_by, report
from engines.workers.own_process import OwnProcess
from storage.objects.usage import COUNTER, LATENCIES, Latency
from tests.engines.workers.dummies import Dummy, NotYet, Payload

NAME = "refrain test"


def unreadable() -> None:
    raise ModuleNotFoundError("where its owner is")


class Unreadable:
    """Cannot be made again."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return unreadable, ()


class Beside(Dummy):
    """What the engine in the process is."""

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        report("half done")
        if payload.tag:
            raise ValueError(f"not with {payload.tag}")
        self.barrier = threading.Barrier(3)

    def meet(self) -> int:
        """Return once three are here."""
        return self.barrier.wait(10)

    def hold(self, version: int) -> None:
        """As after a sync."""
        self.version = version

    def read(self, nbytes: int) -> None:
        """As from a store."""
        with LATENCIES.timed("read"):
            COUNTER.add(requests=1, bytes_read=nbytes)

    def answer_badly(self) -> object:
        """What can be sent and not read."""
        return Unreadable()

    def lock_itself(self, lock: object = None) -> object:
        """What cannot be sent."""
        return self.lock


PATH = f"{__name__}:{Beside.__name__}"


def dead(cause: str) -> Exception:
    return InfrastructureError(f"the engine {cause}")


def begin(tag: str = "") -> OwnProcess:
    return OwnProcess(NAME, PATH, Payload(tag=tag), dead)


@pytest.fixture(scope="module")
def shared() -> Iterator[OwnProcess]:
    """One for tests that leave it alive."""
    process = begin()
    yield process
    process.close()
    assert not psutil.pid_exists(process.pid)


@pytest.fixture
def own() -> Iterator[OwnProcess]:
    """One for a test that ends it."""
    process = begin()
    yield process
    process.close()


def gone(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_calls_run_at_once_in_another_process(shared: OwnProcess) -> None:
    with ThreadPoolExecutor(3) as threads:
        met = [threads.submit(shared.call, Beside.meet) for _ in range(3)]
        assert sorted(each.result(10) for each in met) == [0, 1, 2]
    assert shared.call(Beside.environ, name="HOME") == os.environ["HOME"]
    assert psutil.Process(shared.pid).name() == NAME


def test_an_exception_comes_back_as_itself(shared: OwnProcess) -> None:
    with pytest.raises(ValueError, match="no such thing") as caught:
        shared.call(Beside.fail, text="no such thing")
    assert f"raised in process {shared.pid}" in caught.value.__notes__[0]
    with pytest.raises(InfrastructureError, match="3 left") as softly:
        shared.call(Beside.fail_softly)
    assert not isinstance(softly.value, NotYet), "which cannot be made again from its text"


def test_what_cannot_be_sent_fails_its_call_alone(shared: OwnProcess) -> None:
    with pytest.raises(TypeError, match="pickle"):
        shared.call(Beside.lock_itself)
    with pytest.raises(TypeError, match="pickle"):
        shared.call(Beside.lock_itself, lock=threading.Lock())
    assert shared.call(Beside.count) > 0


def test_the_version_is_that_of_the_last_answer(shared: OwnProcess) -> None:
    for version in (3, 4):
        shared.call(Beside.hold, version=version)
        assert shared.version == version


def test_what_it_asks_of_the_store_is_counted_here(shared: OwnProcess) -> None:
    before, tries = COUNTER.total(), LATENCIES.total().get("read", Latency())
    for nbytes in (30, 12):
        shared.call(Beside.read, nbytes=nbytes)
    more = COUNTER.total() - before
    assert (more.requests, more.bytes_read) == (2, 42)
    assert sum((LATENCIES.total()["read"] - tries).counts) == 2


def test_reports_reach_who_listens_to_the_call() -> None:
    progress = StartProgress()
    with heard_by(progress.heard):
        begin().close()
    assert progress.phase == "half done"


@pytest.mark.parametrize(
    "kill", [lambda pid: os.kill(pid, signal.SIGKILL), lambda pid: os.kill(pid, signal.SIGTERM)]
)
def test_its_death_ends_calls_in_flight_and_later_ones(
    own: OwnProcess, kill: Callable[[int], None]
) -> None:
    with ThreadPoolExecutor(4) as threads:
        naps = [threads.submit(own.call, Beside.nap, seconds=60) for _ in range(4)]
        child = own.call(Beside.spawn)
        kill(own.pid)
        for nap in naps:
            with pytest.raises(InfrastructureError, match=f"process {own.pid} was killed by SIG"):
                nap.result(5)
    for _ in range(2):
        with pytest.raises(InfrastructureError, match="was killed by SIG"):
            own.call(Beside.count)
    own.close()
    assert gone(own.pid)
    psutil.Process(child).kill()  # nothing tells it that its parent has died


def test_an_answer_that_cannot_be_read_is_its_end_and_no_wait(
    own: OwnProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InfrastructureError, match="was killed by SIGKILL"):
        own.call(Beside.answer_badly)
    assert "ModuleNotFoundError: where its owner is" in caplog.text


def test_a_death_between_calls_is_known_at_once(own: OwnProcess) -> None:
    os.kill(own.pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while not own.cause and time.monotonic() < until:
        time.sleep(0.01)
    assert own.cause == f"is dead: its process {own.pid} was killed by SIGKILL"


def test_close_ends_it_and_what_it_started_in_the_middle_of_a_call_too(own: OwnProcess) -> None:
    child = own.call(Beside.spawn)
    with ThreadPoolExecutor(1) as threads:
        nap = threads.submit(own.call, Beside.nap, seconds=60)
        own.call(Beside.count)
        own.close()
        with pytest.raises(InfrastructureError, match="the engine is closed"):
            nap.result(5)
    own.close()
    assert gone(own.pid) and gone(child)
    with pytest.raises(InfrastructureError, match="the engine is closed"):
        own.call(Beside.count)
    assert own.cause == ""


def test_an_engine_that_cannot_be_built_leaves_no_process() -> None:
    with pytest.raises(ValueError, match="not with that") as caught:
        begin("that")
    pid = int(caught.value.__notes__[0].partition("process ")[2].partition(":")[0])
    assert gone(pid)


OWNER = f"""
import sys, time
from {__name__} import Beside, begin
if __name__ == "__main__":
    process = begin()
    print(process.pid, flush=True)
    process.call(Beside.nap, seconds=600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_dies_with_its_owner(tmp_path, number: signal.Signals) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.send_signal(number)
        assert owner.wait(10) != 0
        assert gone(pid)
