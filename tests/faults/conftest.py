"""Runs with planted faults, and the undisturbed run that each must end like."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from storage.runs.commit_log import Commit
from tests.faults.ledger import committed
from tests.faults.planted import Fault, Faults
from tests.flows.conftest import Launch, Launched, launch, prefect_api, starting

__all__ = ["launch", "prefect_api"]  # fixtures

STEPS = 4
# Short deadlines: a call of this recipe takes a fraction of a second, on a busy machine a few.
WORDS = (
    "tiny",
    f"steps={STEPS}",
    "name=faults",
    "rollout.max_new_tokens=8",
    "rollout.deadline=12",
    "train.deadline=12",
    "cluster.start_timeout=60",
    "cluster.no_workers_timeout=40",
    "algorithm.kl.coefficient=0.01",
)


@pytest.fixture(scope="session")
def undisturbed(
    prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Commit]]:
    """The commits of a run with some settings to which nothing happened; made once."""
    known: dict[tuple[str, ...], list[Commit]] = {}

    def made(*words: str) -> list[Commit]:
        if words not in known:
            with starting(tmp_path_factory.mktemp("undisturbed"), prefect_api) as start:
                run = start(*WORDS, *words)
                code, out = run.end(600)
                assert code == 0, out
                known[words] = committed(run.files)
        return known[words]

    return made


Disturbed = tuple[Launched, list[Commit], str]


@pytest.fixture
def disturb(launch: Launch, tmp_path: Path) -> Callable[..., Disturbed]:
    """Run to the end under faults, resuming as often as it takes; (run, commits, all output)."""

    def to_the_end(
        faults: Sequence[Fault],
        *words: str,
        resumes: int = 1,
        embedded: bool = False,
        timeout: float = 300,
    ) -> Disturbed:
        planted = Faults(tmp_path / "faults", faults)
        run = launch(*WORDS, *words, environment=planted.environment, embedded=embedded)
        code, out = run.end(timeout)
        for _ in range(resumes):
            if code == 0:
                break
            assert "Traceback" not in out, out
            assert code < 0 or re.search(r"--resume faults-\S+", out), out
            run = launch(
                "--resume",
                run.files.run,
                *(word for word in words if word.startswith("store.")),
                environment=planted.environment,
                embedded=embedded,
            )
            code, more = run.end(timeout)
            out += more
        assert code == 0, out
        assert planted.missed == [], out
        assert run.children() == []
        return run, committed(run.files), out

    return to_the_end
