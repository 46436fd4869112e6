"""An agent that branches, from its requests to the weights: every token trained once, in its context."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from storage.audit.audit import audit
from storage.batches.forest import read_forests
from tests.flows.conftest import Launch, Launched

pytestmark = pytest.mark.cluster

# A lead with two sub-agents at once, who have prompts of their own and two turns, and whose answers
# it is given in the place of its past. Writes down what each request was after and got.
AGENT = """
import asyncio
import json

import httpx


async def play(base_url, api_key, log, number, **row):
    seen = []
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=None, verify=False) as client:

        async def chat(messages):
            body = {"messages": messages, "return_token_ids": True}
            said = (await client.post(f"{base_url}/chat/completions", json=body)).json()
            (choice,) = said["choices"]
            seen.append([said["prompt_token_ids"], choice["token_ids"]])
            return [*messages, choice["message"]]

        async def sub(name):
            first = await chat([{"role": "system", "content": name}, {"role": "user", "content": "do"}])
            return (await chat([*first, {"role": "user", "content": "more"}]))[-1]["content"]

        lead = await chat([{"role": "user", "content": f"plan {number}"}])
        found = await asyncio.gather(sub("a"), sub("b"), chat([*lead, {"role": "user", "content": "?"}]))
        summary = [{"role": "user", "content": f"{found[0]} {found[1]}"}]
        last = await chat(asked_to_end(await chat(summary)))
    with open(log, "a") as file:
        print(json.dumps(seen), file=file)
    said = "".join(one["content"] for one in last if one["role"] == "assistant")
    return sum(one.isdigit() for one in said) / 16


def asked_to_end(messages):
    return [*messages, {"role": "user", "content": "end"}]


def rows(size=16):
    return [{"question": "", "number": n} for n in range(size)]
"""


def words(folder: Path, *more: str) -> list[str]:
    return [
        "tiny",
        "name=forests",
        "steps=2",
        "data.source={kind: function, path: agent.py:rows}",
        "data.template=chat",
        f"episodes={{environment: {{kind: agent, path: agent.py:play, params: {{log: {folder}/log}}}}}}",
        "episodes.max_turns=9",
        "episodes.max_turn_tokens=6",
        "episodes.full_turn=counts",
        "episodes.max_tokens=600",
        "rollout.max_new_tokens=120",
        "rollout.deadline=120",
        "rewards.functions=[{kind: environment}]",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        (),
        (
            "train.tree_training=true",
            "algorithm.advantage={kind: gigpo}",
            "algorithm.loss={kind: gspo}",
            "algorithm.kl.coefficient=0.01",
        ),
    ],
    ids=["grpo", "gigpo-gspo-tree"],
)
def test_each_token_that_was_sent_trains_once_in_its_context(
    launch: Launch, tmp_path: Path, more: tuple[str, ...]
) -> None:
    run = launch(*words(tmp_path, *more), files={"agent.py": AGENT}).whole()
    sent = Counter(
        (tuple(read), tuple(written))
        for line in (tmp_path / "log").read_text().splitlines()
        for read, written in json.loads(line)
    )
    stored: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for commit in run.commits():
        batch, store = commit.refs["samples"], run.files.store
        names = ("prompt_ids", "response_ids", "response_mask", "turn_ids")
        columns = [batch.fetch_list(store, name) for name in names]
        forests = read_forests(store, batch)
        assert forests is not None
        for forest, prompt, response, mask, turns in zip(forests, *columns, strict=True):
            assert len(forest.paths()) == 4
            laid = np.concatenate([prompt, response])
            for turn in np.unique(turns):
                own = len(prompt) + np.flatnonzero((turns == turn) & (mask > 0))
                path = forest.path_to(int(own[-1]) + 1)
                assert path[-len(own) :].tolist() == own.tolist()
                stored[tuple(laid[path[: -len(own)]].tolist()), tuple(laid[own].tolist())] += 1
        metrics = commit.metrics
        # The sampler was given each path as a prompt; the trainer computed it within the forest.
        assert metrics["train/rollout_mismatch_max"] < 1e-4
        assert metrics["train/grad_norm"] > 0
        assert metrics["train/tokens_saved"] > 0.2, "what paths share is computed once"
    assert stored == sent
    assert sum(stored.values()) == 2 * 8 * len(forests)
    assert audit(run.files).problems == []
    assert "Equal, to the bit." in asked(run, "replay", run.files.run, "2")
    shown = asked(run, "samples", run.files.run, "--best", "--limit", "1")
    assert "went on after" in shown and "began a conversation of its own" in shown


def asked(run: Launched, command: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"flows.{command}", *words],
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
