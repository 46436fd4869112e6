"""What follows a commit does not undo it."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from storage.objects.errors import StoreUnavailable
from tasks import commit


@pytest.mark.parametrize("breaks", ["show_step", "tidy"])
def test_a_store_that_is_away_after_a_commit_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    run, record, said = Mock(), SimpleNamespace(step=4, metrics={"reward/mean": 1.0}), Mock()
    away = StoreUnavailable("list s3://bucket/run failed 6 times")
    monkeypatch.setattr(commit, "get_run_logger", lambda: said)
    monkeypatch.setattr(commit, "tell", Mock())
    monkeypatch.setattr(commit, "show_step", Mock())
    if breaks == "tidy":
        run.tidy.side_effect = away
    else:
        monkeypatch.setattr(commit, "show_step", Mock(side_effect=away))

    commit.show(run, record, [], [])

    run.tracker.step.assert_called_once_with(record, {"reward/mean": 1.0})
    run.tracker.register.assert_called_once_with(record)
    assert said.warning.call_args.args[1:] == (4, away)


def test_a_page_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run, record = Mock(), SimpleNamespace(step=4, metrics={})
    run.tracker.step.side_effect = RuntimeError("MLflow says no")
    with pytest.raises(RuntimeError, match="MLflow says no"):
        commit.show(run, record, [], [])
