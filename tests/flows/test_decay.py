"""A run whose learning rate decays, killed and resumed with another number of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch

pytestmark = pytest.mark.cluster

WORDS = ("tiny", "name=d", "steps=4", "train.schedule=cosine")


@pytest.mark.slow  # seven runs, one after the other
def test_fewer_steps_leave_the_schedule_as_it_was_and_more_are_refused(
    launch: Launch, tmp_path: Path
) -> None:
    """Its weights are rebuilt by the updates of before, which have to give what is published."""
    killed = Fault(id="x", target="tasks.commit:write_commit", when="after", nth=2, action="kill")
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [killed])
    broken = launch(*WORDS, environment=faults.environment)
    code, out = broken.end()
    assert (code, faults.missed) == (-9, []), out
    name = broken.files.run

    code, out = launch("--resume", name, "steps=8").end()
    assert code == 2
    assert "steps = 8, but train.schedule = cosine of run" in out

    resumed = launch("--resume", name, "steps=3")
    code, out = resumed.end()
    assert code == 0, out
    commits = resumed.commits()
    rates = [commit.metrics["train/learning_rate"] for commit in commits]
    peak = rates[0]
    assert peak is not None
    assert rates == pytest.approx([peak, peak * 0.853553, peak * 0.5], rel=1e-5)
    assert [commit.update["steps"] for commit in commits] == [4, 4, 4]

    whole = launch("--resume", name)  # on to its four steps
    code, out = whole.end()
    assert code == 0, out
    assert whole.commits()[-1].metrics["train/learning_rate"] == pytest.approx(
        peak * 0.146447, rel=1e-5
    )
    code, out = launch("--resume", name).end()
    assert code == 2
    assert "train.schedule = cosine has ended: to train on, fork it" in out

    code, out = launch("--fork", f"{name}@2", "steps=6").end()
    assert code == 0, out
