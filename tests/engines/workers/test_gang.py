"""Gangs: ranks that live and die together."""

import os
import signal
import threading
import time

import pytest

from configs.cluster import ClusterConfig
from engines.failures import (
    CallCancelled,
    GangFailed,
    GangLost,
    InfrastructureError,
    OutOfMemory,
)
from engines.workers.engine import CallId
from engines.workers.gang import Gang
from tests.engines.workers.dummies import Dummy, Lone, Summing, lone, summing

pytestmark = pytest.mark.cluster


@pytest.fixture
def gang(cluster, pair):
    """A formed gang of two that needs no torch."""
    gang = Gang(cluster, "pair", "lone", lone(), 60.0, start_timeout=60.0)
    gang.form()
    return gang


def test_real_ranks_meet_lose_one_and_meet_again(cluster, pair):
    gang = Gang(cluster, "pair", "sum", summing(), 120.0, start_timeout=120.0)
    gang.form()
    met = gang.call(Summing.joined)
    assert met == ["rank 0 of 2, generation 1", "rank 1 of 2, generation 1"]
    assert gang.call(Summing.total, value=1.0) == [3.0, 3.0]

    victim = gang.call(Summing.pid)[1]
    threading.Timer(0.5, os.kill, [victim, signal.SIGKILL]).start()
    began = time.monotonic()
    with pytest.raises(GangLost, match=r"rank 1 \(worker pair-1\)") as caught:
        gang.call(Summing.nap_on, rank=1, seconds=60.0)
    assert time.monotonic() - began < 6
    assert isinstance(caught.value, InfrastructureError)
    assert not gang.formed

    gang.form()
    assert gang.generation == 2
    assert gang.call(Summing.total, value=2.0) == [6.0, 6.0]


def test_the_result_is_rank_0s_or_all_joined(gang):
    assert gang.call(Lone.lead) == 0
    assert gang.call(Lone.each) == [(0, 1), (1, 1)]


def test_a_gang_of_one_works_alike(cluster, solo):
    gang = Gang(cluster, "solo", "lone", lone(), 60.0, start_timeout=60.0)
    gang.form()
    assert gang.call(Lone.lead) == 0
    assert gang.call(Lone.each) == [(0, 1)]


def test_a_call_runs_once_on_every_rank(gang):
    right = CallId(run="run", epoch=1, step=0, call="each")
    assert gang.call(Lone.each, right) == gang.call(Lone.each, right)
    assert gang.call(Lone.each)[0][1] == gang.call(Lone.each, right)[0][1] + 1


def test_a_rank_past_the_deadline_ends_the_gang(gang, pair):
    began = time.monotonic()
    gang.deadline = 1.0
    with pytest.raises(GangLost, match="did not end within 1 s"):
        gang.call(Lone.nap, seconds=60.0)
    assert time.monotonic() - began < 6
    assert not gang.formed
    with pytest.raises(GangLost, match="not formed"):
        gang.call(Lone.each)
    gang.form()
    assert gang.generation == 2
    gang.deadline = 60.0
    assert gang.call(Lone.each) == [(0, 1), (1, 1)]


def test_a_ranks_own_mistake_ends_the_gang_for_good(gang):
    with pytest.raises(GangFailed, match=r"rank 1 .*: a wrong row") as caught:
        gang.call(Lone.fail_on, rank=1, text="a wrong row")
    assert not isinstance(caught.value, InfrastructureError)
    assert isinstance(caught.value.__cause__, ValueError)
    gang.form()
    with pytest.raises(GangLost, match="1 left"):
        gang.call(Lone.fail_on, rank=0, text="", machinery=True)


def test_a_rank_that_runs_out_of_memory_says_so_and_nobody_tries_again(gang):
    with pytest.raises(OutOfMemory) as caught:
        gang.call(Lone.run_out_on, rank=1)
    assert str(caught.value) == (
        "lone.run_out_on on pair-1 ran out of device memory, held by: activations 70.0 GiB, weights "
        "3.0 GiB. Give its pool fewer workers on each machine, or machines with more memory."
    )
    assert not isinstance(caught.value, InfrastructureError)
    assert not gang.formed
    gang.form()
    assert gang.call(Lone.lead) == 0


def test_cancelling_ends_the_gang(gang):
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    with pytest.raises(CallCancelled):
        gang.call(Lone.nap, None, cancel, seconds=60.0)
    assert not gang.formed


def test_colocated_gangs_take_turns_and_do_not_end_each_others_new_workers(cluster, gang):
    other = Gang(cluster, "pair", "other", lone(), 60.0, start_timeout=60.0)
    other.form()
    gang.deadline = 1.0
    with pytest.raises(GangLost):
        gang.call(Lone.nap, seconds=60.0)
    gang.deadline = 60.0
    gang.form()
    with pytest.raises(GangLost, match="not formed"):
        other.call(Lone.each)
    assert gang.formed
    other.form()
    assert gang.formed
    naps = [
        threading.Thread(target=one.call, args=(Lone.nap,), kwargs={"seconds": 0.4})
        for one in (gang, other)
    ]
    began = time.monotonic()
    for nap in naps:
        nap.start()
    for nap in naps:
        nap.join()
    assert time.monotonic() - began >= 0.8


def test_wrong_use_is_an_error_before_anything_runs(gang):
    with pytest.raises(ValueError, match="offers no 'count'. Its contract Lone has"):
        gang.call(Dummy.count)
    assert gang.formed
    assert isinstance(gang.cluster.config, ClusterConfig)
