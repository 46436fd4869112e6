"""Which settings may change when a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.live import End, RolledBack, goes_on_as, write_end
from storage.runs.run_store import RunStore
from tasks.run.opening import (
    differing,
    going_on_as,
    keeping_no_less,
    may_change,
    open_run,
    told_kept,
)
from tasks.run.run_record import settings_of


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("rewards.functions.0.deadline", True),
        ("rewards.functions.12.url", True),
        ("rewards.functions.0.model", False),
        ("rewards.functions.0.params.deadline", False),  # of a user's function
        ("rewards.functions", False),
        ("cluster.pools.cpu.workers", True),
        ("data.source.timeout", True),  # of a function, which may be slower here
        ("data.source.params.timeout", False),
        ("data.source.path", False),
        ("storey", False),
    ],
)
def test_where_and_how_others_are_asked_may_change(key: str, may: bool) -> None:
    assert may_change(key) is may


def test_entries_of_lists_of_one_length_are_compared_one_by_one() -> None:
    old = {"functions": [{"a": 1, "b": 2}, 3]}
    assert differing(old, {"functions": [{"a": 1, "b": 4}, 3]}) == ["functions.0.b"]
    assert differing(old, {"functions": [{"a": 1, "b": 2}]}) == ["functions"]


FLOW = "flows.grpo:grpo"


def stored(store: Store, name: str, *words: str) -> tuple[RunStore, GRPOConfig]:
    """A run on record with the settings of `tiny` and some changes."""
    run = RunStore(store, name)
    config = load_recipe(GRPOConfig, "tiny", ["store.uri=file:///elsewhere", *words])
    run.write_run({"config": config.model_dump(mode="json"), "flow": FLOW})
    return run, config


def rolled_back(run: RunStore, child: str) -> None:
    back = RolledBack(to=2, child=child, guard="g", why="It was beyond.")
    write_end(run, End(step=4, rolled_back=back))


def test_a_run_that_was_rolled_back_goes_on_as_its_last_child() -> None:
    store = Store("memory://rolled-back")
    guard = "guards=[{metric: m, above: 1}]"
    run, config = stored(store, "r", guard)
    assert going_on_as(run, config, FLOW) == ("r", config)
    rates = ["train.learning_rate=0.001", "train.learning_rate=0.0001"]
    first, _ = stored(store, "r-rollback-1", guard, rates[0])
    rolled_back(run, first.run)
    _, last = stored(store, "r-rollback-2", guard, rates[1])
    rolled_back(first, "r-rollback-2")
    assert going_on_as(run, config, FLOW) == ("r-rollback-2", last)
    assert goes_on_as(run).run == goes_on_as(first).run == "r-rollback-2"
    # What may change on resuming is given to the child; all else stays the child's own.
    words = ["store.uri=file:///elsewhere", "steps=9", "guards=[{metric: m, above: 2}]"]
    given = load_recipe(GRPOConfig, "tiny", words)
    name, settings = going_on_as(run, given, FLOW)
    assert (name, settings.steps, settings.guards[0].above) == ("r-rollback-2", 9, 2.0)
    assert settings.train.learning_rate == 0.0001
    other = load_recipe(GRPOConfig, "tiny", [*words, "train.learning_rate=1"])
    with pytest.raises(
        ConfigError, match=r"Run r was made with other values of train.learning_rate"
    ):
        going_on_as(run, other, FLOW)


def begun_before(tmp_path: Path) -> tuple[RunStore, str]:
    """A run of a Refrain that knew no bound for registered versions and kept every step."""
    where = f"store.uri=file://{tmp_path}"
    config = load_recipe(GRPOConfig, "tiny", [where]).model_dump(mode="json")
    config["store"] |= {"keep_steps": None}
    del config["store"]["keep_registered"], config["store"]["keep_registered_days"]
    run = RunStore(Store(f"file://{tmp_path}"), "r")
    run.write_run({"config": config, "flow": FLOW})
    return run, where


@pytest.mark.parametrize(
    ("words", "registered", "steps"),
    [
        ([], None, None),
        (["store.keep_registered=10"], 10, None),
        (["store.keep_registered=3", "store.keep_steps=20"], 3, 20),
    ],
)
def test_no_default_of_today_removes_what_an_older_run_kept(
    tmp_path: Path, words: list[str], registered: int | None, steps: int | None
) -> None:
    run, where = begun_before(tmp_path)
    assert settings_of(run).store.keep_registered is None
    asked = load_recipe(GRPOConfig, "tiny", [where, *words])
    opened = open_run(FLOW, asked, resume="r").config
    assert (opened.store.keep_registered, opened.store.keep_steps) == (registered, steps)
    assert len(told_kept(asked, opened)) == (len(words) < 2)


def test_a_form_that_shows_defaults_says_nothing_about_what_is_kept(tmp_path: Path) -> None:
    run, where = begun_before(tmp_path)
    shown = load_recipe(GRPOConfig, "tiny", [where])
    whole = GRPOConfig.model_validate(shown.model_dump(mode="json"))
    assert keeping_no_less(run, whole).store.keep_registered == 10  # a command's are a person's
    assert keeping_no_less(run, whole, filled_in=True).store.keep_registered is None
    typed = load_recipe(GRPOConfig, "tiny", [where, "store.keep_registered=4"])
    assert keeping_no_less(run, typed, filled_in=True).store.keep_registered == 4
