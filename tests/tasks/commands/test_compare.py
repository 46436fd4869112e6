"""What `refrain compare` says of runs that are made without engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from flows import compare
from storage.batches.writing import write_batch
from storage.evaluations.results import EvaluationResult, note, write_result
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef
from tests.storage.audit import small_run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(f"file://{tmp_path}/store")
    for name, rewards in (("a", (0.1, 0.2)), ("b", (0.1, 0.4)), ("c", (0.1, 0.2))):
        run, before = RunStore(store, name), None
        run.write_run({"config": {"seed": len(name)}, "code": "0.1.0", "flow": "flows.grpo:grpo"})
        for step, reward in enumerate(rewards, 1):
            before = small_run.take(run, step, before, metrics={"reward/mean": reward})
    return store


def said(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["compare", *words, f"store.uri={store.uri}"])
    code = compare.main()
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_difference_is_told_and_shown_by_step(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = said(store, monkeypatch, capsys, "a", "b", "--of", "reward/mean")
    assert code == 1
    assert "The first step that differs is 2, by its metrics." in out
    assert "No difference: settings." in out
    assert "+0.2" in out


def test_runs_that_did_the_same_are_good(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = said(store, monkeypatch, capsys, "a", "c", "--json")
    record = json.loads(out)
    assert code == 0
    assert record["differs"] is None
    assert record["curves"]["reward/mean"] == [[1, 0.1, 0.1], [2, 0.2, 0.2]]


def evaluated(run: RunStore, rewards: list[float]) -> None:
    """As if a suite had been asked of the run's second version: a prompt for each reward."""
    store, key = run.store, f"_evaluations/{run.run}/result-1.json"
    rows = {
        "reward": np.array(rewards, np.float32),
        "prompt_row": np.arange(len(rewards)),
    }
    samples = write_batch(store, f"{key}-samples", rows)
    result = EvaluationResult(
        key=run.run,
        suite="sums",
        weights=WeightsRef(version=2, key="w", digest=f"xxh3:{run.run}", nbytes=4),
        engine="transformers",
        on="rows",
        metrics={"reward": sum(rewards) / len(rewards), "failed": 0.0},
        asked=len(rewards),
        samples=samples,
        prompts=samples,
        right_from=1.0,
        seconds=0.1,
        asked_by=run.run,
    )
    write_result(store, key, result)
    note(run, "sums", 2, key)


def test_evaluations_are_tested_prompt_by_prompt(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five prompts that are all better by 1: 2 of 2^5 assignments of signs are as far from 0."""
    evaluated(RunStore(store, "a"), [0.0] * 5 + [1.0])
    evaluated(RunStore(store, "b"), [1.0] * 6)
    _, out, _ = said(store, monkeypatch, capsys, "a", "b")
    assert "b less a, prompt by prompt" in out
    assert "+0.8333" in out and "0.0625" in out
    _, out, _ = said(store, monkeypatch, capsys, "a", "b", "--json")
    (test,) = json.loads(out)["tests"]
    assert test["found"]["p_value"] == 2 / 2**5 and test["found"]["prompts"] == 6
    store.delete(["_evaluations/b/result-1.json-samples"])
    _, out, _ = said(store, monkeypatch, capsys, "a", "b", "--json")
    record = json.loads(out)
    assert record["tests"] == [] and len(record["evaluations"]) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("a", "d"), "There is no run d"),
        (("a", "b", "--of", "reward"), "--of reward: the runs have"),
    ],
)
def test_bad_words_are_one_sentence(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    says: str,
) -> None:
    code, _, err = said(store, monkeypatch, capsys, *words)
    assert code == 2
    assert says in err and err.count("\n") == 1
