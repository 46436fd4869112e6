"""A team's servers are not started where a part of them is missing, or where they let everybody in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.launch import team_servers


def test_the_missing_half_of_mlflow_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(team_servers, "installed", lambda name: None)
    assert team_servers.serve("127.0.0.1", 4200, 5000, tmp_path / "servers") == 2
    assert "Install it: pip install mlflow==3.17.2." in capsys.readouterr().err
    assert not (tmp_path / "servers").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "login.example.org"])
def test_no_server_is_opened_to_a_network_without_a_login(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(team_servers, "installed", lambda name: "1")
    for name in (team_servers.PREFECT_LOGIN, team_servers.MLFLOW_LOGIN):
        monkeypatch.delenv(name, raising=False)
    assert team_servers.serve(host, 4200, 5000, tmp_path / "servers") == 2
    said = capsys.readouterr().err
    assert f"--host {host}" in said
    assert f"Set {team_servers.PREFECT_LOGIN} and {team_servers.MLFLOW_LOGIN} " in said
    assert not (tmp_path / "servers").exists()
    monkeypatch.setenv(team_servers.PREFECT_LOGIN, "team:secret")
    assert f"Set {team_servers.MLFLOW_LOGIN} " in str(team_servers.open_to_all(host))
    monkeypatch.setenv(team_servers.MLFLOW_LOGIN, "basic_auth.ini")
    assert team_servers.open_to_all(host) is None
    monkeypatch.setattr(team_servers, "installed", lambda name: None)
    assert "pip install flask-wtf" in str(team_servers.open_to_all(host))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_loopback_a_login_is_nobodys_demand(host: str) -> None:
    assert team_servers.open_to_all(host) is None
