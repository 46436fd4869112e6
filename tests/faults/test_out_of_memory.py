"""An engine that runs out of memory ends the run in one sentence; no gang is built again for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.runs.commit_log import Commit
from tests.faults.conftest import WORDS
from tests.faults.ledger import committed, story
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

IN_THE_UPDATE = Fault(
    id="memory",
    target="engines.train.optimizer:Optimizer.step",
    action="raise",
    error="OutOfMemoryError",
    nth=2,
)
COUNTED = Fault(  # never happens
    id="join", target="engines.train.fsdp_engine:FSDPEngine.join", action="raise", nth=99
)


@pytest.mark.slow
def test_the_run_ends_in_a_sentence_and_the_gang_is_not_built_again(
    launch: Launch, tmp_path: Path
) -> None:
    planted = Faults(tmp_path / "faults", [IN_THE_UPDATE, COUNTED])
    run = launch(*WORDS, "steps=2", environment=planted.environment)
    code, out = run.end()
    assert code == 1, out
    assert planted.missed == ["join"]
    said = " ".join(out.split())
    assert said.count("OutOfMemory: actor.update on train-0 ran out of device memory, held by") == 1
    assert "Set train.gradient_checkpointing = true, or train.micro_batch_tokens" in said
    assert "To go on from the last step:" in said
    assert "Traceback" not in out
    assert planted.calls("join") == 2  # the actor and the reference once each
    assert [commit.step for commit in committed(run.files)] == [1]
    assert run.children() == []


@pytest.mark.slow
def test_the_run_goes_on_with_the_setting_that_the_sentence_names(
    launch: Launch, tmp_path: Path, undisturbed: Callable[..., list[Commit]]
) -> None:
    planted = Faults(tmp_path / "faults", [IN_THE_UPDATE])
    run = launch(*WORDS, environment=planted.environment)
    assert run.end()[0] == 1
    again = launch("--resume", run.files.run, "train.gradient_checkpointing=true")
    code, out = again.end()
    assert code == 0, out
    assert story(committed(again.files)) == story(undisturbed())
