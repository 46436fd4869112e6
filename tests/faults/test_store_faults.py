"""The store answers badly, not at all for a while, or has no room: bounded waits, nothing half done."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from storage.audit.audit import audit
from storage.batches.writing import write_batch
from storage.objects import errors as retries
from storage.objects.errors import StoreUnavailable
from storage.objects.store import Store
from storage.runs.commit_log import Commit, head
from storage.runs.run_store import RunStore
from storage.runs.weights import open_manifest
from tests.contract.conftest import BUCKET, Endpoint, s3, s3_server
from tests.faults.conftest import WORDS
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault, Faults
from tests.faults.s3_proxy import S3Proxy, Weather
from tests.flows.conftest import Launch

__all__ = ["s3", "s3_server"]  # fixtures

MODES = ("error", "unavailable", "reset", "reset after", "slow", "truncated")


@pytest.fixture
def proxy(s3: Endpoint) -> Iterator[S3Proxy]:
    with S3Proxy(s3.url, Weather()) as found:
        yield found


@pytest.fixture
def store(proxy: S3Proxy) -> Store:
    return Store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}", {"endpoint_url": proxy.url})


@pytest.mark.parametrize("mode", MODES)
def test_every_operation_survives(store: Store, proxy: S3Proxy, mode, monkeypatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.01)
    store.list()  # its first connection, in good weather
    proxy.weather = Weather(modes=(mode,), share=0.15, slow_seconds=0.05)
    for number in range(10):
        ref = write_batch(store, f"{number}/a.safetensors", {"reward": np.arange(50.0, dtype="f4")})
        assert ref.fetch_numpy(store, "reward")[0].sum() == 1225
        assert store.create(f"{number}/once", b"first")
        assert not store.create(f"{number}/once", b"second")
        store.replace(f"{number}/once", b"next", expected=b"first")
        assert store.read(f"{number}/once") == b"next"
        with store.write_stream(f"{number}/stream") as out:
            out.write(b"x" * 100_000)
        assert store.size(f"{number}/stream") == 100_000
        assert len(store.list(f"{number}")) == 3
        store.delete([f"{number}/stream"])
    assert proxy.faults > 4


def test_retries_spread_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many writers that failed at once do not come back at once."""
    pauses: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", pauses.append)
    for _ in range(50):
        with pytest.raises(retries.OutOfAttempts):
            retries.retry("x", lambda _: (_ for _ in ()).throw(OSError()), lambda _: True)
    for number in range(retries.ATTEMPTS - 1):
        mine = pauses[number :: retries.ATTEMPTS - 1]
        middle = retries.FIRST_DELAY * 2**number
        assert max(mine) > 1.2 * middle > 0.8 * middle > min(mine)


def test_a_store_that_is_gone_is_waited_for_within_bounds(store: Store, proxy: S3Proxy) -> None:
    store.write("k", b"1")
    proxy.weather.down = True
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"does not answer: read s3://.*/k failed 6 times"):
        store.read("k")
    assert 1.0 < time.monotonic() - began < 20
    proxy.weather.down = False
    assert store.read("k") == b"1"


S3_WORDS = ("store.cache_mib=16", "steps=3", "rollout.deadline=60", "train.deadline=60")


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_run_on_a_bad_store_ends_with_equal_weights(
    launch: Launch, s3: Endpoint, undisturbed: Callable[..., list[Commit]]
) -> None:
    uri = f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}"
    weather = Weather(modes=MODES, share=0.05, slow_seconds=0.3)
    with S3Proxy(s3.url, weather) as proxy:
        run = launch(
            *WORDS, *S3_WORDS, f"store.uri={uri}", f"store.options.endpoint_url={proxy.url}"
        )
        run.store_uri = uri
        code, out = run.end(600)
        assert code == 0, out
        assert proxy.faults > 10
    store = Store(uri, {"endpoint_url": s3.url})
    run_name = re.search(r"Run (\S+):", out)[1]
    files = RunStore(store, run_name)
    assert [c.version_out.digest for c in committed(files)] == [
        c.version_out.digest for c in undisturbed(*S3_WORDS)
    ]
    assert not store.backend._call("list_multipart_uploads").get("Uploads")  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [6, 120])
def test_the_store_goes_away_in_a_run(
    launch: Launch, s3: Endpoint, undisturbed: Callable[..., list[Commit]], seconds: float
) -> None:
    """For a moment: the run goes on. For long: it says so, and is resumed."""
    uri = f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}"
    with S3Proxy(s3.url, Weather()) as proxy:
        place = (f"store.uri={uri}", f"store.options.endpoint_url={proxy.url}")
        run = launch(*WORDS, *S3_WORDS, *place)
        store = Store(uri, {"endpoint_url": s3.url})
        name = wait_for(lambda: next((one for one in store.children() if one[0] != "."), None))
        wait_for(lambda: head(RunStore(store, name)))
        proxy.weather.down = True
        timer = threading.Timer(seconds, lambda: setattr(proxy.weather, "down", False))
        timer.start()
        code, out = run.end(300)
        if seconds > 60:
            assert code == 1, out
            assert "StoreUnavailable" in out and f"--resume {name}" in out
            assert "Traceback" not in out
            timer.join()
            code, out = launch("--resume", name, *place).end(300)
        assert code == 0, out
    assert [c.version_out.digest for c in committed(RunStore(store, name))] == [
        c.version_out.digest for c in undisturbed(*S3_WORDS)
    ]


