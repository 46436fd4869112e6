"""What the page of a step shows of its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.reporting import artifacts
from tests.storage.audit.small_run import begin, publish_version, take


def test_the_page_of_a_step_says_that_no_token_trained(tmp_path: Path) -> None:
    run = RunStore(Store(f"file://{tmp_path}"), "run")
    begin(run)
    step = take(run, 1, sampled_with=publish_version(run, 0))
    view = Mock(store=run.store, config=Mock(store=Mock(words=list), features=()), origin=None)
    view.name = "run"

    def page(**metrics: float) -> str:
        made = {f"train/{name}": value for name, value in metrics.items()}
        return artifacts.lineage(view, step.model_copy(update={"metrics": made}), [])

    left_out = page(optimizer_steps=2.0, trained_tokens=0.0, correction_left_out=1.0)
    assert "\n**No token trained: algorithm.correction left all of them out.**\n" in left_out
    nothing = page(optimizer_steps=1.0, trained_tokens=0.0)
    assert "\n**No token trained: none has a part in the loss.**\n" in nothing
    assert "\n**No update: no sample was left to train on.**\n" in page(optimizer_steps=0.0)
    assert "rained:" not in page(optimizer_steps=1.0, trained_tokens=40.0, grad_norm=0.5)


def test_samples_are_shown_without_what_the_update_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of a step may have millions of rows, over thousands of objects."""
    run = RunStore(Store(f"file://{tmp_path}"), "run")
    begin(run)
    weights = publish_version(run, 0)
    words = Tokenizer(WordLevel({"two": 0, "and": 1, "four": 2}, unk_token="two"))
    run.store.write(f"{weights.key}/tokenizer.json", words.to_str().encode())
    step = take(run, 1, sampled_with=weights)
    run.store.delete([key for key in run.store.list("run/steps") if "/advantage/" in key])
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(artifacts, "create_markdown_artifact", lambda **given: shown.append(given))
    view = Mock(files=run, config=Mock(tracking=Mock(shown_samples=2), store=None))
    view.name = "run"
    monkeypatch.setattr(artifacts, "command", lambda *words: " ".join(map(str, words[2:])))

    artifacts.show_samples(view, step)

    (page,) = shown
    assert page["markdown"].count("    two and four\n") == 2  # asked
    assert page["markdown"].count("    two and\n") == 2  # wrote
