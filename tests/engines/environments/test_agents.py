"""Agents that ask the model over HTTP: their requests are the turns of an episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.episodes import AgentEnvironment, EpisodesConfig
from engines.environments.protocol import Outcome
from engines.environments.sessions import Environments
from tests.engines.environments.playing import begin_agent as begin
from tests.engines.environments.playing import call, new_messages, requests

AGENTS = """
import asyncio, os, time
import httpx

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def ask(base_url, api_key, messages, **more):
    answer = httpx.post(
        f"{base_url}/chat/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={"model": "any", "messages": messages, **more},
        timeout=30,
    )
    if answer.status_code != 200:
        raise RuntimeError(f"{answer.status_code} {answer.json()['error']['message']}")
    return answer.json()["choices"][0]["message"]


def adds(base_url, api_key, start=0, seed=0):
    chat = [{"role": "system", "content": "Count."}, {"role": "user", "content": f"from {start}"}]
    for number in range(2):
        said = ask(base_url, api_key, chat)
        chat += [said, {"role": "user", "content": f"{said['content']} and {number}?"}]
    return len(said["content"])


async def waits(base_url, api_key, **row):
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as client:
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
        answer = await client.post(f"{base_url}/chat/completions", json=body, timeout=30)
    return answer.json()["choices"][0]["message"]["content"] == "yes"


SHARED = []


async def shares(base_url, api_key, **row):
    if not SHARED:
        SHARED.append(httpx.AsyncClient())
    headers = {"Authorization": f"Bearer {api_key}"}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    url = f"{base_url}/chat/completions"
    answer = await SHARED[0].post(url, json=body, headers=headers, timeout=30)
    said = answer.json()["choices"][0]["message"]["content"]
    if said == "leave":
        raise SystemExit(3)
    return float(said)


async def blocks(base_url, api_key, **row):
    return float(ask(base_url, api_key, [{"role": "user", "content": "hi"}])["content"])


def uses_tools(base_url, api_key, **row):
    chat = [{"role": "user", "content": "2 and 3?"}]
    while True:
        said = ask(base_url, api_key, chat, tools=TOOLS)
        chat.append(said)
        if not said.get("tool_calls"):
            return float(said["content"] == "5")
        for one in said["tool_calls"]:
            chat.append({"role": "tool", "tool_call_id": one["id"], "content": one["function"]["arguments"]})


def partial(base_url, api_key, **row):
    try:
        ask(base_url, api_key, [{"role": "user", "content": "on"}])
        ask(base_url, api_key, [{"role": "user", "content": "on"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}])
    except RuntimeError as error:
        assert "400 the episode is over: it has reached a limit" in str(error)
        return 0.25


def asks_again(base_url, api_key, **row):
    body = {"messages": [{"role": "user", "content": "one"}]}
    headers = {"Authorization": f"Bearer {api_key}"}
    send = lambda **more: httpx.post(f"{base_url}/chat/completions", json=body, headers=headers | more, timeout=30)
    first = send().json()
    again = send(**{"x-stainless-retry-count": "1"}).json()
    assert again["choices"] == first["choices"]
    return 0.5


def forgets(base_url, api_key, **row):
    ask(base_url, api_key, [{"role": "user", "content": "one"}])
    ask(base_url, api_key, [{"role": "user", "content": "two"}])


def repeats(base_url, api_key, **row):
    ask(base_url, api_key, [{"role": "user", "content": "one"}])
    ask(base_url, api_key, [{"role": "user", "content": "one"}])


def silent(base_url, api_key, **row):
    return 1.0


def raises(base_url, api_key, **row):
    ask(base_url, api_key, [{"role": "user", "content": "one"}])
    raise KeyError("lost")


def leaves(base_url, api_key, **row):
    ask(base_url, api_key, [{"role": "user", "content": "one"}])
    raise SystemExit(3)


def nonsense(base_url, api_key, **row):
    ask(base_url, api_key, [{"role": "user", "content": "one"}])
    return "good"


def tells(base_url, api_key, **row):
    return ask(base_url, api_key, [{"role": "user", "content": f"{base_url} {api_key}"}]) and None


def no_url(question):
    return 1.0


def dies(base_url, api_key, log, **row):
    chat = [{"role": "user", "content": "one"}]
    chat += [ask(base_url, api_key, chat), {"role": "user", "content": "two"}]
    if not os.path.exists(log):
        open(log, "w").close()
        os._exit(1)
    return float(ask(base_url, api_key, chat)["content"])


def streams(base_url, api_key, **row):
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    assert [model.id for model in client.models.list()] == ["policy"]
    chat = [{"role": "user", "content": "one"}]
    whole = client.chat.completions.create(model="policy", messages=chat)
    chat += [whole.choices[0].message.model_dump(), {"role": "user", "content": "two"}]
    text = ""
    for chunk in client.chat.completions.create(model="policy", messages=chat, stream=True):
        text += chunk.choices[0].delta.content or ""
    return float(text)
