"""vLLM's worker or its core dies or hangs in a run: as with transformers, it costs time only.

In float32 and with seeds vLLM draws the same tokens whatever it is batched with, so the weights are
compared here too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.ledger import causes, story
from tests.faults.planted import Fault
from tests.faults.test_matrix import FLOW, TRAIN

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
]
WORDS = ("rollout.engine=vllm", "steps=3", "rollout.deadline=30", "cluster.start_timeout=240")
# The third shard of the run: the first of step 2.
SHARD = Fault(
    id="shard", target="engines.rollout.engine:RolloutEngine.generate", nth=3, action="kill"
)


@pytest.fixture(autouse=True, scope="module")
def vllm() -> None:
    pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("victim", "action", "cause"),
    [
        ("self", "kill", "its process ended"),
        ("core", "kill", "is dead: its process"),
        ("core", "stop", "did not end within 30 s"),
        ("self", "stop", "did not end within 30 s"),
    ],
)
def test_vllm_dies_in_a_shard(disturb, undisturbed, victim: str, action: str, cause: str) -> None:
    fault = replace(SHARD, action=action, victim=victim)
    _, commits, out = disturb([fault], *WORDS, resumes=0, timeout=600)
    assert any(cause in found for found in causes(commits, "rollout")), out
    assert story(commits) == story(undisturbed(*WORDS))


def test_vllm_raises_in_a_shard(disturb, undisturbed) -> None:
    """An error of the code itself: the run ends with it and is resumed."""
    _, commits, out = disturb([replace(SHARD, action="raise")], *WORDS, timeout=600)
    assert "planted" in out
    assert story(commits) == story(undisturbed(*WORDS))


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_the_core_while_it_loads_weights(disturb, undisturbed, action: str) -> None:
    fault = Fault(
        id="sync",
        target="engines.rollout.engine:RolloutEngine.sync",
        nth=2,
        action=action,
        victim="core",
    )
    _, commits, out = disturb([fault], *WORDS, resumes=0, timeout=600)
    assert causes(commits, "weight_sync") or causes(commits, "rollout"), out
    assert story(commits) == story(undisturbed(*WORDS))


@pytest.mark.parametrize("stage", ["update", "weight_sync"])
def test_a_train_rank_dies_beside_vllm(disturb, undisturbed, stage: str) -> None:
    fault = replace(TRAIN[stage], nth=2)
    _, commits, out = disturb([fault], *WORDS, resumes=0, timeout=600)
    assert causes(commits, stage), out
    assert story(commits) == story(undisturbed(*WORDS))


@pytest.mark.parametrize("stage", ["start", "rollout", "update", "weight_sync", "committed"])
def test_the_flow_dies_beside_vllm(disturb, undisturbed, stage: str) -> None:
    """vLLM's processes go with it, and those of the resumed run sample the same tokens."""
    fault = replace(FLOW[stage], nth=min(FLOW[stage].nth, 2))
    _, commits, _ = disturb([fault], *WORDS, timeout=600)
    assert story(commits) == story(undisturbed(*WORDS))
