"""What only a store across a network does: retries, lost answers, uploads in parts, caching."""

import threading

import numpy as np
import pytest

from storage.batches.writing import Jagged, write_batch
from storage.objects import errors as retries
from storage.objects.errors import Conflict, StoreError, StoreUnavailable
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from tests.contract.conftest import Endpoint, Fault


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.01)


def test_errors_that_pass_are_retried(s3_store: Store, s3: Endpoint) -> None:
    s3.faults = [Fault("PUT", "/k", 2), Fault("GET", "/k", 2, "500 Internal Server Error")]
    s3_store.write("k", b"value")
    assert s3_store.read("k") == b"value"
    s3.faults = [Fault("GET", "/k", 1)]
    assert bytes(s3_store.read_ranges([("k", 1, 3)])[0]) == b"al"


def test_a_store_that_stays_down_says_so(s3_store: Store, s3: Endpoint) -> None:
    s3.faults = [Fault("PUT", "/k", 100)]
    with pytest.raises(StoreUnavailable, match=r"does not answer: write s3://.*/k failed 6 times"):
        s3_store.write("k", b"value")
    assert not s3_store.exists("k")


def test_an_endpoint_that_is_not_there() -> None:
    store = Store("s3://bucket/x", {"endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(StoreUnavailable, match="does not answer"):
        store.write("k", b"value")


def test_a_lost_answer_to_create_is_no_defeat(s3_store: Store, s3: Endpoint) -> None:
    s3.faults = [Fault("PUT", "/k", 1, after=True)]
    assert s3_store.create("k", b"mine")
    assert not s3_store.create("k", b"mine")
    s3.faults = [Fault("PUT", "/k", 1, after=True)]
    s3_store.replace("k", b"next", expected=b"mine")
    assert s3_store.read("k") == b"next"


def test_large_objects_go_in_parts(
    s3_store: Store, s3: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.objects.s3.PART_BYTES", 5 * 2**20)
    monkeypatch.setattr("storage.objects.s3.SINGLE_PUT_BYTES", 6 * 2**20)
    data = np.random.default_rng(0).bytes(12 * 2**20)
    s3.faults = [Fault("PUT", "/stream", 1), Fault("POST", "/stream", 1)]
    with s3_store.write_stream("stream") as out:
        for start in range(0, len(data), 1_000_003):
            out.write(data[start : start + 1_000_003])
        assert not s3_store.exists("stream")
    assert s3_store.read("stream") == data
    view = s3_store.read_ranges([("stream", 3, 11 * 2**20)])[0]  # in pieces of a part's size
    assert view == data[3 : 11 * 2**20]
    assert s3_store.create("made", data)
    assert not s3_store.create("made", data[::-1])
    assert s3_store.read("made") == data
    with pytest.raises(RuntimeError, match="crash"), s3_store.write_stream("half") as out:
        out.write(data[: 7 * 2**20])
        raise RuntimeError("crash")
    assert s3_store.list() == ["made", "stream"]
    uploads = s3_store.backend._call("list_multipart_uploads")  # type: ignore[attr-defined]
    assert not uploads.get("Uploads")


def test_many_threads_share_one_client(s3_store: Store) -> None:
    failures: list[BaseException] = []
    backends = set()

    def work(number: int) -> None:
        try:
            backends.add(s3_store.backend)
            s3_store.write(f"t/{number}", b"%d" % number)
            assert s3_store.read(f"t/{number}") == b"%d" % number
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(backends) == 1
    assert len(s3_store.list("t")) == 12


def batch(rows: int) -> dict[str, object]:
    offsets = np.arange(rows + 1) * 3000
    return {
        "response_ids": Jagged(np.arange(offsets[-1]), offsets),
        "rollout_logprobs": Jagged(np.zeros(offsets[-1], np.float32), offsets),
    }


def test_a_second_read_comes_from_the_cache(s3_store: Store, s3: Endpoint) -> None:
    cached = s3_store.with_cache(10 * 2**20)
    ref = write_batch(cached, "a.safetensors", batch(4))
    ref.fetch_numpy(cached, "response_ids")
    s3.requests.clear()
    values, _ = ref.fetch_numpy(cached, "response_ids")
    values[:] = 7  # a reader's copy, not the cache's
    assert s3.requests == []
    assert ref.fetch_numpy(cached, "response_ids")[0][5] == 5
    assert s3.requests == []


def test_prefetch_fills_the_cache(s3_store: Store, s3: Endpoint) -> None:
    cached = s3_store.with_cache(10 * 2**20)
    ref = write_batch(cached, "a.safetensors", batch(4))
    ref.prefetch(cached, ["response_ids"]).result(timeout=30)
    s3.requests.clear()
    assert ref.fetch_numpy(cached, "response_ids")[0][5] == 5
    assert s3.requests == []


def test_the_cache_is_bounded(s3_store: Store) -> None:
    cached = s3_store.with_cache(200_000)
    ref = write_batch(cached, "a.safetensors", batch(10))
    for row in range(10):
        ref.rows(row, row + 1).fetch_numpy(cached, "response_ids")
    assert cached.cache is not None
    assert 0 < cached.cache.nbytes <= 200_000


def test_only_the_rows_asked_for_travel(s3_store: Store, s3: Endpoint) -> None:
    ref = write_batch(s3_store, "a.safetensors", batch(100))
    ref.rows(0, 1).fetch_numpy(s3_store, "response_ids")  # the head is now known
    s3.requests.clear()
    ref.take([40, 41, 90]).fetch_numpy(s3_store, "response_ids")
    sizes = []
    for _, _, asked in s3.requests:
        first, last = asked.removeprefix("bytes=").split("-")
        sizes.append(int(last) - int(first) + 1)
    assert sorted(sizes) == [12000, 24000]


def test_sizes_of_a_folder_are_one_listing(s3_store: Store, s3: Endpoint) -> None:
    keys = [f"run/steps/1/rollout/{number}.bin" for number in range(30)]
    for key in keys:
        s3_store.write(key, b"abc")
    s3.requests.clear()
    assert set(s3_store.sizes(keys).values()) == {3}
    assert [method for method, _, _ in s3.requests] == ["GET"]


def test_nothing_else_retries(s3_store: Store, s3: Endpoint) -> None:
    """A retry inside s3fs or botocore would make a lost answer look like another writer's win."""
    s3.faults = [Fault("HEAD", "/k", 100)]
    with pytest.raises(StoreUnavailable):
        s3_store.exists("k")
    assert len([1 for method, _, _ in s3.requests if method == "HEAD"]) == retries.ATTEMPTS


def test_an_endpoint_without_conditional_writes_is_found_out(
    s3_store: Store, s3: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_store.check_writable()
    s3.unconditional = True
    try:
        with pytest.raises(
            StoreError, match=r"ignores conditional writes.*conditional_writes=false"
        ):
            s3_store.check_writable()
        lenient = Store(s3_store.uri, {**s3_store.options, "conditional_writes": False})
        lenient.check_writable()
        assert lenient.create("k", b"first")
        assert not lenient.create("k", b"second")
        lenient.replace("k", b"third", expected=b"first")
        with pytest.raises(Conflict):
            lenient.replace("k", b"fourth", expected=b"first")
        assert lenient.read("k") == b"third"
    finally:
        s3.unconditional = False


def test_requests_and_bytes_are_counted(s3_store: Store, s3: Endpoint) -> None:
    s3_store.exists("k")
    s3.requests.clear()
    before = COUNTER.total()
    s3.faults = [Fault("PUT", "/k", 2)]
    s3_store.write("k", b"12345")
    s3_store.read("k")
    s3_store.read_ranges([("k", 0, 2), ("k", 1, 3)])
    s3_store.list()
    used = COUNTER.total() - before
    assert used.requests == len(s3.requests) == 6  # three tries to write
    assert (used.bytes_written, used.bytes_read) == (5, 8)


def test_a_range_is_as_long_as_its_object_whatever_is_said(s3_store: Store) -> None:
    """A manifest may say 2^62 bytes: no list of so many parts is made, nor asked for."""
    s3_store.write("k", b"value")
    assert bytes(s3_store.read_ranges([("k", 1, 2**62)])[0]) == b"alue"
    assert bytes(s3_store.read_ranges([("k", 2**40, 2**62)])[0]) == b""
    with pytest.raises(StoreError, match="does not exist"):
        s3_store.read_ranges([("none", 1, 2**40)])
