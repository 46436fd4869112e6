"""Which names of flow runs are a person's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import pytest
from prefect.utilities.names import generate_slug

from tasks.run import flow_run
from tasks.run.flow_run import NOT_BEGUN, evaluation_name, made_up, name_after, name_before


def test_names_that_prefect_made_up_are_known() -> None:
    """Those of its server, of its form (as 3.7.7 fills them in), and ours for the time before."""
    for _ in range(500):
        name = generate_slug(2)
        assert made_up(name), name
    for name in ("beta3-lyrae", "omega417-uxmal-reach", "pi62-canis-majoris-b", f"tiny{NOT_BEGUN}"):
        assert made_up(name), name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "lr sweep 3",
            "tiny",
            "my-run",
            "fast-run",
            "alpha-test",
            "beta-sweep-b",
            "beta3",
            "Brave-Cat",
        ),
        *("tiny-20261129-034545-ab12", "qwen2-lora", "run-7", "brave-cat-2", "", "alpha3_lyrae"),
        # Of models, whose names begin as the form's do.
        *("phi3-mini", "phi4-mini-reasoning", "phi2-lora", "mu2-test", "beta3-small-b", "nu7-deep"),
    ],
)
def test_other_names_are_a_persons(name: str) -> None:
    assert not made_up(name)


class Server:
    """A flow run at a server, and the context that it is called in."""

    def __init__(self, name: str, deployed: bool = True, scheduled: bool = False) -> None:
        self.flow_run = SimpleNamespace(
            id="1",
            name=name,
            tags=["grpo"],
            deployment_id="2" if deployed else None,
            auto_scheduled=scheduled,
        )
        self.name, self.tags = name, ["grpo"]

    def get(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update_flow_run(self, _: str, **changes: Any) -> None:
        vars(self).update(changes)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    def at(name: str, **how: bool) -> Server:
        server = Server(name, **how)
        monkeypatch.setattr(flow_run, "FlowRunContext", server)
        monkeypatch.setattr(flow_run, "get_client", lambda sync_client: server)
        called = SimpleNamespace(name=name, parameters={"config": SimpleNamespace(run="tiny-1-a")})
        monkeypatch.setattr(flow_run, "flow_run", called)
        return server

    return at


@pytest.mark.parametrize(
    ("name", "how", "shown", "tags"),
    [
        ("phi3-mini", {}, "phi3-mini", ["tiny-1-a"]),
        ("lr sweep / 3", {}, "lr sweep / 3", ["tiny-1-a"]),
        ("tiny-llama", {}, "tiny-1-a", ["tiny-llama"]),  # a person's, or the server's
        ("beta3-lyrae", {}, "tiny-1-a", ["beta3-lyrae"]),
        ("tiny-llama", {"scheduled": True}, "tiny-1-a", []),
        ("tiny-llama", {"deployed": False}, "tiny-1-a", []),
    ],
)
def test_a_name_that_may_be_typed_is_the_flow_runs_or_a_tag(
    at: Any, name: str, how: dict[str, bool], shown: str, tags: list[str]
) -> None:
    server = at(name, **how)
    name_before("tiny")
    name_after("tiny-1-a")
    name_after("tiny-1-a")  # a later attempt
    assert (server.name, server.tags) == (shown, ["grpo", *tags])


def test_so_it_is_of_an_evaluation(at: Any) -> None:
    server = at("tiny-llama")
    assert evaluation_name() == "evaluate tiny-1-a" and server.tags == ["grpo", "tiny-llama"]
    server = at("phi3-mini")
    assert evaluation_name() == "phi3-mini" and server.tags == ["grpo"]
