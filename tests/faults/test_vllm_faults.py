"""vLLM's worker or its core dies or hangs in a run: as with transformers, it costs time only.

In float32 and with seeds vLLM draws the same tokens whatever it is batched with, so the weights are
compared here too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.ledger import causes, story
from tests.faults.planted import Fault

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
]
WORDS = ("rollout.engine=vllm", "steps=3", "rollout.deadline=30", "cluster.start_timeout=240")
# The third shard of the run: the first of step 2.
SHARD = Fault(id="shard", target="engines.vllm:VllmEngine.generate", nth=3, action="kill")


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


def test_the_core_dies_while_it_loads_weights(disturb, undisturbed) -> None:
    fault = Fault(
        id="sync", target="engines.vllm:VllmEngine.sync", nth=2, action="kill", victim="core"
    )
    _, commits, out = disturb([fault], *WORDS, resumes=0, timeout=600)
    assert causes(commits, "weight_sync") or causes(commits, "rollout"), out
    assert story(commits) == story(undisturbed(*WORDS))
