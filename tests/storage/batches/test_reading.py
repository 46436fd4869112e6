"""Reading takes the bytes asked for, without copies, and notices every kind of damage."""

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from storage.batches import reading
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.documents import digest
from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.objects.store import GAP_BYTES, Store, merge_ranges


class Recording(MemoryFileSystem):
    """A memory file system that notes every range that is read."""

    protocol = "recording"
    ranges: list[tuple[int, int]] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("recording://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        Recording.ranges.append((start, end))
        return super().cat_file(path, start, end, **kwargs)


@pytest.fixture
def recording() -> Store:
    fsspec.register_implementation("recording", Recording, clobber=True)
    Recording.ranges = []
    return Store(f"recording://{uuid.uuid4().hex[:8]}")


def wide(store: Store, rows: int = 50, tokens: int = 5000) -> BatchRef:
    """Rows of `tokens` elements: further apart than ranges that are read as one."""
    offsets = np.arange(rows + 1) * tokens
    columns = {
        "response_ids": Jagged(np.arange(offsets[-1]), offsets),
        "rollout_logprobs": Jagged(np.zeros(offsets[-1], np.float32), offsets),
        "reward": np.arange(rows, dtype=np.float32),
        "worker": [f"w{row}" for row in range(rows)],
    }
    return write_batch(store, f"{uuid.uuid4().hex}.safetensors", columns)


def taken() -> int:
    total = sum(stop - start for start, stop in Recording.ranges)
    Recording.ranges = []
    return total


def test_exactly_the_bytes_asked_for(recording: Store) -> None:
    ref = wide(recording)
    head = ref.column("reward").sources[0].head
    ref.rows(7, 9).fetch(recording, ["response_ids"])
    assert taken() == head + 2 * 5000 * 4
    ref.rows(7, 9).fetch(recording, ["response_ids"])  # the head is known by now
    assert taken() == 2 * 5000 * 4
    ref.take([3, 30, 4]).fetch(recording, ["rollout_logprobs"])
    assert sorted(stop - start for start, stop in Recording.ranges) == [20_000, 40_000]
    taken()
    ref.rows(10, 20).fetch_numpy(recording, "reward")
    assert taken() == 10 * 4
    ref.lengths(recording, "response_ids")
    assert taken() == 0
    ref.rows(5, 5).fetch(recording)
    assert taken() == 0


def test_the_head_is_small(recording: Store) -> None:
    source = wide(recording).column("reward").sources[0]
    assert source.head < 0.01 * recording.size(source.key)


def test_near_ranges_are_read_as_one() -> None:
    ranges = [("a", 100, 110), ("a", 0, 50), ("b", 0, 5), ("a", 105, 120), ("a", 300, 301)]
    merged, places = merge_ranges(ranges, 60)
    assert merged == [("a", 0, 120), ("a", 300, 301), ("b", 0, 5)]
    assert places == [(0, 100), (0, 0), (2, 0), (0, 105), (1, 0)]
    assert GAP_BYTES == 16384


def test_local_files_are_mapped_not_copied(store: Store) -> None:
    count = 64 * 2**20 // 8
    ref = write_batch(
        store,
        "big.safetensors",
        {"response_ids": Jagged(np.zeros(count, np.int64), np.array([0, count // 2, count]))},
    )
    reading.heads(store, set(ref.column("response_ids").sources))
    private = _private_bytes()
    tensor = ref.rows(1, 2).fetch(store)["response_ids"].values()
    assert _private_bytes() - private < 4 * 2**20
    assert tensor.data_ptr() % 8 == 0
    tensor[0] = 7  # changes this process's page only
    assert ref.fetch(store)["response_ids"].values()[count // 2] == 0


def _private_bytes() -> int:
    """Memory of this process that is no page of a file."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Private_Dirty")


def test_verify_reads_everything(store: Store) -> None:
    ref = wide(store, rows=5, tokens=10)
    ref.verify(store)
    flip(store, ref, "rollout_logprobs", byte=3)
    with pytest.raises(ObjectDamaged, match="rollout_logprobs"):
        ref.verify(store)
    ref[["response_ids", "reward"]].verify(store)


def flip(store: Store, ref: BatchRef, name: str, byte: int) -> None:
    """Change one bit of a stored column, behind the store's back."""
    column = ref.column(name)
    (source,) = column.sources
    start = reading.heads(store, {source})[source.digest][name].start
    change(
        store,
        source.key,
        lambda data: (
            data[: start + byte] + bytes([data[start + byte] ^ 1]) + data[start + byte + 1 :]
        ),
    )


def change(store: Store, key: str, how: Callable[[bytes], bytes]) -> None:
    store.write(key, how(store.read(key)))


@pytest.fixture
def ref(memory: Store) -> BatchRef:
    return write_batch(
        memory,
        f"run/{uuid.uuid4().hex}.safetensors",
        {
            "response_ids": [[1, 2], [3, 4, 5], [6]],
            "reward": [0.5, 1, 2],
            "worker": ["a", "bc", ""],
        },
    )


def key_of(ref: BatchRef) -> str:
    (key,) = ref.objects
    return key


def damaged(ref: BatchRef, store: Store, *words: str) -> None:
    """Reading fails with one sentence that has all the words."""
    with pytest.raises(ObjectDamaged) as raised:
        ref.fetch(store)
    text = str(raised.value)
    assert all(word in text for word in (key_of(ref), *words)), text
    assert "\n" not in text
    assert text.endswith(".")


@pytest.mark.parametrize("part", ["whole", "rows"])
def test_a_flipped_bit_names_column_and_row(memory: Store, ref: BatchRef, part: str) -> None:
    for name, byte, row in (("response_ids", 3 * 4 + 1, 1), ("reward", 4, 1), ("worker", 1, 1)):
        flip(memory, ref, name, byte)
        damaged(ref if part == "whole" else ref.rows(0, 2), memory, f"'{name}'", f"Row {row} ")
        assert len(ref.rows(2, 3).fetch(memory)) == 1  # the other rows are fine
        flip(memory, ref, name, byte)


def test_a_flipped_bit_in_the_head(memory: Store, ref: BatchRef) -> None:
    for at in (0, 30, ref.column("reward").sources[0].head - 70):
        reading._heads.clear()
        change(
            memory,
            key_of(ref),
            lambda data, at=at: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
        )
        damaged(ref, memory, "head", "digest")
        change(
            memory,
            key_of(ref),
            lambda data, at=at: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
        )


def test_a_truncated_object(memory: Store, ref: BatchRef) -> None:
    change(memory, key_of(ref), lambda data: data[:-1])
    damaged(ref, memory, "it ends at byte", "row 1", "'worker'")
    reading._heads.clear()
    change(memory, key_of(ref), lambda data: data[:100])
    damaged(ref, memory, "ends after 100 bytes")
    change(memory, key_of(ref), lambda data: b"")
    damaged(ref, memory, "ends after 0 bytes")


def test_swapped_objects(memory: Store, ref: BatchRef) -> None:
    other = write_batch(
        memory,
        "run/other.safetensors",
        {"response_ids": [[9, 9], [9, 9, 9], [9]], "reward": [0, 0, 0], "worker": ["x", "yz", ""]},
    )
    ref.fetch(memory)
    memory.write(key_of(ref), memory.read(key_of(other)))
    damaged(ref, memory, "Row 0")  # the head is known, so the rows are found out
    reading._heads.clear()
    damaged(ref, memory, "head", "digest")


def test_a_missing_object(memory: Store, ref: BatchRef) -> None:
    memory.delete([key_of(ref)])
    for _ in range(2):
        with pytest.raises(ObjectMissing, match=key_of(ref)):
            ref.fetch(memory)
        reading._heads.clear()


def test_an_object_of_another_kind(memory: Store, ref: BatchRef) -> None:
    value = ref.to_json()
    value["columns"]["reward"][1] = "F64"  # type: ignore[index]
    with pytest.raises(ObjectDamaged, match="holds no column 'reward' of type"):
        BatchRef.from_json(value).fetch(memory)


def test_heads_are_kept_by_content(memory: Store) -> None:
    reading._heads.clear()
    for number in range(reading.HEADS + 5):
        ref = write_batch(memory, f"many/{number}", {"reward": [float(number)]})
        ref.fetch_numpy(memory, "reward")
    assert len(reading._heads) == reading.HEADS


def test_prefetch_of_local_files(store: Store) -> None:
    ref = wide(store, rows=3, tokens=10)
    ref.prefetch(store).result(timeout=30)
    missing = wide(store, rows=3, tokens=10)
    store.delete(sorted(missing.objects))
    missing.prefetch(store)  # the error is for fetch to raise
    with pytest.raises(ObjectMissing):
        missing.fetch(store)


def test_tensors_outlive_their_file(store: Store) -> None:
    ref = wide(store, rows=3, tokens=10)
    found = ref.fetch(store)["response_ids"]
    store.delete(sorted(ref.objects))
    assert torch.equal(found.values(), torch.arange(30))
    assert not os.path.exists(store.url(key_of(ref)).removeprefix("file://"))


def forged(store: Store, change: Callable[[dict, dict, dict[str, np.ndarray]], None]) -> BatchRef:
    """A batch whose head was written by somebody else: its digests are right, its numbers are not."""
    ref = write_batch(
        store,
        "forged.safetensors",
        {"ids": [[1, 2], [3], [4, 5, 6]], "reward": np.array([1.0, 2.0, 3.0], np.float32), "s": ["a", "bc", ""]},
    )  # fmt: skip
    data = store.read("forged.safetensors")
    size = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + size]))
    note = json.loads(header["__metadata__"]["refrain"])
    body = bytearray(data[8 + size :])
    names = [note["columns"][name]["offsets"] for name in ("ids", "s")]
    arrays = {n: np.frombuffer(body, "<i8", 4, header[n]["data_offsets"][0]) for n in names}
    change(header, note, {"ids": arrays[names[0]], "s": arrays[names[1]]})
    header["__metadata__"]["refrain"] = json.dumps(note)
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    (source,) = ref.columns["ids"].sources
    inner = source.head - 8 - size
    head += bytes(body[:inner])
    key = f"{uuid.uuid4().hex}.safetensors"
    store.write(key, head + bytes(body[inner:]))
    value = ref.to_json()
    value["sources"] = [[key, 3, len(head), digest(head)]]  # type: ignore[index]
    return BatchRef.from_json(value)


def _set(where: dict, **values: object) -> None:
    where.update(values)


FORGERIES: dict[str, tuple[Callable[[dict, dict, dict[str, np.ndarray]], object], str]] = {
    "offsets that decrease": (lambda h, n, o: o["ids"].__setitem__(1, 4), "go back in row 1, from 4"),
    "negative offsets": (lambda h, n, o: o["ids"].__setitem__(0, -2), "begin at -2, not 0"),
    "offsets from one": (lambda h, n, o: o["ids"].__setitem__(0, 1), "begin at 1, not 0"),
    "offsets past the end": (lambda h, n, o: o["ids"].__setitem__(3, 7), "end at 7; it has 6"),
    "offsets before the end": (lambda h, n, o: o["s"].__setitem__(slice(2, 4), 2), "end at 2; it has 3"),
    "offsets that overflow": (lambda h, n, o: o["s"].__setitem__(1, 2**63 - 1), "go back in row 1"),
    "a negative size": (lambda h, n, o: _set(h["reward"], shape=[-3]), "a size of reward is -3"),
    "a huge size": (lambda h, n, o: _set(h["reward"], shape=[2**62, 2**62]), "needs"),
    "a size that is no number": (lambda h, n, o: _set(h["reward"], shape=[True, 3.0]), "is True"),
    "a place of another column": (
        lambda h, n, o: _set(h["reward"], data_offsets=h["ids"]["data_offsets"]), "its shape",
    ),
    "an overlap": (
        lambda h, n, o: _set(h["reward"], data_offsets=[h["ids"]["data_offsets"][0], h["ids"]["data_offsets"][0] + 12]),
        "begins at",
    ),
    "places that go back": (lambda h, n, o: _set(h["reward"], data_offsets=[12, 0]), "takes the bytes 12 to 0"),
    "a place before the first": (lambda h, n, o: _set(h["reward"], data_offsets=[-12, 0]), "is -12"),
    "another number of rows": (lambda h, n, o: _set(n, rows=2), "holds 2 rows, the reference says 3"),
    "rows without number": (lambda h, n, o: _set(n, rows=2**80), "number of rows is"),
    "a type that there is not": (lambda h, n, o: _set(h["reward"], dtype="F3"), "reward is 'F3'"),
    "a dense column with offsets": (lambda h, n, o: _set(n["columns"]["ids"], kind="dense"), "is dense"),
    "checksums in the values": (
        lambda h, n, o: _set(h["_row_checksums.ids"], data_offsets=[2**40, 2**40 + 12]), "after the head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_head_whose_numbers_do_not_agree_is_refused(name: str, tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    honest = forged(store, lambda header, note, offsets: None)
    assert [list(row) for row in honest.fetch_list(store, "ids")] == [[1, 2], [3], [4, 5, 6]]  # type: ignore[call-overload]
    change, reason = FORGERIES[name]
    ref = forged(store, lambda header, note, offsets: change(header, note, offsets) and None)
    with pytest.raises(ObjectDamaged, match="is no batch object") as refused:
        ref.verify(store)
    assert reason in str(refused.value)
