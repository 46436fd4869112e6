"""What follows a commit: everybody hears of it, then what is not kept is removed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from tasks import commit


@pytest.mark.parametrize(("step", "due"), [(10, True), (11, False)])
def test_curves_are_written_and_what_is_registered_stays(
    monkeypatch: pytest.MonkeyPatch, step: int, due: bool
) -> None:
    run: Any = Mock(start=0, head=step)
    run.config.rollback_steps = 2
    run.config.features = ()
    run.tracking.retained.return_value = {3}
    run.disk.after.return_value = None
    run.to_be_evaluated.return_value = {7}
    sweep, write = Mock(return_value=[]), Mock()
    monkeypatch.setattr(commit, "sweep", sweep)
    monkeypatch.setattr(commit, "write_curves", write)
    commit.tidy(run, step, nbytes=0.0)
    assert write.called is due
    assert sweep.call_args.kwargs["tagged"] == {3, 7}
    assert sweep.call_args.kwargs["rebuilt_from"] == step - 2
