"""What `refrain compare` says of runs that are made without engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flows import compare
from storage.objects.store import Store
from storage.runs.run_store import RunStore
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
