"""The cluster and calls on engines: real workers, real deaths."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import dask
import psutil
import pytest
from distributed import LocalCluster
from distributed.comm import CommClosedError

from configs.cluster import ClusterConfig, PoolConfig
from engines.clusters.opening import open_cluster
from engines.failures import (
    CallCancelled,
    CallDeadline,
    ClusterLost,
    InfrastructureError,
    NoWorkers,
    StaleIncarnation,
    WorkerLost,
)
from engines.processes import dask_settings
from engines.processes.process_setup import C_LIBRARIES
from engines.processes.process_tree import session
from engines.workers import calls
from engines.workers.calls import submit_to_all
from engines.workers.engine import CallId
from tests.engines.conftest import left_after, one_pool_roles
from tests.engines.workers.dummies import dummy, request

pytestmark = pytest.mark.cluster

DEADLINE = 60.0


def build(cluster, address, tag=""):
    return calls.build(cluster, address, "role", dummy(tag), deadline=DEADLINE)


def call(cluster, address, method, call_id=None, deadline=DEADLINE, cancel=None, **kwargs):
    asked = request(method, call_id, **kwargs)
    return calls.submit(cluster, address, asked, deadline=deadline, cancel=cancel)


def call_id(call, **kwargs):
    return CallId(run="run", epoch=1, step=0, call=call, **kwargs)


def in_thread(function, *args, **kwargs):
    """Run a call in a thread; returns a function that waits for (result or error, seconds)."""
    began = time.monotonic()
    ended = []

    def run():
        try:
            ended.append(function(*args, **kwargs))
        except Exception as error:
            ended.append(error)
        ended.append(time.monotonic() - began)

    thread = threading.Thread(target=run)
    thread.start()

    def wait():
        thread.join(60)
        return ended

    return wait


def running(cluster, address, count):
    """Wait until a worker runs so many calls."""
    until = time.monotonic() + 20
    while len(calls.status_of(cluster, address).running) != count:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_workers_have_their_names_slots_and_environment(cluster, pair, solo):
    assert list(cluster.workers("pair")) == ["pair-0", "pair-1"]
    assert list(cluster.workers("solo")) == ["solo-0"]
    build(cluster, pair[0])
    build(cluster, solo)
    assert call(cluster, pair[0], "environ", name="REFRAIN_TEST") == "from the caller"
    assert call(cluster, pair[0], "environ", name="CUDA_VISIBLE_DEVICES") == ""
    for name, value in C_LIBRARIES.items():
        assert call(cluster, pair[0], "environ", name=name) == os.environ.get(name, value)
    assert call(cluster, solo, "environ", name="REFRAIN_TEST") is None
    assert not call(cluster, pair[0], "loaded", module="torch")
    assert not call(cluster, pair[0], "loaded", module="prefect")


def test_torch_has_the_pools_threads_on_every_thread(cluster, solo):
    build(cluster, solo)
    assert call(cluster, solo, "threads") == 2
    assert calls.control(cluster, solo, request("threads")) == 2


def test_an_engines_own_exception_comes_back(cluster, pair):
    build(cluster, pair[0])
    with pytest.raises(ValueError, match="a wrong column") as caught:
        call(cluster, pair[0], "fail", text="a wrong column")
    (note,) = caught.value.__notes__
    assert "role.fail on worker pair-0" in note
    assert "dummies.py" in note
    with pytest.raises(InfrastructureError, match="3 left"):
        call(cluster, pair[0], "fail_softly")


def test_control_passes_calls_that_fill_the_worker(cluster, solo):
    build(cluster, solo)
    first = in_thread(call, cluster, solo, "nap", seconds=3.0)
    running(cluster, solo, 1)
    assert calls.control(cluster, solo, request("threads")) == 2
    assert len(calls.status_of(cluster, solo).running) == 1  # still the nap
    first()


def test_the_slots_are_the_calls_at_once(cluster, pair):
    build(cluster, pair[1])
    waits = [in_thread(call, cluster, pair[1], "nap", seconds=0.5) for _ in range(3)]
    running(cluster, pair[1], 2)
    took = sorted(wait()[1] for wait in waits)
    assert took[2] >= 1.0


def test_calls_aside_are_past_slots_and_threads(cluster, solo):
    """However many: each is in a thread of its own, and a call in a slot is taken beside them."""
    build(cluster, solo)
    nap = request("nap", seconds=4.0)
    waits = [
        in_thread(calls.submit, cluster, solo, nap, deadline=DEADLINE, aside=True) for _ in range(8)
    ]
    running(cluster, solo, 8)
    assert call(cluster, solo, "threads") == 2
    assert len(calls.status_of(cluster, solo).running) == 8
    assert all(isinstance(wait()[0], int) for wait in waits)


def test_a_killed_worker_fails_its_calls_aside(cluster, pair):
    build(cluster, pair[1])
    nap = request("nap", seconds=60.0)
    waits = [
        in_thread(calls.submit, cluster, pair[1], nap, deadline=DEADLINE, aside=True)
        for _ in range(4)
    ]
    running(cluster, pair[1], 4)
    os.kill(calls.status_of(cluster, pair[1]).pid, signal.SIGKILL)
    assert all(isinstance(wait()[0], WorkerLost) for wait in waits)
    assert cluster.wait("pair", 2)["pair-1"] != pair[1]


def test_a_killed_worker_fails_its_call_at_once_and_comes_back_as_another(
    cluster, pair, tmp_path, monkeypatch
):
    report = build(cluster, pair[0])
    monkeypatch.setattr(cluster, "logs", tmp_path)  # as of a cluster that keeps its workers' output
    (tmp_path / "pair-0.log").write_text("the first words\nthe last words\n\n")
    wait = in_thread(call, cluster, pair[0], "nap", seconds=30.0)
    running(cluster, pair[0], 1)
    died = time.monotonic()
    os.kill(calls.status_of(cluster, pair[0]).pid, signal.SIGKILL)
    error, _ = wait()
    assert time.monotonic() - died < 10  # of the 30 s of the nap
    assert isinstance(error, WorkerLost)
    assert error.worker == "pair-0"
    assert "which ends: the last words" in str(error)
    address = cluster.wait("pair", 2)["pair-0"]
    assert address != pair[0]
    again = build(cluster, address)
    assert again.fresh
    assert again.incarnation != report.incarnation
    with pytest.raises(StaleIncarnation):
        call(cluster, address, "count", replace(call_id("x"), incarnation=report.incarnation))
    with pytest.raises(WorkerLost, match="any more"):
        call(cluster, pair[0], "count")


def test_what_a_killed_worker_started_is_ended(cluster, pair):
    build(cluster, pair[0])
    child = call(cluster, pair[0], "spawn")
    os.kill(calls.status_of(cluster, pair[0]).pid, signal.SIGKILL)
    assert left_after(5, [child]) == []


def test_a_call_past_its_deadline_restarts_the_worker(cluster, pair):
    build(cluster, pair[1])
    child = call(cluster, pair[1], "spawn")
    began = time.monotonic()
    with pytest.raises(CallDeadline, match=r"role.nap on worker pair-1 did not end within 1 s"):
        call(cluster, pair[1], "nap", seconds=60.0, deadline=1.0)
    assert time.monotonic() - began < 15  # of 60 s
    assert left_after(5, [child]) == []
    assert cluster.wait("pair", 2)["pair-1"] != pair[1]


def test_a_stopped_worker_is_past_its_deadline_too(cluster, pair):
    build(cluster, pair[1])
    wait = in_thread(call, cluster, pair[1], "nap", seconds=0.5, deadline=1.0)
    running(cluster, pair[1], 1)
    os.kill(calls.status_of(cluster, pair[1]).pid, signal.SIGSTOP)
    error, seconds = wait()
    assert isinstance(error, CallDeadline)
    assert seconds < 20  # the deadline, and the time in which a worker must report its status
    assert cluster.wait("pair", 2)["pair-1"] != pair[1]


def test_time_in_the_queue_does_not_count(cluster, solo):
    build(cluster, solo)
    waits = [in_thread(call, cluster, solo, "nap", seconds=1.2, deadline=3.0) for _ in range(3)]
    ends = [wait() for wait in waits]
    assert all(isinstance(result, int) for result, _ in ends), ends
    assert max(seconds for _, seconds in ends) > 3.2, "longer than the deadline of one call"


def test_a_finished_call_outlives_its_worker_and_is_not_run_again(cluster, pair, tmp_path):
    build(cluster, pair[0])
    path = tmp_path / "calls"
    held = calls.start(cluster, pair[0], request("note", path=str(path)), deadline=DEADLINE)
    assert held.done.wait(20)  # finished, its future still held
    assert cluster.kill([pair[0]]) == [pair[0]]
    cluster.wait("pair", 2)
    time.sleep(1)
    assert held.wait(5).failure is None, "its result had come with the word that it ended"
    assert path.read_text() == "called\n"


def test_all_who_read_the_table_of_workers_share_one_look_at_it(cluster, pair):
    assert cluster.workers("pair", 60.0) is cluster.workers("pair", 60.0)


def test_the_scheduler_tells_of_workers_that_leave_and_join(cluster, pair):
    before = cluster.table.changes
    cluster.kill([pair[0]])
    cluster.wait("pair", 2)
    until = time.monotonic() + 10
    while cluster.table.changes < before + 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert cluster.table.changes >= before + 2


def test_a_lease_makes_a_call_run_once(cluster, pair):
    report = build(cluster, pair[0], tag="once")
    right = call_id("only", incarnation=report.incarnation)
    assert call(cluster, pair[0], "count", right) == 1
    assert call(cluster, pair[0], "count", right) == 1
    assert calls.stop(cluster, pair[0], "role")
    with pytest.raises(InfrastructureError, match="no engine for role 'role'"):
        call(cluster, pair[0], "count", right)


def test_a_cancel_event_ends_the_wait(cluster, pair):
    build(cluster, pair[0])
    cancel = threading.Event()

    def cancel_what_runs() -> None:
        running(cluster, pair[0], 1)
        cancel.set()

    threading.Thread(target=cancel_what_runs).start()
    with pytest.raises(CallCancelled):
        call(cluster, pair[0], "nap", seconds=3.0, cancel=cancel)
    assert len(calls.status_of(cluster, pair[0]).running) == 1  # the engine itself goes on
    running(cluster, pair[0], 0)


def to_both(cluster, method, deadline=DEADLINE, cancel=None, **kwargs):
    workers = cluster.wait("pair", 2)
    asked = request(method, **kwargs)
    return submit_to_all(cluster, "pair", workers, asked, deadline=deadline, cancel=cancel)


def test_one_message_calls_every_engine_past_its_slots(cluster, pair):
    for address in pair:
        build(cluster, address)
    before = to_both(cluster, "count")
    waits = [in_thread(call, cluster, pair[0], "nap", seconds=3.0) for _ in range(2)]
    running(cluster, pair[0], 2)
    after = to_both(cluster, "count")
    assert after == {name: before[name] + 1 for name in ("pair-0", "pair-1")}
    assert len(calls.status_of(cluster, pair[0]).running) == 2
    for wait in waits:
        wait()


def test_of_calls_by_one_message_each_fails_on_its_own(cluster, pair):
    build(cluster, pair[0])
    calls.stop(cluster, pair[1], "role")
    found = to_both(cluster, "count")
    assert isinstance(found["pair-0"], int)
    assert isinstance(found["pair-1"], InfrastructureError)
    assert "holds no engine for role 'role'" in str(found["pair-1"])
    build(cluster, pair[1])
    for failure in to_both(cluster, "fail_softly").values():
        assert isinstance(failure, InfrastructureError)
        assert "3 left" in str(failure)
    with pytest.raises(ValueError, match="no such thing"):
        to_both(cluster, "fail", text="no such thing")


def test_a_worker_killed_in_a_call_by_one_message_takes_no_other_along(cluster, pair):
    for address in pair:
        build(cluster, address)
    pid = calls.status_of(cluster, pair[0]).pid
    wait = in_thread(to_both, cluster, "nap", seconds=3.0)
    running(cluster, pair[0], 1)
    os.kill(pid, signal.SIGKILL)
    found, _ = wait()
    assert isinstance(found["pair-0"], WorkerLost)
    said = str(found["pair-0"])
    assert "its process ended" in said and "role.nap was under way" in said
    assert isinstance(found["pair-1"], int)
    assert cluster.wait("pair", 2)["pair-0"] != pair[0]


def test_who_is_late_in_a_call_by_one_message_is_killed(cluster, pair):
    for address in pair:
        build(cluster, address)
    wait = in_thread(to_both, cluster, "nap", seconds=2.0, deadline=3.0)
    running(cluster, pair[1], 1)
    os.kill(calls.status_of(cluster, pair[1]).pid, signal.SIGSTOP)
    found, seconds = wait()
    assert isinstance(found["pair-0"], int)
    assert isinstance(found["pair-1"], CallDeadline)
    assert seconds < 25  # the deadline, and the time in which a worker must report its status
    assert cluster.wait("pair", 2)["pair-1"] != pair[1]


def test_a_cancel_event_ends_the_wait_for_all(cluster, pair):
    for address in pair:
        build(cluster, address)
    cancel = threading.Event()
    threading.Timer(0.5, cancel.set).start()
    with pytest.raises(CallCancelled):
        to_both(cluster, "nap", seconds=3.0, cancel=cancel)
    running(cluster, pair[0], 0)


def test_a_pool_without_enough_workers_is_an_error_that_names_it(cluster):
    began = time.monotonic()
    with pytest.raises(NoWorkers, match="pool 'solo' has 1 of 2 live workers"):
        cluster.wait("solo", 2, timeout=0.5)
    assert time.monotonic() - began < 10  # the default is a minute
    with pytest.raises(ValueError, match="'sole' is no pool"):
        cluster.workers("sole")


def test_nothing_listens_beyond_this_machine(cluster):
    addresses = {
        connection.laddr.ip
        for process in session(cluster._node.pid)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


def test_joining_a_running_cluster_finds_its_engines_and_leaves_them(cluster, pair):
    first = build(cluster, pair[0], tag="joined")
    config = cluster.config.model_copy(
        update={"kind": "address", "address": cluster.client.scheduler.address}
    )
    with open_cluster(config) as joined:
        assert joined.members() == cluster.members()
        second = build(joined, pair[0], tag="joined")
        assert (second.incarnation, second.fresh) == (first.incarnation, False)
    assert call(cluster, pair[0], "count") == 1


def test_a_scheduler_that_would_run_calls_again_is_refused():
    # As a scheduler is that knows nothing of us, whatever a test before has left in this process.
    own = {"distributed.scheduler.preload": [], "distributed.scheduler.allowed-failures": 3}
    with (
        dask.config.set(own),
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as found,
    ):
        config = ClusterConfig(kind="address", address=found.scheduler_address, start_timeout=20)
        with pytest.raises(ValueError, match="ALLOWED_FAILURES=0"):
            open_cluster(config)


def test_an_address_where_nobody_answers_is_refused():
    config = ClusterConfig(kind="address", address="tcp://127.0.0.1:9", start_timeout=0.5)
    with pytest.raises(ValueError, match=r"cluster.address = tcp://127.0.0.1:9 does not answer"):
        open_cluster(config)


def test_an_address_that_is_taken_by_something_silent_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        config = ClusterConfig(kind="address", address=address, start_timeout=1.0)
        with pytest.raises(ValueError, match=rf"cluster.address = {address} does not answer"):
            open_cluster(config)


def test_a_plan_that_does_not_fit_is_refused_before_anything_starts():
    config = ClusterConfig(pools={"p": PoolConfig(gpus=64)}, roles=one_pool_roles("p"))
    with pytest.raises(ValueError, match=r"cluster.pools.p wants 1 workers with 64 GPUs"):
        open_cluster(config)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_lost_scheduler_ends_calls_and_workers(number, monkeypatch):
    monkeypatch.setattr("engines.workers.cluster.ASK_TIMEOUT", 2.0)
    config = ClusterConfig(pools={"p": PoolConfig()}, roles=one_pool_roles("p"))
    with open_cluster(config) as cluster:
        (address,) = cluster.workers("p").values()
        build(cluster, address)
        pids = [process.pid for process in session(cluster._node.pid)]
        pids.append(call(cluster, address, "spawn"))
        wait = in_thread(call, cluster, address, "nap", seconds=60.0)
        running(cluster, address, 1)
        os.kill(cluster._node.pid, number)
        error, seconds = wait()
        assert isinstance(error, ClusterLost)
        assert "The run can be resumed." in str(error)
        if number == signal.SIGKILL:
            assert "ended (exit status -9)" in str(error)
        assert seconds < 30
        with pytest.raises(ClusterLost, match="can be resumed"):
            cluster.workers("p")
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert left_after(0, pids) == []


def test_a_result_that_the_scheduler_does_not_hand_out_any_more_is_a_lost_cluster(monkeypatch):
    """It died between the call's end and the fetch, which goes by way of it."""

    class Future:
        async def _result(self) -> None:
            raise CommClosedError("in <TCP (closed) local=… remote=…>: Stream is closed")

        def release(self) -> None: ...

    config = ClusterConfig(pools={"p": PoolConfig()}, roles=one_pool_roles("p"))
    with open_cluster(config) as cluster:
        (address,) = cluster.workers("p").values()
        build(cluster, address)
        pending = calls.start(cluster, address, request("nap", seconds=0.0), deadline=60)
        assert pending.done.wait(30)
        assert cluster.pushed.take(pending.token) is not None  # as if it were too large
        os.kill(cluster._node.pid, signal.SIGKILL)
        monkeypatch.setattr(pending._task, "future", Future())
        with pytest.raises(ClusterLost, match=r"ended \(exit status -9\)"):
            pending.wait(60)


