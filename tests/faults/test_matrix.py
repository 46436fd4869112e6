"""A process dies, hangs or raises at every stage of a step: it costs time, and nothing else.

Each case ends with the weights of an undisturbed run, bit for bit, and with a ledger that balances;
tests/faults/ledger.py says what else is checked. Where a run has to be resumed, it is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.ledger import causes, story
from tests.faults.planted import Fault

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# Where a fault strikes: the function at whose beginning (or end) it does, in whichever call.
ROLLOUT = {
    "start": Fault(id="start", target="engines.rollout.hf_engine:HFEngine.__init__", action="kill"),
    "rollout": Fault(
        id="rollout", target="engines.rollout.hf_decoding:Decoding.step", nth=12, action="kill"
    ),
    # The samples are stored and marked as done, and the flow does not hear of it.
    "marked": Fault(
        id="marked",
        target="storage.runs.run_store:finish_result",
        only="rollout",
        nth=2,
        when="after",
        action="kill",
    ),
    "weight_sync": Fault(
        id="weight_sync", target="engines.rollout.engine:RolloutEngine.sync", nth=2, action="kill"
    ),
}
CPU = {
    "start": Fault(
        id="start", target="engines.data.data_engine:DataEngine.__init__", action="kill"
    ),
    "prompts": Fault(
        id="prompts", target="engines.data.data_engine:DataEngine.prompts", nth=2, action="kill"
    ),
    "reward": Fault(
        id="reward", target="engines.data.data_engine:DataEngine.score", nth=3, action="kill"
    ),
    "advantage": Fault(
        id="advantage",
        target="engines.data.data_engine:DataEngine.advantages",
        nth=2,
        action="kill",
    ),
}
TRAIN = {
    "start": Fault(id="start", target="engines.train.fsdp_engine:FSDPEngine.join", action="kill"),
    # Of the reference in step 2, while the actor shares its processes.
    "logprob": Fault(
        id="logprob", target="engines.train.fsdp_engine:FSDPEngine.logprobs", nth=2, action="kill"
    ),
    # The weights have moved, and nobody knows it yet.
    "update": Fault(
        id="update",
        target="engines.train.optimizer:Optimizer.step",
        nth=3,
        when="after",
        action="kill",
    ),
    "weight_sync": Fault(
        id="weight_sync",
        target="engines.train.fsdp_engine:FSDPEngine.export_weights",
        nth=3,
        action="kill",
    ),
    "snapshot": Fault(
        id="snapshot", target="engines.train.snapshots:_Writer.write_data", nth=1, action="kill"
    ),
}
RANK_0 = {
    "weight_sync": Fault(
        id="weight_sync", target="storage.runs.weights_writing:finish", nth=3, action="kill"
    ),
    "snapshot": Fault(
        id="snapshot", target="storage.runs.snapshots:mark", nth=1, when="after", action="kill"
    ),
}
FLOW = {
    "start": Fault(
        id="start",
        target="engines.processes.node:NodeProcess.__init__",
        when="after",
        action="kill",
    ),
    "prompts": Fault(id="prompts", target="storage.prompts.cursor:draw", nth=2, action="kill"),
    "rollout": Fault(
        id="rollout",
        target="engines.rollout.rollout_pool:RolloutPool.generate",
        nth=3,
        when="after",
        action="kill",
    ),
    "advantage": Fault(
        id="advantage", target="engines.train.trainer:Trainer.update", nth=2, action="kill"
    ),
    "update": Fault(
        id="update",
        target="engines.train.trainer:Trainer.update",
        nth=2,
        when="after",
        action="kill",
    ),
    "weight_sync": Fault(
        id="weight_sync",
        target="engines.train.trainer:Trainer.export",
        nth=3,
        when="after",
        action="kill",
    ),
    "snapshot": Fault(
        id="snapshot", target="engines.train.trainer:Trainer.snapshot", when="after", action="kill"
    ),
    "commit": Fault(id="commit", target="storage.runs.commit_log:commit", nth=2, action="kill"),
    # commit.json is written, HEAD still names the step before.
    "HEAD": Fault(id="HEAD", target="storage.runs.commit_log:_advance", nth=2, action="kill"),
    "committed": Fault(
        id="committed", target="storage.runs.commit_log:commit", nth=2, when="after", action="kill"
    ),
}
STAGES = {  # anchors for faults of other processes than the one at work
    "start": FLOW["start"],
    "rollout": ROLLOUT["rollout"],
    "reward": CPU["reward"],
    "logprob": TRAIN["logprob"],
    "update": TRAIN["update"],
    "weight_sync": RANK_0["weight_sync"],
    "snapshot": TRAIN["snapshot"],
    "commit": FLOW["commit"],
}
MLFLOW = Fault(
    id="mlflow", target="storage.tracking.tracker:Tracker.log_step", nth=2, action="kill"
)
RECORDED = {
    "rollout",
    "reward",
    "logprob",
    "update",
    "weight_sync",
    "snapshot",
    "prompts",
    "advantage",
}


def with_actions(faults: dict[str, Fault], *actions: str) -> list[Fault]:
    return [replace(fault, action=action) for fault in faults.values() for action in actions]


def named(fault: Fault) -> str:
    return f"{fault.id}-{fault.action}"


def test_faults_of_all_workers_in_one_run(disturb, undisturbed) -> None:
    """The default suite's share: one fault after the other, in every kind of worker."""
    from mlflow import MlflowClient

    run, commits, out = disturb(
        [
            MLFLOW,
            ROLLOUT["rollout"],
            ROLLOUT["marked"],
            CPU["reward"],
            TRAIN["update"],
            replace(RANK_0["weight_sync"], nth=5),
            replace(RANK_0["snapshot"], nth=2, action="raise"),
        ],
        resumes=0,
    )
    assert story(commits) == story(undisturbed())
    for stage in ("rollout", "reward", "update", "weight_sync"):
        assert any("its process ended" in cause for cause in causes(commits, stage)), out
    assert any("planted" in cause for cause in causes(commits, "snapshot"))
    # What was marked by the worker that was lost then is used, and not sampled again.
    sampled = [
        (commit.step, one["shard"], one["error"])
        for commit in commits
        for one in commit.attempts
        if one["stage"] == "rollout"
    ]
    well = {(step, shard) for step, shard, error in sampled if not error}
    assert {(step, shard) for step, shard, _ in sampled} - well, sampled
    mlflow = MlflowClient(f"sqlite:///{run.folder}/.refrain/mlflow.db")
    (page,) = mlflow.search_runs(["1"])
    logged = mlflow.get_metric_history(page.info.run_id, "reward/mean")
    assert [one.step for one in logged] == [one.step for one in commits]
    assert page.info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.parametrize("fault", with_actions(ROLLOUT, "kill", "stop", "hang", "raise"), ids=named)
