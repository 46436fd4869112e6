"""A user's reward that raises, hangs or crashes: failed samples, its stack in the task's log."""

from __future__ import annotations

import httpx
import pytest

from storage.batches.columns import SampleStatus
from tests.faults.conftest import WORDS
from tests.faults.ledger import committed
from tests.flows.conftest import Launch

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


def words(function: str, policy: str) -> tuple[str, ...]:
    return (
        *WORDS,
        "steps=2",
        f"name={function}",
        "rewards.timeout=1.5",
        f"rewards.functions.0.path=tests.faults.scores:{function}",
        f"rewards.on_failure={policy}",
    )


def logs(api: str) -> str:
    """Everything logged as an error, newest first."""
    found = httpx.post(
        f"{api}/logs/filter",
        json={"logs": {"level": {"ge_": 40}}, "sort": "TIMESTAMP_DESC", "limit": 200},
    ).json()
    return "\n".join(line["message"] for line in found)


@pytest.mark.parametrize(
    ("function", "said", "line"),
    [
        ("raises", "KeyError: 'the_line_that_failed'", "in look_closely"),
        ("hangs", "took longer than", "in where_it_hangs"),
        ("crashes", "its process was killed by SIGSEGV", "in where_it_crashes"),
    ],
)
@pytest.mark.parametrize("policy", ["drop", "complete"])
def test_groups_of_failed_samples(
    launch: Launch, prefect_api: str, function: str, said: str, line: str, policy: str
) -> None:
    run = launch(*words(function, policy))
    code, out = run.end()
    assert code == 0, out
    commits = committed(run.files)
    failed = dropped = 0
    for commit in commits:
        samples, store = commit.refs["samples"], run.files.store
        bad = samples.fetch_numpy(store, "status")[0] == SampleStatus.FAILED
        failed += int(bad.sum())
        batch = commit.refs["batch"]
        assert not (batch.fetch_numpy(store, "status")[0] == SampleStatus.FAILED).any()
        touched = set(samples.fetch_numpy(store, "group_id")[0][bad].tolist())
        trained = set(batch.fetch_numpy(store, "group_id")[0].tolist())
        if policy == "drop":
            assert not touched & trained
            dropped += len(touched)
    assert failed > 0
    ledger = commits[-1].ledger
    if policy == "drop":
        assert ledger.dropped == {"reward_failed": dropped}
    assert ledger.drawn == ledger.trained + ledger.filtered + sum(ledger.dropped.values())
    found = logs(prefect_api)
    assert said in found
    assert line in found
    assert "tests/faults/scores.py" in found or "scores.py" in found


def test_abort(launch: Launch) -> None:
    run = launch(*words("raises", "abort"))
    code, out = run.end()
    assert code == 1, out
    assert "Scoring failed for" in out
    assert "rewards.on_failure is abort" in out
    assert "Traceback" not in out
