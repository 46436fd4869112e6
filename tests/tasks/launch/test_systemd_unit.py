"""The units that commands print are ones that systemd takes, and run the command with its words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from configs.overrides import ConfigError
from tasks.launch.systemd_unit import unit, writable

WORDS = ["rollout", "rollout.stop=[a b]", 'x="50%"', "path=C:\\y", "$HOME"]


def test_words_reach_the_command_as_they_were_given() -> None:
    text = unit("worker", WORDS, [])
    assert r'worker rollout "rollout.stop=[a b]" "x=\"50%%\"" "path=C:\\y" "$$HOME"' in text
    assert "Restart=always" in text
    with pytest.raises(ConfigError, match="line break"):
        unit("worker", ["a\nUser=root"], [])


@pytest.mark.parametrize("lines", [[], writable(Path("/var/lib/re frain"))])
def test_systemd_takes_it(lines: list[str], tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (apt install systemd)")
    path = tmp_path / "refrain-worker.service"
    path.write_text(unit("worker", WORDS, lines))
    said = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, said.stderr) == (0, "")
