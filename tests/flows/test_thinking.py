"""Templates of thinking models over four turns: the tokens that train are those that were sampled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from configs.model import RandomModel
from engines.models.checkpoints import character_tokenizer, draw
from storage.audit.audit import audit
from storage.audit.samples import tokenizer_of
from storage.batches.columns import Author
from storage.batches.forest import read_forests
from tests.faults.ledger import committed
from tests.faults.planted import Fault
from tests.flows.conftest import Launch, ends_alike

pytestmark = pytest.mark.cluster

# Of an earlier turn stays what follows its last letter of these: a random model writes such often.
FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set ns.said = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set ns.said = ns.said.split('</think>')[-1].lstrip('\n') %}"
    "{% for c in 'bcdfjkmpvxyz' %}{% set ns.said = ns.said.split(c)[-1] %}{% endfor %}{% endif %}"
    "{{ m.role + ': ' + ns.said + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% if terse %}{{ '#' }}{% endif %}{% endif %}"
)
# Asks four times, writes down the ids that it was given, and rewards what was said first and last.
AGENT = """
import json
import httpx

def ask(base_url, api_key, seed, number, log):
    chat = [{"role": "user", "content": "say"}]
    seen = []
    with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=None, verify=False) as client:
        for turn in range(4):
            body = {"messages": chat, "return_token_ids": True}
            answer = client.post(f"{base_url}/chat/completions", json=body)
            if answer.is_error:
                break
            said = answer.json()
            (choice,) = said["choices"]
            seen.append([said["prompt_token_ids"], choice["token_ids"]])
            chat += [choice["message"], {"role": "user", "content": f"{turn}?"}]
    with open(log, "a") as file:
        print(json.dumps(seen), file=file)
    said = "".join(one["content"] for one in chat if one["role"] == "assistant")
    return sum(one.isdigit() for one in said) / 16

