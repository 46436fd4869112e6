"""Agents that branch in the real flow: what trains is what was sent, whoever dies."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from storage.audit.audit import audit
from storage.batches.columns import Author
from storage.batches.forest import read_forests
from tests.faults.ledger import committed
from tests.faults.planted import Fault
from tests.flows.conftest import ROOT, Launch, Launched, ends_alike, starting

pytestmark = pytest.mark.cluster

EXAMPLE = ROOT / "examples/sub_agents"
# The example's agent, which also writes down the ids of each answer.
TRACED = """
import json
from examples import sub_agents

class Client(sub_agents.httpx.AsyncClient):
    async def post(self, url, json, **more):
        answer = await super().post(url, json={**json, "return_token_ids": True}, **more)
        if answer.status_code == 200:
            note(answer.json())
        return answer

def note(got):
    with open(LOG, "a") as file:
        print(json.dumps([got["prompt_token_ids"], got["choices"][0]["token_ids"]]), file=file)

async def lead(base_url, api_key, question, log):
    global LOG
    LOG = log
    sub_agents.httpx.AsyncClient = Client
    return await sub_agents.lead(base_url, api_key, question)
"""


def words(folder: Path, *more: str) -> list[str]:
    return [
        f"{EXAMPLE}.yaml",
        f"data.source.path={EXAMPLE}.py:rows",
        "episodes.environment.path=traced.py:lead",
        f"episodes.environment.params={{log: {folder}/log}}",
        "steps=2",
        "prompts_per_step=2",
        "group_size=3",
        "store.snapshot_every=1",
        "rollout.deadline=60",
        "name=branches",
        *more,
    ]


@pytest.fixture(scope="module")
def whole(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A run to which nothing happened."""
    folder = tmp_path_factory.mktemp("branches")
    with starting(folder, prefect_api) as start:
        return start(*words(folder), files={"traced.py": TRACED}).whole()


@pytest.mark.slow
def test_what_trains_is_what_was_sent(whole: Launched) -> None:
    lines = (whole.folder / "log").read_text().splitlines()
    sent = Counter(str(json.loads(line)) for line in lines)
    files, turns = whole.files, 0
    for commit in committed(files):
        samples = commit.refs["samples"]
        names = ("prompt_ids", "response_ids", "author", "response_mask", "turn_ids")
        columns = [samples.fetch_list(files.store, name) for name in names]
        forests = read_forests(files.store, samples)
        assert forests is not None
        for forest, prompt, response, author, mask, numbers in zip(forests, *columns, strict=True):
            assert (mask.astype(bool) == (author == Author.POLICY)).all()
            assert len(forest.paths()) == 6, "two rounds: a lead and two others in each"
            tokens = np.concatenate([prompt, response])
            for turn in range(len(forest.lengths)):
                own = len(prompt) + np.flatnonzero((numbers == turn) & mask.astype(bool))
                path = forest.path_to(int(own[-1]) + 1)
                before = tokens[path[: len(path) - len(own)]].tolist()
                assert sent[str([before, tokens[own].tolist()])] > 0
                turns += 1
        advantages = samples_by_branch(files.store, commit.refs["batch"])
        assert any(len({*each}) > 1 for each in advantages), "branches have their own"
        assert commit.metrics["episode/drift"] == 0
        assert commit.metrics["episode/turns_max"] == 12
    assert turns == 2 * 6 * 12
    assert audit(files).problems == []


def samples_by_branch(store: object, batch: object) -> list[list[float]]:
    """Of each sample, the advantage of each of its branches."""
    names = ("branch_ids", "advantages", "response_mask")
    columns = [batch.fetch_list(store, name) for name in names]  # type: ignore[attr-defined]
    found = []
    for ids, advantages, mask in zip(*columns, strict=True):
        branches, own = ids[mask == 1], advantages[mask == 1]
        each = []
        for branch in np.unique(branches):
            values = np.unique(own[branches == branch])
            assert len(values) == 1, "one of a branch"
            each.append(float(values[0]))
        found.append(each)
    return found


FAULTS = {
    "flow": Fault(id="flow", target="tasks.episodes:go_on", nth=20, action="kill"),
    "environment worker": Fault(
        id="environment",
        target="engines.episodes.environment_engine:EnvironmentEngine.go_on",
        nth=20,
        action="kill",
    ),
    "engine": Fault(
        id="engine", target="engines.rollout.engine:RolloutEngine.generate", nth=15, action="kill"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_whoever_dies(whole: Launched, launch: Launch, tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "traced.py").write_text(TRACED)
    ends_alike(whole, launch, tmp_path, words(whole.folder), fault)
