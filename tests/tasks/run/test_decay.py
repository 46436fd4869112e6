"""Where a decaying learning rate ends, when a run goes on with another number of steps."""

from __future__ import annotations

import uuid

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from storage.objects.store import Store
from storage.runs.commit_log import Commit, commit
from storage.runs.run_store import RunStore
from tasks.run.opening import check_resumable
from tasks.run.run_record import decay_steps
from tests.storage.runs.test_retention import publish_version

FLOW = "flows.grpo:grpo"


def settings(*words: str) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", ["store.uri=file:///elsewhere", *words])


def stored(schedule: str, committed: list[int | None]) -> RunStore:
    """A run that began with steps = 10; committed: where each commit says that its schedule ends."""
    run = RunStore(Store(f"memory://{uuid.uuid4().hex}"), "r")
    config = settings("steps=10", f"train.schedule={schedule}")
    run.write_run({"config": config.model_dump(mode="json"), "flow": FLOW})
    before = publish_version(run, 0)
    for step, ends in enumerate(committed, 1):
        out = publish_version(run, step)
        commit(
            run,
            Commit(
                step=step,
                parent=step - 1,
                refs={},
                version_in=before,
                version_out=out,
                update={} if ends is None else {"steps": ends},
            ),
        )
        before = out
    return run


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("committed", "ends"),
    [
        ([], 10),
        ([10, 10], 10),
        ([10, 10, 20], 20),  # an older Refrain let it grow at a snapshot
        ([None, None], 10),  # one older still said nothing
    ],
)
def test_it_ends_where_it_did(schedule: str, committed: list[int | None], ends: int) -> None:
    run = stored(schedule, committed)
    for steps in (5, 10, 20, 30):
        config = settings(f"steps={steps}", f"train.schedule={schedule}")
        assert decay_steps(config, run) == ends
        if steps > ends:
            with pytest.raises(ConfigError) as caught:
                check_resumable(run, config, FLOW)
            assert str(caught.value) == (
                f"steps = {steps}, but train.schedule = {schedule} of run r ends at a learning rate "
                f"of 0 after step {ends}, so later steps would train nothing. Set steps = {ends}, or "
                "go on in a fork (--fork r), whose schedule ends at its own steps."
            )
        else:
            check_resumable(run, config, FLOW)


def test_a_constant_rate_has_as_many_steps_as_one_likes() -> None:
    run = stored("constant", [10, 10])
    for steps in (5, 10, 30):
        assert decay_steps(settings(f"steps={steps}"), run) == steps
        check_resumable(run, settings(f"steps={steps}"), FLOW)


def test_a_run_that_begins_ends_at_its_own_steps() -> None:
    run = RunStore(Store(f"memory://{uuid.uuid4().hex}"), "r")
    assert decay_steps(settings("steps=7", "train.schedule=cosine"), run) == 7
