"""What a store says of itself is forged: one sentence, no memory for a number that is only said, no
file outside the store. The digests are right, as who writes to a store can make them."""

from __future__ import annotations

import json
import os
import resource
import zlib
from base64 import b85encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects import documents
from storage.objects.documents import digest
from storage.objects.errors import ObjectDamaged, StoreError
from storage.objects.node_cache import NodeCache
from storage.objects.store import Store
from storage.prompts.cursor import Cursor
from storage.runs import commit_log, seen_rows
from storage.runs.commit_log import head, read_commit
from storage.runs.run_store import RunStore, ancestry, committer, origin_of
from storage.runs.tensor_changes import BLOCK, HEAD, decode, encode
from storage.runs.weights import (
    BaseVersion,
    WeightsRef,
    open_chain,
    open_manifest,
    stream,
    weights_digest,
)
from storage.runs.weights_writing import publish

SPARE = 512 * 2**20  # bytes of memory that reading a forged object may take beside the process's


@pytest.fixture
def bounded() -> Any:
    """No more memory than there is in use now and SPARE."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def forged(run: RunStore, key: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a document's body and make its digest anew."""
    document = json.loads(run.store.read(key))
    change(document["body"])
    run.store.write(key, documents.encode(document["format"], document["body"]))


def sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 1000
    return text


# ----- documents


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"format": [], "digest": "", "body": {}}',
        b'{"format": {"a": 1}, "digest": "", "body": {}}',
        b'{"format": "refrain.run/2", "digest": "", "body": {"a": NaN}}',
        b'{"format": "refrain.run/2", "digest": "", "body": {"a": '
        + b"[" * 900
        + b"]" * 900
        + b"}}",
        b'{"format": "refrain.run/2", "digest": "", "body": {"a": "\\ud800"}}',
        b'{"format": "refrain.run/2", "digest": 7, "body": []}',
        b'{"format": "' + b"x" * 10_000 + b'", "digest": 7, "body": {}}',
        b"\xff\xfe",
        b"9" * 5000,
    ],
)
def test_a_document_of_any_bytes(run: RunStore, data: bytes) -> None:
    run.store.write(run.run_json_key, data)
    with pytest.raises(ObjectDamaged) as error:
        run.read_run()
    assert run.run_json_key in sentence(error)


@pytest.mark.parametrize(
    "body", [{}, {"config": 3}, {"config": None}, {"config": {"rewards": 3, "model": []}}]
)
def test_a_run_of_before_without_sense(run: RunStore, body: dict[str, Any]) -> None:
    run.store.write(run.run_json_key, documents.encode("refrain.run/1", body))
    try:
        run.read_run()
    except ObjectDamaged as error:
        assert run.run_json_key in str(error)


def test_a_commit_of_before_without_sense(run: RunStore) -> None:
    for body in ({"refs": [1]}, {"refs": {"a": 1}}, {"step": 1}):
        run.store.write(run.commit_key(1), documents.encode("refrain.commit/1", body))
        with pytest.raises(ObjectDamaged) as error:
            read_commit(run, 1)
        assert run.commit_key(1) in sentence(error)


# ----- names that lead out of the store

AWAY = ("../secret", "/etc/passwd", "a/../../secret", "a//b", "", ".", "a\\b", "a\0b")


