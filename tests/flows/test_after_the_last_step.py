"""A run that dies between its last commit and its end has all its steps, and not yet all its rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from storage.registry import EVALUATION_TAG, PROMOTION_TAG
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch

pytestmark = pytest.mark.cluster

MOMENTS = {
    "tested": Fault(id="x", target="tasks.evaluate:manner", action="kill"),
    "decided": Fault(id="x", target="storage.registry:Registry.give", action="kill"),
    "alias moved": Fault(
        id="x", target="storage.registry:Registry.give", when="after", action="kill"
    ),
    "promoted": Fault(id="x", target="storage.registry:Registry.tag", when="after", action="kill"),
    "told": Fault(id="x", target="storage.ends:write_end", action="kill"),
}
IN_DEFAULT_SUITE = ("alias moved",)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(name, marks=() if name in IN_DEFAULT_SUITE else pytest.mark.slow)
        for name in MOMENTS
    ],
)
def test_it_is_resumed_for_what_is_left(launch: Launch, tmp_path: Path, moment: str) -> None:
    rows = [{"question": f"{n} + {n} = ", "answer": str(2 * n)} for n in range(30, 34)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [MOMENTS[moment]])
    broken = launch(
        "tiny",
        "name=last",
        "steps=1",
        "evaluation.source.kind=file",
        "evaluation.source.path=rows.jsonl",
        "promotion.alias=champion",
        environment=faults.environment,
    )
    code, out = broken.end()
    assert code == -9, out
    assert faults.missed == []
    name = broken.files.run
    (commit,) = broken.commits()

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
