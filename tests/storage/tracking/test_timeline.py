"""The picture of which engine did what and when, and the shares of time without work."""

from __future__ import annotations

import pytest

from storage.tracking.timeline import Work, idle_shares, timeline_png


def call(engine: str, start: float, end: float, stage: str = "rollout", step: int = 1) -> Work:
    return Work(engine=engine, stage=stage, step=step, start=start, seconds=end - start)


def test_calls_that_overlap_count_once() -> None:
    work = [
        call("rollout-0", 100, 106),
        call("rollout-0", 104, 108, step=2),
        call("rollout-0", 105, 107),
        call("train", 106, 110, "update"),
    ]
    assert idle_shares(work) == pytest.approx({"rollout-0": 0.2, "train": 0.6})
    assert idle_shares([]) == {}


def test_the_picture_has_a_row_for_each_engine() -> None:
    few = timeline_png([call("rollout-0", 0, 1)])
    many = timeline_png([call(f"rollout-{n}", 0, 1) for n in range(16)], "a run")
    height = slice(20, 24)  # of a PNG's header
    assert few.startswith(b"\x89PNG")
    assert int.from_bytes(many[height]) > int.from_bytes(few[height])
