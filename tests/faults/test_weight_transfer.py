"""A trainer or an engine dies or hangs while a version is sent: the run ends as one by the store."""

from __future__ import annotations

import pytest

from tests.faults.ledger import causes, story
from tests.faults.planted import Fault

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(2600)]

# When the first piece of the second version is full.
TRAINER = Fault(
    id="trainer", target="engines.train.transfer:WeightSending._over", nth=2, action="kill"
)
# When the trainer has let the engine in, and sends the second version.
ENGINE = Fault(
    id="engine", target="engines.weight_transfer.receiver:_assembled", nth=2, action="kill"
)


# Ends of a transfer that hangs are within it, so calls need none of their own that are short.
SLOW = (
    "rollout.deadline=60",
    "train.deadline=60",
    "cluster.start_timeout=400",
    "cluster.no_workers_timeout=300",
)


def words(way: str) -> tuple[str, ...]:
    return (f"rollout.weight_transfer={way}", "rollout.weight_transfer_timeout=5", *SLOW)


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_nothing_happens(disturb, undisturbed, way: str) -> None:
    _, commits, out = disturb([], *words(way), resumes=0, timeout=1200)
    assert story(commits) == story(undisturbed(*SLOW))
    assert all(commit.metrics["weights/transferred"] == 1 for commit in commits), out


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_the_trainer_while_it_sends(disturb, undisturbed, way: str, action: str) -> None:
    fault = Fault(id="trainer", target=TRAINER.target, nth=TRAINER.nth, action=action)
    _, commits, out = disturb([fault], *words(way), resumes=0, timeout=1200)
    assert story(commits) == story(undisturbed(*SLOW))
    shares = [commit.metrics["weights/transferred"] for commit in commits]
    assert causes(commits, "weight_sync") or 0 in shares, out
    assert shares[-1] == 1, "later versions are sent again"


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_an_engine_while_it_receives(disturb, undisturbed, way: str, action: str) -> None:
    fault = Fault(id="engine", target=ENGINE.target, nth=ENGINE.nth, action=action)
    _, commits, out = disturb([fault], *words(way), resumes=0, timeout=1200)
    assert story(commits) == story(undisturbed(*SLOW))
    assert causes(commits, "weight_sync") or causes(commits, "rollout"), out
    assert commits[-1].metrics["weights/transferred"] == 1


def test_a_rank_of_two_dies_while_they_send(disturb, undisturbed) -> None:
    """The first rank is left in a collective that cannot end."""
    two = "cluster.pools.train.workers=2"
    fault = Fault(id="rank", target=TRAINER.target, nth=3, only="train-1", action="kill")
    _, commits, _ = disturb([fault], *words("nccl"), two, resumes=0, timeout=1200)
    assert story(commits) == story(undisturbed(two, *SLOW))
