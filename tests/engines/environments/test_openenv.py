"""Environments behind a server of OpenEnv: its protocol on a real socket."""

from __future__ import annotations

import http
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.sync.server import Request, Response, ServerConnection, serve

from configs.episodes import EpisodesConfig, OpenEnvEnvironment
from engines.environments.protocol import Outcome
from engines.environments.sessions import Environments
from tests.engines.environments.playing import Episode, begin, call

TEXT = {"properties": {"metadata": {}, "message": {"type": "string"}}, "required": ["message"]}
NUMBER = {"properties": {"guess": {"type": "integer"}}, "required": ["guess"]}
TWO = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}}
TOOLS = {"properties": {"tool_name": {"type": "string"}, "arguments": {"type": "object"}}}
DOUBLE = {"name": "double", "description": "Twice it.", "input_schema": {"type": "object"}}


class Server:
    """Answers each message as openenv 0.10's server does; `sessions` at once."""

    def __init__(self, action: dict[str, Any], sessions: int) -> None:
        self.action = action
        self.sessions = sessions
        self.open = 0
        self.breaks_at: int | None = None  # the step, of the next session to reach it
        self.resets: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def page(self, connection: ServerConnection, request: Request) -> Response | None:
        pages = {"/schema": {"action": self.action}, "/metadata": {"name": "game"}}
        if request.path in pages:
            return connection.respond(http.HTTPStatus.OK, json.dumps(pages[request.path]))
        return None

    def session(self, connection: ServerConnection) -> None:
        with self.lock:
            full = self.open >= self.sessions
            self.open += not full
        if full:
            told = {"message": "no room", "code": "CAPACITY_REACHED"}
            connection.send(json.dumps({"type": "error", "data": told}))
            return
        try:
            self.play(connection)
        finally:
            with self.lock:
                self.open -= 1

    def play(self, connection: ServerConnection) -> None:
        steps: list[Any] = []
        for text in connection:
            message = json.loads(text)
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                self.resets.append(message["data"])
                answer = observed({"text": f"seed {message['data'].get('seed')}", "metadata": {}})
            elif message["data"].get("type") == "list_tools":
                answer = observed({"tools": [DOUBLE]})
            else:
                steps.append(message["data"])
                if len(steps) == self.breaks_at:
                    self.breaks_at = None
                    return
                answer = self.step(steps)
            connection.send(json.dumps(answer))

    def step(self, steps: list[Any]) -> dict[str, Any]:
        action = steps[-1]
        if action.get("type") == "call_tool":
            if action["tool_name"] != "double":
                error = {"error_type": "tool_not_found", "message": "no such tool"}
                return observed({"tool_name": action["tool_name"], "result": None, "error": error})
            twice = 2 * action["arguments"]["of"]
            result = {"data": twice, "content": []}
            return observed({"tool_name": "double", "result": result, "error": None}, twice / 2)
        if action.get("message") == "raise":
            return {"type": "error", "data": {"message": "broken", "code": "EXECUTION_ERROR"}}
        if "row" in action and not isinstance(action["row"], int):
            wrong = [{"loc": ["row"], "msg": "not an integer"}]
            data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": wrong}
            return {"type": "error", "data": data}
        done = action.get("message") == "stop"
        return observed({"text": f"{len(steps)}: {json.dumps(action)}"}, done, done)


def observed(fields: dict[str, Any], reward: Any = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


Serving = Callable[..., tuple[Server, Environments]]


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Starts a server, and environments that play with it."""
    running: list[Any] = []

    def start(action: dict[str, Any], sessions: int = 8, **settings: Any) -> Any:
        server = Server(action, sessions)
        socket = serve(server.session, "127.0.0.1", 0, process_request=server.page)
        threading.Thread(target=socket.serve_forever, daemon=True).start()
        running.append(socket.shutdown)
        url = f"http://127.0.0.1:{socket.socket.getsockname()[1]}"
        config = EpisodesConfig(
            environment=OpenEnvEnvironment(url=url, **settings), processes=1, turn_timeout=20.0
        )
        environments = Environments(config)
        running.append(environments.close)
        return server, environments

    yield start
    for stop in reversed(running):
        stop()


def test_a_text_is_the_action(serving: Serving) -> None:
    server, environments = serving(TEXT, params={"level": 2})
    assert environments.start().digest.startswith("sha256:")
    episode = begin(environments, start=3)
    assert server.resets[-1] == {"seed": 7, "start": 3, "level": 2}
    assert episode.act(environments, "hello").observation == '1: {"message": "hello"}'
    last = episode.act(environments, "stop")
    assert last == Outcome(observation='2: {"message": "stop"}', reward=1.0, done=True)
    assert episode.finish(environments) == Outcome()
    with waiting(lambda: server.open == 0):
        pass


@contextmanager
def waiting(holds: Callable[[], bool]) -> Iterator[None]:
    """After the body, wait until something holds."""
    yield
    pause = threading.Event()
    for _ in range(200):
        if holds():
            return
        pause.wait(0.05)
    raise AssertionError("it does not come")


def test_a_number_or_json_is_the_action(serving: Serving) -> None:
    _, environments = serving(NUMBER)
    episode = begin(environments)
    assert episode.act(environments, "3, no: -4!").observation == '1: {"guess": -4}'
    none = episode.act(environments, "well")
    assert none == Outcome(observation="That is no action: name a number.")

    _, environments = serving(TWO)
    episode = begin(environments)
    none = episode.act(environments, "the corner")
    assert none.observation == "That is no action: write JSON with the fields row, column."
    assert episode.act(environments, '{"row": 1, "column": 2}').observation.startswith("1: ")
    invalid = episode.act(environments, '{"row": "a"}')
    assert invalid.observation == "That is no action: Invalid message; row: not an integer"


def test_tools(serving: Serving) -> None:
    _, environments = serving(TOOLS)
    ready = environments.start()
    assert [one["function"]["name"] for one in ready.tools] == ["double"]
    episode = begin(environments)
    both = episode.act(environments, "", [call("double", of=4), call("half", of=4)])
    assert both.results == ("8", "Error: no such tool")
    assert both.reward == 4.0 and not both.done
    assert episode.act(environments, "that is all").done


def test_a_lost_connection_is_played_again(serving: Serving) -> None:
    server, environments = serving(TEXT)
    episode = begin(environments)
    first = episode.act(environments, "a")
    server.breaks_at = 2
    assert first.observation == '1: {"message": "a"}'
    assert episode.act(environments, "b").observation == '2: {"message": "b"}'
    assert server.breaks_at is None, "the connection broke"
    assert [one["seed"] for one in server.resets] == [7, 7, 7]


def test_an_error_of_the_server_fails_the_episode(serving: Serving) -> None:
    _, environments = serving(TEXT)
    outcome = begin(environments).act(environments, "raise")
    assert outcome.failed is not None and "broken" in outcome.failed


def test_a_server_without_room_is_named(serving: Serving) -> None:
    _, environments = serving(TEXT, sessions=1)
    first = begin(environments, "one")
    assert first.act(environments, "a").failed is None
    [second] = environments.opening([{}], [8])
    assert second.failed is not None and "episodes.at_once" in second.failed
    assert first.act(environments, "stop").done
    first.finish(environments)
    assert isinstance(begin(environments, "two"), Episode), "there is room again"


def test_no_server_is_told_at_once() -> None:
    config = EpisodesConfig(environment=OpenEnvEnvironment(url="http://127.0.0.1:9"), processes=1)
    with Environments(config) as environments, pytest.raises(ValueError, match="gives no answer"):
        environments.start()
