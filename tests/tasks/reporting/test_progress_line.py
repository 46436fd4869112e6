"""What the line of a committed step says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tasks.reporting.progress import ProgressLine, untrained
from tasks.reporting.terminal import Terminal
from tasks.run.events import Listeners, StepBegan, StepCommitted
from tasks.run.run_log import LINES


def step_committed(step: int, metrics: dict[str, float]) -> StepCommitted:
    """As far as its line goes."""
    record: Any = SimpleNamespace(step=step)
    return StepCommitted(record=record, metrics=metrics, scored=[], attempts=[], snapshot=False)


METRICS = {"reward/mean": 0.5, "train/loss": 0.0, "time/step": 1.0, "retries": 0.0}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"train/optimizer_steps": 1.0, "train/trained_tokens": 40.0}, "loss +0.0000"),
        ({"train/optimizer_steps": 1.0}, "loss +0.0000"),  # of an older Refrain
        (
            {
                "train/optimizer_steps": 2.0,
                "train/trained_tokens": 0.0,
                "train/correction_left_out": 1.0,
            },
            "no token trained: algorithm.correction left all of them out",
        ),
        (
            {"train/optimizer_steps": 1.0, "train/trained_tokens": 0.0},
            "no token trained: none has a part in the loss",
        ),
        (
            {
                "train/optimizer_steps": 1.0,
                "train/trained_tokens": 40.0,
                "train/grad_norm": 0.0,
                "groups/without_variance": 1.0,
            },
            "no token trained: the rewards of each group are equal",
        ),
        (
            {"train/optimizer_steps": 1.0, "train/trained_tokens": 4.0, "train/grad_norm": 0.0},
            "no token trained: gradient 0",
        ),
        (
            {"train/optimizer_steps": 1.0, "train/grad_norm": float("nan")},
            "loss +0.0000",
        ),
        ({"train/optimizer_steps": 0.0}, "no update: no sample was left to train on"),
    ],
)
def test_a_step_that_trained_no_token_says_so(metrics: dict[str, float], said: str) -> None:
    out = StringIO()
    listeners = Listeners()
    ProgressLine(Terminal(Console(file=out, width=400)), 1).listen(listeners)
    listeners.tell(StepBegan(step=1, shards=1))
    listeners.tell(step_committed(1, METRICS | metrics))
    assert f"reward 0.500  {said}  tokens" in out.getvalue()
    assert untrained(METRICS | metrics) == ("" if said.startswith("loss") else said)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_secret_line_is_for_a_terminal_and_no_log(
    terminal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    out = StringIO()
    said = Terminal(Console(file=out, force_terminal=terminal, width=200))
    with caplog.at_level("INFO", LINES.name), told(caplog):
        said.say("where the secret is", shown="the secret itself")
    assert ("itself" in out.getvalue()) is terminal
    assert ("where" in out.getvalue()) is not terminal
    assert set(caplog.messages) == {"where the secret is"}


@contextlib.contextmanager
def told(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """During the body, what the terminal's log is told is seen, which hands nothing up."""
    LINES.addHandler(caplog.handler)
    try:
        yield
    finally:
        LINES.removeHandler(caplog.handler)