@pytest.mark.parametrize("name", AWAY)
def test_no_range_lies_outside_the_store(store: Store, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789")
    store.write("a/b", b"1")
    for source in (store, NodeCache(store, tmp_path / "cache", 2**20)):
        with pytest.raises(ValueError, match="is no relative POSIX path"):
            source.read_ranges([(name, 0, 10)])


@pytest.mark.parametrize("name", AWAY)
def test_a_manifest_names_files_of_its_folder(run: RunStore, tmp_path: Path, name: str) -> None:
    """The file is there and has the bytes that are said; even so it is not read."""
    ref = published(run)
    secret = torch.arange(4.0).numpy().tobytes()
    (tmp_path / "secret").write_bytes(secret)

    def elsewhere(body: dict[str, Any]) -> None:
        body["files"][name] = {"nbytes": 16, "digest": digest(secret)}
        body["tensors"]["w"] |= {"file": name, "start": 0, "stop": 16}

    forged(run, f"{ref.key}/manifest.json", elsewhere)
    with pytest.raises(ObjectDamaged, match="leads out of the store") as error:
        list(stream(run.store, ref))
    sentence(error)


@pytest.mark.parametrize("name", AWAY)
def test_no_other_record_leads_out(run: RunStore, name: str) -> None:
    for build in (
        lambda: WeightsRef(version=1, key=name, digest="", nbytes=0),
        lambda: BaseVersion(key=name, digest=""),
        lambda: commit_log.ListsRef(key=name, digest="", nbytes=0),
        lambda: BatchRef.from_json(a_ref(run, lambda ref: ref["sources"][0].__setitem__(0, name))),
    ):
        with pytest.raises(ValueError, match="leads out of the store|no relative POSIX path"):
            build()


def test_lists_fill_in_lists_alone(run: RunStore) -> None:
    body = {"refs": {}, "carried": [], "dropped_rows": {}, "attempts": [], "step": 7}
    data = documents.encode(commit_log.LISTS_FORMAT, body)
    run.store.write("run/steps/000001/lists-a.json", data)
    lists = {"key": "run/steps/000001/lists-a.json", "digest": digest(data), "nbytes": len(data)}
    assert commit_log.attach(run, "k", {"step": 1, "lists": lists})["step"] == 1


@pytest.mark.timeout(20)
def test_a_pipe_is_no_object(store: Store, tmp_path: Path) -> None:
    """It would never end; so would a device be."""
    store.write("a", b"1")
    os.mkfifo(tmp_path / "store" / "pipe")
    (tmp_path / "store" / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(StoreError, match="no regular file"):
            store.read(name)
        with pytest.raises(StoreError, match="no regular file"):
            store.read_ranges([(name, 0, 10)])


# ----- numbers


def published(run: RunStore) -> WeightsRef:
    return publish(run.store, run.run, 1, [("w", torch.arange(4.0))], {"config.json": b"{}"})


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2**61], "start": 0, "stop": 2**63},
        {"shape": [0, 2**62, 2**62], "start": 0, "stop": 0},
        {"shape": [-4], "start": 0, "stop": 0},
        {"shape": [4], "start": -16, "stop": 0},
        {"shape": [10**4000]},
        {"dtype": "F8"},
        {"dtype": "U8"},
        {"start": 0, "stop": 2**70},
        {"form": "changed"},
        {"form": "same", "start": 0, "stop": 0},
        {"form": "other"},
    ],
)
def test_places_of_a_tensor(run: RunStore, bounded: None, change: dict[str, Any]) -> None:
    ref = published(run)
    forged(run, f"{ref.key}/manifest.json", lambda body: body["tensors"]["w"].update(change))
    with pytest.raises(ObjectDamaged) as error:
        list(stream(run.store, ref))
    assert f"{ref.key}/manifest.json" in sentence(error)


@pytest.mark.parametrize("size", [2**34, 2**62])
def test_a_file_that_is_said_to_be_large(run: RunStore, bounded: None, size: int) -> None:
    """All that the manifest says agrees, and its digest with the reference: the file is short."""
    ref = published(run)

    def enlarged(body: dict[str, Any]) -> None:
        (file,) = {entry["file"] for entry in body["tensors"].values()}
        body["files"][file]["nbytes"] = size
        body["tensors"]["w"] |= {"dtype": "U8", "shape": [size], "start": 0, "stop": size}
        entry = body["tensors"]["w"]
        body["digest"] = weights_digest([("w", "U8", [size], entry["digest"])])

    forged(run, f"{ref.key}/manifest.json", enlarged)
    body = json.loads(run.store.read(f"{ref.key}/manifest.json"))["body"]
    with pytest.raises(ObjectDamaged, match="the object ends within it") as error:
        list(stream(run.store, ref.model_copy(update={"digest": body["digest"]})))
    sentence(error)


@pytest.mark.parametrize("size", [2**34, 2**62])
def test_the_head_of_a_batch_that_is_said_to_be_large(
    run: RunStore, bounded: None, size: int
) -> None:
    ref = BatchRef.from_json(a_ref(run, lambda ref: ref["sources"][0].__setitem__(2, size)))
    with pytest.raises(ObjectDamaged, match="before the end of its head") as error:
        ref.fetch_numpy(run.store, "reward")
    sentence(error)


