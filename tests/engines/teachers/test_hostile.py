"""What somebody gets from a teacher's service by reaching its socket: nothing, and no memory of it."""

from __future__ import annotations

import base64
import json
import socket
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.processes import key_guard
from engines.teachers import api
from engines.teachers.messages import MOST_ROWS, Question
from tests.engines.teachers.test_service import KEY, FakeGang, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, FakeGang())
    made.serve()
    made.attached().close()  # it listens
    try:
        yield made
    finally:
        for client in made.clients:
            client.close()
        while made.services:
            made.end()


def answer(port: int, *parts: bytes, seconds: float = 20.0) -> str:
    """All that comes back on a connection, until the service closes it."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        said = b""
        try:
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(65536):
                said += data
        except ConnectionError:
            pass
        return said.decode()


def head(length: object, key: str | None = KEY, path: str = "/v1/teach", more: str = "") -> bytes:
    shown = "" if key is None else f"Authorization: Bearer {key}\r\n"
    more += f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{shown}{more}\r\n".encode()


@pytest.mark.parametrize(
    ("key", "body"),
    [
        (None, b"{"),
        ("wrong", b"{}"),
        ("wrong", b"[" * 10_000),
        (KEY[:-1], b""),
        (KEY + "0", b""),
        ("\u00e4", b""),
    ],
)
def test_without_the_key_no_body_is_read(world: World, key: str | None, body: bytes) -> None:
    said = answer(world.port, head(2**28, key), body)  # the rest never comes
    assert said.startswith("HTTP/1.1 401"), said
    for path in ("/v1/nothing", "/docs", "/v1/lease"):
        assert answer(world.port, head(2**28, key, path)).startswith("HTTP/1.1 401")


def test_with_the_key_a_body_has_a_size_and_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_guard, "BODY_SECONDS", 0.5)
    assert answer(world.port, head(2**28)).startswith("HTTP/1.1 413")
    assert answer(world.port, head(100), b"{").startswith("HTTP/1.1 408")
    chunked = head("1").replace(b"Content-Length: 1", b"Transfer-Encoding: chunked")
    chunk = b"%x\r\n%s\r\n" % (2**20, b" " * 2**20)
    assert answer(world.port, chunked, *[chunk] * 40)[:12] in ("HTTP/1.1 413", "")
    for wrong in ("-1", "1e3", "9" * 30, "x"):
        assert answer(world.port, head(wrong))[:10] in ("HTTP/1.1 4", "")
    deep = b"[" * 200_000
    said = answer(world.port, head(len(deep), more="Connection: close\r\n"), deep)
    assert said.startswith("HTTP/1.1 4"), said
    assert world.attached(), "it goes on"


def test_connections_that_ask_nothing_end_and_are_few(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(api, "CONNECTIONS", 4)
    began = time.monotonic()
    for parts in ((), (b"POST /v1/",), (head(5)[:-2],)):
        assert answer(world.port, *parts) == ""
    assert time.monotonic() - began < 15
    monkeypatch.setattr(api, "SILENT_SECONDS", 60.0)
    silent = [socket.create_connection(("127.0.0.1", world.port)) for _ in range(4)]
    time.sleep(0.3)
    assert answer(world.port, head(5)) == "", "one too many"
    for one in silent:
        one.close()
    time.sleep(0.3)
    assert answer(world.port, head(2, "wrong")).startswith("HTTP/1.1 401")


def packed(numbers: int) -> str:
    return "1:" + base64.b85encode(zlib.compress(bytes(numbers), 9)).decode()


def views(*encoded: object, rows: int = 2**30) -> dict[str, Any]:
    """A batch's JSON whose views are these."""
    return {
        "format": "refrain.batch/1",
        "rows": rows,
        "sources": [["run/a", 2**40, 100, "d"]],
        "views": [[[0], one] for one in encoded],
        "columns": {"prompt_ids": ["jagged", "I32", [], 0]},
    }


HOSTILE: dict[str, dict[str, Any]] = {
    "span": views([0, 2**30]),
    "span beyond the object": views([2**40, 2**40 + 5], rows=5),
    "runs": views([0, 2**29, 2**30, 2**30 + 2**29]),
    "many views of runs": views(*[[0, 2**19, 2**20, 2**20 + 2**19]] * 50, rows=2**20),
    "packed": views(packed(2**27), rows=2**27),
    "many packed": views(*[packed(2**20)] * 50, rows=2**20),
    "cut short": views(packed(2**10)[:20], rows=2**10),
    "width": views("8000:abc"),
    "huge numbers": views([10**30, 10**30 + 4, 7, 9], rows=6),
    "negative": views([-5, 5], rows=10),
    "sizes": {
        **views([0, 10], rows=2),
        "columns": {"frame": ["jagged", "U8", [], 0, [2**62, 2**62 + 2]]},
    },
    "negative sizes": {
        **views([0, 5], rows=2),
        "columns": {"frame": ["jagged", "U8", [], 0, [-5, -4, 10, 11]]},
    },
    "head": {**views([0, 2], rows=2), "sources": [["run/a", 2, 2**40, "d"]]},
    "objects": {
        **views([0, 2], rows=2),
        "sources": [[f"run/{n}", 2, 100, "d"] for n in range(5000)],
        "views": [[list(range(5000)), [0, 2]]],
    },
    "rows": {**views([0, 2]), "columns": {}},
}


def question(batch: object, **changed: object) -> bytes:
    fields = {
        "run": "run",
        "store": "file:///a",
        "epoch": 1,
        "batch": batch,
        "out_key": "run/t",
        "temperature": 1.0,
        "top_k": 0,
        "dtype": "float32",
        "digest": "d",
    }
    return json.dumps({**fields, **changed}).encode()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_short_text_takes_no_large_memory(name: str) -> None:
    text = question(HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            Question.model_validate_json(text)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def test_what_a_question_may_have_is_taken() -> None:
    good = views([0, 10], [3, 5, 0, 8], packed(40), rows=10)
    assert len(Question.model_validate_json(question(good)).batch) == 10
    large = views([0, MOST_ROWS], rows=MOST_ROWS)
    assert len(Question.model_validate_json(question(large)).batch) == MOST_ROWS


@pytest.mark.parametrize(
    "changed",
    [
        {"top_k": -1},
        {"top_k": 2**70},
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"epoch": -1},
        {"dtype": "float8"},
        {"run": "r" * 5000},
        {"out_key": "run/" + "t" * 5000},
    ],
)
def test_numbers_and_names_have_bounds(world: World, changed: dict[str, object]) -> None:
    text = question(views([0, 10], rows=10), **changed)
    said = answer(world.port, head(len(text), more="Connection: close\r\n"), text)
    (name,) = changed
    assert said.startswith("HTTP/1.1 422") and f'"{name} is not' in said, said
    assert world.gang.asked == []


def test_a_probe_reads_nothing_that_is_larger_than_its_text(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store.write("run/weights", bytes(1000))
    body = {"store": world.store.uri, "key": "run/weights", "text": "a", "dtype": "float32"}
    read: list[str] = []
    monkeypatch.setattr("storage.objects.store.Store.read", lambda store, key: read.append(key))
    for key in ("run/weights", "../../etc/passwd", "gone"):
        text = json.dumps({**body, "key": key}).encode()
        asked = head(len(text), path="/v1/probe", more="Connection: close\r\n")
        said = answer(world.port, asked, text)
        assert said.startswith("HTTP/1.1 400") and "does not see" in said
    assert read == []
