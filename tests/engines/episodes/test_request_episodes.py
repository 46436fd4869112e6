"""Episodes of requests: which tokens a request is after, and that each is stored once, where it was.

The oracle is what an agent writes down of its answers: the ids that were read and written.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.data import DataConfig, FunctionSource
from configs.episodes import AgentEnvironment, ClassEnvironment, EpisodesConfig
from configs.model import RandomModel
from engines.episodes.contract import AnswerResult, EnvironmentFailed, EnvironmentSpec, RoundRequest
from engines.episodes.environment_engine import EnvironmentEngine
from engines.models.grammars import TurnGrammar
from storage.batches.columns import LIMIT, Author, SampleStatus
from storage.batches.forest import read_forests
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store

P, E = Author.POLICY, Author.ENVIRONMENT
AGENTS = '''
import asyncio, json, os, threading
from engines.environments import agents

agents.PAUSE_SECONDS = 0.5  # however busy the machine is


def by_ids(base_url, api_key, start, more, route="completions", **row):
    """Gives token ids, checks what it gets, and goes on with others."""
    ids, field = list(start), "prompt" if route == "completions" else "token_ids"
    url = base_url if route == "completions" else base_url.removesuffix("/v1") + "/inference/v1"
    for new in (more, None):
        body = {field: ids, "logprobs": 1, "return_token_ids": True}
        got = ask(f"{url}/{route}", api_key, body)
        choice = got["choices"][0]
        assert (choice.get("prompt_token_ids") or got["prompt_token_ids"]) == ids, got
        assert got["usage"]["completion_tokens"] == len(choice["token_ids"])
        if route == "generate":
            assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-1.0] * len(choice["token_ids"])
        else:
            assert choice["logprobs"]["token_logprobs"] == [-1.0] * len(choice["token_ids"])
        ids += choice["token_ids"] + (new or [])
    return float(len(ids))


def changes_ids(base_url, api_key, **row):
    got = ask(f"{base_url}/completions", api_key, {"prompt": [5, 6, 7]})
    ask(f"{base_url}/completions", api_key, {"prompt": [5, 6, 8, *got["choices"][0]["token_ids"], 9]})


def unknown_id(base_url, api_key, **row):
    got = ask(f"{base_url}/completions", api_key, {"prompt": [5]})
    ask(f"{base_url}/completions", api_key, {"prompt": [5, *got["choices"][0]["token_ids"], 10**6]})


def unknown_first(base_url, api_key, **row):
    ask(f"{base_url}/completions", api_key, {"prompt": [10**6]})


def speaks(base_url, api_key, route, log, **row):
    """Calls two tools at once, gives back what it got, and writes down the ids of each turn."""
    schema = {"type": "object", "properties": {}}
    flat = {"type": "function", "name": "add", "parameters": schema}
    tools = {
        "chat/completions": {"type": "function", "function": {"name": "add", "parameters": schema}},
        "responses": flat,
        "messages": {"name": "add", "input_schema": schema},
    }
    chat, field = [{"role": "user", "content": "hello"}], "input" if route == "responses" else "messages"
    for _ in range(3):
        body = {field: chat, "tools": [tools[route]], "return_token_ids": True}
        got = ask(f"{base_url}/{route}", api_key, body)
        assert got == ask(f"{base_url}/{route}", api_key, body, {"x-stainless-retry-count": "1"})
        chat = [*chat]
        if route == "responses":
            chat += got["output"]
            ids = [one["call_id"] for one in got["output"] if one["type"] == "function_call"]
            chat += [{"type": "function_call_output", "call_id": id, "output": "5"} for id in ids]
        elif route == "messages":
            chat.append({"role": "assistant", "content": got["content"]})
            ids = [one["id"] for one in got["content"] if one["type"] == "tool_use"]
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": "5"} for id in ids]
            chat += [{"role": "user", "content": blocks}]
        else:
            chat.append(got["choices"][0]["message"])
            ids = [one["id"] for one in got["choices"][0]["message"].get("tool_calls", [])]
            chat += [{"role": "tool", "tool_call_id": id, "content": "5"} for id in ids]
        one = got["choices"][0] if "choices" in got else got
        note(log, got["prompt_token_ids"], one["token_ids"])
        if not ids:
            break
    return 1.0


def chat(base_url, api_key, log, messages, **more):
    """A turn's message, whose ids are written down."""
    body = {"messages": messages, "return_token_ids": True, **more}
    got = ask(f"{base_url}/chat/completions", api_key, body)
    for choice in got["choices"]:
        note(log, got["prompt_token_ids"], choice["token_ids"])
    return got["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


async def parallel(base_url, api_key, log, **row):
    """Three requests at once from one point, and a last one that has all their answers."""
    first = [user("plan")]
    first.append(await asyncio.to_thread(chat, base_url, api_key, log, first))
    said = await asyncio.gather(
        *(asyncio.to_thread(chat, base_url, api_key, log, [*first, user(f"part {n}")]) for n in range(3))
    )
    joined = ", ".join(one["content"] for one in said)
    await asyncio.to_thread(chat, base_url, api_key, log, [*first, user(joined)])
    return 1.0


async def sub_agents(base_url, api_key, log, late="", **row):
    """Two others with prompts of their own, at once and each over two turns, then itself again."""
    main = [system("Lead."), user("go")]
    main.append(await asyncio.to_thread(chat, base_url, api_key, log, main))

    async def sub(name):
        await asyncio.sleep(2.0 if name == late else 0.0)
        own = [system(f"You are {name}."), user("work")]
        for more in ("on", "end"):
            own.append(await asyncio.to_thread(chat, base_url, api_key, log, own))
            own.append(user(more))
        return own[-2]["content"]

    found = await asyncio.gather(sub("a"), sub("b"))
    await asyncio.to_thread(chat, base_url, api_key, log, [*main, user(" ".join(found))])
    return 1.0


def compacts(base_url, api_key, log, **row):
    """After two turns the history is a summary, which the model wrote."""
    own = [system("Play."), user("one")]
    for text in ("two", "sum up"):
        own += [chat(base_url, api_key, log, own), user(text)]
    summary = chat(base_url, api_key, log, own)["content"]
    own = [system("Play."), user(f"So far: {summary}. three")]
    for text in ("four", "five"):
        own += [chat(base_url, api_key, log, own), user(text)]
    return 1.0


def goes_back(base_url, api_key, log, **row):
    """Goes on from its first turn again, and from another past, and drops the history."""
    first = [user("one")]
    first.append(chat(base_url, api_key, log, first))
    second = [*first, user("two")]
    second.append(chat(base_url, api_key, log, second))
    chat(base_url, api_key, log, [*first, user("other two")])
    chat(base_url, api_key, log, [user("one"), {"role": "assistant", "content": "edited"}, user("two")])
    chat(base_url, api_key, log, [second[-1], user("three")])
    chat(base_url, api_key, log, [*second, user("three")])
    return 1.0


def several(base_url, api_key, log, **row):
    """Two answers to one request, and the same question once more."""
    chat(base_url, api_key, log, [user("one")], n=2)
    chat(base_url, api_key, log, [user("one")])
    return 1.0


def retries(base_url, api_key, log, **row):
    """In the middle of two that wait, one is sent again; both clients get one turn."""
    chat(base_url, api_key, log, [user("one")])
    got = []

    def send(text, count):
        body = {"messages": [user(text)], "return_token_ids": True}
        got.append(ask(f"{base_url}/chat/completions", api_key, body, {"x-stainless-retry-count": count}))

    threads = [threading.Thread(target=send, args=each) for each in (("a", "0"), ("b", "0"))]
    for one in threads:
        one.start()
    import time
    time.sleep(0.5)
    threads.append(threading.Thread(target=send, args=("b", "1")))
    threads[-1].start()
    for one in threads:
        one.join()
    answers = {str(one): one for one in got}
    assert len(got) == 3 and len(answers) == 2
    for one in answers.values():
        note(log, one["prompt_token_ids"], one["choices"][0]["token_ids"])
    return 1.0


def dies(base_url, api_key, log, died, **row):
    """Its process is lost while two requests wait."""
    first = [user("one")]
    first.append(chat(base_url, api_key, log, first))
    got = {}

    def send(text):
        got[text] = chat(base_url, api_key, log, [*first, user(text)])
        got[text + "2"] = chat(base_url, api_key, log, [*first, user(text), got[text], user("on")])

    threads = [threading.Thread(target=send, args=(each,)) for each in ("a", "b")]
    for one in threads:
        one.start()
    if not os.path.exists(died):
        while "a" not in got or "b" not in got:
            import time
            time.sleep(0.01)
        open(died, "w").close()
        open(log, "w").close()
        os._exit(1)
    for one in threads:
        one.join()
    return 1.0


def meets_limits(base_url, api_key, log, **row):
    """Asks until it is told of a limit, then begins anew."""
    own = [user("one")]
    for _ in range(9):
        try:
            own += [chat(base_url, api_key, log, own), user("more " * 3)]
        except AssertionError as error:
            assert "context_length_exceeded" in str(error)
            break
    chat(base_url, api_key, log, [user("anew")])
    return 1.0


def widens(base_url, api_key, log, **row):
    """Goes on from its first turn in many ways, until it is told of a limit."""
    first = [user("one")]
    first.append(chat(base_url, api_key, log, first))
    for number in range(9):
        try:
            chat(base_url, api_key, log, [*first, user(f"way {number}")])
        except AssertionError as error:
            assert "context_length_exceeded" in str(error)
            return 1.0


def thinks(base_url, api_key, log, **row):
    """Three turns that grow, whose thoughts it does not give back."""
    own = [user("hello")]
    for n in range(3):
        said = chat(base_url, api_key, log, own)
        assert "<think>" not in said["content"]
        own += [{"role": "assistant", "content": said["content"]}, user(f"[{n}]")]
    return 1.0


def counts(base_url, api_key, log, **row):
    """Asks for its tokens before each turn, of a conversation and then of another with a tool."""
    root, asked = base_url.removesuffix("/v1"), {"n": 0}
    tool = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": tool}]
    own = [{"name": "add", "input_schema": tool["parameters"]}]

    def turn(messages, **more):
        made = ask(f"{root}/tokenize", api_key, {"messages": messages, "return_token_strs": True, **more})
        same = ask(f"{base_url}/tokenize", api_key, {"messages": messages, **more})
        theirs = {"messages": messages, **({"tools": own} if more else {})}
        plain = all(one["role"] != "tool" for one in messages)  # Anthropic has another form of results
        number = plain and ask(f"{base_url}/messages/count_tokens", api_key, theirs)["input_tokens"]
        body = {"messages": messages, "return_token_ids": True, **more}
        got = ask(f"{base_url}/chat/completions", api_key, body)
        note(log, got["prompt_token_ids"], got["choices"][0]["token_ids"])
        assert made["tokens"] == same["tokens"] == got["prompt_token_ids"]
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        assert number in (made["count"], False)
        assert made["max_model_len"] == 1600 and same["token_strs"] is None
        text = ask(f"{root}/detokenize", api_key, {"tokens": made["tokens"]})["prompt"]
        bare = {"prompt": text, "add_special_tokens": False}
        assert ask(f"{root}/tokenize", api_key, bare)["tokens"] == made["tokens"]
        asked["n"] += 1
        return got["choices"][0]["message"]

    chat = [user("one")]
    for text in ("two", "three"):
        chat += [turn(chat), user(text)]
    other = [system("You add."), user("work")]
    other.append(turn(other, tools=tools))
    other += [{"role": "tool", "content": "5", "tool_call_id": one["id"]} for one in other[-1]["tool_calls"]]
    turn(other, tools=tools)
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"}
    got = httpx.post(f"{root}/detokenize", json={"tokens": [10**6]}, headers=headers, timeout=60)
    assert got.status_code == 400 and "token id 1000000" in got.json()["error"]["message"]
    return float(asked["n"])


def forms(base_url, api_key, log, **row):
    """Asks for JSON with tools at hand, for a call, and for either by other protocols."""
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    own = [user("one")]
    first = chat(base_url, api_key, log, own, tools=tools, response_format=wanted)
    assert json.loads(first["content"]) == {"x": "</think>"} and "tool_calls" not in first
    own += [first, user("two")]
    second = chat(base_url, api_key, log, own, tool_choice="required")  # of the tools before
    assert [one["function"]["arguments"] for one in second["tool_calls"]] == ['{"x": "</think>"}']
    other = [user("other")]
    third = chat(base_url, api_key, log, other, tools=tools, response_format=wanted)
    assert third["tool_calls"][0]["function"]["name"] == "add", "a call in the place of the answer"
    cut = ask(f"{base_url}/messages", api_key, {
        "messages": [user("cut")], "return_token_ids": True, "tool_choice": {"type": "any"},
        "tools": [{"name": "add", "input_schema": schema}],
    })
    note(log, cut["prompt_token_ids"], cut["token_ids"])
    assert (cut["stop_reason"], cut["content"][0]["type"]) == ("max_tokens", "text")
    body = {"input": "x", "return_token_ids": True, "text": {"format": {"type": "json_object"}}}
    last = ask(f"{base_url}/responses", api_key, body)
    note(log, last["prompt_token_ids"], last["token_ids"])
    assert last["text"] == body["text"]
    import httpx

    bad = {"messages": [user("x")], "tool_choice": {"type": "function", "function": {"name": "sub"}}}
    headers = {"Authorization": f"Bearer {api_key}"}
    got = httpx.post(f"{base_url}/chat/completions", json=bad, headers=headers, timeout=60)
    assert got.status_code == 400 and "no tool of the request" in got.json()["error"]["message"]
    return 2.0


async def pays(base_url, api_key, log, pay, **row):
    """Two branches and the rest, each with a reward of its own."""
    first = [user("plan")]
    first.append(await asyncio.to_thread(chat, base_url, api_key, log, first))

    async def sub(name):
        own = [system(f"You are {name}."), user("work")]
        metadata = {"branch": name}
        own.append(await asyncio.to_thread(chat, base_url, api_key, log, own, metadata=metadata))
        own.append(user("on"))
        await asyncio.to_thread(chat, base_url, api_key, log, own, metadata=metadata)

    await asyncio.gather(sub("a"), sub("b"))
    return json.loads(pay)


def note(log, read, written):
    with open(log, "a") as file:
        print([read, written], file=file)


def ask(url, key, body, more=()):
    import httpx

    headers = {"Authorization": f"Bearer {key}", **dict(more)}
    got = httpx.post(url, json=body, headers=headers, timeout=60)
    assert got.status_code == 200, got.text
    return got.json()


class Echo:
    """Says what it was told."""

    def reset(self, **row):
        self.turns = 0
        return "hello"

    def step(self, text):
        self.turns += 1
        return f"[{text[-3:]}]", 0.5, text.endswith("bye")


class Injects(Echo):
    """Says what looks like the end of a message."""

    def step(self, text):
        return "a<eos>b"


def rows():
    ids = {"start": [5, 6, 7], "more": [8, 9]}
    return [{"question": f"q{n}", **ids} for n in range(6)]
'''
Make = Callable[..., EnvironmentEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes an engine of an agent, or the class, of the file above, with text in single characters."""
    (tmp_path / "agents.py").write_text(AGENTS)
    made = []

    def build(
        name: str,
        template: str = "chat",
        most: int = 1000,
        path_tokens: int | None = None,
        **settings: Any,
    ) -> EnvironmentEngine:
        params = settings.pop("params", {})
        if name[0].islower():
            params = {"log": str(tmp_path / "log"), **params}
        kind = ClassEnvironment if name[0].isupper() else AgentEnvironment
        environment = kind(path=f"{tmp_path}/agents.py:{name}", params=params)
        source = FunctionSource(path=f"{tmp_path}/agents.py:rows")
        settings = {"max_turns": 20, **settings}
        made.append(
            EnvironmentEngine(
                EnvironmentSpec(
                    model=RandomModel(),
                    model_cache=str(tmp_path / "models"),
                    data=DataConfig(source=source, template=template, max_prompt_tokens=600),
                    episodes=EpisodesConfig(environment=environment, processes=1, **settings),
                    max_new_tokens=most,
                    path_tokens=path_tokens,
                    store_uri=f"file://{tmp_path}/store",
                    store_options={},
                )
            )
        )
        return made[-1]

    yield build
    for engine in made:
        engine.close()


class Rounds:
    """Episodes of one prompt, whose turns are written by the test."""

    def __init__(
        self, engine: EnvironmentEngine, folder: Path, count: int = 1, row: int = 1
    ) -> None:
        self.engine, self.store, self.count = engine, Store(f"file://{folder}/store"), count
        self.folder = folder
        self.tokenizer = engine._tokenizer
        made = engine.prompts([row], 7, "prompts.safetensors")
        assert made.ref is not None, made.dropped
        self.prompts = made.ref
        self.number = 0
        self.result = self.go_on(None, None)

    def go_on(self, begun: BatchRef | None, turns: BatchRef | None) -> AnswerResult:
        self.number += 1
        key = f"round-{self.number}.safetensors"
        return self.engine.go_on(
            RoundRequest(prompts=self.prompts, n=self.count, begun=begun, turns=turns), key
        )

    def column(self, name: str, of: BatchRef | None = None) -> list[Any]:
        found = (of or self.result.ref).fetch_list(self.store, name)
        return [one.tolist() if isinstance(one, np.ndarray) else one for one in found]

    @property
    def pending(self) -> BatchRef:
        assert self.result.pending is not None, "nothing waits"
        return self.result.pending

    @property
    def read(self) -> list[str]:
        """What the requests that wait are after."""
        return [self.tokenizer.decode(ids) for ids in self.column("prompt_ids", self.pending)]

    def turns(self, *texts: str, finish: str = "stop") -> BatchRef:
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        columns: dict[str, object] = {
            "response_ids": [np.array(one, np.int32) for one in ids],
            "rollout_logprobs": [np.full(len(one), -1.0, np.float32) for one in ids],
            "weight_spans": [np.array([3, 0, len(one)], np.int64) for one in ids],
            "finish_reason": [finish] * len(ids),
            "weights_digest": ["d"] * len(ids),
            "worker": ["w"] * len(ids),
            "attempt": np.zeros(len(ids), np.int64),
        }
        return write_batch(self.store, f"turns-{self.number}.safetensors", columns)

    def says(self, *texts: str, finish: str = "stop") -> AnswerResult:
        """The turns of the requests that wait, and what comes after."""
        assert len(texts) == len(self.pending)
        self.result = self.go_on(self.result.ref, self.turns(*texts, finish=finish))
        return self.result

    def play(self) -> None:
        """Turns that differ, until all is over."""
        while self.result.pending is not None:
            count = len(self.pending)
            self.says(*(f"{self.number}.{number}" for number in range(count)))

    @property
    def trace(self) -> list[tuple[list[int], list[int]]]:
        """What the agent wrote down: ids read and written."""
        lines = (self.folder / "log").read_text().splitlines()
        return [tuple(ast.literal_eval(line)) for line in lines]

    def check(self) -> None:
        """What is stored is what was sent: each turn once, after what it was asked for after."""
        assert self.column("episode_error") == [""] * self.count
        forests = read_forests(self.store, self.result.ref)
        assert forests is not None
        found = []
        for row, forest in enumerate(forests):
            prompt, response = (self.column(n)[row] for n in ("prompt_ids", "response_ids"))
            tokens, mask = [*prompt, *response], self.column("response_mask")[row]
            authors, turns = self.column("author")[row], self.column("turn_ids")[row]
            forest.check_row(len(response), np.array(mask))
            covered = np.zeros(len(response), bool)
            for _, start, stop in np.array(self.column("weight_spans")[row]).reshape(-1, 3):
                covered[start:stop] = True
            assert mask == [int(author == P) for author in authors] == covered.astype(int).tolist()
            logprobs = self.column("rollout_logprobs")[row]
            assert logprobs == [-1.0 if one else 0.0 for one in mask]
            for node, start in enumerate(forest.starts.tolist()):
                stop = start + int(forest.lengths[node])
                own = [place for place in range(start, stop) if mask[place - len(prompt)]]
                path = forest.path_to(stop).tolist()
                assert path[len(path) - len(own) :] == own, "the turn is the end of its node"
                assert {turns[place - len(prompt)] for place in own} == {node}
                before = [tokens[place] for place in path[: len(path) - len(own)]]
                found.append((before, [tokens[place] for place in own]))
        assert sorted(found) == sorted(self.trace)
        assert self.engine.replay(self.result.ref) == []


@pytest.mark.parametrize(
    ("agent", "turns", "paths"),
    [
        ("parallel", 5, 4),
        ("sub_agents", 6, 3),
        ("compacts", 5, 2),
        ("goes_back", 6, 4),
        ("several", 3, 3),
        ("retries", 3, 3),
        ("dies", 5, 2),
    ],
)
def test_each_turn_is_stored_once_where_it_was_drawn(
    make: Make, tmp_path: Path, agent: str, turns: int, paths: int
) -> None:
    params = {"died": str(tmp_path / "died")} if agent == "dies" else {}
    rounds = Rounds(make(agent, params=params), tmp_path)
    rounds.play()
    assert rounds.column("episode") == ["done"]
    assert rounds.column("turn_rewards")[0][-1] == 1.0
    rounds.check()
    (forest,) = read_forests(rounds.store, rounds.result.ref) or []
    assert (len(forest.lengths), len(forest.paths())) == (turns, paths)


# Removes what was thought in all but the last turns: those after the last user's message.
FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set said = m.content.split('</think>')[-1] if loop.index0 < ns.last else m.content %}"
    "{{ m.role + ': ' + said + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize("agent", ["Echo", "thinks"])
def test_each_turn_may_be_asked_for_after_a_rendering_of_its_own(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    forgetful(monkeypatch)
    rounds = Rounds(make(agent, past_turns="as_rendered"), tmp_path)
    texts = ["<think>one</think>x", "<think>two</think>y", "<think>three</think>bye"]
    chat = rounds.read[0]
    for number, text in enumerate(texts):
        assert rounds.read == [chat], "as the template has it, without what was thought"
        rounds.says(text)
        answer = text[-3:] if agent == "Echo" else str(number)
        chat += f"{text.split('</think>')[1]}\nuser: [{answer}]\nassistant: "
    assert rounds.column("episode") == ["done"] and rounds.column("episode_error") == [""]
    (forest,) = read_forests(rounds.store, rounds.result.ref) or []
    prompt, response = (rounds.column(name)[0] for name in ("prompt_ids", "response_ids"))
    tokens = [*prompt, *response]
    paths = [rounds.tokenizer.decode([tokens[place] for place in one]) for one in forest.paths()]
    assert len(paths) == 3, "each turn has a path of its own"
    assert sorted(path[-len(text) :] for path, text in zip(paths, texts, strict=True)) == sorted(
        texts
    )
    assert "<think>" not in paths[2][: -len(texts[2])]
    assert sum(rounds.column("response_mask")[0]) == sum(map(len, texts)), "each token once"
    if agent == "thinks":
        rounds.check()
    else:
        assert rounds.engine.replay(rounds.result.ref) == []


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the model's tokenizer use that template."""
    from engines.models import checkpoints

    load = checkpoints.load_tokenizer

    def loaded(directory: Path) -> Any:
        tokenizer = load(directory)
        tokenizer.chat_template = FORGETFUL
        return tokenizer

    monkeypatch.setattr(checkpoints, "load_tokenizer", loaded)


def test_an_injected_end_of_a_message_stays_text(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful(monkeypatch)
    rounds = Rounds(make("Injects", past_turns="as_rendered"), tmp_path)
    end = rounds.tokenizer.eos_token
    rounds.says("<think>one</think>x")
    (ids,) = rounds.column("prompt_ids", rounds.pending)
    assert f"a{end}b" in rounds.tokenizer.decode(ids)
    assert rounds.tokenizer.eos_token_id not in ids


def test_a_template_that_keeps_the_past_makes_one_path(make: Make, tmp_path: Path) -> None:
    rounds = Rounds(make("Echo", past_turns="as_rendered"), tmp_path)
    for text in ("x", "y", "bye"):
        rounds.says(text)
    (forest,) = read_forests(rounds.store, rounds.result.ref) or []
    assert forest.one_path and len(forest.lengths) == 3
    assert rounds.column("turn_rewards") == [[0.5, 0.5, 0.5]]


def test_requests_at_once_are_one_round_and_know_no_order(make: Make, tmp_path: Path) -> None:
    rounds = Rounds(make("sub_agents"), tmp_path)
    rounds.says("go!")
    assert sorted(rounds.read) == [
        f"system: You are {name}.\nuser: work\nassistant: " for name in "ab"
    ]
    seeds = rounds.column("branch_seed", rounds.pending)
    assert len({*seeds}) == 2
    assert rounds.column("group_id", rounds.pending) == [rounds.column("sample_id")[0]] * 2


@pytest.mark.slow
def test_when_a_request_came_is_no_difference(make: Make, tmp_path: Path) -> None:
    names = ("response_ids", "node_lengths", "node_parents", "rollout_logprobs", "requests")
    found, counts = [], []
    for late in ("", "a", "b"):
        (tmp_path / "log").unlink(missing_ok=True)
        rounds = Rounds(make("sub_agents", params={"late": late}), tmp_path)
        while rounds.result.pending is not None:
            rounds.says(*(f"{read[14:17]}{len(read)}" for read in rounds.read))
        rounds.check()
        found.append([str(rounds.column(name)) for name in names])
        counts.append(rounds.number)
    assert counts[1] == counts[2] > counts[0], "the late one had rounds of its own"
    assert found[0] == found[1] == found[2]


def test_what_is_asked_twice_is_drawn_twice(make: Make, tmp_path: Path) -> None:
    rounds = Rounds(make("several"), tmp_path)
    assert len({*rounds.read}) == 1 and len(rounds.read) == 2
    first = rounds.column("branch_seed", rounds.pending)
    rounds.says("a", "b")
    seeds = [*first, *rounds.column("branch_seed", rounds.pending)]
    assert len({*seeds}) == 3, "the noise of each is its own"


def test_an_engine_that_is_lost_is_no_difference(make: Make, tmp_path: Path) -> None:
    """Another worker begins the agents anew; and a call that is made again finds its answer."""
    found = []
    for lost in (False, True):
        (tmp_path / "log").unlink(missing_ok=True)
        rounds = Rounds(make("sub_agents"), tmp_path, count=2)
        while rounds.result.pending is not None:
            texts = [str(seed)[:4] for seed in rounds.column("branch_seed", rounds.pending)]
            before, turns = rounds.result.ref, rounds.turns(*texts)
            if lost:
                rounds.engine.close()
                rounds.engine = make("sub_agents")
            rounds.result = rounds.go_on(before, turns)
            again = rounds.go_on(before, turns)
            assert rounds.column("requests", again.ref) == rounds.column("requests")
        assert rounds.column("episode") == ["done", "done"]
        names = (
            "response_ids",
            "node_lengths",
            "node_parents",
            "author",
            "turn_rewards",
            "requests",
        )
        found.append([str(rounds.column(name)) for name in names])
    assert found[0] == found[1]


@pytest.mark.parametrize("lost", [False, True])
def test_the_tokenizer_gives_the_ids_that_a_turn_reads(
    make: Make, tmp_path: Path, lost: bool
) -> None:
    """Also of a turn that goes on from one that was cut; it is asked again after a loss."""
    counts = {"full_turn": "counts", "max_turn_tokens": 60}
    rounds = Rounds(make("counts", **counts), tmp_path)
    for text, finish in (
        ("a", "stop"),
        ("b" * 60, "length"),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', "stop"),
        ("d", "stop"),
    ):
        if lost:
            (tmp_path / "log").unlink(missing_ok=True)
            rounds.engine.close()
            rounds.engine = make("counts", **counts)
        rounds.says(text, finish=finish)
    assert rounds.column("episode_error") == [""]
    assert rounds.column("turn_rewards")[0][-1] == 4.0
    assert rounds.result.pending is None
    if not lost:
        rounds.check()


@pytest.mark.parametrize("lost", [False, True])
def test_the_form_that_is_asked_for_goes_to_the_engine(
    make: Make, tmp_path: Path, lost: bool
) -> None:
    """With the prompt; what comes back is read by it, and a turn that was cut is no call."""
    settings: dict[str, Any] = {"full_turn": "counts", "max_turn_tokens": 60, "most": 4000}
    rounds, kinds = Rounds(make("forms", **settings), tmp_path), []
    call = '<tool_call>{"name": "add", "arguments": {"x": "</think>"}}</tool_call>'
    for text in ('{"x": "</think>"}', call, call, call[:60], "{}"):
        (grammar,) = rounds.column("grammar", rounds.pending)
        kinds.append(TurnGrammar.of_json(grammar).calls)
        if lost:
            (tmp_path / "log").unlink(missing_ok=True)
            rounds.engine.close()
            rounds.engine = make("forms", **settings)
        rounds.says(text, finish="length" if text == call[:60] else "stop")
    assert rounds.column("episode_error") == [""]
    assert rounds.column("turn_rewards")[0][-1] == 2.0
    assert kinds == ["tagged", "yes", "tagged", "yes", "no"]
    if not lost:
        rounds.check()


def test_a_turn_that_was_cut_off_is_asked_for_again(make: Make, tmp_path: Path) -> None:
    rounds = Rounds(make("sub_agents"), tmp_path)
    rounds.says("go!")
    asked = rounds.read
    rounds.says("a", "b", finish="unfinished")
    assert rounds.read == asked
    rounds.play()
    rounds.check()


def test_by_setting_another_conversation_fails(make: Make, tmp_path: Path) -> None:
    rounds = Rounds(make("by_ids", "plain", branches=False), tmp_path)
    rounds.play()
    assert rounds.column("episode") == ["done"] and "node_parents" not in rounds.result.ref.names
    assert rounds.engine.replay(rounds.result.ref) == []
    for agent in ("parallel", "compacts", "several"):
        rounds = Rounds(make(agent, branches=False), tmp_path)
        rounds.play()
        assert rounds.column("status") == [SampleStatus.FAILED]
        assert "episodes.branches = false" in rounds.column("episode_error")[0]


def test_limits(make: Make, tmp_path: Path) -> None:
    rounds = Rounds(make("meets_limits", most=100), tmp_path)
    assert rounds.column(LIMIT, rounds.pending) == [100]
    rounds.says("a" * 20)
    said = len("\nuser: more more more \nassistant: ")
    assert rounds.column(LIMIT, rounds.pending) == [100 - 20 - said]
    rounds.says("b" * 20)
    assert rounds.column("episode") == ["tokens"], "the third turn does not fit"
    assert rounds.column("status") == [SampleStatus.TRUNCATED]
    rounds = Rounds(make("meets_limits", max_turn_tokens=30), tmp_path)
    rounds.says("a" * 30, finish="length")
    assert rounds.column("episode") == ["turn_tokens"]
    rounds = Rounds(make("parallel", max_turns=3), tmp_path)
    rounds.says("a")
    assert len(rounds.pending) == 2, "the third at once is told of the limit"
    rounds.play()
    assert rounds.column("episode") == ["turns"] and len(rounds.column("node_lengths")[0]) == 3


def test_paths_have_together_what_a_micro_batch_takes_of_a_sample(
    make: Make, tmp_path: Path
) -> None:
    rounds = Rounds(make("widens", path_tokens=200), tmp_path)
    before = len("user: one\nassistant: ")
    assert rounds.column(LIMIT, rounds.pending) == [200 - before]
    rounds.play()
    assert rounds.column("episode") == ["paths"]
    assert rounds.column("turn_rewards")[0][-1] == 1.0
    rounds.check()
    (forest,) = read_forests(rounds.store, rounds.result.ref) or []
    longest = int(forest.path_lengths().max())
    assert 200 - longest < forest.path_lengths().sum() <= 200
    rounds = Rounds(make("widens", path_tokens=80), tmp_path)
    rounds.says("a" * 20)
    rounds.says("b" * rounds.column(LIMIT, rounds.pending)[0], finish="length")
    assert rounds.column("episode") == ["paths"], "the turn was cut there"


@pytest.mark.parametrize("route", ["completions", "generate"])
def test_token_ids_are_taken_and_given_as_they_are(make: Make, tmp_path: Path, route: str) -> None:
    rounds = Rounds(make("by_ids", "plain", params={"route": route}), tmp_path, 2)
    assert rounds.column("prompt_ids") == [[5, 6, 7]] * 2
    rounds.says("ab", "abc")
    rounds.says("d", "d")
    first = rounds.tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert rounds.column("response_ids")[0][: len(first) + 2] == [*first, 8, 9]
    assert rounds.column("author")[0] == [P] * len(first) + [E, E, P]
    rewards = [one[-1] for one in rounds.column("turn_rewards")]
    assert rewards == [3.0 + len(one) for one in rounds.column("response_ids")]
    assert rounds.engine.replay(rounds.result.ref) == []


def test_token_ids_may_leave_a_sequence_anywhere(make: Make, tmp_path: Path) -> None:
    rounds = Rounds(make("changes_ids", "plain"), tmp_path)
    rounds.says("ab")
    assert rounds.column("prompt_ids", rounds.pending)[0][:3] == [5, 6, 8]
    rounds.says("c")
    (forest,) = read_forests(rounds.store, rounds.result.ref) or []
    assert forest.parents.tolist() == [2, 3] or forest.parents.tolist() == [3, 2]


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_each_protocol_trains_the_tokens_that_it_was_sent(
    make: Make, tmp_path: Path, route: str
) -> None:
    rounds = Rounds(make("speaks", params={"route": route}), tmp_path)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    texts = [f"<think>so</think>I add.{call}{call}", call, "<think>hm</think>10"]
    for text in texts:
        assert rounds.says(text).failures == ()
    rounds.check()
    (forest,) = read_forests(rounds.store, rounds.result.ref) or []
    assert forest.one_path
    told = rounds.tokenizer.decode(rounds.column("response_ids")[0])
    assert told.count("5\n5") == 1 and told.endswith(texts[-1])


def test_unknown_token_ids_fail(make: Make, tmp_path: Path) -> None:
    rounds = Rounds(make("unknown_id", "plain"), tmp_path)
    (failure,) = rounds.says("ab").failures
    assert "the agent gave the token id 1000000; the model's tokenizer has" in failure.error
    with pytest.raises(EnvironmentFailed, match="the token id 1000000"):
        make("unknown_first", "plain").prompts([1], 5, "none.safetensors")


def test_prompts_of_token_ids_are_bounded(make: Make) -> None:
    long = make("by_ids", "plain")
    agents = long._tasks[""].agents
    agents._data = agents._data.model_copy(update={"max_prompt_tokens": 2})
    made = long.prompts([1], 5, "none.safetensors")
    assert made.ref is None and made.dropped == ((1, "prompt_too_long"),)


@pytest.mark.parametrize("credit", ["episode", "branch"])
def test_rewards_by_branch(make: Make, tmp_path: Path, credit: str) -> None:
    rounds = Rounds(make("pays", credit=credit, params={"pay": '{"": 1.0, "a": 0.25}'}), tmp_path)
    rounds.play()
    rounds.check()
    (rewards,), (turns,) = rounds.column("turn_rewards"), rounds.column("turn_ids")
    assert np.nansum(rewards) == 1.25
    if credit == "episode":
        assert "branch_ids" not in rounds.result.ref.names
        return
    (ids,), (more,) = rounds.column("branch_ids"), rounds.column("branch_rewards")
    names = [one["branch"] for one in rounds.column("requests")[0]["answered"]]
    assert sorted(names) == ["", "a", "a", "b", "b"]
    for turn, id, own in zip(turns, ids, more, strict=True):
        assert own == (-1.0 if names[turn] == "a" else -0.25), "b has none of its own: the rest's"
        assert (id == ids[turns.index(names.index("a"))]) == (names[turn] == "a")
    assert rewards[max(n for n, name in enumerate(names) if name == "a")] == 0.25


@pytest.mark.parametrize("pay", ['{"a": "much"}', '{"a": NaN}'])
def test_rewards_by_branch_are_numbers(make: Make, tmp_path: Path, pay: str) -> None:
    rounds = Rounds(make("pays", params={"pay": pay}), tmp_path)
    rounds.play()
    assert rounds.column("status") == [SampleStatus.FAILED]
