"""Environments behind a server of OpenEnv, one WebSocket a session.

The protocol as openenv 0.10 speaks it: JSON messages of `type` reset, step and close, answered by an
observation with its reward, or by an error. GET /schema says what an action is. Runs in the process
of the environments: of ours only what needs the standard library alone is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from engines.environments.contract import Given, Loaded, Lost, NotAllowed, library
from engines.environments.protocol import EnvironmentReady, EnvironmentStart, ToolCall

CONNECT_SECONDS = 10.0
ROOM_SECONDS = 2.0  # that a session is waited for where the server has no more of them
_PAUSE = 0.1  # seconds
_STACK = 2**19  # bytes of the stack of a connection's thread, of which there are many
_NUMBER = re.compile(r"-?\d+")
_OURS = ("metadata", "done", "reward")  # fields that are no part of an action or an observation


def load_openenv(start: EnvironmentStart, codec: Callable[..., Any] | None) -> Loaded:
    """A server's environment, after a look at what it says of itself."""
    url = start.id.rstrip("/")
    connect = library("websockets.sync.client").connect
    threading.stack_size(_STACK)
    schema = _fetched(f"{url}/schema")
    action = schema.get("action")
    if not isinstance(action, dict):
        raise ValueError(f"{url}/schema names no action: it is no server of OpenEnv")

    def make() -> OpenEnvAdapter:
        socket = f"ws{url.removeprefix('http')}/ws"
        connection = OpenEnvSession(lambda: connect(socket, open_timeout=CONNECT_SECONDS), url)
        if has_tools:
            return OpenEnvAdapter(connection, ToolCodec(), start.params)
        made = codec() if codec is not None else FieldCodec(action)
        return OpenEnvAdapter(connection, made, start.params)

    has_tools = codec is None and {"tool_name", "arguments"} <= set(action.get("properties", {}))
    tools: list[dict[str, Any]] = []
    if has_tools:
        first = make()
        try:
            tools = first.tools()
        finally:
            first.close()
    said = {"schema": schema, "metadata": _fetched(f"{url}/metadata"), "tools": tools}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    ready = EnvironmentReady(digest=f"sha256:{digest}", packages={}, tools=tools)
    return Loaded(make=make, ready=ready)


def _fetched(url: str) -> dict[str, Any]:
    """What the server says at an address; ValueError, in one sentence, where it does not."""
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer:
            found = json.load(answer)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(f"{url} gives no answer: {reason}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{url} gives no JSON object: it is no server of OpenEnv")
    return found


class ServerRefused(Exception):
    """The server answers with an error: its code, and what it says."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class OpenEnvSession:
    """A session of a server. Raises Lost where the server has gone."""

    def __init__(self, connect: Callable[[], Any], url: str) -> None:
        self._connect = connect
        self._url = url
        self._socket: Any = None

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a session; one that the server has no room for is asked for again for a while."""
        end = time.monotonic() + ROOM_SECONDS
        while True:
            self.close()
            try:
                return self.asked("reset", data)
            except ServerRefused as error:
                if error.code != "CAPACITY_REACHED":
                    raise
                if time.monotonic() > end:
                    raise NotAllowed(
                        f"{self._url} has no further session: {error}. Set episodes.at_once to as "
                        "many as it has, or its max_concurrent_envs higher"
                    ) from None
            time.sleep(_PAUSE)

    def asked(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer to a message; Refused where that is an error."""
        try:
            if self._socket is None:
                self._socket = self._connect()
            with suppress(Exception):  # of a server that has said why it ends the session
                self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            answer = json.loads(self._socket.recv())
        except Exception as error:  # of the library's, or of the system's: any
            self.close()
            raise Lost(f"the connection to {self._url} broke: {error}") from error
        found = answer.get("data") or {}
        if answer.get("type") == "error":
            text = str(found.get("message") or "it says nothing of it")
            for one in found.get("errors") or ():
                text += f"; {'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}"
            raise ServerRefused(str(found.get("code")), text)
        return dict(found)

    def close(self) -> None:
        """Let the server end the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):  # the library's own: the server has ended it already
                socket.send(json.dumps({"type": "close"}))
            socket.close()


