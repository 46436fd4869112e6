"""Client libraries, unchanged, as agents, where an interpreter that has them is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.episodes import AgentEnvironment, EpisodesConfig
from engines.environments.sessions import Environments
from storage.audit.audit import audit
from tests.engines.environments.playing import begin_agent as begin
from tests.engines.environments.playing import call, new_messages, requests
from tests.examples import client_agents, form_clients
from tests.faults.ledger import committed
from tests.flows.conftest import Launch

PYTHON = os.environ.get("REFRAIN_TEST_CLIENTS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="REFRAIN_TEST_CLIENTS names no interpreter"),
]
AGENTS = Path(client_agents.__file__)
THOUGHT = "<think>I add.</think>"
CALLING = f"{THOUGHT}<tool_call>…</tool_call>"
Said = tuple[str, list[dict[str, Any]]]  # a turn of the model: its text and its calls
ADDING: Said = (CALLING, [call("add", one=2, other=3)])

# What the model says in each client's episode, where that is no call of `add` and then an answer.
TURNS: dict[str, list[Said]] = {
    "smolagents_code": [
        (f"{THOUGHT}I add.\n<code>\nprint(add(2, 3))\n</code>", []),
        ("<code>\nfinal_answer(add(2, 3))\n</code>", []),
    ],
    "smolagents_tools": [ADDING, (CALLING, [call("final_answer", answer="5")])],
    "mini_swe_agent": [
        (CALLING, [call("bash", command="expr 2 + 3")]),
        (CALLING, [call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 5")]),
    ],
}


@pytest.fixture(scope="module")
def environments() -> Iterator[Environments]:
    agent = AgentEnvironment(path=f"{AGENTS}:play")
    config = EpisodesConfig(
        environment=agent, processes=1, turn_timeout=300.0, timeout=900.0, python=PYTHON
    )
    with Environments(config) as made:
        yield made


@pytest.mark.parametrize("client", client_agents.CLIENTS)
def test_an_episode_with_a_tool(environments: Environments, client: str) -> None:
    """The tool's result is all that is new in the second request, and the answer has its reward."""
    episode = begin(environments, name=client, client=client)
    first, second = TURNS.get(client, [ADDING, (f"{THOUGHT}5", [])])
    outcome = episode.act(environments, *first)
    assert outcome.failed is None, outcome.failed
    (request,) = requests(outcome)
    (result,) = new_messages(request)
    assert "5" in result["content"]
    assert result["role"] == ("user" if client.startswith("smolagents") else "tool")
    outcome = episode.act(environments, *second)
    assert outcome.failed is None and outcome.done, outcome.failed
    assert outcome.reward is not None and outcome.reward > 0


@pytest.mark.parametrize("client", client_agents.CLIENTS)
def test_a_limit_is_final(environments: Environments, client: str) -> None:
    """No client asks again: each has an error of its own for a conversation that is too long."""
    outcome = begin(environments, name=f"{client} at a limit", client=client).finish(environments)
    assert outcome.failed is None and outcome.reward is not None, outcome.failed


@pytest.mark.cluster
def test_all_train(launch: Launch) -> None:
    """Two steps of `tiny` in which each client plays, with what a random model writes."""
    run = launch(
        "tiny",
        "name=clients",
        "steps=2",
        f"prompts_per_step={len(client_agents.CLIENTS)}",
        "group_size=2",
        "model.max_positions=4096",
        "data.source={kind: function, path: client_agents.py:rows}",
        "data.template=chat",
        "data.max_prompt_tokens=3072",
        "episodes={environment: {kind: agent, path: client_agents.py:play}}",
        f"episodes.python={PYTHON}",
        "episodes.processes=1",
        "episodes.turn_timeout=300",
        "episodes.max_turns=2",
        "rollout.stop=[e,t,a,o,i,n,s,h,r,d,l,u,c,m,w,f,g,y,p,b]",  # some clients raise at a cut turn
        "rollout.max_new_tokens=768",
        "rollout.deadline=600",
        "rewards.functions=[{kind: environment}]",
        "train.micro_batch_tokens=4096",
        files={AGENTS.name: AGENTS.read_text()},
    ).whole()
    files = run.files
    commits = committed(files)
    assert len(commits) == 2
    for commit in commits:
        samples = commit.refs["samples"]
        assert len(samples) == 2 * len(client_agents.CLIENTS)
        assert {*samples.fetch_list(files.store, "episode_error")} == {""}
        assert {*samples.fetch_list(files.store, "episode")} <= {"done", "turns"}
        assert commit.metrics["episode/drift"] == 0
    assert audit(files).problems == []


FORMS = Path(form_clients.__file__)


@pytest.mark.cluster
def test_forms_that_clients_ask_for(launch: Launch) -> None:
    """Two steps of `tiny` in which clients ask for JSON and for calls: what is whole validates."""
    run = launch(
        "tiny",
        "name=forms",
        "steps=2",
        f"prompts_per_step={len(form_clients.CLIENTS)}",
        "group_size=2",
        "model.max_positions=4096",
        "data.source={kind: function, path: form_clients.py:rows}",
        "data.template=chat",
        "data.max_prompt_tokens=2048",
        "episodes={environment: {kind: agent, path: form_clients.py:play}}",
        f"episodes.python={PYTHON}",
        "episodes.processes=1",
        "episodes.turn_timeout=300",
        "episodes.max_turns=2",
        "episodes.max_turn_tokens=300",
        "episodes.full_turn=counts",
        "rollout.engine=transformers",
        "rollout.sampling_mask=true",
        "rollout.max_new_tokens=1000",
        "rollout.deadline=600",
        "rewards.functions=[{kind: environment}]",
        "algorithm.correction=[{kind: reject}]",
        "train.micro_batch_tokens=4096",
        files={FORMS.name: FORMS.read_text()},
    ).whole()
    files, whole = run.files, set()
    for commit in committed(files):
        samples = commit.refs["samples"]
        assert {*samples.fetch_list(files.store, "episode_error")} == {""}
        rows = samples.fetch_numpy(files.store, "prompt_row")[0].tolist()
        rewards = [float(one[-1]) for one in samples.fetch_list(files.store, "turn_rewards")]
        names = [*form_clients.CLIENTS]
        whole |= {
            names[row % len(names)] for row, own in zip(rows, rewards, strict=True) if own >= 1
        }
        assert commit.metrics["train/rollout_mismatch"] < 1e-5
    assert whole == {*form_clients.CLIENTS} - {"openai_json_object"}
    assert audit(files).problems == []
