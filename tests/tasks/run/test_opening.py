"""Taking over a run that another process may still write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from storage.objects.errors import Conflict
from storage.objects.store import Store
from storage.runs import run_lease
from storage.runs.run_lease import LeaseHeld, RunLease, holder_of
from storage.runs.run_store import RunStore
from tasks.run.facts import OpenedRun
from tasks.run.opening import take_over


def test_the_lease_of_a_process_killed_elsewhere_is_waited_for_where_it_may_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunStore(Store(f"file://{tmp_path}"), "tiny-1")
    opened = cast(
        OpenedRun,
        cast(Any, SimpleNamespace(files=files, resumed=False, origin=None, start=0, first=None)),
    )
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(run_lease, "_host", lambda: "another machine")
        RunLease.acquire(files, "the first attempt", ttl=1.0)
    with pytest.raises(LeaseHeld, match="is being written by the first attempt"):
        take_over(opened)
    lease, _ = take_over(opened, waits=True)
    lease.release()


def test_a_run_that_another_process_began_meanwhile_is_not_begun_again(tmp_path: Path) -> None:
    files = RunStore(Store(f"file://{tmp_path}"), "sums-1")
    files.write_run({"config": {}, "flow": "flows.grpo:grpo"})
    opened = cast(OpenedRun, cast(Any, SimpleNamespace(name="sums-1", files=files, resumed=False)))
    with pytest.raises(Conflict, match=r"sums-1 was begun by another process.*the same command"):
        take_over(opened)
    assert holder_of(files) is None  # it can be gone on with at once
