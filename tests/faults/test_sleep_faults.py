"""Engines that share devices die or fail in the middle of a turn: it costs time only."""

from __future__ import annotations

import pytest

from tests.faults.ledger import story
from tests.faults.planted import Fault

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
WORDS = ("cluster.roles.rollout=train", "cluster.share_devices=true", "steps=3")


@pytest.mark.parametrize(
    ("target", "nth"),
    [
        ("engines.rollout.engine:RolloutEngine.sleep", 2),
        ("engines.rollout.engine:RolloutEngine.wake", 2),
        ("engines.train.fsdp_engine:FSDPEngine.offload", 3),
        ("engines.train.fsdp_engine:FSDPEngine.onload", 2),
        # While the engines that sample sleep.
        ("engines.train.fsdp_engine:FSDPEngine.update", 2),
        # While the trainer is away.
        ("engines.rollout.engine:RolloutEngine.generate", 3),
    ],
)
def test_the_worker_dies_in_a_turn(disturb, undisturbed, target: str, nth: int) -> None:
    fault = Fault(id="turn", target=target, action="kill", nth=nth)
    _, commits, _ = disturb([fault], *WORDS, resumes=0, timeout=300)
    assert story(commits) == story(undisturbed(*WORDS))


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_an_engine_hangs_in_its_turn(disturb, undisturbed, method: str) -> None:
    target = f"engines.rollout.engine:RolloutEngine.{method}"
    fault = Fault(id="turn", target=target, action="hang", nth=2)
    _, commits, _ = disturb([fault], *WORDS, resumes=0, timeout=300)
    assert story(commits) == story(undisturbed(*WORDS))
