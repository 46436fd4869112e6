"""Which attempt of a flow run this is, and which run an earlier one began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Crashed,
    Pending,
    Retrying,
    Running,
    Scheduled,
    State,
)

from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.run import flow_run
from tasks.run.flow_run import FIELD, attempt, begun_before

THIS = uuid4()
FIRST: list[State] = [Pending(), Running()]
AGAIN: list[State] = [*FIRST, Cancelled(), AwaitingRetry(), Pending(), Running()]


class Server:
    """Prefect's, of which a flow run's states are asked."""

    def __init__(self, states: list[State]) -> None:
        self.states = states

    def read_flow_run_states(self, identity: UUID) -> list[State]:
        assert identity == THIS
        return self.states


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"file://{tmp_path}")
    runs: dict[str, dict[str, str]] = {
        "tiny-1": {},
        "tiny-2": {FIELD: str(uuid4())},
        "tiny-3": {FIELD: str(THIS)},
        "tiny-4": {FIELD: str(THIS)},  # by a rollback of tiny-3
        "other-1": {FIELD: str(THIS)},
    }
    for name, begun_by in runs.items():
        RunStore(made, name).write_run({"config": {}, **begun_by})
    (tmp_path / "tiny-1 (copy)").mkdir()  # of a person, and no name of a run
    return made


def attempts(monkeypatch: pytest.MonkeyPatch, states: list[State], of: UUID | None = THIS) -> int:
    @contextmanager
    def client(sync_client: bool) -> Iterator[Server]:
        yield Server(states)

    monkeypatch.setattr(flow_run, "get_client", client)
    monkeypatch.setattr(flow_run, "flow_run_id", lambda: of)
    return attempt()


def test_attempts_are_counted_by_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempts(monkeypatch, FIRST) == 1
    assert attempts(monkeypatch, AGAIN) == 2
    assert attempts(monkeypatch, [*FIRST, Crashed(), Scheduled(), *FIRST]) == 2
    assert (
        attempts(monkeypatch, [*FIRST, AwaitingRetry(), Retrying(), AwaitingRetry(), Retrying()])
        == 3
    )
    assert attempts(monkeypatch, [], of=None) == 1


def begun(monkeypatch: pytest.MonkeyPatch, store: Store, of: UUID | None = THIS) -> str | None:
    monkeypatch.setattr(flow_run, "flow_run_id", lambda: of)
    found = begun_before(store, "tiny")
    return None if found is None else found.run


def test_another_attempt_finds_its_run(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    assert begun(monkeypatch, store) == "tiny-3"


def test_of_another_flow_run_in_the_same_store_nothing_is_taken(
    monkeypatch: pytest.MonkeyPatch, store: Store, tmp_path: Path
) -> None:
    assert begun(monkeypatch, store, of=uuid4()) is None
    assert begun(monkeypatch, store, of=None) is None
    assert begun(monkeypatch, Store(f"file://{tmp_path}/new")) is None
