"""A run's log has what its tasks and its terminal say, and the traceback of what ends it."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from tasks.reporting.terminal import Terminal
from tasks.run.run_log import FLOW, kept


def work() -> None:
    raise ValueError("the work's own")


def test_tasks_terminal_and_failure_are_in_the_log(tmp_path: Path) -> None:
    terminal = Terminal(Console(file=io.StringIO()))
    tasks = logging.getLogger("prefect.task_runs")
    with pytest.raises(ValueError), kept(tmp_path / "run"):
        tasks.error("Scoring failed", extra={"task_run_name": "reward 1/2"})
        terminal.say("step 1/3")
        work()
    text = (tmp_path / "run" / FLOW).read_text()
    assert "ERROR   reward 1/2: Scoring failed" in text
    assert "INFO    step 1/3" in text
    assert text.rstrip().endswith("ValueError: the work's own")
    assert "in work" in text and "in kept" not in text


def test_a_resumed_run_goes_on_in_the_same_file_and_nothing_is_written_later(
    tmp_path: Path,
) -> None:
    terminal = Terminal(Console(file=io.StringIO()))
    for word in ("first", "second"):
        with kept(tmp_path):
            terminal.say(word)
    terminal.say("third")
    assert [line.split()[-1] for line in (tmp_path / FLOW).read_text().splitlines()] == [
        "first",
        "second",
    ]


def test_other_handlers_get_the_whole_traceback(tmp_path: Path) -> None:
    shown = io.StringIO()
    other = logging.StreamHandler(shown)
    logger = logging.getLogger("prefect.task_runs")
    with kept(tmp_path):
        logger.addHandler(other)
        try:
            try:
                work()
            except ValueError:
                logger.exception("it failed")
        finally:
            logger.removeHandler(other)
    assert "in work" in shown.getvalue()
    assert "reward" not in shown.getvalue()
