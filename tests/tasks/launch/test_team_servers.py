"""A team's servers are not started where a part of them is missing, or where they let everybody in."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from configs.overrides import ConfigError
from tasks.launch import team_servers
from tasks.launch.team_servers import Place, place

LOGINS = (team_servers.PREFECT_LOGIN, team_servers.MLFLOW_LOGIN)


def places(host: str, url: str | None = None) -> tuple[Place, Place]:
    return place("prefect", host, 4200, url), place("mlflow", host, 5000, url)


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_servers, "installed", lambda name: "1")
    for name in LOGINS:
        monkeypatch.delenv(name, raising=False)


def test_the_missing_half_of_mlflow_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(team_servers, "installed", lambda name: None)
    assert team_servers.serve(*places("127.0.0.1"), tmp_path / "servers") == 2
    assert "Install it: pip install mlflow==3.17.2." in capsys.readouterr().err
    assert not (tmp_path / "servers").exists()


@pytest.mark.usefixtures("no_login")
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "login.example.org"])
def test_no_server_is_opened_to_a_network_without_a_login(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = places(host)
    assert team_servers.serve(*both, tmp_path / "servers") == 2
    said = capsys.readouterr().err
    assert both[0].url in said
    assert f"Set {LOGINS[0]} and {LOGINS[1]} " in said
    assert not (tmp_path / "servers").exists()
    monkeypatch.setenv(LOGINS[0], "team:secret")
    assert f"Set {LOGINS[1]} " in str(team_servers.open_to_all(*both))
    monkeypatch.setenv(LOGINS[1], "basic_auth.ini")
    assert team_servers.open_to_all(*both) is None
    monkeypatch.setattr(team_servers, "installed", lambda name: None)
    assert "pip install flask-wtf" in str(team_servers.open_to_all(*both))


@pytest.mark.usefixtures("no_login")
def test_a_server_of_others_is_not_taken_for_ours(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = place("prefect", "127.0.0.1", other.getsockname()[1], None)
        with pytest.raises(ConfigError, match="--prefect-port = .* cannot be listened at"):
            team_servers.serve(taken, place("mlflow", "127.0.0.1", 1, None), tmp_path / "servers")
    assert not (tmp_path / "servers").exists()


@pytest.mark.usefixtures("no_login")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_loopback_a_login_is_nobodys_demand(host: str) -> None:
    assert team_servers.open_to_all(*places(host)) is None


@pytest.mark.usefixtures("no_login")
def test_behind_a_proxy_prefects_login_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    both = places("127.0.0.1", "https://refrain.example.org")
    said = str(team_servers.open_to_all(*both))
    assert f"Set {LOGINS[0]} (" in said
    monkeypatch.setenv(LOGINS[0], "team:secret")
    assert team_servers.open_to_all(*both) is None


def test_mlflow_answers_by_the_names_that_others_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(team_servers.MLFLOW_HOSTS, "mlflow.lan:5000")
    monkeypatch.delenv(team_servers.MLFLOW_ORIGINS, raising=False)
    monkeypatch.delenv("PREFECT_UI_API_URL", raising=False)
    prefect, mlflow = places("0.0.0.0", "https://refrain.example.org:8443")
    environment = team_servers.mlflow_server(mlflow, tmp_path)._environment
    hosts = environment[team_servers.MLFLOW_HOSTS].split(",")
    assert {"127.0.0.1:5000", "refrain.example.org:8443", "mlflow.lan:5000"} <= set(hosts)
    assert "*" not in environment[team_servers.MLFLOW_HOSTS]
    assert mlflow.url in environment[team_servers.MLFLOW_ORIGINS].split(",")
    # The dashboard asks the address that it came from.
    assert (
        team_servers.prefect_server(prefect, tmp_path)._environment["PREFECT_UI_API_URL"] == "/api"
    )
