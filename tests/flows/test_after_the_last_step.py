"""A run that dies between its last commit and its end has all its steps, and not yet all its rest."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient

from storage.evaluations.results import evaluations_of
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.tracking.registry import EVALUATION_TAG, PROMOTION_TAG
from tasks.evaluation import summary
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch, Launched

pytestmark = pytest.mark.cluster

MOMENTS = {
    "tested": Fault(id="x", target="tasks.evaluation.evaluate:counts_of", action="kill"),
    "decided": Fault(id="x", target="storage.tracking.registry:Registry.give", action="kill"),
    "alias moved": Fault(
        id="x", target="storage.tracking.registry:Registry.give", when="after", action="kill"
    ),
    "promoted": Fault(
        id="x", target="storage.tracking.registry:Registry.tag", when="after", action="kill"
    ),
    "told": Fault(id="x", target="storage.runs.live:write_end", action="kill"),
}


def words(folder: Path) -> list[str]:
    """A run of one step whose policy is then tested and promoted."""
    rows = [{"question": f"{n} + {n} = ", "answer": str(2 * n)} for n in range(30, 34)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ["evaluation.source.kind=file", "evaluation.source.path=rows.jsonl"]
    return ["tiny", "name=last", "steps=1", *source, "promotion.alias=champion"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_it_is_resumed_for_what_is_left(launch: Launch, tmp_path: Path, moment: str) -> None:
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [MOMENTS[moment]])
    broken = launch(*words(tmp_path), environment=faults.environment)
    code, out = broken.end()
    assert code == -9, out
    assert faults.missed == []
    name = broken.files.run
    (commit,) = broken.commits()
    assert (
        f"{name} is stopped: 1 of 1 steps are committed.\n"
        f"What follows the last step is not done. To go on: refrain grpo --resume {name}\n"
    ) in inspected(broken)

    resumed = launch("--resume", name)
    code, out = resumed.end()
    assert code == 0, out
    assert resumed.commits() == [commit]
    client = MlflowClient(f"sqlite:///{tmp_path}/.refrain/mlflow.db")
    champion = client.get_model_version_by_alias("last", "champion")
    assert champion.tags["refrain.step"] == "1"
    assert float(champion.tags[EVALUATION_TAG]) >= 0
    assert "champion" in champion.tags[PROMOTION_TAG]
    assert client.get_run(champion.run_id).info.status == "FINISHED"

    code, out = launch("--resume", name).end()
    assert code == 2
    assert "is finished: 1 of 1 steps are committed" in out


def inspected(run: Launched) -> str:
    """What `refrain inspect` prints about a run."""
    command = [sys.executable, "-m", "flows.inspect", run.files.run]
    looked = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, timeout=200)
    assert looked.returncode == 0, looked.stderr
    return looked.stdout


def paused(api: str, run: Launched, known: str = "") -> str:
    """Id of the flow run that waits for a person, once there is one besides `known`."""
    question = {
        "flow_runs": {"name": {"like_": "last-"}, "state": {"type": {"any_": ["PAUSED"]}}},
        "sort": "START_TIME_DESC",
    }
    end = time.monotonic() + 180
    while time.monotonic() < end:
        assert run.process.poll() is None, run.end()[1]
        found = httpx.post(f"{api}/flow_runs/filter", json=question).json()
        if found and found[0]["id"] != known:
            return str(found[0]["id"])
        time.sleep(0.5)
    raise AssertionError("nobody is asked")


@pytest.mark.slow
def test_a_run_killed_while_it_waits_for_a_person_asks_again(
    launch: Launch, prefect_api: str, tmp_path: Path
) -> None:
    waiting = launch(*words(tmp_path), "promotion.approval=true")
    first = paused(prefect_api, waiting)
    assert "Its workers have ended." in inspected(waiting)
    waiting.process.kill()
    waiting.process.wait()
    resumed = launch("--resume", waiting.files.run)
    second = paused(prefect_api, resumed, known=first)
    answer = httpx.post(
        f"{prefect_api}/flow_runs/{second}/resume", json={"run_input": {"approve": True}}
    )
    assert answer.json().get("status") == "ACCEPT", answer.text
    code, out = resumed.end()
    assert code == 0, out
    client = MlflowClient(f"sqlite:///{tmp_path}/.refrain/mlflow.db")
    assert client.get_model_version_by_alias("last", "champion").tags["refrain.step"] == "1"


@pytest.mark.slow
def test_a_gain_that_may_be_chance_does_not_move_the_alias_after_a_kill_either(
    launch: Launch, tmp_path: Path
) -> None:
    """The next night tests the champion too, and dies while it decides; four prompts prove nothing."""
    launch(*words(tmp_path)).whole()
    client = MlflowClient(f"sqlite:///{tmp_path}/.refrain/mlflow.db")
    champion = client.get_model_version_by_alias("last", "champion")
    store = Store(f"file://{tmp_path}/.refrain/store")
    (first,) = (name for name in store.children() if not name.startswith("_"))
    kill = Fault(id="x", target="tasks.promotion.judging:judge", action="kill")
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [kill])
    night = ("continue_from=models:/last@champion", "evaluation.before=true")
    rule = "promotion.significance=0.05"
    code, out = launch(*words(tmp_path), *night, rule, environment=faults.environment).end()
    assert (code, faults.missed) == (-9, []), out
    second = max(name for name in store.children() if not name.startswith("_"))
    assert second != first
    code, out = launch("--resume", second).end()
    assert code == 0, out
    ours, theirs = (
        evaluations_of(RunStore(store, second), "held_out", version)[-1] for version in (1, 0)
    )
    assert theirs.weights.digest == champion.tags["refrain.digest"]
    test = summary.tested(store, ours, theirs)
    assert test is not None and test.prompts == 4
    assert test.p_value >= 2 / 2**4, "no four prompts are enough"
    (said,) = (
        one.tags[PROMOTION_TAG]
        for one in client.search_model_versions("name = 'last'")
        if one.version != champion.version
    )
    assert f"over 4 prompts that is {test.difference:+.4f}" in said
    assert f"p = {test.p_value:.4g} is above the significance of 0.05." in said
    assert client.get_model_version_by_alias("last", "champion").version == champion.version
