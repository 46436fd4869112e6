"""How a flow begins that nobody has checked before: a server's worker calls it with settings alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import yaml

import tasks.train
from configs.grpo import GRPOConfig
from configs.recipe import find_recipe, load_recipe
from configs.resolving import Machine
from storage.runs.run_lease import LeaseHeld
from storage.runs.run_store import RunStore


class Checked(Exception):
    """The checks were asked; nothing is to start after them."""


def test_settings_that_a_worker_hands_over_are_resolved_before_they_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(config: GRPOConfig, resumed: bool) -> NoReturn:
        assert (config.rollout.dtype, config.rollout.shards, resumed) == ("float32", 4, False)
        raise Checked

    monkeypatch.setattr(tasks.train, "check", check)
    monkeypatch.setattr(tasks.train, "begin_process", lambda: None)
    monkeypatch.setattr(tasks.train, "close_to_others", lambda: None)
    slow = Machine(multiplies_bfloat16=False)
    monkeypatch.setattr(tasks.train, "this_machine", lambda: slow)
    raw = yaml.safe_load(find_recipe("tiny").read_text())
    raw |= {"rollout": {"engine": "transformers"}, "prompts_per_step": 4}
    config = GRPOConfig.model_validate(raw)
    with pytest.raises(Checked):
        tasks.train.train(lambda run, step: None, config, None, None, None)


@pytest.mark.parametrize("alive", [True, False])
def test_the_bars_of_an_earlier_attempt_end_once_this_one_holds_the_run(
    monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    ended: list[int] = []

    @contextlib.contextmanager
    def started(*_: object, waits: bool) -> Iterator[Any]:
        assert waits and ended == []
        if alive:
            raise LeaseHeld("Run tiny-1 is being written by another attempt.")
        nobody = threading.Event()
        yield SimpleNamespace(
            name="tiny-1", head=2, tell=lambda event: None, cancelled_there=nobody
        )

    def shown(run: object) -> NoReturn:
        raise Checked

    config = load_recipe(GRPOConfig, "tiny")
    opened = SimpleNamespace(config=config, name="tiny-1")
    replaced: dict[str, Any] = {
        "attempt": lambda: 2,
        "begun_before": lambda store, family: RunStore(store, "tiny-1"),
        "goes_on_as": lambda files: files,
        "head": lambda files: 2,
        "is_done": lambda files, step: False,
        "check": lambda config, resumed: [],
        "open_run": lambda *_, **__: opened,
        "_this_flow": lambda: "flows.grpo:grpo",
        "started": started,
        "shown": shown,
        "part_from_earlier_attempts": lambda tried, flows: ended.append(tried),
        **dict.fromkeys(("begin_process", "close_to_others"), lambda: None),
    }
    for name, fake in replaced.items():
        monkeypatch.setattr(tasks.train, name, fake)
    with pytest.raises(LeaseHeld if alive else Checked):
        tasks.train.train(lambda run, step: None, config, None, None, None)
    assert ended == ([] if alive else [2])