class OpenEnvAdapter:
    """One session, whose turns a codec makes actions of."""

    def __init__(self, connection: OpenEnvSession, codec: Any, params: Mapping[str, Any]) -> None:
        self._connection = connection
        self._codec = codec
        self._params = params

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        return self._given(self._connection.reset({"seed": seed, **row, **self._params}))

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        if isinstance(self._codec, ToolCodec):
            return self._called(calls or ())
        try:
            answer = self._connection.asked("step", self._codec.action(text))
        except ValueError as error:
            return Given(observation=f"That is no action: {error}")
        except ServerRefused as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Given(observation=f"That is no action: {error}")
        return self._given(answer)

    def _called(self, calls: Sequence[ToolCall]) -> Given:
        """The answers to the calls of a turn; a turn without any ends the episode."""
        rewards, results, done = [], [], not calls
        for call in calls:
            if done:
                results.append("Error: the episode is over.")
                continue
            answer = self._connection.asked("step", self._codec.action(call))
            given = self._given(answer)
            rewards += [] if given.reward is None else [given.reward]
            results.append(given.observation)
            done = given.done
        reward = sum(rewards) if rewards else None
        return Given(observation=None, reward=reward, done=done, results=tuple(results))

    def tools(self) -> list[dict[str, Any]]:
        """The server's tools, as chat templates take them."""
        self._connection.reset(self._params)
        answer = self._connection.asked("step", {"type": "list_tools"})
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["input_schema"],
                },
            }
            for tool in answer["observation"]["tools"]
        ]

    def finish(self) -> Given:
        return Given(observation=None)

    def close(self) -> None:
        self._connection.close()

    def _given(self, answer: Mapping[str, Any]) -> Given:
        reward = answer.get("reward")
        return Given(
            observation=self._codec.describe(answer.get("observation") or {}),
            reward=float(reward) if isinstance(reward, bool) else reward,
            done=bool(answer.get("done")),
        )


class FieldCodec:
    """An action of one field is the text, or the last number in it; one of more is JSON."""

    def __init__(self, action: Mapping[str, Any]) -> None:
        fields = {k: v for k, v in action.get("properties", {}).items() if k not in _OURS}
        required = [name for name in action.get("required", ()) if name in fields]
        self._fields = fields
        named = required or list(fields)
        self._name = named[0] if len(named) == 1 else ""
        self._type = fields[self._name].get("type") if self._name else None

    def action(self, text: str) -> Mapping[str, Any]:
        if self._type == "string":
            return {self._name: text}
        if self._type == "integer":
            numbers = _NUMBER.findall(text)
            if not numbers:
                raise ValueError("name a number.")
            return {self._name: int(numbers[-1])}
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"write JSON with the fields {', '.join(self._fields)}.")
        return found

    def describe(self, observation: Mapping[str, Any]) -> str:
        """The one text that an observation has, or all of its fields as JSON."""
        fields = {k: v for k, v in observation.items() if k not in _OURS}
        if len(fields) == 1 and isinstance(value := next(iter(fields.values())), str):
            return value
        return json.dumps(fields, ensure_ascii=False)


class ToolCodec:
    """Actions are calls of the server's tools (MCP)."""

    def action(self, call: ToolCall) -> Mapping[str, Any]:
        named = {"tool_name": call["name"], "arguments": call["arguments"]}
        return {"type": "call_tool", **named}

    def describe(self, observation: Mapping[str, Any]) -> str | None:
        """What a tool gave; of an observation that is no tool's, all of its fields as JSON."""
        if "tool_name" not in observation:
            fields = {k: v for k, v in observation.items() if k not in _OURS}
            return json.dumps(fields, ensure_ascii=False) if fields else None
        if error := observation.get("error"):
            return f"Error: {error.get('message')}"
        result = observation.get("result")
        if isinstance(result, dict):  # as MCP gives it
            result = result.get("data", result)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
