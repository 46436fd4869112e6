"""The key before an application, as vLLM's server puts it there: by class, with the key in the environment."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from engines.processes.key_guard import SERVED_KEY, ServedKey

KEY = "k" * 32


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    app = FastAPI()
    app.add_api_route("/health", lambda: "well")
    app.add_api_route("/invocations", lambda: "said", methods=["POST"])
    app.add_middleware(ServedKey)
    monkeypatch.setenv(SERVED_KEY, KEY)
    return TestClient(app)


@pytest.mark.parametrize(
    "shown",
    [None, KEY, "Bearer", "Bearer ", f"Bearer {KEY[:-1]}", f"Bearer {KEY}k", f"Basic {KEY}"],
)
@pytest.mark.parametrize("path", ["/invocations", "/docs", "/v1/models", "//health", "/healthy"])
def test_no_route_answers_without_the_key(client: TestClient, path: str, shown: str | None) -> None:
    headers = {} if shown is None else {"Authorization": shown}
    for method in ("GET", "POST", "OPTIONS", "HEAD"):
        assert client.request(method, path, headers=headers).status_code == 401


def test_health_and_the_key_go_through(client: TestClient) -> None:
    assert client.get("/health").json() == "well"
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {KEY}"}
        assert client.post("/invocations", headers=headers).json() == "said"


def test_a_websocket_is_refused(client: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass
