"""Steps that overlap (max_staleness > 0): bound, order, failures, the data's end, kill and resume."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from storage.evaluations.results import evaluations_of
from storage.objects.store import Store
from storage.runs.commit_log import Commit, history, read_commit
from storage.runs.run_store import RunStore
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch, Launched
from tests.flows.test_epochs import audited, words
from tests.flows.test_grpo import gone, wait_for_step

pytestmark = pytest.mark.cluster

ASYNC = ("max_staleness=2", "algorithm.correction=[{kind: truncate}]")
# Answers take their time, so that new weights arrive in the middle of them.
SLOW = Fault(id="slow", target="engines.rollout.hf_decoding:Decoding.step", action="delay")

# Kills the flow once its fifth step is committed, before MLflow is told or the sixth trains.
AFTER_STEP_5 = Fault(id="committed", target="tasks.run.run:Run.advance", action="kill", nth=5)


def rows_trained(commits: list[Commit], store: Store) -> list[list[int]]:
    """The rows of the data that each step trained on, in order."""
    return [
        np.unique(commit.refs["batch"].fetch_numpy(store, "prompt_row")[0]).tolist()
        for commit in commits
    ]


def lags(commit: Commit, run: Launched) -> np.ndarray:
    """By how many versions each sample's oldest token lags behind the version that trains."""
    spans, offsets = commit.refs["batch"].fetch_numpy(run.files.store, "weight_spans")
    assert offsets is not None
    return commit.step - 1 - spans[offsets[:-1]]


def spans_of(commit: Commit, run: Launched) -> list[list[int]]:
    """The policy versions of each sample's tokens, oldest first."""
    spans, offsets = commit.refs["samples"].fetch_numpy(run.files.store, "weight_spans")
    assert offsets is not None
    return [spans[a:b:3].tolist() for a, b in itertools.pairwise(offsets)]


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["recompute", "keep"])
def test_steps_overlap_within_the_bound(launch: Launch, tmp_path: Path, kept: str) -> None:
    """New weights arrive in the middle of answers, and every token knows its version."""
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [SLOW])
    words = ["tiny", "steps=5", *ASYNC, "rollout.max_new_tokens=48", f"rollout.kv_on_update={kept}"]
    run = launch(*words, environment=faults.environment)
    code, out = run.end()
    assert (code, faults.missed) == (0, []), out
    assert re.findall(r"^step (\d)/5", out, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    commits = run.commits()
    assert len(list(history(run.files))) == 5
    found = [lags(commit, run) for commit in commits]
    assert max(lag.max() for lag in found) <= 2
    assert max(lag.max() for lag in found) > 0, "the steps did overlap"
    for commit, lag in zip(commits, found, strict=True):
        assert commit.metrics["staleness/max"] == lag.max()
        assert commit.metrics["staleness/mean"] == pytest.approx(lag.mean())
    versions = [spans for commit in commits for spans in spans_of(commit, run)]
    assert all(spans == sorted(spans) for spans in versions)
    assert any(len(spans) > 1 for spans in versions), "answers went on under new weights"
    assert [step["drawn"] for step in audited(run)] == [4, 8, 12, 16, 20]
    assert run.children() == []
    command = [sys.executable, "-m", "flows.replay", run.files.run, "4"]
    done = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, timeout=400)
    assert (done.returncode, "Equal, to the bit." in done.stdout) == (0, True), done.stdout


@pytest.mark.slow
def test_killed_and_resumed_it_trains_on_the_same_prompts(
    launch: Launch, undisturbed: RunStore, tmp_path: Path
) -> None:
    """The same as a run whose steps do not overlap, in the same order."""
    # The last of all shards is sampled, and the last step cannot be committed yet.
    fault = Fault(id="last", target="tasks.reward:scored", action="kill", nth=12)
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [fault])
    broken = launch("tiny", "steps=6", *ASYNC, environment=faults.environment)
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    name = broken.files.run
    finished = shards(broken, 6)
    assert len(finished) == 2
    resumed = launch("--resume", name)
    code, out = resumed.end()
    assert code == 0, out
    whole = [read_commit(undisturbed, step) for step in range(1, 7)]
    trained = rows_trained(resumed.commits(), resumed.files.store)
    assert trained == rows_trained(whole, undisturbed.store)
    assert resumed.commits()[-1].ledger == whole[-1].ledger
    assert audited(resumed)[-1]["recounted"]
    # What the last step had sampled before the kill is what it trains on.
    assert set(finished) <= resumed.commits()[5].refs["samples"].objects


