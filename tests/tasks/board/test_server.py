"""The board's server: who gets in, what a browser is told, and what is refused in a sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from starlette.testclient import TestClient

from storage.runs.run_store import RunStore
from tasks.board.run_view import RunView
from tasks.board.server import FILES, application
from tests.ports import free_port
from tests.tasks.board.conftest import HOSTILE

KEY = "k" * 32
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture
def client(hostile: RunStore) -> TestClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    return TestClient(application(RunView(hostile), KEY), base_url=ADDRESS, headers=headers)


def test_records_are_for_who_has_the_key(client: TestClient) -> None:
    assert client.get("/api/run").json()["last"] == 4
    for authorization in ("", "Bearer ", f"Bearer {KEY[:-1]}", f"Basic {KEY}", f"Bearer {KEY}x"):
        answer = client.get("/api/run", headers={"Authorization": authorization})
        assert (answer.status_code, "last" in answer.text) == (401, False)
    assert client.get(f"/api/run?key={KEY}", headers={"Authorization": ""}).status_code == 401


def test_the_page_is_open_and_holds_nothing_of_the_run(client: TestClient) -> None:
    for path in FILES:
        answer = client.get(path, headers={"Authorization": ""})
        assert answer.status_code == 200
        assert "grpo-killed" not in answer.text and KEY not in answer.text
        assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg|\"/api/", "", answer.text)


def test_another_host_and_another_page_are_refused(client: TestClient) -> None:
    for host, status in (
        ("127.0.0.1:8000", 200),
        ("localhost:9", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("[::1]", 400),
    ):
        assert client.get("/api/run", headers={"Host": host}).status_code == status, host
    for origin, status in (
        (ADDRESS, 200),
        ("http://127.0.0.1:8001", 403),
        ("https://evil.example", 403),
        ("null", 403),
    ):
        answer = client.get("/api/run", headers={"Origin": origin})
        assert answer.status_code == status, origin
        assert "access-control-allow-origin" not in answer.headers
    assert client.post("/api/run").status_code == 405
    assert client.options("/api/run", headers={"Authorization": ""}).status_code == 401


def test_a_browser_is_told_to_run_the_pages_script_alone(client: TestClient) -> None:
    for path in ("/", "/api/run", "/nothing"):
        headers = client.get(path).headers
        policy = dict(
            one.strip().split(" ", 1) for one in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
    page = client.get("/").text
    assert not re.search(r"<script(?! src=\"/board.js\" defer>)|<style|\son\w+=|\sstyle=", page)
    script = client.get("/board.js").text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_no_path_leads_out_of_the_page(client: TestClient) -> None:
    for path in (
        "/../server.py",
        "/%2e%2e/server.py",
        "/board.js/../../server.py",
        "/page/board.js",
        "//etc/passwd",
        "/api/../../server.py",
    ):
        answer = client.get(path)
        assert answer.status_code == 404, path
        assert "import" not in answer.text
    for of in ("../other", "/etc/passwd", "..@1", "-1", "1.5", "", "9" * 40, "%00"):
        answer = client.get("/api/samples", params={"of": of})
        assert answer.status_code in (404, 500), of
        assert list(answer.json()) == ["error"] and "Traceback" not in answer.text


def test_a_models_text_goes_out_as_data(client: TestClient) -> None:
    answer = client.get("/api/samples", params={"of": "4", "search": "<script"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["samples"][0]["response"] == HOSTILE
    assert answer.json()["matches"] == {"prompts": 0, "responses": 1}
    picture = client.get("/api/picture", params={"of": "4", "row": 0, "number": 0})
    assert picture.headers["content-type"] == "image/png"


def test_what_is_asked_wrongly_is_one_sentence(client: TestClient) -> None:
    for path, status, said in (
        ("/api/samples?of=99", 404, "has no committed step 99"),
        ("/api/samples?of=nobody@3", 404, "has no evaluation nobody@3"),
        ("/api/samples?of=4&search=[", 404, "is no regular expression"),
        ("/api/samples?of=4&reward=much", 404, "names no rewards"),
        ("/api/samples?of=4&page=x", 404, "page=x is no number."),
        ("/api/sample?of=4&row=16", 404, "has samples 0 to 15"),
        ("/api/picture?of=3&row=0&number=0", 404, "Sample 0 of step 3 has 0 pictures."),
        ("/api/data_row?row=99999", 404, "has not drawn row 99999"),
        ("/nothing", 404, "Not Found"),
    ):
        answer = client.get(path)
        assert answer.status_code == status, path
        assert said in answer.json()["error"], answer.text


def test_a_long_body_is_not_read(client: TestClient) -> None:
    assert client.post("/api/run", content=b"x" * 2000).status_code == 413


@pytest.fixture
def board(stored: RunStore) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The command in a process of its own, its address and its key."""
    words = [sys.executable, "-m", "flows.board", stored.run, f"store.uri={stored.store.uri}"]
    started = subprocess.Popen(words, stdout=-1, stderr=-1, text=True, start_new_session=True)
    try:
        assert started.stderr is not None
        said = started.stderr.readline()
        found = re.fullmatch(r"(\S+): (http://127\.0\.0\.1:\d+)/#key=(\S{32})\n", said)
        assert found and found[1] == stored.run, said
        yield started, found[2], found[3]
    finally:
        started.kill()
        started.communicate()


def test_the_command_serves_until_it_is_interrupted(
    board: tuple[subprocess.Popen[str], str, str],
) -> None:
    started, address, key = board
    with httpx.Client(base_url=address, trust_env=False) as client:
        assert "board.js" in client.get("/").text
        answer = client.get("/api/run", headers={"Authorization": f"Bearer {key}"})
        assert answer.json()["last"] == 3
        assert client.get("/api/run").status_code == 401
    os.kill(started.pid, signal.SIGINT)
    out, err = started.communicate(timeout=20)
    assert (started.returncode, out) == (0, "The board has ended.\n"), err
    assert "Traceback" not in err


def test_a_port_that_is_taken_is_one_sentence(
    board: tuple[subprocess.Popen[str], str, str], stored: RunStore
) -> None:
    port = board[1].rpartition(":")[2]
    words = [sys.executable, "-m", "flows.board", stored.run, f"store.uri={stored.store.uri}"]
    for bad in (port, "70000"):
        ended = subprocess.run([*words, "--port", bad], capture_output=True, text=True, check=False)
        assert ended.returncode == 2
        assert (
            ended.stderr.startswith(f"--port {bad} cannot be had") and ended.stderr.count("\n") == 1
        )


def test_a_named_port_is_taken(stored: RunStore) -> None:
    port = free_port()
    words = [sys.executable, "-m", "flows.board", stored.run, f"store.uri={stored.store.uri}"]
    started = subprocess.Popen(
        [*words, "--port", str(port), "--json"], stdout=-1, stderr=-1, text=True
    )
    try:
        assert f":{port}/#key=" in started.stderr.readline()  # type: ignore[union-attr]
        with httpx.Client(trust_env=False) as client:
            client.get(f"http://127.0.0.1:{port}/")
    finally:
        started.send_signal(signal.SIGINT)
        out, _ = started.communicate(timeout=20)
    assert json.loads(out) == {"address": f"http://127.0.0.1:{port}"}
