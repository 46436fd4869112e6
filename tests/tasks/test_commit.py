"""What follows a commit does not undo it."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from configs.data import DataConfig, ReasoningGymSource
from storage.objects.errors import StoreUnavailable
from storage.prompts.cursor import Cursor
from tasks import commit


def committed() -> SimpleNamespace:
    source = type("Rows", (), {"digest": "d", "__len__": lambda self: 8})()
    cursor = Cursor.start(DataConfig(source=ReasoningGymSource(task="chain_sum")), source)
    return SimpleNamespace(
        step=4, metrics={"reward/mean": 1.0}, cursor=cursor.to_json(), carried=[]
    )


@pytest.mark.parametrize("breaks", ["show_step", "tidy"])
def test_a_store_that_is_away_after_a_commit_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    run, record, said = Mock(), committed(), Mock()
    away = StoreUnavailable("list s3://bucket/run failed 6 times")
    monkeypatch.setattr(commit, "get_run_logger", lambda: said)
    monkeypatch.setattr(commit, "tell", Mock())
    monkeypatch.setattr(commit, "show_step", Mock())
    monkeypatch.setattr(commit, "show_samples", Mock())
    monkeypatch.setattr(commit, "tidy", Mock())
    monkeypatch.setattr(commit, breaks, Mock(side_effect=away))

    commit.show(run, record, [], [])

    run.tracker.step.assert_called_once_with(record, {"reward/mean": 1.0})
    run.tracker.register.assert_called_once_with(record)
    assert said.warning.call_args.args[1:] == (4, away)


def test_a_page_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run, record = Mock(), committed()
    run.tracker.step.side_effect = RuntimeError("MLflow says no")
    with pytest.raises(RuntimeError, match="MLflow says no"):
        commit.show(run, record, [], [])