def shards(run: Launched, step: int) -> list[str]:
    """Keys of the samples of a step's finished shards."""
    store = run.files.store
    folder = f"{run.files.step_key(step)}/rollout"
    found = []
    for key in store.list(folder):
        if key.endswith(".json"):
            record = json.loads(store.read(key))
            found += [
                name for name in re.findall(r'"([^"]+)"', json.dumps(record)) if "/rollout/" in name
            ]
    return sorted({name for name in found if store.exists(name)})


@pytest.mark.slow
def test_a_failure_lets_the_steps_before_it_end(launch: Launch, tmp_path: Path) -> None:
    fault = Fault(id="draw", target="tasks.draw:draw_rows", action="raise", nth=4)
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [fault])
    run = launch("tiny", "steps=8", *ASYNC, environment=faults.environment)
    code, out = run.end()
    assert (code, faults.missed) == (1, []), out
    assert re.findall(r"^step (\d)/8", out, re.MULTILINE) == ["1", "2", "3"]
    assert "RuntimeError: planted: draw" in out
    assert "Traceback" not in out
    assert f"To go on from the last step: refrain grpo --resume {run.files.run}" in out
    assert run.children() == []


@pytest.mark.slow
def test_a_persons_stop_is_no_failure(launch: Launch) -> None:
    run = launch("tiny", "steps=1000", *ASYNC)
    wait_for_step(run, 2)
    run.process.send_signal(signal.SIGINT)
    assert gone(run, 30), run.children()
    code, out = run.end(timeout=20)
    assert code == 130, out
    assert f"Stopped. To go on: refrain grpo --resume {run.files.run}" in out
    assert "Traceback" not in out, out


@pytest.mark.slow
def test_the_end_of_the_data_is_its_end(launch: Launch, tmp_path: Path) -> None:
    """Rows for two steps and a half; nobody knows before the third draw, since some are too long."""
    run = launch(*words(tmp_path, rows=9, long=3), *ASYNC)
    code, out = run.end()
    assert code == 0, out
    assert f"{run.files.run}: 2 of 5 steps are committed; the data's epochs are over." in out
    assert run.commits()[-1].ledger.drawn == 8
    assert run.files.store.exists(f"{run.files.state_key(2)}/marker.json")
    assert audited(run)[-1]["recounted"]


@pytest.mark.slow
def test_beyond_the_guards_bound_the_run_is_synchronous(launch: Launch, tmp_path: Path) -> None:
    """Its first step crosses it. What is under way is finished, after a kill and a resume too."""
    slow = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [SLOW, AFTER_STEP_5])
    guard = (
        "guards=[{metric: train/rollout_mismatch, above: 1.0e-9, patience: 1, action: synchronous}]"
    )
    broken = launch("tiny", "steps=8", *ASYNC, guard, environment=slow.environment)
    code, out = broken.end()
    assert (code, slow.missed) == (-9, []), out
    assert out.count("from now on max_staleness is 0") == 1, out
    resumed = launch("--resume", broken.files.run, environment={**slow.environment})
    code, out = resumed.end()
    assert code == 0, out
    assert "from now on" not in out, "it is already"
    commits = resumed.commits()
    assert [commit.step for commit in commits] == list(range(1, 9))
    assert [commit.metrics["staleness/bound"] for commit in commits] == [0.0] * 8
    stale = [commit.metrics["staleness/max"] for commit in commits]
    assert max(stale[:3]) > 0, "steps 2 and 3 were under way"
    assert stale[3:] == [0.0] * 5
    assert all("train/rollout_effective_sample_size" in commit.metrics for commit in commits)
    assert audited(resumed)[-1]["recounted"]


