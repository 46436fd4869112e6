"""A rank dies whose masters are remainders and whose moments are codes: batches are replayed to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.ledger import causes, story
from tests.faults.planted import Fault
from tests.faults.test_matrix import FLOW, RANK_0, TRAIN, named

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

WORDS = (
    "train.compute_dtype=bfloat16",
    "rollout.dtype=bfloat16",
    "rollout.probe_tolerance=0.2",
    "train.weights_dtype=bfloat16",
    "train.master_weights=remainder",
    "train.optimizer_dtype=8bit",
)
SEVERAL = (*WORDS, "cluster.pools.train.workers=2")


@pytest.mark.slow
def test_a_rank_dies_after_its_weights_have_moved(disturb, undisturbed) -> None:
    _, commits, out = disturb([TRAIN["update"]], *WORDS, resumes=0)
    assert story(commits) == story(undisturbed(*WORDS))
    assert causes(commits, "update"), out


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        *(replace(TRAIN[stage], only="train-1") for stage in ("update", "snapshot", "weight_sync")),
        RANK_0["snapshot"],
        FLOW["update"],
        FLOW["snapshot"],
    ],
    ids=named,
)
def test_of_several_ranks(disturb, undisturbed, fault: Fault) -> None:
    _, commits, _ = disturb([fault], *SEVERAL)
    assert story(commits) == story(undisturbed(*SEVERAL))