def test_the_settings_hold_on_the_scheduler(cluster):
    assert dask_settings.SETTINGS["distributed.scheduler.allowed-failures"] == 0
    seen = cluster.client.run_on_scheduler(
        lambda dask_scheduler: (
            dask_scheduler.allowed_failures,
            dask_scheduler.worker_ttl,
            dask_scheduler.no_workers_timeout,
            {stream.recent_message_log.maxlen for stream in dask_scheduler.stream_comms.values()},
        )
    )
    assert seen == (0, None, 30.0, {10})


def test_idle_processes_wake_seldom(cluster):
    """Milliseconds between what Dask does in each process for its warnings and its dashboard."""

    def intervals(server):
        own = (server.periodic_callbacks[name].callback_time for name in ("tick", "monitor"))
        return tuple(own)

    there = cluster.client.run_on_scheduler(lambda dask_scheduler: intervals(dask_scheduler))
    workers = cluster.client.run(lambda dask_worker: intervals(dask_worker))
    assert {there, *workers.values()} == {(1000, 5000)}


def test_the_scheduler_keeps_nothing_of_calls_that_have_ended(cluster, pair, solo):
    build(cluster, pair[0])
    build(cluster, solo)
    ended = in_thread(call, cluster, solo, "nap", seconds=1.0)  # so that it is never idle
    running(cluster, solo, 1)
    for _ in range(10):
        call(cluster, pair[0], "nap", seconds=0.0)
    ended()

    def kept(dask_scheduler):
        groups = {group for one in dask_scheduler.computations for group in one.groups}
        spans = dask_scheduler.extensions["spans"].spans
        return len(dask_scheduler.tasks), len(dask_scheduler.task_groups), len(groups), len(spans)

    until = time.monotonic() + 20
    while (found := cluster.client.run_on_scheduler(kept)) != (0, 0, 0, 0):
        assert time.monotonic() < until, found
        time.sleep(0.05)