def test_rollout_workers(disturb, undisturbed, fault: Fault) -> None:
    _, commits, out = disturb([fault], resumes=int(fault.action == "raise"))
    assert story(commits) == story(undisturbed())
    if fault.action != "raise" and fault.id in RECORDED:
        cause = "its process ended" if fault.action == "kill" else "did not end within 12 s"
        assert any(cause in found for found in causes(commits, fault.id)), out


@pytest.mark.slow
@pytest.mark.parametrize("fault", with_actions(CPU, "kill", "stop", "raise"), ids=named)
def test_cpu_workers(disturb, undisturbed, fault: Fault) -> None:
    _, commits, out = disturb([fault], resumes=int(fault.action == "raise"))
    assert story(commits) == story(undisturbed())
    if fault.action != "raise" and fault.id in RECORDED:
        cause = "its process ended" if fault.action == "kill" else "did not end within 12 s"
        assert any(cause in found for found in causes(commits, fault.id)), out


@pytest.mark.slow
@pytest.mark.parametrize("fault", with_actions(TRAIN, "kill", "stop", "raise"), ids=named)
@pytest.mark.parametrize("world", [1, 2])
def test_train_ranks(disturb, undisturbed, fault: Fault, world: int) -> None:
    """Of two ranks it is the second: the first is left in a collective that cannot end."""
    words = (f"cluster.pools.train.workers={world}",)
    rank = replace(fault, only=f"train-{world - 1}")
    _, commits, out = disturb([rank], *words, resumes=0)
    assert story(commits) == story(undisturbed(*words))
    if fault.id in RECORDED:
        assert causes(commits, fault.id), out


@pytest.mark.slow
@pytest.mark.parametrize("fault", with_actions(RANK_0, "kill", "stop", "raise"), ids=named)
def test_the_rank_that_writes(disturb, undisturbed, fault: Fault) -> None:
    words = ("cluster.pools.train.workers=2",)
    _, commits, out = disturb([fault], *words, resumes=0)
    assert story(commits) == story(undisturbed(*words))
    assert causes(commits, fault.id), out


@pytest.mark.slow
def test_a_rank_dies_again_while_its_gang_is_brought_back(disturb, undisturbed) -> None:
    again = Fault(
        id="again", target="engines.train.fsdp_engine:FSDPEngine.load_state", action="kill"
    )
    late = replace(TRAIN["update"], nth=4)
    _, commits, out = disturb([late, again], resumes=0)
    assert story(commits) == story(undisturbed())
    assert len(causes(commits, "update")) == 2, out


@pytest.mark.slow
@pytest.mark.parametrize("fault", with_actions(FLOW, "kill"), ids=named)
def test_the_flow(disturb, undisturbed, fault: Fault) -> None:
    _, commits, _ = disturb([fault])
    assert story(commits) == story(undisturbed())


@pytest.mark.slow
@pytest.mark.parametrize("fault", with_actions(FLOW, "raise"), ids=named)
def test_an_exception_in_the_flow(disturb, undisturbed, fault: Fault) -> None:
    """Nobody expected it, so it is not retried; the run ends in order, and can be resumed."""
    _, commits, _ = disturb([fault])
    assert story(commits) == story(undisturbed())


@pytest.mark.slow
@pytest.mark.parametrize("fault", with_actions(STAGES, "kill", "stop"), ids=named)
def test_the_scheduler(disturb, undisturbed, fault: Fault) -> None:
    """All workers go with it, and the run says so; it is resumed."""
    _, commits, out = disturb([replace(fault, victim="scheduler")])
    assert story(commits) == story(undisturbed())
    assert "ClusterLost" in out
    assert "Dask scheduler" in out


@pytest.mark.slow
@pytest.mark.parametrize("fault", with_actions(STAGES, "kill", "stop"), ids=named)
def test_the_prefect_server(disturb, undisturbed, fault: Fault) -> None:
    """It is started again, and the run goes on."""
    _, commits, _ = disturb([replace(fault, victim="server")], embedded=True, resumes=0)
    assert story(commits) == story(undisturbed())
