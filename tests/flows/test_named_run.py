"""`--name`: the same command begins a run, goes on with it after a kill, and does nothing once it is finished."""

from __future__ import annotations

import time

import pytest

from storage.objects import documents
from storage.runs.commit_log import head
from storage.runs.run_lease import FORMAT, TTL
from storage.runs.run_store import RunStore
from tests.flows.conftest import Launch

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = ("tiny", "steps=3", "--name", "sums-1")


def test_one_command_makes_one_run(launch: Launch) -> None:
    first = launch(*WORDS)
    while not list(first.folder.glob(".refrain/store/sums-1/HEAD")):
        assert first.process.poll() is None, first.end()[1]
        time.sleep(0.05)
    first.process.kill()
    first.end()
    done = head(first.files)
    assert done is not None and done < 3
    held_elsewhere(first.files)
    code, out = launch(*WORDS).end()
    assert code == 0, out
    assert "Run sums-1 may still be written by" in out and "on a lost node: waiting" in out
    assert [path.name for path in first.folder.glob(".refrain/store/*")] == ["sums-1"]
    assert head(first.files) == 3
    epochs = [commit.epoch for commit in first.commits()]
    assert epochs[0] < epochs[-1]  # another flow made the rest
    code, out = launch(*WORDS).end()
    assert (code, out.strip()) == (0, "Run sums-1 is finished: 3 of 3 steps are committed.")


def held_elsewhere(files: RunStore) -> None:
    """Have the lease say that its holder was on another machine, and wrote it a moment ago."""
    body = documents.decode(FORMAT, files.lease_key, before := files.store.read(files.lease_key))
    lost = {**body, "host": "a lost node", "expires": time.time() + TTL}
    files.store.replace(files.lease_key, documents.encode(FORMAT, lost), before)
