"""Agents that ask for JSON and for calls, in the real flow: both policies are of the words left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage.audit.audit import audit
from storage.batches.sampling_mask import read_masks
from tests.faults.ledger import committed
from tests.faults.planted import Fault
from tests.flows.conftest import Launch, Launched, ends_alike, starting
from tests.flows.test_over_sampling import replayed

pytestmark = pytest.mark.cluster

AGENT = """
import json
import httpx

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 12]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "sub")
]
WANTED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def play(base_url, api_key, question):
    chat, reward = [{"role": "user", "content": question}], 0.0

    def ask(**more):
        answer = httpx.post(
            f"{base_url}/chat/completions",
            headers={"Authorization": f"Bearer {api_key}"},
            json={"messages": chat, **more},
            timeout=300,
        )
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        chat.append(choice["message"])
        return choice

    got = ask(response_format=WANTED)
    if got["finish_reason"] != "length":
        value = json.loads(got["message"]["content"])
        assert set(value) == {"ok", "n"} and value["n"] in (1, 12)
        reward += 0.5 + 0.5 * value["ok"]
    else:
        assert got["message"]["content"].startswith("{")
    chat.append({"role": "user", "content": "a call"})
    got = ask(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "sub"}})
    if got["finish_reason"] != "length":
        (call,) = got["message"]["tool_calls"]
        assert call["function"]["name"] == "sub"
        reward += set(json.loads(call["function"]["arguments"])) == {"ok", "n"}
    else:
        assert not got["message"].get("tool_calls")
    return reward


def rows():
    return [{"question": f"q{n}"} for n in range(16)]
"""

WORDS = (
    "tiny",
    "steps=2",
    "prompts_per_step=2",
    "group_size=3",
    "name=grammars",
    "store.snapshot_every=1",
    "data.source={kind: function, path: agent.py:rows}",
    "data.template=chat",
    "data.max_prompt_tokens=1200",
    "model.max_positions=4096",
    "train.micro_batch_tokens=4096",
    "episodes={environment: {kind: agent, path: agent.py:play}, max_turn_tokens: 130}",
    "episodes.full_turn=counts",
    "episodes.max_turns=4",
    "rollout.engine=transformers",
    "rollout.max_new_tokens=2400",
    "rollout.deadline=600",
    "rollout.sampling_mask=true",
    "rewards.functions=[{kind: environment}]",
    "algorithm.correction=[{kind: reject}]",
)
FILES = {"agent.py": AGENT}


@pytest.fixture(scope="module")
def whole(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A run to which nothing happened."""
    with starting(tmp_path_factory.mktemp("grammars"), prefect_api) as start:
        return start(*WORDS, files=FILES).whole()


@pytest.mark.slow
def test_the_trainer_has_the_words_that_the_grammar_left(whole: Launched) -> None:
    check(whole, 1e-5)


def check(run: Launched, most: float) -> None:
    """most: by which log-probs of engine and trainer may differ, nats."""
    files, rewards = run.files, []
    for commit in committed(files):
        assert commit.metrics["train/rollout_mismatch"] < most
        assert commit.metrics["episode/drift"] == 0
        samples = commit.refs["samples"]
        assert {*samples.fetch_list(files.store, "episode_error")} == {""}
        rewards += commit.refs["batch"].fetch_numpy(files.store, "reward")[0].tolist()
        batch = commit.refs["batch"]
        written = batch.fetch_list(files.store, "response_mask")
        for mask, own in zip(read_masks(files.store, batch), written, strict=True):
            assert ((np.asarray(own) == 1) == (mask.numbers > 0)).all(), "of what was drawn"
    assert max(rewards) >= 1.0, "some turns are JSON that validates, or calls"
    assert audit(files).problems == []


@pytest.mark.slow
def test_its_steps_can_be_replayed(whole: Launched) -> None:
    assert "Equal, to the bit." in replayed(whole, 2)


FAULTS = {
    "engine": Fault(
        id="engine", target="engines.rollout.hf_decoding:Row.add", nth=700, action="kill"
    ),
    "environment worker": Fault(
        id="environment",
        target="engines.episodes.environment_engine:EnvironmentEngine.go_on",
        nth=5,
        action="kill",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_whoever_dies(whole: Launched, launch: Launch, tmp_path: Path, fault: Fault) -> None:
    """An engine in the middle of a turn with a grammar, too: the story is the same."""
    (tmp_path / "agent.py").write_text(AGENT)
    ends_alike(whole, launch, tmp_path, list(WORDS), fault)


IN_VLLM = [*WORDS, "rollout.engine=vllm"]


@pytest.mark.slow
@pytest.mark.vllm
def test_in_vllm_too(launch: Launch, prefect_api: str, tmp_path: Path) -> None:
    """Undisturbed, and with an engine that dies in the middle of its turns."""
    pytest.importorskip("vllm")
    with starting(tmp_path / "whole", prefect_api) as start:
        whole = start(*IN_VLLM, files=FILES).whole()
    check(whole, 1e-3)
    fault = Fault(id="engine", target="engines.models.grammars:Progress.mask", nth=9, action="kill")
    (tmp_path / "agent.py").write_text(AGENT)
    run = ends_alike(whole, launch, tmp_path, IN_VLLM, fault)
    check(run, 1e-3)


@pytest.mark.slow
def test_without_a_mask_a_grammar_is_refused_by_its_setting(launch: Launch) -> None:
    words = [one for one in WORDS if "sampling_mask" not in one and "correction" not in one]
    agent = AGENT.replace("assert answer.status_code == 200, answer.text", "assert_told(answer)")
    agent += """

def assert_told(answer):
    said = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "rollout.sampling_mask = false" in said, said
    raise StopAsking


class StopAsking(Exception):
    pass


def play_refused(base_url, api_key, question):
    try:
        play(base_url, api_key, question)
    except StopAsking:
        pass
    answer = httpx.post(
        f"{base_url}/chat/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={"messages": [{"role": "user", "content": question}], "tool_choice": "none"},
        timeout=300,
    )
    return float(len(answer.json()["choices"][0]["message"]["content"]))
"""
    words = [one.replace("agent.py:play", "agent.py:play_refused") for one in words]
    run = launch(*words, files={"agent.py": agent}).whole()
    samples = committed(run.files)[-1].refs["samples"]
    assert {*samples.fetch_list(run.files.store, "episode_error")} == {""}