def rows(size=16):
    return [
        {"question": "", "number": n, "chat_template_kwargs": {"terse": n % 2 == 1}}
        for n in range(size)
    ]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a template that forgets."""
    folder = tmp_path_factory.mktemp("model")
    draw(RandomModel(kind="random", layers=2, hidden_size=64, heads=2, max_positions=256), folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = FORGETFUL
    tokenizer.save_pretrained(folder)
    return folder


def words(model: Path, folder: Path, *more: str) -> list[str]:
    return [
        "tiny",
        "name=thinking",
        f"model={{kind: pretrained, path: {model}}}",
        "data.source={kind: function, path: agent.py:rows}",
        "data.template=chat",
        "data.prefill=so,",
        f"episodes={{environment: {{kind: agent, path: agent.py:ask, params: {{log: {folder}/log}}}}}}",
        "episodes.max_turns=4",
        "episodes.max_turn_tokens=4",
        "episodes.full_turn=counts",
        "rollout.max_new_tokens=128",
        "rollout.deadline=60",
        "rewards.functions=[{kind: environment}]",
        *more,
    ]


@pytest.mark.slow
def test_what_trains_is_what_the_agent_was_given(
    model: Path, launch: Launch, tmp_path: Path
) -> None:
    run = launch(*words(model, tmp_path), files={"agent.py": AGENT}).whole()
    told = {tuple(map(tuple, seen[-1])) for seen in logged(tmp_path / "log") if len(seen) == 4}
    files, heads = run.files, set()
    for commit in committed(files):
        samples = commit.refs["samples"]
        names = ("prompt_ids", "response_ids", "author", "response_mask")
        columns = [samples.fetch_list(files.store, name) for name in names]
        tokenizer = tokenizer_of(files, (commit.version_out,))
        for prompt, response, author, mask in zip(*columns, strict=True):
            assert ((author == Author.POLICY) == mask.astype(bool)).all()
            last = len(response) - int((author[::-1] != Author.POLICY).argmax())
            before, written = (*prompt, *response[:last]), tuple(response[last:])
            assert (before, written) in told, "the last request had all earlier tokens"
            heads.add(tokenizer.decode(prompt))
        assert 0.01 < commit.metrics["episode/template_drift"] < 0.5
        assert commit.metrics["episode/drift"] == 0
        assert commit.metrics["episode/turns_max"] == 4
    assert heads == {"user: say\nassistant: so,", "user: say\nassistant: #so,"}, (
        "by the row's variables"
    )
    assert audit(files).problems == []


def logged(file: Path) -> list[list[list[list[int]]]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_by_setting_each_turn_is_after_a_rendering(
    model: Path, launch: Launch, tmp_path: Path
) -> None:
    """What was read is what the template writes; each turn is stored once, after that."""
    run = launch(
        *words(model, tmp_path, "episodes.past_turns=as_rendered", "episodes.max_tokens=512"),
        files={"agent.py": AGENT},
    ).whole()
    told = {str(turn) for seen in logged(tmp_path / "log") for turn in seen}
    files, paths = run.files, 0
    for commit in committed(files):
        samples = commit.refs["samples"]
        names = ("prompt_ids", "response_ids", "response_mask", "turn_ids")
        columns = [samples.fetch_list(files.store, name) for name in names]
        forests = read_forests(files.store, samples)
        assert forests is not None
        for forest, prompt, response, mask, turns in zip(forests, *columns, strict=True):
            tokens = np.concatenate([prompt, response])
            for turn in range(len(forest.lengths)):
                own = len(prompt) + np.flatnonzero((turns == turn) & mask.astype(bool))
                path = forest.path_to(int(own[-1]) + 1)
                assert str([tokens[path[: -len(own)]].tolist(), tokens[own].tolist()]) in told
            paths += len(forest.paths()) > 1
        assert "episode/template_drift" not in commit.metrics
    assert paths > 8, "the template rewrites the past"
    assert audit(files).problems == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault(id="answer", target="tasks.episodes:go_on", action="kill", nth=7),
        Fault(
            id="engine",
            target="engines.episodes.environment_engine:EnvironmentEngine.go_on",
            action="kill",
            nth=6,
        ),
    ],
    ids=lambda fault: fault.id,
)
def test_whoever_dies(
    model: Path,
    launch: Launch,
    prefect_api: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    fault: Fault,
) -> None:
    from tests.flows.conftest import starting

    folder = tmp_path_factory.mktemp("whole")
    with starting(folder, prefect_api) as start:
        whole = start(*words(model, folder), files={"agent.py": AGENT}).whole()
        (tmp_path / "agent.py").write_text(AGENT)
        ends_alike(whole, launch, tmp_path, words(model, tmp_path), fault)


@pytest.mark.slow
def test_a_budget_of_thoughts_over_turns(model: Path, launch: Launch, tmp_path: Path) -> None:
    run = launch(
        *words(model, tmp_path),
        "episodes.max_turn_tokens=8",
        "rollout.thinking={budget: 2, start: 'assistant', end: '#', closing: '# '}",
        files={"agent.py": AGENT},
    ).whole()
    files, cut = run.files, 0
    for commit in committed(files):
        samples = commit.refs["samples"]
        names = ("response_ids", "author", "response_mask", "rollout_logprobs", "turn_ids")
        tokenizer = tokenizer_of(files, (commit.version_out,))
        for ids, author, mask, logprobs, turns in zip(
            *(samples.fetch_list(files.store, name) for name in names), strict=True
        ):
            forced = author == Author.BUDGET
            cut += forced.any()
            assert (mask.astype(bool) == (author == Author.POLICY)).all()
            assert (logprobs[forced] == 0).all()
            assert turns.max() <= 3, "words within a turn make no turn of their own"
            assert set(tokenizer.decode(ids[forced].tolist())) <= set("# ")
        assert commit.metrics["episode/drift"] == 0
        assert commit.metrics["response/thoughts_ended_by_budget"] > 0
    assert cut > 8
    assert audit(files).problems == []
