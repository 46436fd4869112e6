"""The line that people read during an outage."""

from __future__ import annotations

import datetime

from engines.workers.cluster import Wait
from tasks.run.engines import sentence

SINCE = datetime.datetime(2026, 11, 20, 13, 53).timestamp()
WAIT = Wait(
    pool="rollout", there=0, needed=1, since=SINCE, until=SINCE + 300, limit=300.0, cause=""
)


def test_it_says_what_since_when_and_until_when() -> None:
    assert sentence(WAIT) == "rollout: 0 of 1 workers since 13:53:00, gives up at 13:58:00"


def test_a_task_gives_up_after_its_last_try() -> None:
    """Three tries are left, between which Prefect waits for 2 and 4 seconds."""
    assert sentence(WAIT, tries=3).endswith("gives up at 14:08:06")
    assert sentence(WAIT, tries=4).endswith("gives up at 14:13:07")


def test_it_says_what_became_of_the_last_worker() -> None:
    wait = Wait(**{**{name: getattr(WAIT, name) for name in WAIT.__slots__}, "cause": "a-0: gone"})
    assert sentence(wait).endswith("13:58:00 (a-0: gone)")
