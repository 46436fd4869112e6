"""Elastic training with a kill at each write: of gradients, their markers, their sum, the step.

The weights are those of FSDP ranks at the same split, bit for bit, whoever dies where.
"""

from __future__ import annotations

import pytest

from storage.audit.audit import audit
from storage.runs.commit_log import Commit
from tests.faults.conftest import Disturbed
from tests.faults.ledger import causes, story
from tests.faults.planted import Fault

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

WORKERS = (
    "train.engine=elastic",
    "cluster.pools.train.workers=2",
    "cluster.roles.ref=ref",
    "cluster.pools.ref={workers: 1, threads: 1}",
    "cluster.roles.aggregator=aggregator",
    "cluster.pools.aggregator={workers: 1, threads: 1}",
)
SHORT = ("data.max_prompt_tokens=80", "train.micro_batch_tokens=88")
UNITS = (*WORKERS, *SHORT, "train.unit_tokens=88")  # several of them in a step

WRITE, MARK = (
    "storage.runs.weights_writing:write_shard",
    "storage.runs.run_store:StageStore.finish",
)
SUM, STEP = (f"engines.train.optimizer:Optimizer.{name}" for name in ("_report", "step_by_tensor"))
AGGREGATOR, TRAINER = "engines.elastic.aggregator:Aggregator", "engines.elastic.trainer"
REMOVE = "storage.runs.gradients:remove_gradients"


def kill(target: str, only: str, nth: int, when: str = "before") -> Fault:
    return Fault(id=when, target=target, action="kill", nth=nth, only=only, when=when)  # type: ignore[arg-type]


def check(disturbed: Disturbed, whole: list[Commit]) -> None:
    run, commits, _ = disturbed
    assert story(commits) == story(whole)
    found = audit(run.files)
    assert found.problems == []
    assert [key for key in (*found.orphans, *found.unfinished) if "gradients" in key] == []


@pytest.mark.slow  # tests/engines/elastic/test_trainer.py kills them without a flow
def test_worker_and_aggregator_die_and_the_weights_are_fsdps(disturb, undisturbed) -> None:
    """With one unit to a step, which is then the shared undisturbed run's only micro-batch."""
    faults = [
        Fault(id="written", target=WRITE, action="kill", nth=2, only="train", when="after"),
        Fault(id="summed", target=SUM, action="kill", nth=4, only="aggregator", when="after"),
    ]
    run, commits, out = disturb(faults, *WORKERS)
    check((run, commits, out), undisturbed())
    assert any("was lost" in cause for cause in causes(commits, "unit"))
    made = [one["worker"] for one in commits[-1].attempts if one["stage"] == "unit"]
    assert made and all(str(worker).startswith("train-") for worker in made)


@pytest.mark.slow
def test_units_are_added_up_as_fsdps_micro_batches_are(undisturbed) -> None:
    ranks = undisturbed(*SHORT)
    elastic = undisturbed(*UNITS)
    assert story(elastic) == story(ranks)
    assert all(commit.metrics["elastic/units"] >= 3 for commit in elastic)
    assert sum(commit.metrics["elastic/repeated"] for commit in elastic) == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_its_aggregator_sends_versions_too(undisturbed, way: str) -> None:
    patient = ("train.deadline=100", "rollout.deadline=100", "rollout.weight_transfer_timeout=30")
    sent = undisturbed(*WORKERS, *patient, f"rollout.weight_transfer={way}")
    assert story(sent) == story(undisturbed())
    assert [commit.metrics["weights/transferred"] for commit in sent] == [1.0] * len(sent)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        kill(WRITE, "train", 3),
        kill(WRITE, "train", 3, "after"),
        kill(MARK, "train", 3),
        kill(MARK, "train", 3, "after"),
        kill("storage.runs.gradients:open_folder", "aggregator", 2),
        kill("storage.runs.gradients:open_folder", "aggregator", 2, "after"),
        kill(SUM, "aggregator", 3),
        kill(STEP, "aggregator", 3, "after"),
        kill(f"{AGGREGATOR}.apply", "aggregator", 2, "after"),
        kill(f"{AGGREGATOR}.close_update", "aggregator", 3),
        kill(f"{TRAINER}:ElasticTrainer._compute", "flow", 2),
        kill(f"{TRAINER}:ElasticTrainer._compute", "flow", 2, "after"),
        kill(f"{TRAINER}:ElasticTrainer._optimizer_step", "flow", 3, "after"),
        kill(REMOVE, "flow", 2),
        kill(REMOVE, "flow", 4),  # after the last commit
    ],
    ids=lambda fault: f"{fault.target.rpartition(':')[2]}-{fault.only}-{fault.when}-{fault.nth}",
)
def test_a_kill_at_each_write_costs_time_only(fault: Fault, disturb, undisturbed) -> None:
    check(disturb([fault], *UNITS), undisturbed(*UNITS))
