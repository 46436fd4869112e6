"""What the log of a task run says of its attempts."""

from __future__ import annotations

import contextvars
import logging
import threading

import pytest

from tasks.run import attempts
from tasks.run.attempts import Attempt, logged_together


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(f"{record.levelname} {record.getMessage()}")

    logger = logging.Logger("task run")
    logger.addHandler(Lines())
    monkeypatch.setattr(attempts, "get_run_logger", lambda: logger)
    return found


def attempt(shard: int | None, number: int = 1, seconds: float = 2.0, error: str = "") -> Attempt:
    made = Attempt(
        step=1, stage="rollout", shard=shard, number=number, started=0.0, ended=seconds, error=error
    )
    made.assignment.worker = f"rollout-{shard or 0}"
    return made


def test_an_attempt_by_itself_has_a_line(lines: list[str]) -> None:
    attempt(None).log()
    attempt(3, 2).log()
    assert lines == [
        "INFO Attempt 1 on rollout-0 took 2.00 s",
        "INFO Shard 3, rollout, attempt 2 on rollout-3 took 2.00 s",
    ]


def test_shards_driven_together_have_one_line_and_failures_their_own(lines: list[str]) -> None:
    with logged_together():
        for one in (attempt(1), attempt(2, error="WorkerLost: gone"), attempt(3, seconds=0.5)):
            context = contextvars.copy_context()  # as in the driver's threads
            thread = threading.Thread(target=context.run, args=(one.log,))
            thread.start()
            thread.join()
        late = contextvars.copy_context()
        assert lines == [
            "WARNING Shard 2, rollout, attempt 1 on rollout-2 took 2.00 s and failed: "
            "WorkerLost: gone"
        ]
        attempt(2, 2, 1.0).log()
    assert lines[1:] == [
        "INFO rollout: 3 calls for 3 shards on rollout-1, rollout-2, rollout-3 took 0.50 to 2.00 s; "
        "shards that were tried again (attempt): 2 (2)"
    ]
    late.run(attempt(4).log)  # of a task run that has failed meanwhile
    assert lines[2:] == ["INFO Shard 4, rollout, attempt 1 on rollout-4 took 2.00 s"]


def test_where_no_attempt_ended_well_there_is_no_line(lines: list[str]) -> None:
    with pytest.raises(ValueError), logged_together():
        raise ValueError
    assert lines == []
