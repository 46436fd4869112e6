"""A process dies, hangs or raises at every stage of a step: it costs time, and nothing else.

Each case ends with the weights of an undisturbed run, bit for bit, and with a ledger that balances.
"""

from __future__ import annotations

import pytest

from tests.faults.conftest import STEPS
from tests.faults.ledger import causes, story
from tests.faults.planted import Fault

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_faults_of_all_workers_in_one_run(disturb, undisturbed) -> None:
    """The default suite's share: one fault after the other, in every kind of worker."""
    run, commits, out = disturb(
        [
            Fault(id="sampling", target="engines.hf_decoding:Decoding.step", nth=12, action="kill"),
            Fault(id="scoring", target="engines.scoring:ScoringEngine.score", nth=3, action="kill"),
            Fault(
                id="half-applied",
                target="engines.optimizer:Optimizer.step",
                nth=2,
                when="after",
                action="kill",
            ),
            Fault(id="publishing", target="storage.weights:_finish", nth=3, action="kill"),
            Fault(id="marking", target="storage.snapshots:mark", nth=1, action="raise"),
        ]
    )
    assert story(commits) == story(undisturbed())
    assert any("its process ended" in cause for cause in causes(commits, "rollout")), out
    assert any("its process ended" in cause for cause in causes(commits, "update")), out
    assert causes(commits, "weight_sync") and causes(commits, "snapshot")
