"""The API that agents ask the model over: a server that only this machine reaches.

An OpenAI-compatible one, with two routes that take token ids in the place of messages, in the forms
of vLLM's server: /v1/completions with a list of ids as its prompt, and /inference/v1/generate. Only
the standard library is imported, as in all that runs in the process of the environments.
"""

from __future__ import annotations

import hmac
import io
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

MODEL = "policy"  # the model's name, whatever a request calls it

MOST_BODY = 2**25  # bytes of a request's body
MOST_ID = 2**31  # token ids are below it
STRANGERS = 128  # connections at once that have shown no episode's key; further ones wait
STRANGER_SECONDS = 10.0  # that such a one has for all of a request
KNOWN_SECONDS = 3600.0  # that a connection with a key may be silent, or needs for a request
SEND_SECONDS = 60.0  # in which an answer has to be taken

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"

Message = dict[str, Any]
Answer: TypeAlias = "tuple[int, dict[str, Any]]"  # HTTP status and body


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A turn of the model, as an agent is given it."""

    text: str
    message: Message  # the same as a message, with its calls of tools
    prompt_ids: Sequence[int]  # token ids of the whole conversation before it
    ids: Sequence[int]  # of the turn
    logprobs: Sequence[float]  # of each, as it was sampled

    @property
    def usage(self) -> dict[str, int]:
        """How many tokens were read and written."""
        read, wrote = len(self.prompt_ids), len(self.ids)
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A request that waits for its answer."""

    route: str
    body: Mapping[str, Any]
    again: bool  # whether its client has sent it before, and given up waiting
    answer: SimpleQueue[Answer] = field(default_factory=SimpleQueue)

    @property
    def ids(self) -> list[int] | None:
        """The token ids that it gives; None for a chat."""
        if self.route == CHAT:
            return None
        found: list[int] = self.body["prompt" if self.route == COMPLETIONS else "token_ids"]
        return found

    def answered(self, written: Written) -> dict[str, Any]:
        """The body that answers it."""
        asked = bool(self.body.get("return_token_ids"))
        if self.route == CHAT:
            reason = "tool_calls" if written.message.get("tool_calls") else "stop"
            choice = {"index": 0, "message": written.message, "finish_reason": reason}
            if self.body.get("logprobs"):
                choice["logprobs"] = {"content": _logprobs(written)}
            if asked:
                choice["token_ids"] = list(written.ids)
            more = {"prompt_token_ids": list(written.prompt_ids)} if asked else {}
            return {**_head("chat.completion"), "choices": [choice], **more, "usage": written.usage}
        choice = {"index": 0, "finish_reason": "stop", "token_ids": list(written.ids)}
        if self.route == GENERATE:
            choice["logprobs"] = {"content": _logprobs(written)}
            return {
                "request_id": secrets.token_hex(8),
                "choices": [choice],
                "prompt_token_ids": list(written.prompt_ids),
                "usage": written.usage,
            }
        choice |= {"text": written.text, "prompt_token_ids": list(written.prompt_ids)}
        if self.body.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [one["token"] for one in _logprobs(written)],
                "token_logprobs": list(written.logprobs),
            }
        return {**_head("text_completion"), "choices": [choice], "usage": written.usage}


def _head(kind: str) -> dict[str, Any]:
    name = f"cmpl-{secrets.token_hex(8)}"
    return {"id": name, "object": kind, "created": 0, "model": MODEL}


def _logprobs(written: Written) -> list[dict[str, Any]]:
    """Of each token, by its number: no tokenizer is here that knows its text."""
    return [
        {"token": f"token_id:{id}", "token_id": id, "logprob": logprob, "top_logprobs": []}
        for id, logprob in zip(written.ids, written.logprobs, strict=True)
    ]


def refused(text: str, status: int, code: str | None = None) -> Answer:
    """An answer that clients do not ask for again."""
    return status, {"error": {"message": text, "type": "invalid_request_error", "code": code}}


class Session(Protocol):
    """What an episode is to the server."""

    over: Answer | None  # what every request is answered from now on

    def ask(self, request: AgentRequest) -> Answer:
        """Wait for the model's turn."""


class Server:
    """The API, on a port of this machine. Each key is an episode's."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        http = _Listener(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{http.server_address[1]}/v1"

    def session(self, key: str) -> Session | None:
        """The episode of a key. How long that takes does not tell how much of a key is right."""
        shown, found = key.encode(errors="replace"), None
        for known, session in list(self.sessions.items()):
            if hmac.compare_digest(shown, known.encode()):
                found = session
        return found

    def answered(self, session: Session, request: AgentRequest) -> Answer:
        """The answer to a request; waits for the model's turn."""
        if session.over is not None:
            return session.over
        if wrong := _wrong(request):
            return refused(wrong, 400)
        return session.ask(request)


