"""A trainer is lost with a version that nobody has committed, and makes it anew with other bits.

So it is on a GPU, whose sums have no fixed order. Here a weight is moved a little more from the update
on that the next trainer makes again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from storage.runs.weights import open_manifest
from tests.faults.conftest import STEPS, WORDS
from tests.faults.ledger import causes, committed
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# `finish` writes a version's manifest: the first is version 0, the third version 2.
PUBLISHED = Fault(
    id="published",
    target="storage.runs.weights_writing:finish",
    nth=3,
    when="after",
    action="kill",
)
# Two updates are made before; the third call is the first update made again, the fourth the second.
OTHER_BITS = Fault(
    id="other_bits", target="engines.train.optimizer:Optimizer.step", nth=4, action="drift"
)
# The store's disk has the last of a version's files, and its manifest is not written.
ON_ITS_WAY = replace(PUBLISHED, id="on_its_way", when="before")
SENT = (
    "rollout.weight_transfer=ipc",
    "rollout.weight_transfer_timeout=15",
    "rollout.deadline=60",
    "train.deadline=60",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (PUBLISHED, ()),
        (ON_ITS_WAY, ()),
        (ON_ITS_WAY, SENT),  # engines have the first already
    ],
    ids=["published", "on_its_way", "sent"],
)
def test_it_takes_the_place_of_the_first(
    disturb, undisturbed, lost: Fault, words: tuple[str, ...]
) -> None:
    run, commits, out = disturb([lost, OTHER_BITS], "store.keep_versions=10", *words, resumes=0)
    reference = undisturbed()
    assert [commit.step for commit in commits] == [commit.step for commit in reference]
    made = [commit.version_out.digest for commit in commits]
    assert made[0] == reference[0].version_out.digest
    assert not {*made[1:]} & {commit.version_out.digest for commit in reference}, "nothing drifted"
    for commit in commits:  # the store has what the commit names, and engines sampled with that
        assert open_manifest(run.files.store, commit.version_out).digest == made[commit.step - 1]
    assert any("its process ended" in cause for cause in causes(commits, "weight_sync")), out
    assert all(commit.metrics.get("weights/transferred", 1) == 1 for commit in commits), out


@pytest.mark.slow
def test_where_samples_may_be_of_the_first_the_run_ends_and_is_resumed(
    launch: Launch, tmp_path: Path
) -> None:
    planted = Faults(tmp_path / "faults", [PUBLISHED, OTHER_BITS])
    settings = ("max_staleness=1", "algorithm.correction=[{kind: truncate}]")
    run = launch(*WORDS, *settings, environment=planted.environment)
    code, out = run.end(300)
    assert code == 1 and planted.missed == [], out
    assert "samples may be of the lost weights and would have no origin. Resume the run." in out
    resumed = launch("--resume", run.files.run, environment=planted.environment)
    code, out = resumed.end(300)
    assert code == 0, out
    assert len(committed(run.files, max_staleness=1)) == STEPS
