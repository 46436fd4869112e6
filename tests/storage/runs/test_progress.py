"""What a run says of itself between two commits."""

from __future__ import annotations

import pytest

from storage.audit.audit import audit
from storage.objects.errors import ObjectDamaged
from storage.runs.live import Phase, Progress, read_progress, remove_progress, write_progress
from storage.runs.run_store import RunStore
from tests.storage.audit import small_run

SAID = Progress(
    epoch=2,
    step=3,
    steps=20,
    phases=(Phase(name="sampling", done=12, total=64, unit="shards", seconds=4.5),),
    seconds_left=61.0,
)


def test_the_last_word_counts_until_it_is_removed(run: RunStore) -> None:
    assert read_progress(run) is None
    write_progress(run, Progress(epoch=2, steps=20, doing=Phase(name="Starting engines")))
    write_progress(run, SAID)
    assert read_progress(run) == SAID
    remove_progress(run)
    remove_progress(run)
    assert read_progress(run) is None


def test_an_audit_minds_neither_it_nor_one_that_is_torn(run: RunStore) -> None:
    small_run.make(run)
    write_progress(run, SAID)
    assert audit(run).good
    assert audit(run).orphans == audit(run).unfinished == []
    run.store.write(f"{run.run}/progress.json", b"{")
    assert audit(run).good
    with pytest.raises(ObjectDamaged, match=r"run/progress\.json is damaged"):
        read_progress(run)