SLOW = 3.0  # seconds more for each object
# How a file of a version comes to the store: from what the machine keeps, or from memory to disk.
COMES = {
    "s3": "storage.objects.node_cache:WriteBehind._copy",
    "local": "storage.objects.store:Store.sync",
}
ON_ITS_WAY = {
    "slow": Fault(id="slow", target="", action="delay", seconds=SLOW),
    "trainer": Fault(id="trainer", target="", nth=2, action="kill"),
    "flow": Fault(id="flow", target="engines.train.trainer:Trainer.settle", nth=2, action="kill"),
    "manifest": Fault(
        id="manifest", target="storage.runs.weights_writing:finish", nth=2, action="kill"
    ),
    "engine": Fault(
        id="engine", target="engines.rollout.engine:RolloutEngine.sync", nth=2, action="kill"
    ),
}
# The trainer that is killed before the manifest has sent the version, if it does.
WAYS = [
    *((place, case, "store") for place in COMES for case in ON_ITS_WAY),
    *((place, case, "nccl") for place in COMES for case in ("slow", "trainer", "manifest")),
]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("place", "case", "way"), WAYS)
def test_a_version_on_its_way_to_the_store(
    launch: Launch,
    s3: Endpoint,
    undisturbed: Callable[..., list[Commit]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    case: str,
    way: str,
) -> None:
    """Engines have it before the store; who is killed then loses nothing, and leaves nothing."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    fault = ON_ITS_WAY[case]
    if not fault.target:
        fault = dataclasses.replace(fault, target=COMES[place])
    faults = Faults(tmp_path / "faults", [fault])
    uri = {"s3": f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}", "local": f"file://{tmp_path}/store"}[
        place
    ]
    words = (f"store.uri={uri}", *(["store.node_cache_gib=0.1"] if place == "s3" else []))
    if way != "store":
        words += (f"rollout.weight_transfer={way}", "rollout.weight_transfer_timeout=15")
    run = launch(*WORDS, *S3_WORDS, *words, environment=faults.environment)
    run.store_uri = uri
    code, out = run.end(300)
    if code:
        assert case == "flow", out
        code, out = launch("--resume", run.files.run, *words).end(300)
        assert code == 0, out
    assert faults.missed == []
    done = committed(run.files)
    assert [c.version_out.digest for c in done] == [
        c.version_out.digest for c in undisturbed(*S3_WORDS)
    ]
    if case == "slow":
        assert all(c.metrics["weights/waited_seconds"] < 0.5 for c in done)
        for c in done:
            published, loaded, stored = (
                c.metrics[f"weights/{what}_seconds"] for what in ("publish", "load", "stored")
            )
            assert published < SLOW < stored, "the store had it later than the engines"
            if way != "store":
                assert published + loaded < stored and c.metrics["weights/transferred"] == 1
    assert audit(run.files).problems == []
    versions = [done[0].version_in, *(c.version_out for c in done)]
    assert [key for key in run.files.store.list() if "model-" in key] == sorted(
        f"{version.key}/{file}"
        for version in versions
        for file in open_manifest(run.files.store, version).files
        if "model-" in file
    )


def wait_for(look: Callable[[], object], timeout: float = 120) -> object:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with little room, which only root can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_disk_fills(
    launch: Launch, small_disk: Path, undisturbed: Callable[..., list[Commit]]
) -> None:
    words = ("steps=12", "store.keep_versions=99", "store.snapshot_every=1")
    run = launch(*WORDS, *words, f"store.uri=file://{small_disk}/store")
    code, out = run.end()
    assert code == 1, out
    assert "No space left on device" in out
    assert "Traceback" not in out
    run.store_uri = f"file://{small_disk}/store"
    last = head(run.files)
    assert 1 <= last < 12, out
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    again = launch("--resume", run.files.run, f"store.uri=file://{small_disk}/store")
    code, out = again.end()
    assert code == 0, out
    assert story(committed(run.files)) == story(undisturbed(*words))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_write_that_fails_in_the_flow(
    launch: Launch, tmp_path: Path, undisturbed: Callable[..., list[Commit]]
) -> None:
    """The commit's own write finds no room: the step does not count, and is taken up again."""
    full = Fault(
        id="full", target="storage.runs.commit_log:commit", nth=2, action="raise", error="OSError"
    )
    faults = Faults(tmp_path / "faults", [full])
    run = launch(*WORDS, environment=faults.environment)
    code, out = run.end()
    assert code == 1 and "Traceback" not in out, out
    assert head(run.files) == 1, out
    code, out = launch("--resume", run.files.run).end()
    assert code == 0, out
    assert story(committed(run.files)) == story(undisturbed())
