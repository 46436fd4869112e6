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
