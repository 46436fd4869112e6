"""What somebody gets by reaching the endpoint of agents: no body is read, no thread is held for long."""

from __future__ import annotations

import json
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from engines.environments import agent_api
from engines.environments.agent_api import AgentRequest, Answer, Refusal, Server, refused
from engines.environments.agent_protocols import CHAT, MESSAGES, RESPONSES, ModelTurn

KEY = "an-episode's-key"


class Session:
    """Answers each request at once."""

    over: Refusal | None = None

    def ask(self, request: AgentRequest) -> Answer:
        return ModelTurn(id="0", text="yes", content="yes")


@pytest.fixture
def server() -> Server:
    made = Server()
    made.sessions[KEY] = Session()
    return made


def say(server: Server, *parts: bytes, pause: float = 0.0, seconds: float = 20.0) -> str:
    """All that comes back, until the server closes the connection."""
    port = urlsplit(server.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        said = b""
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            while data := connection.recv(65536):
                said += data
        except ConnectionError:
            pass
        return said.decode()


def head(length: object, key: str | None = KEY, more: str = "") -> bytes:
    shown = "" if key is None else f"Authorization: Bearer {key}\r\n"
    size = "" if length is None else f"Content-Length: {length}\r\n"
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{shown}{more}{size}\r\n".encode()


HELLO = b'{"messages": [{"role": "user", "content": "hello"}]}'
CLOSE = "Connection: close\r\n"


@pytest.mark.parametrize("key", [None, "", "wrong", KEY[:-1], KEY + "x", "\u00e4"])
def test_without_a_key_no_body_is_read(server: Server, key: str | None) -> None:
    assert say(server, head(2**40, key), b"[" * 1000).startswith("HTTP/1.1 401")


@pytest.mark.parametrize(
    ("length", "more", "status"),
    [
        (None, "", 411),
        ("-1", "", 411),
        ("x", "", 411),
        ("1e3", "", 411),
        ("\u0663", "", 411),
        ("9" * 5000, "", 413),
        (2**40, "", 413),
        (5, "Transfer-Encoding: chunked\r\n", 411),
    ],
)
def test_bad_lengths_are_refused(server: Server, length: object, more: str, status: int) -> None:
    assert say(server, head(length, more=more), HELLO).startswith(f"HTTP/1.1 {status}")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        b"\xff\xfe",
        b'{"messages": [1]}',
        b'{"messages": {}}',
        b"",
    ],
)
def test_bad_bodies_are_refused(
    server: Server, body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    said = say(server, head(len(body), more=CLOSE), body)
    assert said.startswith("HTTP/1.1 400"), said
    assert "Traceback" not in capsys.readouterr().err
    assert say(server, head(len(HELLO), more=CLOSE), HELLO).startswith("HTTP/1.1 200")


@pytest.mark.parametrize("ids", ["[-1]", "[2147483648]", "[1e3]", "[true]", "[[1]]"])
def test_token_ids_have_bounds(server: Server, ids: str) -> None:
    body = f'{{"prompt": {ids}}}'.encode()
    asked = head(len(body), more=CLOSE).replace(b"/chat/completions", b"/completions")
    assert say(server, asked, body).startswith("HTTP/1.1 400")


def test_silent_and_slow_connections_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_api, "STRANGER_SECONDS", 1.0)
    before = threading.active_count()
    began = time.monotonic()
    assert say(server) == ""
    assert say(server, b"POST /v1/chat") == ""
    assert say(server, *[bytes([byte]) for byte in head(5, "wrong")[:40]], pause=0.1) == ""
    assert time.monotonic() - began < 12
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_strangers_hold_few_threads_and_agents_are_served(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_api, "STRANGER_SECONDS", 2.0)
    before = threading.active_count()
    port = urlsplit(server.url).port
    silent = [
        socket.create_connection(("127.0.0.1", port)) for _ in range(agent_api.STRANGERS + 40)
    ]
    time.sleep(0.5)
    assert threading.active_count() - before <= agent_api.STRANGERS
    assert say(server, head(len(HELLO), more=CLOSE), HELLO).startswith("HTTP/1.1 200")
    for one in silent:
        one.close()


def test_agents_with_a_key_count_as_no_strangers(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_api, "STRANGER_SECONDS", 1.0)
    port = urlsplit(server.url).port
    held = []
    for _ in range(agent_api.STRANGERS + 20):
        connection = socket.create_connection(("127.0.0.1", port), timeout=20)
        connection.sendall(head(len(HELLO)) + HELLO)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        held.append(connection)
    time.sleep(1.5)  # silent for longer than a stranger may be
    held[0].sendall(head(len(HELLO)) + HELLO)
    time.sleep(0.2)
    assert b"HTTP/1.1 200" in held[0].recv(65536)
    for connection in held:
        connection.close()


def test_an_episode_that_is_over_is_told(server: Server) -> None:
    session = Session()
    session.over = refused("the episode is over", 403)
    server.sessions["over"] = session
    assert say(server, head(len(HELLO), "over", CLOSE), HELLO).startswith("HTTP/1.1 403")


FIELDS = {
    CHAT: "messages tools tool_choice stop stream_options response_format chat_template_kwargs n "
    "logprobs stream",
    RESPONSES: "input tools tool_choice text instructions include previous_response_id stream",
    MESSAGES: "messages system tools tool_choice stop_sequences output_format output_config stream",
}
GOOD = [{"role": "user", "content": "hello"}]
BAD = [
    *(5, "x", True, [1], [[1]], {"a": [1]}, [{"type": []}], {"type": {}}, [{"role": "user"}]),
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": ["text"], "text": 5}]}],
    [{"role": "assistant", "content": {"text": "a"}, "tool_calls": 7}],
    [{"role": "user", "content": [{"type": "tool_result", "content": 7}]}],
    [{"type": "function_call", "name": 7}, {"type": "function_call_output", "output": {}}],
    [{"type": "function", "function": 7}],
    [{"type": "function", "name": 7}],
]


@pytest.mark.parametrize("route", FIELDS)
def test_no_value_of_a_field_breaks_the_server(
    server: Server, route: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"input": GOOD} if route == RESPONSES else {"messages": GOOD}
    for name in FIELDS[route].split():
        for value in BAD:
            body = json.dumps({**given, name: value}).encode()
            asked = head(len(body), more=CLOSE).replace(b"/v1/chat/completions", route.encode())
            status = say(server, asked, body)[:12]
            assert status in ("HTTP/1.1 200", "HTTP/1.1 400"), (name, value)
    assert "Traceback" not in capsys.readouterr().err