@pytest.mark.slow
def test_beyond_the_guards_bound_the_run_stops(launch: Launch, tmp_path: Path) -> None:
    guard = "guards=[{metric: train/rollout_mismatch, above: 1.0e-9, patience: 2, action: stop}]"
    run = launch("tiny", "steps=8", *ASYNC, guard)
    code, out = run.end()
    assert code == 1, out
    assert re.findall(r"^step (\d)/8", out, re.MULTILINE) == ["1", "2"]
    assert re.search(
        r"GuardStopped: Guard train/rollout_mismatch: train/rollout_mismatch of step 2 was \S+, "
        r"above 1e-09 for 2 steps in a row by now. Look at the run",
        out,
    )
    assert "Traceback" not in out
    assert f"To go on from the last step: refrain grpo --resume {run.files.run}" in out
    assert len(run.commits()) == 2
    assert run.children() == []
    code, out = launch("--resume", run.files.run, "steps=4", "guards=[]").end()
    assert code == 0, out
    assert [commit.metrics["staleness/bound"] for commit in run.commits()] == [2.0] * 4


def test_samples_that_nothing_corrects_are_refused(launch: Launch) -> None:
    code, out = launch("tiny", "max_staleness=1").end()
    assert code == 2
    assert out.startswith("max_staleness = 1 trains on samples of older policies, and ")
    assert "Set algorithm.correction = [{kind: truncate}]" in out


@pytest.mark.slow
def test_an_interpolated_proximal_policy_is_replayed_to_the_bit(
    launch: Launch, tmp_path: Path
) -> None:
    """No pass before the update, and what it needs of each token is a column of the batch."""
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [SLOW])
    recipe = ["algorithm.proximal=loglinear", "algorithm.loss.kind=decoupled"]
    words = ["tiny", "steps=5", "max_staleness=2", *recipe, "train.mini_batches=2"]
    run = launch(*words, "rollout.max_new_tokens=60", environment=faults.environment)
    code, out = run.end()
    assert (code, faults.missed) == (0, []), out
    commits = run.commits()
    stale = []
    for commit in commits:
        batch = commit.refs["batch"]
        assert "old_logprobs" not in batch.names
        assert all(attempt["stage"] != "logprob" for attempt in commit.attempts)
        found, offsets = batch.fetch_numpy(run.files.store, "staleness")
        assert offsets is not None
        oldest = [found[a:b].max() for a, b in itertools.pairwise(offsets) if b > a]
        assert oldest == lags(commit, run).tolist()
        stale += found.tolist()
        assert 0 < commit.metrics["train/rollout_effective_sample_size"] <= 1
    assert set(stale) <= {0, 1, 2} and len(set(stale)) > 1
    command = [sys.executable, "-m", "flows.replay", run.files.run, "4"]
    done = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, timeout=400)
    assert (done.returncode, "Equal, to the bit." in done.stdout) == (0, True), done.stdout


@pytest.mark.slow
def test_an_evaluation_measures_one_version(launch: Launch, tmp_path: Path) -> None:
    """From its first prompt to its last, though other steps overlapped until then."""
    rows = [{"question": f"{n} + {n} = ", "answer": str(2 * n)} for n in range(30, 38)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ["evaluation.source.kind=file", "evaluation.source.path=rows.jsonl"]
    run = launch("tiny", "steps=4", *ASYNC, *source).whole()
    (result,) = evaluations_of(run.files)
    assert result.version == 4
    spans = result.samples.fetch_numpy(run.files.store, "weight_spans")[0].reshape(-1, 3)
    assert {int(version) for version in spans[:, 0]} == {4}
    assert len(spans) == len(rows)
    assert set(result.samples.fetch_list(run.files.store, "weights_digest")) == {
        run.commits()[-1].version_out.digest
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "worker"),
    [
        ("engines.rollout.hf_decoding:Decoding.step", "rollout"),
        ("engines.train.fsdp_engine:FSDPEngine.update", "train"),
    ],
)
def test_a_worker_that_dies_changes_no_step(
    launch: Launch, tmp_path: Path, target: str, worker: str
) -> None:
    """Killed in the middle of an answer, or of an update while later steps are sampled."""
    fault = Fault(id="dead", target=target, action="kill", nth=4, only=worker)
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [fault])
    run = launch("tiny", "steps=6", *ASYNC, environment=faults.environment)
    code, out = run.end()
    assert (code, faults.missed) == (0, []), out
    commits = run.commits()
    assert [commit.ledger.trained for commit in commits] == [4, 8, 12, 16, 20, 24]
    rows = [row for step in rows_trained(commits, run.files.store) for row in step]
    assert len(set(rows)) == 24
    assert max(lags(commit, run).max() for commit in commits) <= 2
    assert any(attempt["number"] == 2 for commit in commits for attempt in commit.attempts)
    assert audited(run)[-1]["recounted"]
    assert run.children() == []
