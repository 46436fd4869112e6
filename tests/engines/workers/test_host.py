"""The engine host, without Dask: leases, at-most-once calls, builds."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from engines.data.contract import Scorer
from engines.failures import (
    EngineMissing,
    InfrastructureError,
    StaleCall,
    StaleIncarnation,
)
from engines.workers.engine import Call, CallId, Engine, EngineSpec
from engines.workers.host import RECORDS, EngineHost
from tests.engines.workers.dummies import Payload, dummy, lone


@dataclass
class FakeWorker:
    """What the host reads of a Dask worker that has no nanny."""

    name: str = "pool-0"
    address: str = "tcp://here:1"
    nanny: None = None
    state: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(total_resources={}))


@pytest.fixture
def host():
    host = EngineHost()
    host.setup(FakeWorker())
    host.build("role", dummy())
    return host


def call(host, role, method, arguments, call_id=None, token=""):
    return host.call(Call(role=role, method=method, arguments=arguments, id=call_id), token)


def call_id(call="a", *, epoch=1, step=0, **kwargs):
    return CallId(run="run", epoch=epoch, step=step, call=call, **kwargs)


def test_building_the_same_engine_again_does_nothing(host):
    call(host, "role", "count", {})
    report = host.build("role", dummy())
    assert not report.fresh
    assert call(host, "role", "count", {}) == 2


def test_building_another_engine_closes_the_old_one_and_forgets_its_results(host):
    old = host.engines["role"].engine
    call(host, "role", "count", {}, call_id())
    report = host.build("role", dummy("other"))
    assert report.fresh
    assert old.closed
    assert call(host, "role", "count", {}, call_id()) == 1


def test_concurrent_builds_make_one_engine(host):
    reports = []
    threads = [
        threading.Thread(
            target=lambda: reports.append(host.build("slow", dummy(build_seconds=0.2)))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report.fresh for report in reports) == [False, False, True]


def test_an_engine_in_use_is_not_closed(host):
    thread = threading.Thread(target=call, args=(host, "role", "nap", {"seconds": 0.3}))
    thread.start()
    time.sleep(0.1)
    with pytest.raises(InfrastructureError, match="while it runs"):
        host.stop("role")
    thread.join()
    assert host.stop("role")
    assert not host.stop("role")


def test_only_engines_are_built(host):
    with pytest.raises(TypeError, match="is no engine"):
        host.build(
            "role2", EngineSpec.of("tests.engines.workers.dummies:Payload", Payload(), Engine)
        )
    other = EngineSpec.of("tests.engines.workers.dummies:Dummy", Payload(), Scorer)
    with pytest.raises(TypeError, match="Dummy is no Scorer. Derive it from that class"):
        host.build("role2", other)


def test_a_finished_call_is_not_run_again(host):
    assert call(host, "role", "count", {}, call_id()) == 1
    assert call(host, "role", "count", {}, call_id()) == 1
    assert call(host, "role", "count", {}, call_id("b")) == 2
    assert call(host, "role", "count", {}, call_id(step=1)) == 3
    assert call(host, "role", "count", {}, call_id(epoch=2)) == 4
    assert call(host, "role", "count", {}) == 5


def test_a_failed_call_may_be_tried_again(host):
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            call(host, "role", "fail", {"text": "no"}, call_id())


def test_a_duplicate_waits_for_the_call_in_flight(host):
    values = []

    def nap():
        values.append(call(host, "role", "nap", {"seconds": 0.3}, call_id()))

    threads = [threading.Thread(target=nap) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [1, 1, 1]


def test_a_duplicate_shares_the_failure_of_the_call_in_flight(host):
    errors = []

    def fail():
        try:
            call(host, "role", "fail", {"text": "no", "seconds": 0.3}, call_id())
        except ValueError as error:
            errors.append(error)

    threads = [threading.Thread(target=fail) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2


def test_an_older_epoch_is_refused(host):
    call(host, "role", "count", {}, call_id(epoch=3))
    with pytest.raises(StaleCall, match="epoch 2 of run run"):
        call(host, "role", "count", {}, call_id("b", epoch=2))
    other_run = CallId(run="other", epoch=1, step=0, call="a")
    assert call(host, "role", "count", {}, other_run) == 2


def test_another_incarnation_is_refused(host):
    assert call(host, "role", "count", {}, call_id(incarnation=host.incarnation)) == 1
    with pytest.raises(StaleIncarnation, match="pool-0 has been restarted"):
        call(host, "role", "count", {}, call_id("b", incarnation="earlier"))


def test_a_missing_engine_and_a_method_that_is_not_remote(host):
    with pytest.raises(EngineMissing, match="no engine for role 'other'"):
        call(host, "other", "count", {})
    with pytest.raises(ValueError, match="offers no 'close'"):
        call(host, "role", "close", {})


def test_records_are_bounded(host):
    for number in range(RECORDS + 10):
        call(host, "role", "count", {}, call_id(str(number)))
    assert len(host.records) == RECORDS
    assert not host.in_progress


def test_status_lists_engines_and_running_calls(host):
    thread = threading.Thread(
        target=call, args=(host, "role", "nap", {"seconds": 0.3}, call_id(), "t")
    )
    thread.start()
    time.sleep(0.1)
    status = host.status()
    thread.join()
    assert status.engines["role"].digest == dummy().digest
    (running,) = status.running
    assert (running.role, running.method, running.call, running.token) == ("role", "nap", "a", "t")
    assert 0.05 < running.age < 5
    assert not host.status().running


def test_all_calls_of_a_rank_are_made_in_one_thread_and_are_heard_from_there(host):
    """Else torch has a team of threads for each of Dask's threads, and DTensor works all out anew."""
    host.build("lone", lone())
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, host, "lone", "thread", {}) for _ in range(2)]
        while not any(each.phase == "in its thread" for each in host.status().running):
            time.sleep(0.01)
        host.engines["lone"].engine.go.set()
        threads = {thread for each in calls for thread in each.result()}
        callers = {pool.submit(threading.get_ident).result() for _ in range(2)}
    assert len(threads) == 1 and not threads & {*callers, threading.get_ident()}


def test_a_process_ends_though_a_rank_hangs():
    code = (
        "import threading, time\n"
        "from tests.engines.workers.dummies import lone\n"
        "from tests.engines.workers.test_host import EngineHost, FakeWorker, call\n"
        "host = EngineHost()\n"
        "host.setup(FakeWorker())\n"
        "host.build('lone', lone())\n"
        "hangs = (host, 'lone', 'thread', {})\n"
        "threading.Thread(target=call, args=hangs, daemon=True).start()\n"
        "while not any(each.phase for each in host.status().running):\n"
        "    time.sleep(0.01)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