@pytest.mark.slow
def test_workers_that_others_started(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    env = {
        **os.environ,
        "PYTHONPATH": os.getcwd(),
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
        "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
    }
    dask = [sys.executable, "-m", "dask"]
    host = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    worker = ["worker", address, "--resources", "p=2", "--nthreads", "3", "--memory-limit", "0"]
    commands = [
        [*dask, "scheduler", "--port", address.rpartition(":")[2], *host],
        [*dask, *worker, "--name", "mine", "--local-directory", str(tmp_path), *host],
    ]
    started = [
        subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        config = ClusterConfig(
            kind="address",
            address=address,
            pools={"p": PoolConfig(env={"REFRAIN_TEST": "late"})},
            roles=one_pool_roles("p"),
        )
        with open_cluster(config) as cluster:
            (mine,) = cluster.workers("p").values()
            build(cluster, mine)
            assert call(cluster, mine, "environ", name="REFRAIN_TEST") == "late"
            child = call(cluster, mine, "spawn")
            with pytest.raises(CallDeadline):
                call(cluster, mine, "nap", seconds=60.0, deadline=1.0)
            assert left_after(2, [child]) == []
            back = cluster.wait("p")["mine"]
            build(cluster, back)
            assert call(cluster, back, "environ", name="REFRAIN_TEST") == "late"
        pids = [process.pid for one in started for process in session(one.pid)]
        started[1].kill()  # the nanny: its worker must not stay behind
        started[0].kill()
        assert left_after(5, pids) == []
    finally:
        for one in started:
            os.killpg(one.pid, signal.SIGKILL) if one.poll() is None else None
            one.wait()
