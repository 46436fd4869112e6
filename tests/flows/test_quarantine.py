"""Rows that leave the draw, and an order by difficulty: killed and resumed, listed and let in again."""

from __future__ import annotations

import functools
import json
import operator
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.audit.audit import audit
from storage.prompts.cursor import Cursor
from storage.runs.commit_log import Commit
from tests.faults.ledger import committed
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch, Launched, ends_alike

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

REWARD = '''
def picky(completions, prompts, **columns):
    """Cannot score answers to two of the questions; long ones are worth more."""
    if any("fails" in prompt for prompt in prompts):
        raise RuntimeError("this question has no answer")
    return [sum(map(str.isdigit, text)) / 16 for text in completions]
'''
ROWS = [{"question": f"{'fails' if number in (2, 5) else 'adds'} {number}"} for number in range(12)]
FILES = {
    "picky.py": REWARD,
    "rows.jsonl": "".join(f"{json.dumps(row)}\n" for row in ROWS),
}
WORDS = (
    "tiny", "steps=8", "data.source.kind=file", "data.source.path=rows.jsonl", "data.order=difficulty",
    "data.quarantine.failures=1", "rollout.shards=4",
    'rewards.functions=[{kind: function, path: "picky.py:picky"}]',
)  # fmt: skip


def rows_of(commit: Commit, run: Launched) -> list[int]:
    found: list[int] = commit.refs["prompts"].fetch_numpy(run.files.store, "prompt_row")[0].tolist()
    return found


def quarantine(run: Launched, *words: str) -> dict[str, Any]:
    """What the command says."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.quarantine", run.files.run, "--json", *words],
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_rows_that_fail_are_drawn_no_more_until_they_are_let_in(launch: Launch) -> None:
    run = launch(*WORDS, files=FILES).whole()
    commits = committed(run.files)
    drawn = [rows_of(one, run) for one in commits]
    assert sorted(functools.reduce(operator.iadd, drawn[:3], [])) == list(range(12)), (
        "in the first epoch all are unseen"
    )
    later = functools.reduce(operator.iadd, drawn[3:], [])
    assert not {2, 5} & set(later)
    assert commits[-1].ledger.drawn == len(functools.reduce(operator.iadd, drawn, [])) == 32
    place = Cursor.from_json(commits[-1].cursor).place
    assert commits[-1].ledger.quarantined == place - 32 > 0
    assert audit(run.files).problems == []
    second = drawn_in_epoch(commits, drawn, 1)
    means = mean_rewards(run, commits[:3])
    assert [means[row] for row in second] == sorted((means[row] for row in second), reverse=True)
    seen = quarantine(run)
    assert [(one["row"], one["reason"]) for one in seen["rows"]] in (
        [(2, "failures"), (5, "failures")],
        [(5, "failures"), (2, "failures")],
    )
    waiting = quarantine(run, "--readmit", "5")["rows"]
    assert {one["row"]: one["waits"] for one in waiting} == {2: False, 5: True}
    code, out = launch("--resume", run.files.run, "steps=14").end()
    assert code == 0, out
    commits = committed(run.files)
    again = functools.reduce(operator.iadd, (rows_of(one, run) for one in commits[8:]), [])
    assert 5 in again and 2 not in again
    assert [one.readmissions for one in commits] == [0] * 8 + [1] * 6
    assert audit(run.files).problems == []
    assert {one["row"] for one in quarantine(run)["rows"]} == {2, 5}, "it failed once more"


def drawn_in_epoch(commits: list[Commit], drawn: list[list[int]], epoch: int) -> list[int]:
    """Rows drawn in an epoch, in order, but for those of steps that also drew of another."""
    before = [0, *(int(str(one.cursor["epoch"])) for one in commits)]
    pairs = zip(commits, drawn, before, strict=False)
    return functools.reduce(
        operator.iadd, (rows for one, rows, was in pairs if was == one.cursor["epoch"] == epoch), []
    )


def mean_rewards(run: Launched, commits: list[Commit]) -> dict[int, float]:
    """Mean reward of each row's samples that could be scored."""
    found: dict[int, float] = {}
    for one in commits:
        store = run.files.store
        prompts = dict(
            zip(
                one.refs["prompts"].fetch_numpy(store, "group_id")[0].tolist(),
                rows_of(one, run),
                strict=True,
            )
        )
        groups, rewards = (
            one.refs["samples"].fetch_numpy(store, name)[0] for name in ("group_id", "reward")
        )
        for group, row in prompts.items():
            own = rewards[groups == group]
            if not np.isnan(own).any():
                found[row] = float(own.astype(np.float64).mean())
    return found


def test_a_killed_run_draws_the_same_rows(launch: Launch, tmp_path: Path, prefect_api: str) -> None:
    from tests.flows.conftest import starting

    (tmp_path / "whole").mkdir()
    with starting(tmp_path / "whole", prefect_api) as start:
        whole = start(*WORDS, files=FILES).whole()
        (tmp_path / "broken").mkdir()
        with starting(tmp_path / "broken", prefect_api) as again:
            fault = Fault(id="x", target="tasks.run.run:Run.advance", action="kill", nth=5)

            def broken(*given: str, **rest: Any) -> Launched:
                return again(*given, files=FILES, **rest)

            ends_alike(whole, broken, tmp_path, list(WORDS), fault)


def test_steps_that_overlap_draw_the_same_rows_after_a_kill(
    launch: Launch, tmp_path: Path, prefect_api: str
) -> None:
    """Weights depend on time there, and so do rewards; which questions cannot be scored does not."""
    from tests.flows.conftest import starting

    words = ("max_staleness=2", "algorithm.correction=[{kind: truncate}]", "data.order=shuffled")
    drawn = []
    for name, faulty in (("whole", False), ("broken", True)):
        (tmp_path / name).mkdir()
        fault = Fault(id="x", target="tasks.run.run:Run.advance", action="kill", nth=5)
        faults = Faults(tmp_path / f"{name}-faults", [fault] if faulty else [])
        with starting(tmp_path / name, prefect_api) as start:
            run = start(*WORDS, *words, files=FILES, environment=faults.environment)
            code, out = run.end()
            if faulty:
                assert code != 0 and faults.missed == [], out
                code, out = start("--resume", run.files.run).end()
            assert code == 0, out
            drawn.append([rows_of(one, run) for one in committed(run.files, max_staleness=2)])
            assert audit(run.files).problems == []
    assert drawn[0] == drawn[1]
    assert not {2, 5} & {row for rows in drawn[0][-2:] for row in rows}, "they have left the draw"
