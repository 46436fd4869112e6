"""Starts of engines are bounded by their progress, not by how long they take."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engines.failures import InfrastructureError, NoProgress
from engines.start_progress import StartProgress, heard_by, report, reporting_growth
from engines.workers.calls import build
from engines.workers.inspection import running_calls, start_phases
from tests.engines.workers.dummies import slow

BOUND = 1.5  # seconds


@pytest.mark.cluster
def test_a_start_that_gets_on_may_take_longer_than_the_bound(cluster, solo) -> None:
    began = time.monotonic()
    assert build(cluster, solo, "slow", slow(9, 0.3), deadline=BOUND).fresh
    assert time.monotonic() - began > 1.5 * BOUND


@pytest.mark.cluster
def test_a_start_that_stops_ends_and_says_in_which_phase(cluster, solo) -> None:
    began = time.monotonic()
    with pytest.raises(NoProgress, match="'loading weights: 2 of 10 tensors'") as caught:
        build(cluster, solo, "slow", slow(2, 60.0), deadline=BOUND)
    assert time.monotonic() - began < 15
    assert isinstance(caught.value, InfrastructureError)
    assert "solo-0 made no progress for 1.5 s" in str(caught.value)
    cluster.wait("solo")


def test_the_same_words_again_are_no_progress() -> None:
    progress = StartProgress()
    with heard_by(progress.heard):
        report("one")
        at = progress.at
        report("one")
        assert progress.at == at
        report("two")
    assert progress.at > at
    assert progress.phase == "two"
    report("nobody listens")
    assert progress.phase == "two"


def test_a_log_that_grows_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.start_progress.LOOK", 0.02)
    progress, log = StartProgress(), tmp_path / "engine.log"
    with heard_by(progress.heard), reporting_growth([log], "starting", log):
        assert progress.phase == "starting"
        log.write_text("INFO compiling\n")
        until = time.monotonic() + 10
        while "compiling" not in progress.phase and time.monotonic() < until:
            time.sleep(0.01)
    assert progress.phase == 'starting: 15 bytes, last "INFO compiling"'


@pytest.mark.cluster
def test_what_a_worker_is_at_is_seen_while_it_works(cluster, solo) -> None:
    with ThreadPoolExecutor(1) as beside:
        started = beside.submit(build, cluster, solo, "slow", slow(5, 0.3), deadline=30.0)
        seen: dict[str, str] = {}
        while not started.done() and not seen:
            seen = start_phases(cluster)
            of_pool = running_calls(cluster, ["solo"])
        assert started.result().fresh
    assert set(seen) == {"solo-0"}
    assert seen["solo-0"].startswith("loading weights: ")
    assert [call.role for call in of_pool["solo-0"]] == ["slow"]
    assert running_calls(cluster, ["solo"]) == {"solo-0": ()}, "nothing is under way any more"