def a_ref(run: RunStore, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    ref = write_batch(run.store, "run/b.safetensors", {"reward": np.arange(8, dtype="f4")})
    found: dict[str, Any] = json.loads(json.dumps(ref.to_json()))
    change(found)
    return found


def bomb(width: int, rows: int) -> str:
    """As many equal row numbers, packed."""
    packing = zlib.compressobj(9)
    block = bytes(width * 2**20)
    packed = b"".join(packing.compress(block) for _ in range(rows >> 20)) + packing.flush()
    return f"{width}:{b85encode(packed).decode()}"


@pytest.mark.parametrize(("width", "rows"), [(1, 2**28), (8, 2**26)])
def test_packed_row_numbers(run: RunStore, bounded: None, width: int, rows: int) -> None:
    packed = bomb(width, rows)
    assert len(packed) < 1_000_000

    def inflate(ref: dict[str, Any]) -> None:
        ref["rows"] = rows
        ref["views"][0][1] = packed

    with pytest.raises(ValueError, match="Malformed batch reference: packed row numbers") as error:
        BatchRef.from_json(a_ref(run, inflate))
    sentence(error)


@pytest.mark.parametrize("rows", [-1, 2**62, 10**30])
def test_rows_without_a_column(rows: int) -> None:
    value = {"format": "refrain.batch/1", "rows": rows, "sources": [], "views": [], "columns": {}}
    with pytest.raises(ValueError, match="Malformed batch reference: it has"):
        BatchRef.from_json(value)


@pytest.mark.parametrize(
    ("count", "width"), [(2**40, 2), (2**33, 4), (BLOCK + 1, 2), (1, 8), (1, 0), (2**64 - 1, 2)]
)
def test_a_difference_that_asks_for_gigabytes(bounded: None, count: int, width: int) -> None:
    """zstd makes gigabytes of zeros of a few kilobytes; a block has 4 Mi elements at most."""
    small = bytes(pa.Codec("zstd").compress(bytes(64), asbytes=True))
    data = HEAD.pack(count, width, len(small), len(small)) + small * 2
    with pytest.raises(ObjectDamaged, match="a block has"):
        decode(memoryview(data), np.zeros(16, np.uint8), 2)


def test_a_difference_within_bounds_is_read() -> None:
    old = np.arange(2 * BLOCK // 1024, dtype=np.uint16)
    data = b"".join(encode((old + 1).view(np.uint8), old.view(np.uint8), 2))
    assert (decode(memoryview(data), old.view(np.uint8), 2).view(np.uint16) == old + 1).all()


@pytest.mark.parametrize("adapter", [{"rank": 0, "alpha": 1}, {"rank": 2, "alpha": 1}])
def test_an_adapter_without_rank_or_base(run: RunStore, adapter: dict[str, Any]) -> None:
    ref = published(run)
    forged(run, f"{ref.key}/manifest.json", lambda body: body.update(adapter=adapter))
    with pytest.raises(ObjectDamaged, match=r"rank|names no base") as error:
        open_manifest(run.store, ref)
    sentence(error)


def test_versions_that_are_each_others_base(run: RunStore) -> None:
    first = published(run)
    second = publish(run.store, run.run, 2, [("w", torch.ones(4))], {})
    for one, other in ((first, second), (second, first)):
        base = {"key": other.key, "digest": other.digest}
        forged(run, f"{one.key}/manifest.json", lambda body, base=base: body.update(base=base))
    with pytest.raises(ObjectDamaged, match="its own base"):
        open_chain(run.store, first)


# ----- runs


@pytest.mark.timeout(20)
def test_runs_that_begin_at_each_other(run: RunStore) -> None:
    weights = WeightsRef(version=1, key="run/weights/v000001", digest="", nbytes=0)
    for name, other in (("run", "b"), ("b", "run")):
        origin = {"run": other, "step": 1, "at": 1, "commit_digest": "", "weights": weights}
        origin |= {"trainer_state": True, "cursor": True, "weights": weights.model_dump()}
        RunStore(run.store, name).write_run({"origin": origin})
    for walk in (
        lambda: list(ancestry(run)),
        lambda: committer(run, 0),
        lambda: seen_rows.seen_before(run),
    ):
        with pytest.raises(ObjectDamaged, match="its own origin") as error:
            walk()
        sentence(error)


@pytest.mark.parametrize("name", ["../other", "/etc", "", "a/b"])
def test_an_origin_of_no_run(run: RunStore, name: str) -> None:
    run.write_run({"origin": {"run": name, "step": 1, "at": 1}})
    with pytest.raises(ObjectDamaged, match="is no valid origin: run") as error:
        origin_of(run)
    sentence(error)


def test_folders_with_digits_of_other_scripts(run: RunStore) -> None:
    """`²` is a digit for str.isdigit, and no number."""
    for name in ("²", "٣", "000001"):
        run.store.write(f"run/steps/{name}/x", b"1")
        run.store.write(f"run/weights/v{name}/x", b"1")
    assert (run.steps(), run.versions()) == ([1], [1])


def test_digests_of_rows(run: RunStore, bounded: None) -> None:
    run.store.write("run/seen.u64", b"123")
    with pytest.raises(ObjectDamaged, match=r"run/seen.u64 is damaged: it has 3 bytes"):
        seen_rows.seen_before(run)
    run.store.write("run/seen.u64", bytes(8))
    run.store.write("run/rows.u64", bytes(80))
    cursor = Cursor(epoch=1, position=0, seed=1, order="shuffled", size=2**40, digest="")
    with pytest.raises(ObjectDamaged, match="its data have 10"):
        seen_rows.seen_at(run, cursor, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [2**200, -(2**200), -1])
def test_a_head_of_any_step(run: RunStore, step: int) -> None:
    body = {"step": step, "commit_digest": ""}
    run.store.write(run.head_key, documents.encode("refrain.head/1", body))
    try:
        head(run)
    except StoreError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("kind", "texts"), [("str", [b"\xff\xfe"]), ("json", [b"{"]), ("json", [b"[" * 100_000])]
)
def test_texts_that_are_none(store: Store, kind: str, texts: list[bytes]) -> None:
    from storage.batches.reading import ReadColumn

    edges = np.cumsum([0, *map(len, texts)])
    values = np.frombuffer(b"".join(texts), np.uint8)
    column = ReadColumn(kind=kind, dtype="U8", shape=(), values=values, offsets=edges)  # type: ignore[arg-type]
    with pytest.raises(ObjectDamaged, match=f"A row of a {kind} column is damaged") as error:
        column.rows()
    sentence(error)
