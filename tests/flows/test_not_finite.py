"""A run on rows with NaN and infinity trains, ends, and goes on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.flows.conftest import Launch

pytestmark = pytest.mark.cluster

REWARD = """
import math

def level(completions, level, info, log_extra, **columns):
    for one, more in zip(level, info):
        assert math.isnan(one) or one == -math.inf, one
        assert more["deep"][0] == math.inf
    log_extra("level", level)
    return [len(text) / 100 for text in completions]
"""


@pytest.mark.slow  # three runs
def test_it_ends_and_goes_on(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    rows = [
        f'{{"question": "{n}+1=", "level": {level}, "info": {{"deep": [Infinity, NaN]}}}}\n'
        for n, level in enumerate(["NaN", "-Infinity"] * 4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    source = ["data.source.kind=file", "data.source.path=rows.jsonl"]
    first = launch("tiny", "steps=1", *source, "rewards.functions.0.path=own.py:level").whole()
    launch("--resume", first.files.run, "steps=2").whole()
    before, last = first.commits()
    assert last.step == 2
    stored = [row["level"] for row in before.refs["prompts"].fetch_list(first.files.store, "row")]
    assert stored and all(math.isnan(one) or one == -math.inf for one in stored)
    again = launch("tiny", "steps=1", *source, f"continue_from={first.files.run}")
    code, out = again.end()
    assert code == 0, out
    assert "rows" in out
