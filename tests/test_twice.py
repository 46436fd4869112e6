"""A test that fails beside others is run once more alone; one that fails alone too fails the run."""

import os
from pathlib import Path

import pytest

from tests import twice

LONELY = """
from pathlib import Path

def test_that_fails_the_first_time():
    seen = Path("seen")
    first = not seen.exists()
    seen.touch()
    assert not first

def test_that_passes():
    pass
"""
THREADS = """
import os

def test_them():
    assert os.environ["OMP_NUM_THREADS"] == "{}"
"""
BROKEN = "def test_that_fails():\n    assert False\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return tmp_path


def _suite(folder: Path, text: str) -> None:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_them.py").write_text(text)


def test_what_passes_alone_passes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _suite(folder, LONELY)

    assert twice.main("1", ["-q"]) == 0

    shown = capfd.readouterr().out
    assert "alone: test_them.py::test_that_fails_the_first_time" in shown
    assert "1 failed, 1 passed" in shown  # beside others
    assert "1 passed" in shown.splitlines()[-1]


def test_what_fails_alone_fails(folder: Path) -> None:
    _suite(folder, LONELY + BROKEN)

    assert twice.main("1", ["-q"]) == 1


def test_many_failures_are_no_accident(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _suite(folder, LONELY)

    assert twice.main("1", ["-q"], most=0) == 1
    assert "alone" not in capfd.readouterr().out


@pytest.mark.parametrize(("own", "seen"), [(None, "2"), ("7", "7")])
def test_processes_share_the_cores(
    folder: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, seen: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    _suite(folder, THREADS.format(seen))

    assert twice.main("2", ["-q"]) == 0
