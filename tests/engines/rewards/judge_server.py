"""An endpoint that answers as a judge, by what it is asked."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer(ThreadingHTTPServer):
    """Answers by what stands in the request: the text after `A: ` says how."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.seen: Counter[str] = Counter()  # requests by completion
        self.under_way = self.most = 0
        self.lock = threading.Lock()
        self.ending = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body["messages"][0]["content"].rpartition("A: ")[2]
        with server.lock:
            server.requests.append({"path": self.path, **body})
            server.keys.add(self.headers["Authorization"])
            server.seen[said] += 1
            times = server.seen[said]
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        self._under_way = True
        try:
            self._answer(said, times, body["seed"])
        finally:
            self._over()

    def _over(self) -> None:
        """Count the request as over, before its answer goes: who has that may ask the next one."""
        with self.server.lock:
            self.server.under_way -= self._under_way
            self._under_way = False

    def _answer(self, said: str, times: int, seed: int) -> None:
        match said.split():
            case ["busy"] if times == 1:
                self._send(429, b"slow down", {"Retry-After": "0"})
            case ["far"]:
                self._send(429, b"slow down", {"Retry-After": "3600"})
            case ["broken"]:
                self._send(500, b"out of order", {})
            case ["leaks"]:
                self._send(401, f"wrong key {self.headers['Authorization']}".encode(), {})
            case ["hang"]:
                self.server.ending.wait()
            case ["nonsense"]:
                self._send(200, b"<html>", {})
            case ["drop"]:
                self.connection.close()
            case ["mute"]:
                self._say("I like it.")
            case ["late-score"] if seed == 0:
                self._say("I like it.")
            case ["by-seed"]:
                self._say(f"Score: {(2, 4, 9)[seed]}" if seed < 3 else "none")
            case ["one-mute"]:
                self._say("none" if seed % 3 == 2 else "Score: 8")
            case ["two-mute"]:
                self._say("Score: 8" if seed % 3 == 0 else "none")
            case ["slow", _]:
                time.sleep(0.02)
                self._say("Score: 7")
            case ["echo"]:
                self._say(f"Score: 5, {self.headers['Authorization']} \ud800")
            case _:
                self._say("Good.\nScore: 7")

    def _say(self, text: str) -> None:
        body = {"choices": [{"message": {"role": "assistant", "content": text}}]}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._over()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[JudgeServer]:
    """A server that runs in the body."""
    with JudgeServer() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            found.ending.set()
            found.shutdown()
            thread.join()
