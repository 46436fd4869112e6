"""A team's servers are not started where a part of them is missing."""

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
