"""Runs whose policy versions are stored as differences: the same weights, kept, forked, exported."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid

import pytest

from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tests.contract.conftest import BUCKET, Endpoint, s3_server  # noqa: F401
from tests.faults.ledger import committed
from tests.flows.conftest import Launch, Launched
from tests.flows.test_forks import audited

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = (
    "tiny", "steps=4", "store.snapshot_every=2", "rollout.dtype=bfloat16",
    "train.learning_rate=1e-5", "rollout.probe_tolerance=0.5", "cluster.pools.train.workers=2", "cluster.pools.rollout.workers=2",
)  # fmt: skip


def run_of(run: Launched, name: str) -> RunStore:
    store = Store(run.store_uri)
    (found,) = (one for one in store.children() if one.startswith(name))
    return RunStore(store, found)


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_the_same_weights_from_differences(
    launch: Launch,
    s3_server: Endpoint,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    where = ()
    if kind == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
        where = (f"store.uri=s3://{BUCKET}/{uuid.uuid4().hex[:8]}",)

    def made(name: str, *words: str) -> tuple[Launched, RunStore]:
        run = launch(*words, f"name={name}", *where)
        run.store_uri = where[0].partition("=")[2] if where else run.store_uri
        code, out = run.end()
        assert code == 0, out
        return run, run_of(run, name)

    less_words = ("store.whole_every=10", "store.node_cache_gib=0.1", "store.keep_versions=2")
    (_, whole), (run, less) = made("whole", *WORDS), made("less", *WORDS, *less_words)
    theirs, mine = committed(whole), committed(less)
    assert [one.version_out.digest for one in mine] == [one.version_out.digest for one in theirs]
    bases = [one.version_out.base.key[-1] if one.version_out.base else "" for one in mine]
    assert bases == ["0", "", "2", ""]  # whole at a snapshot
    for one in mine:
        stored, nbytes = one.version_out.stored, one.version_out.nbytes
        assert stored is not None
        assert (stored < nbytes / 2) == (one.version_out.base is not None)
    there = [
        number
        for number in less.versions()
        if less.store.exists(f"{less.weights_key(number)}/manifest.json")
    ]
    assert there == [0, 2, 3, 4]  # the first, the newest two, and what they are based on

    _, child = made("child", "--fork", f"{less.run}@3", *less_words)
    assert committed(child)[-1].version_out.digest == mine[-1].version_out.digest
    for files in (less, child):
        audited(run, files.run, *where)
    for version in ("3", "4"):
        done = subprocess.run(
            [sys.executable, "-m", "flows.export", less.run, "--to", str(run.folder / version),
             "--version", version, "--json", *where],
            cwd=run.folder, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["digest"] == mine[int(version) - 1].version_out.digest
