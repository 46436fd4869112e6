"""Bytes to and from stores are counted where they pass, whatever way they take."""

from pathlib import Path

from storage.objects.store import Store
from storage.objects.usage import COUNTER


def test_every_way_in_and_out_is_counted(store: Store, memory: Store, tmp_path: Path) -> None:
    for place in (store, memory):
        before = COUNTER.total()
        place.write("a", b"12345")
        assert place.create("b", [b"12", b"345"])
        assert not place.create("b", b"lost")
        with place.write_stream("c") as out:
            out.write(b"1234567")
        assert place.read("a") == b"12345"
        assert [bytes(part) for part in place.read_ranges([("c", 0, 2), ("c", 5, 7)])] == [
            b"12",
            b"67",
        ]
        after = COUNTER.total()
        assert after.bytes_written - before.bytes_written == 21  # what was refused was sent too
        read = after.bytes_read - before.bytes_read
        assert read == 9 or (place is memory and read == 12)  # near ranges are read as one
