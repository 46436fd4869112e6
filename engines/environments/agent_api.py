"""The API that agents ask the model over: a server that only this machine reaches.

What is asked and answered there is in agent_protocols.py. Only the standard library is imported, as
in all that runs in the process of the environments.
"""

from __future__ import annotations

import hmac
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from engines.environments.agent_protocols import (
    MESSAGES,
    MODEL,
    PROTOCOLS,
    TOKENIZER,
    Event,
    ModelTurn,
    TokenizerRequest,
    TurnRequest,
    branch_of,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_BODY = 2**25  # bytes of a request's body
STRANGERS = 128  # connections at once that have shown no episode's key; further ones wait
STRANGER_SECONDS = 10.0  # that such a one has for all of a request
KNOWN_SECONDS = 3600.0  # that a connection with a key may be silent, or needs for a request
SEND_SECONDS = 60.0  # in which an answer has to be taken

_MODEL = {
    "id": MODEL,
    "object": "model",
    "created": 0,
    "owned_by": "refrain",  # OpenAI's form
    "type": "model",
    "display_name": MODEL,
    "created_at": "1970-01-01T00:00:00Z",
}
_MODELS = {
    "object": "list",
    "data": [_MODEL],
    "has_more": False,
    "first_id": MODEL,
    "last_id": MODEL,
}
TOO_LONG = "context_length_exceeded"  # the code at a limit of the episode
_NO_HEADERS: Mapping[str, str] = {}
_ERRORS = {  # of Anthropic's, by status
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}

Refusal: TypeAlias = "tuple[int, dict[str, Any]]"  # HTTP status and body
Answer: TypeAlias = "ModelTurn | Refusal"
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A request that waits for its answer."""

    route: str
    body: Mapping[str, Any]
    turn: TurnRequest
    again: bool  # whether its client says that it has sent it before, and given up waiting
    key: str = ""  # its Idempotency-Key
    branch: str = ""  # the part of the episode that it says it is of
    left: Callable[[], bool] = lambda: False  # whether its client has closed the connection
    answer: SimpleQueue[Answer] = field(default_factory=SimpleQueue)
    # Whether the client was still there to take the answer.
    taken: Future[bool] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTokenizerRequest:
    """A request to the tokenizer that waits for its answer: what it made, or a refusal."""

    asked: TokenizerRequest
    answer: SimpleQueue[Mapping[str, Any] | Refusal] = field(default_factory=SimpleQueue)


def refused(text: str, status: int, code: str | None = None) -> Refusal:
    """An answer that clients do not ask for again."""
    return status, {"error": {"message": text, "type": "invalid_request_error", "code": code}}


def _as_anthropic(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """A refusal in the form of Anthropic's API, which has no codes: its clients read the message."""
    error = body["error"]
    before = "prompt is too long: " if error["code"] == TOO_LONG else ""
    kind = _ERRORS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{before}{error['message']}"}}


class Session(Protocol):
    """What an episode is to the server."""

    over: Refusal | None  # what every request is answered from now on

    def ask(self, request: AgentRequest) -> Answer:
        """Wait for the model's turn."""

    def ask_tokenizer(self, request: AgentTokenizerRequest) -> Mapping[str, Any] | Refusal:
        """Wait for the tokenizer."""


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
        if not isinstance(sys.exc_info()[1], OSError):
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

        @property
        def route(self) -> str:
            """The path that is asked; some clients put a `/v1` of their own after the address's."""
            path = self.path.partition("?")[0].rstrip("/")
            path = path.removeprefix("/v1") if path.startswith("/v1/v1/") else path
            bare = path.removeprefix("/v1")  # vLLM has its own routes without
            return bare if bare in TOKENIZER else path

        def do_GET(self) -> None:
            if self.route == "/v1/models":
                self._send(200, _MODELS)
            elif self.route == f"/v1/models/{MODEL}":
                self._send(200, _MODEL)
            else:
                self._refuse(*refused(f"there is no {self.path}", 404))

        def do_POST(self) -> None:
            shown = self.headers.get("Authorization") or self.headers.get("x-api-key") or ""
            session = server.session(shown.removeprefix("Bearer "))
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
            if self.route in TOKENIZER:
                self._answer_by_tokenizer(session, text)
            elif self.route in PROTOCOLS:
                self._answer(session, text)
            else:
                self._refuse(*refused(f"there is no {self.path}", 404))

        def _read(
            self, session: Session, text: bytes, read: Callable[[dict[str, Any]], Read]
        ) -> Read | None:
            """What a body asks; None where it was refused."""
            try:
                body = json.loads(text)
                if not isinstance(body, dict):
                    raise ValueError("a body has to be a JSON object")
                return read(body)
            except RecursionError:
                self._refuse(*refused("the body is nested too deeply", 400))
            except ValueError as error:
                self._refuse(*(session.over or refused(str(error), 400)))
            return None

        def _answer_by_tokenizer(self, session: Session, text: bytes) -> None:
            """Answer a request that needs no turn."""
            protocol = TOKENIZER[self.route]
            asked = self._read(session, text, protocol.read)
            if asked is None:
                return
            made = session.over or session.ask_tokenizer(AgentTokenizerRequest(asked=asked))
            if isinstance(made, tuple):
                self._refuse(*made)
            else:
                self._send(200, protocol.answer(made))

        def _answer(self, session: Session, text: bytes) -> None:
            """Answer a request of an episode; waits for the model's turn."""
            protocol, branch = PROTOCOLS[self.route], self.headers.get("X-Branch")
            asked = self._read(
                session, text, lambda body: (body, protocol.read(body), branch_of(body, branch))
            )
            if asked is None:
                return
            body, turn, branch = asked
            # The clients of OpenAI and Anthropic count how often they have sent a request.
            again = self.headers.get("x-stainless-retry-count", "0") != "0"
            key = self.headers.get("Idempotency-Key") or ""
            request = AgentRequest(
                route=self.route,
                body=body,
                turn=turn,
                again=again,
                key=key,
                branch=branch,
                left=self._client_left,
            )
            answer = session.over or session.ask(request)
            taken = False
            try:
                if self._client_left():
                    self.close_connection = True
                elif isinstance(answer, tuple):
                    self._refuse(*answer)
                else:
                    if body.get("stream"):
                        self._stream(protocol.stream(body, answer))
                    else:
                        self._send(200, protocol.answer(body, answer))
                    taken = True
            finally:
                request.taken.set_result(taken)

        def _client_left(self) -> bool:
            """Whether the client has closed the connection, as one does that waits no more."""
            self.connection.setblocking(False)
            try:
                return not self.connection.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return False
            except OSError:
                return True

        def _is_known(self) -> None:
            if not self.known:
                self.known = True
                self.server.strangers.release()
                self._incoming.until = time.monotonic() + KNOWN_SECONDS

        def _close(self, status: int, answer: Mapping[str, Any]) -> None:
            """Refuse a request whose body is not read."""
            self.close_connection = True
            self._refuse(status, answer)

        def _refuse(self, status: int, answer: Mapping[str, Any]) -> None:
            """An error in the form of the client's protocol, after which it does not ask again."""
            if "anthropic-version" in self.headers or self.route.startswith(MESSAGES):
                answer = _as_anthropic(status, answer)
            self._send(status, answer, {"x-should-retry": "false"})

        def _send(
            self, status: int, answer: Mapping[str, Any], headers: Mapping[str, str] = _NO_HEADERS
        ) -> None:
            data = json.dumps(answer).encode()
            self.connection.settimeout(SEND_SECONDS)
            self.send_response(status)
            if self.close_connection:
                self.send_header("Connection", "close")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, events: Iterable[Event]) -> None:
            """A turn, which is whole by now, as server-sent events."""
            self.connection.settimeout(SEND_SECONDS)
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for name, data in events:
                shown = data if isinstance(data, str) else json.dumps(data)
                named = f"event: {name}\n" if name else ""
                self.wfile.write(f"{named}data: {shown}\n\n".encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not told one by one."""

    return Handler