"""

Playing = Callable[..., Environments]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playing]:
    """Makes environments of an agent of the file above."""
    (tmp_path / "my_agents.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[Environments] = []

    def play(name: str, **params: Any) -> Environments:
        environment = AgentEnvironment(path=f"my_agents:{name}", params=params)
        config = EpisodesConfig(environment=environment, processes=1, turn_timeout=20.0)
        made.append(Environments(config))
        return made[-1]

    yield play
    for one in made:
        one.close()


def messages(outcome: Outcome) -> list[dict[str, Any]]:
    (request,) = requests(outcome)
    return [*new_messages(request)]


def test_requests_are_turns(play: Playing) -> None:
    environments = play("adds")
    assert environments.start().chats
    [opening] = environments.opening([{"start": 3, "other": 1}], [7])
    assert messages(opening) == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "from 3"},
    ]
    episode = begin(environments, start=3, other=1)
    assert messages(episode.act(environments, "four", ())) == [
        {"role": "user", "content": "four and 0?"}
    ]
    assert episode.act(environments, "fives", ()) == Outcome(reward=5.0, done=True)
    assert episode.finish(environments) == Outcome()


def test_an_agent_may_be_async(play: Playing) -> None:
    environments = play("waits")
    episode = begin(environments)
    assert episode.act(environments, "yes", ()) == Outcome(reward=1.0, done=True)


def test_async_agents_share_a_client_and_its_event_loop(play: Playing) -> None:
    environments = play("shares")
    for number in range(4):
        episode = begin(environments, str(number))
        assert episode.act(environments, str(number), ()).reward == number
    first, second = begin(environments, "first"), begin(environments, "second")
    left = first.act(environments, "leave", ())
    assert left.failed is not None and "left by SystemExit" in left.failed
    assert second.act(environments, "5", ()).reward == 5.0
    assert begin(environments, "last").act(environments, "6", ()).reward == 6.0


def test_an_async_agent_that_blocks_its_loop_keeps_nobody_waiting(play: Playing) -> None:
    environments = play("blocks")
    episodes = [begin(environments, str(number)) for number in range(3)]
    for number in (2, 0, 1):
        assert episodes[number].act(environments, str(number), ()).reward == number


def test_tools_are_called(play: Playing) -> None:
    environments = play("uses_tools")
    [opening] = environments.opening([{}], [7])
    assert requests(opening)[0]["tools"][0]["function"]["name"] == "add"
    episode = begin(environments)
    calls = [call("add", of=[2, 3]), call("add", of=[1])]
    new = messages(episode.act(environments, "<tool_call>…", calls))
    assert [one["content"] for one in new] == ['{"of": [2, 3]}', '{"of": [1]}']
    first, second = [one["tool_call_id"] for one in new]
    assert first[:-1] == second[:-1] and (first[-1], second[-1]) == ("0", "1")
    assert episode.act(environments, "5", ()) == Outcome(reward=1.0, done=True)


def test_calls_are_text_to_an_agent_without_tools(play: Playing) -> None:
    environments = play("adds")
    episode = begin(environments)
    new = messages(episode.act(environments, "{}", [call("add")]))
    assert new == [{"role": "user", "content": "{} and 0?"}]


def test_an_agent_learns_that_its_episode_is_over(play: Playing) -> None:
    environments = play("partial")
    episode = begin(environments)
    episode.act(environments, "a", ())
    assert episode.finish(environments) == Outcome(reward=0.25)


def test_a_request_that_was_sent_again_is_answered_again(play: Playing) -> None:
    environments = play("asks_again")
    assert begin(environments).act(environments, "a", ()) == Outcome(reward=0.5, done=True)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("raises", "KeyError: 'lost'"),
        ("leaves", "the agent left by SystemExit: 3"),
        ("nonsense", "'good' (str) as a reward, no number"),
    ],
)
def test_what_an_agent_may_not_come_to_fails(play: Playing, agent: str, said: str) -> None:
    environments = play(agent)
    outcome = begin(environments).act(environments, "a", ())
    assert outcome.failed is not None and said in outcome.failed


@pytest.mark.parametrize("agent", ["forgets", "repeats"])
def test_another_conversation_goes_on_from_none(play: Playing, agent: str) -> None:
    environments = play(agent)
    episode = begin(environments)
    (first,) = episode.waiting
    episode.answer("a")
    (second,) = episode.waiting
    assert (second["after"], second["new"]) == ("", 1)
    assert second["name"] != first["name"]
    assert (second["name"].split("/")[0] == first["name"].split("/")[0]) == (agent == "repeats")
    assert episode.answer("b").done


def test_an_agent_that_asks_nothing_fails(play: Playing) -> None:
    [opening] = play("silent").opening([{}], [7])
    assert opening.failed == "the agent ended before it had asked the model anything"


def test_an_agent_has_to_take_the_address(play: Playing) -> None:
    with pytest.raises(ValueError, match="takes no argument base_url"):
        play("no_url").start()


def test_an_agent_that_dies_is_begun_again(play: Playing, tmp_path: Path) -> None:
    environments = play("dies", log=str(tmp_path / "died"))
    episode = begin(environments)
    assert messages(episode.act(environments, "a", ()))[0]["content"] == "two"
    assert (tmp_path / "died").exists()
    assert episode.act(environments, "2", ()) == Outcome(reward=2.0, done=True)


def test_a_key_is_of_one_episode(play: Playing) -> None:
    [opening] = play("tells").opening([{}], [7])
    url, key = messages(opening)[0]["content"].split()
    body = {"messages": [{"role": "user", "content": "mine?"}]}

    def status(key: str, body: Any) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{url}/chat/completions", json=body, headers=headers).status_code

    assert status(key, body) == 401, "its episode has been let go"
    assert status("none", body) == 401
    assert httpx.get(f"{url}/nothing").status_code == 404


def test_the_openai_client(play: Playing) -> None:
    pytest.importorskip("openai")
    environments = play("streams")
    episode = begin(environments)
    assert messages(episode.act(environments, "a", ()))[0]["content"] == "two"
    assert episode.act(environments, "3", ()) == Outcome(reward=3.0, done=True)
