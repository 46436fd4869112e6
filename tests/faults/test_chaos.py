"""Kills at random in a run of thirty steps change nothing but its duration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.conftest import ROOT


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    # Overlapping steps are quick: in fewer of them there is no time for so many kills.
    ("kills", "how"),
    [(20, []), (30, ["--overlapping", "--steps", "150"]), (20, ["--episodes"])],
)
def test_kills_at_random(tmp_path: Path, kills: int, how: list[str]) -> None:
    out = tmp_path / "report.json"
    command = ["-m", "benchmarks.chaos", "--kills", str(kills), "--out", str(out), *how]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    report = json.loads(out.read_text())
    assert report["equal"]
    assert report["left"] == []
    assert len(report["kills"]) == kills
