"""The end of data.epochs is the end of the run, in order; what they leave over trains if asked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from storage.runs.live import DataOver, read_end
from tests.flows.conftest import Launch, Launched

pytestmark = pytest.mark.cluster


def words(folder: Path, rows: int, long: int = 0) -> list[str]:
    """A run over a few rows, some of them too long, of which a step takes four."""
    lines = [{"question": f"{n} + {n} = ", "answer": str(2 * n)} for n in range(rows)]
    lines += [{"question": "1 + " * 50, "answer": "50"}] * long
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = ["data.source.kind=file", "data.source.path=rows.jsonl", "data.order=sequential"]
    return ["tiny", "steps=5", *source, "data.epochs=1", "store.snapshot_every=10"]


def audited(run: Launched) -> list[dict[str, int]]:
    """The steps as `flows.audit --strict` recounts them."""
    command = [sys.executable, "-m", "flows.audit", run.files.run, "--strict", "--json"]
    done = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["steps"]


@pytest.mark.slow
def test_a_run_ends_with_its_data_and_goes_on_with_more(launch: Launch, tmp_path: Path) -> None:
    run = launch(*words(tmp_path, rows=7))
    code, out = run.end()
    assert code == 0, out
    assert f"{run.files.run}: 1 of 5 steps are committed; the data's epochs are over." in out
    end = read_end(run.files)
    assert end is not None and (end.step, end.rolled_back) == (1, None)
    assert end.data_over == DataOver(epochs=1, last_step="drop")
    (first,) = run.commits()
    assert (first.ledger.drawn, first.ledger.trained) == (4, 4)
    assert run.files.store.exists(f"{run.files.state_key(1)}/marker.json")  # of its last step
    assert audited(run)[0]["recounted"]

    code, out = launch("--resume", run.files.run).end()
    assert code == 2
    assert out == (
        f"Run {run.files.run} is finished: 1 of 5 steps are committed, and data.epochs = 1 is over. "
        "Set data.epochs higher, or data.last_step = partial to train on.\n"
    )
    code, out = launch("--resume", run.files.run, "data.last_step=partial").end()
    assert code == 0, out
    assert f"{run.files.run}: 2 of 5 steps are committed; the data's epochs are over." in out
    _, second = run.commits()
    assert second.ledger.drawn == second.ledger.trained == 7
    assert len(second.refs["prompts"]) == 3
    assert len(second.refs["samples"]) == 12
    assert [step["drawn"] for step in audited(run)] == [4, 7]


@pytest.mark.slow
def test_a_last_step_may_have_fewer_prompts_than_shards(launch: Launch, tmp_path: Path) -> None:
    given = [*words(tmp_path, rows=5), "data.last_step=partial", "rollout.shards=3"]
    whole = launch(*given, "store.uri=file://whole")
    code, out = whole.end()
    assert code == 0, out
    whole.store_uri = f"file://{tmp_path}/whole"
    assert [len(commit.refs["samples"]) for commit in whole.commits()] == [16, 4]
    command = [sys.executable, "-m", "flows.replay", whole.files.run, "2", "store.uri=file://whole"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert (done.returncode, "Equal, to the bit." in done.stdout) == (0, True), done.stdout


@pytest.mark.slow
def test_prompts_that_are_too_long_end_the_data_sooner(launch: Launch, tmp_path: Path) -> None:
    """Nobody knows before the draw: four rows are left, and three of them do not fit."""
    run = launch(*words(tmp_path, rows=9, long=3))
    code, out = run.end()
    assert code == 0, out
    assert f"{run.files.run}: 2 of 5 steps are committed; the data's epochs are over." in out
    assert run.commits()[-1].ledger.drawn == 8  # what the third draw took does not count as drawn
    assert run.files.store.exists(f"{run.files.state_key(2)}/marker.json")


def test_data_for_no_step_at_all_are_refused(launch: Launch, tmp_path: Path) -> None:
    code, out = launch(*words(tmp_path, rows=3)).end()
    assert code == 2
    assert re.search(r"^data.epochs = 1 leaves 3 prompts of \S+, and a step takes 4\. Set", out)
    assert "Set data.epochs higher, prompts_per_step lower, or data.last_step = partial." in out
    assert not (tmp_path / ".refrain/store").exists() or not any(
        path.is_dir() and (path / "run.json").exists()
        for path in (tmp_path / ".refrain/store").iterdir()
    )
