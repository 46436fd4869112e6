"""The error of a step is the cause, not Prefect's word on the tasks that waited for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import pytest
from prefect import flow, tags, task
from prefect.client.orchestration import PrefectClient
from prefect.context import AsyncClientContext, FlowRunContext
from prefect.runtime import task_run
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from tasks.run.flow_options import STEP, forget_results, one_client, result_of
from tasks.run.stage import OPTIONS
from tests.flows.conftest import prefect_api, settings_for

__all__ = ["prefect_api"]  # a fixture
ASKED = (PREFECT_API_URL, PREFECT_API_AUTH_STRING, PREFECT_LOGGING_TO_API_ENABLED)


@task
def breaks() -> int:
    raise RuntimeError("the cause")


@task
def adds(number: int) -> int:
    return number + 1


@task
def own_tags(number: int) -> list[str]:
    return sorted(task_run.tags)


@flow(name="a-step", **STEP)
def a_step(step: int, broken: bool) -> int:
    first = breaks.submit() if broken else adds.submit(1)
    other = adds.submit(5)
    waits = adds.submit(other, wait_for=[first])
    last = adds.submit(waits)
    return result_of(last)


@flow(name="tagged", **STEP)
def tagged(step: int) -> list[str]:
    return result_of(own_tags.submit(step))


@dataclass
class Walked:
    """A result that counts how often someone looks into it."""

    number: int = 2
    looks: ClassVar[int] = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "number":
            Walked.looks += 1
        return super().__getattribute__(name)


@task
def walked() -> tuple[Walked, ...]:
    return (Walked(), Walked())


@task(**OPTIONS)
def counts(
    whole: tuple[Walked, ...],
    parts: list[tuple[Walked, ...]],
    named: dict[str, tuple[Walked, ...]],
    plain: Walked,
) -> int:
    given = [*whole, *parts[0], *parts[1], *named["x"], plain]
    return sum(one.number for one in given)


@flow(name="counted", **STEP)
def counted(step: int) -> int:
    one, other = walked.submit(), walked.submit()
    return result_of(counts.submit(one, [other, other], {"x": other}, Walked()))


@contextlib.contextmanager
def asking(api: str) -> Iterator[None]:
    """During the body Prefect's client asks that server, and sends it no logs."""
    settings = [*settings_for(api).items(), ("PREFECT_LOGGING_TO_API_ENABLED", False)]
    known = {setting.name: setting for setting in ASKED}
    with temporary_settings({known[name]: value for name, value in settings}):
        yield


def inputs_of(prefect_api: str, name: str) -> dict[str, list[object]]:
    """What Prefect noted of a task run's inputs; nothing until it has it."""
    asked = {"task_runs": {"name": {"like_": name}}}
    found = httpx.post(f"{prefect_api}/task_runs/filter", json=asked).json()
    return found[0]["task_inputs"] if found else {}


@flow
def undeclared() -> int:
    return result_of(adds.submit(1))


@flow
def several(forgetful: bool) -> list[int]:
    context, kept, known = FlowRunContext.get(), [], []
    assert context is not None
    for step in range(3):
        kept.append(tagged(step))  # so that no id is used again
        if forgetful:
            forget_results()
        known.append(len(context.run_results))
    return known


@flow
def in_turn(steps: int) -> None:
    for step in range(steps):
        a_step(step, False)


@flow
def by_one_client(steps: int) -> None:
    with one_client():
        in_turn.fn(steps)
    assert AsyncClientContext.get() is None


@pytest.mark.cluster
def test_the_flow_runs_of_all_steps_are_made_by_one_client(
    prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PrefectClient] = []
    init = PrefectClient.__init__

    def counted(self: PrefectClient, *given: Any, **named: Any) -> None:
        made.append(self)
        init(self, *given, **named)

    monkeypatch.setattr(PrefectClient, "__init__", counted)
    with asking(prefect_api):
        in_turn(3)
        assert len(made) >= 3, "Prefect keeps one by itself: one_client may go"
        made.clear()
        by_one_client(3)
        assert len(made) == 1


@pytest.mark.cluster
def test_events_are_not_compressed_between_processes_of_one_machine(prefect_api: str) -> None:
    address = prefect_api.replace("http://", "ws://") + "/events/in"
    with connect(address, subprotocols=[Subprotocol("prefect")]) as connection:
        assert connection.response is not None
        assert "Sec-WebSocket-Extensions" not in connection.response.headers


@pytest.mark.cluster
def test_the_first_failure_is_raised_whatever_waited_for_it(prefect_api: str) -> None:
    with asking(prefect_api):
        assert a_step(1, False) == 8
        with pytest.raises(RuntimeError, match="the cause"):
            a_step(2, True)
        with tags("step 3"):
            assert tagged(3) == []  # a task run with tags waits for the server, a slot for each
        with pytest.raises(ValueError, match=r"Declare it by @flow\(name=…, \*\*RUN\)"):
            undeclared()


@pytest.mark.cluster
def test_prefect_does_not_walk_through_what_tasks_hand_to_each_other(prefect_api: str) -> None:
    with asking(prefect_api):
        Walked.looks = 0
        assert counted(1) == 18
        assert Walked.looks == 9, "each once, by the task itself"
    deadline = time.monotonic() + 20
    while not (inputs := inputs_of(prefect_api, "counts")) and time.monotonic() < deadline:
        time.sleep(0.1)
    # The dashboard's arrows: which tasks' results a task was given.
    assert {name: len(given) for name, given in inputs.items() if given} == {
        "whole": 1,
        "parts": 1,
        "named": 1,
    }


@pytest.mark.cluster
def test_results_of_steps_are_not_noted_for_as_long_as_the_run(prefect_api: str) -> None:
    with asking(prefect_api):
        noted = several(False)
        assert noted[2] > noted[0] > 0, "Prefect forgets by itself: forget_results may go"
        assert several(True) == [0, 0, 0]
