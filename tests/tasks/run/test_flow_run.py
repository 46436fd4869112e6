"""Which run an earlier attempt of a flow run began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect.states import AwaitingRetry, Cancelled, Pending, Running, State

from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.run import flow_run
from tasks.run.flow_run import FIELD, begun_before

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


def asked(
    monkeypatch: pytest.MonkeyPatch, store: Store, states: list[State], of: UUID | None = THIS
) -> str | None:
    @contextmanager
    def client(sync_client: bool) -> Iterator[Server]:
        yield Server(states)

    monkeypatch.setattr(flow_run, "get_client", client)
    monkeypatch.setattr(flow_run, "flow_run_id", lambda: of)
    return begun_before(store, "tiny")


def test_another_attempt_finds_its_run(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    assert asked(monkeypatch, store, AGAIN) == "tiny-3"


def test_a_first_attempt_begins_a_run(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """Of another flow run in the same store nothing is taken, whatever it is called."""
    assert asked(monkeypatch, store, FIRST) is None
    assert asked(monkeypatch, store, AGAIN, of=None) is None


def test_an_attempt_that_ended_before_a_run_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert asked(monkeypatch, Store(f"file://{tmp_path}/new"), AGAIN) is None
