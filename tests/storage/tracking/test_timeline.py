"""The picture of which engine did what and when, and the shares of time without work."""

from __future__ import annotations

import pytest

from storage.tracking.plots import (
    MOST_ROWS,
    TimelineCall,
    idle_shares,
    shown_engines,
    timeline_png,
)


def call(
    engine: str, start: float, end: float, stage: str = "rollout", step: int = 1
) -> TimelineCall:
    return TimelineCall(engine=engine, stage=stage, step=step, start=start, seconds=end - start)


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


def test_of_many_engines_the_idlest_and_the_busiest_are_shown() -> None:
    shares = {f"rollout-{n:03}": n / 200 for n in range(200)}
    half = MOST_ROWS // 2
    assert shown_engines(shares) == [*list(shares)[:half], *list(shares)[-half:]]
    assert shown_engines({"train": 0.5}) == ["train"]
    height = slice(20, 24)
    drawn = [
        timeline_png([call(f"rollout-{n}", 0, 1 + n) for n in range(count)], "a run")
        for count in (MOST_ROWS, 4 * MOST_ROWS)
    ]
    assert drawn[0][height] == drawn[1][height]
