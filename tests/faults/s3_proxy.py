"""An HTTP proxy before an S3 endpoint that answers badly: errors, resets, late and half answers."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["error", "unavailable", "reset", "reset after", "slow", "truncated"]
BODY = b"<Error><Code>InternalError</Code><Message>later</Message></Error>"


@dataclass(kw_only=True)
class Weather:
    """How bad it is. May be changed while the proxy runs."""

    modes: tuple[Mode, ...] = ()
    share: float = 0.0  # of requests that are answered badly
    slow_seconds: float = 0.5
    down: bool = False  # every connection is reset


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Of a client that was killed there is nothing to say."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class S3Proxy:
    """Listens on a port of its own; forwards to `target`. A context manager."""

    def __init__(self, target: str, weather: Weather, seed: int = 0) -> None:
        self.weather = weather
        self.faults = 0  # made so far
        self._target = urlsplit(target).netloc
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *args: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> S3Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def draw(self) -> Mode | None:
        """What shall go wrong with the next request."""
        with self._lock:
            if self.weather.down:
                return "reset"
            if not self.weather.modes or self._dice.random() >= self.weather.share:
                return None
            self.faults += 1
            return self._dice.choice(self.weather.modes)

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request, well or badly."""
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        mode = self.draw()
        if mode == "reset":
            reset(request)
        elif mode in ("error", "unavailable"):
            status = 500 if mode == "error" else 503
            request.send_response(status)
            request.send_header("Content-Length", str(len(BODY)))
            request.end_headers()
            if request.command != "HEAD":
                request.wfile.write(BODY)
        else:
            if mode == "slow":
                time.sleep(self.weather.slow_seconds)
            response, data = self.forward(request, body)
            if mode == "reset after":  # carried out, and nobody learns of it
                reset(request)
            else:
                answer(request, response, data, cut=mode == "truncated")

    def forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[HTTPResponse, bytes]:
        """Ask the real endpoint."""
        connection = HTTPConnection(self._target, timeout=60)
        with contextlib.closing(connection):
            connection.request(request.command, request.path, body, dict(request.headers))
            response = connection.getresponse()
            return response, response.read()


def reset(request: BaseHTTPRequestHandler) -> None:
    """Drop the connection with a TCP reset."""
    linger = struct.pack("ii", 1, 0)
    with contextlib.suppress(OSError):
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        request.connection.close()
    request.close_connection = True


def answer(request: BaseHTTPRequestHandler, response: HTTPResponse, data: bytes, cut: bool) -> None:
    """Pass an answer on; with `cut`, half of its body and then the end."""
    request.send_response(response.status)
    for name, value in response.getheaders():
        if name.lower() not in ("content-length", "transfer-encoding", "connection"):
            request.send_header(name, value)
    # The answer to HEAD has a length and no body.
    length = response.getheader("Content-Length") if request.command == "HEAD" else len(data)
    request.send_header("Content-Length", str(length or 0))
    request.end_headers()
    with contextlib.suppress(OSError):
        if request.command != "HEAD":
            request.wfile.write(data[: len(data) // 2] if cut and data else data)
        request.wfile.flush()
    if cut:
        reset(request)