def _wrong(request: AgentRequest) -> str | None:
    """What keeps a request from being answered, in a sentence."""
    body = request.body
    if request.route == CHAT:
        if not _is_chat(body.get("messages")):
            return "messages has to be a list of messages with a role"
    else:
        name = "prompt" if request.route == COMPLETIONS else "token_ids"
        ids = body.get(name)
        if not isinstance(ids, list) or not ids or not all(map(_is_token, ids)):
            return f"{name} has to be a list of token ids; /v1/chat/completions takes text"
    if not isinstance(body.get("chat_template_kwargs") or {}, dict):
        return "chat_template_kwargs has to be an object"
    if body.get("n") not in (None, 1):
        return "n has to be 1: an episode has one answer a turn"
    if body.get("stream") and request.route == GENERATE:
        return "stream has to be false: a turn is given whole"
    return None


def _is_token(id: object) -> bool:
    return type(id) is int and 0 <= id < MOST_ID


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages)
    )


class _Timed(io.RawIOBase):
    """What comes on a connection, until a point in time; TimeoutError then."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.until = 0.0  # by time.monotonic

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no whole request came in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Listener(ThreadingHTTPServer):
    """A thread for each connection, of which few are anybody's who has shown no key."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.strangers = threading.BoundedSemaphore(STRANGERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """The handler gives the place back, once it has seen a key, and else at its end."""
        self.strangers.acquire()
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server: _Listener
        known = False  # whether this connection has shown a key

        def setup(self) -> None:
            super().setup()
            self._incoming = _Timed(self.connection)
            self.rfile = io.BufferedReader(self._incoming)

        def finish(self) -> None:
            try:
                super().finish()
            finally:
                if not self.known:
                    self.server.strangers.release()

        def handle_one_request(self) -> None:
            seconds = KNOWN_SECONDS if self.known else STRANGER_SECONDS
            self._incoming.until = time.monotonic() + seconds
            super().handle_one_request()

        def do_GET(self) -> None:
            if self.path.rstrip("/") == "/v1/models":
                self._send(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            else:
                self._send(*refused(f"there is no {self.path}", 404))

        def do_POST(self) -> None:
            key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            session = server.session(key)
            if session is None:
                self._close(*refused("this key is of no episode", 401))
                return
            self._is_known()
            length = self.headers.get("Content-Length", "")
            if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
                self._close(
                    *refused("Content-Length has to be the number of the body's bytes", 411)
                )
                return
            if len(length) > 20 or int(length) > MOST_BODY:
                self._close(*refused(f"a body may have {MOST_BODY} bytes", 413))
                return
            text = self.rfile.read(int(length))
            if len(text) < int(length):  # it has ended before: nobody waits for an answer
                self.close_connection = True
                return
            route = self.path.rstrip("/")
            if route not in (CHAT, COMPLETIONS, GENERATE):
                self._send(*refused(f"there is no {self.path}", 404))
                return
            try:
                body = json.loads(text)
            except (ValueError, RecursionError):
                body = None
            # OpenAI's clients count how often they have sent a request.
            again = self.headers.get("x-stainless-retry-count", "0") != "0"
            body = body if isinstance(body, dict) else {}
            status, answer = server.answered(
                session, AgentRequest(route=route, body=body, again=again)
            )
            if status == 200 and body.get("stream"):
                self._stream(answer)
            else:
                self._send(status, answer)

        def _is_known(self) -> None:
            if not self.known:
                self.known = True
                self.server.strangers.release()
                self._incoming.until = time.monotonic() + KNOWN_SECONDS

        def _close(self, status: int, answer: Mapping[str, Any]) -> None:
            """Answer a request whose body is not read."""
            self.close_connection = True
            self._send(status, answer)

        def _send(self, status: int, answer: Mapping[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.connection.settimeout(SEND_SECONDS)
            self.send_response(status)
            if self.close_connection:
                self.send_header("Connection", "close")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, answer: Mapping[str, Any]) -> None:
            """The whole answer as one event, for clients that ask for a stream."""
            (choice,) = answer["choices"]
            chunk = dict(answer)
            if "message" in choice:
                delta = dict(choice["message"])
                if "tool_calls" in delta:
                    numbered = enumerate(delta["tool_calls"])
                    delta["tool_calls"] = [{**call, "index": n} for n, call in numbered]
                rest = {name: value for name, value in choice.items() if name != "message"}
                chunk |= {"object": "chat.completion.chunk", "choices": [{**rest, "delta": delta}]}
            self.connection.settimeout(SEND_SECONDS)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not told one by one."""

    return Handler
