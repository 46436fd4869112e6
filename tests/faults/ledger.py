"""What must hold of a run in the store, however it came there."""

from __future__ import annotations

import os
from pathlib import Path

from storage.runs.commit_log import Commit, history
from storage.runs.retention import orphans
from storage.runs.run_store import RunStore
from storage.runs.weights import stream


def committed(files: RunStore, max_staleness: int = 0) -> list[Commit]:
    """Every commit, oldest first, after the checks that any run must pass.

    The chain is whole, the ledger balances, each ref and each version reads back as it was written,
    versions follow each other, and nothing lies about that no commit names.
    """
    commits = list(history(files))[::-1]
    for before, commit in zip([None, *commits], commits, strict=False):
        ledger = commit.ledger
        accounted = ledger.trained + ledger.filtered + sum(ledger.dropped.values())
        assert ledger.drawn == accounted + ledger.in_flight, commit.step
        drawn = ledger.drawn - (before.ledger.drawn if before else 0)
        assert drawn >= len(commit.refs["prompts"]), commit.step
        for ref in commit.refs.values():
            ref.verify(files.store)
        if before is not None:
            assert commit.step == before.step + 1
            behind = before.version_out.version - commit.version_in.version
            assert 0 <= behind <= max_staleness
            assert behind or commit.version_in == before.version_out
    last = commits[-1]
    for _ in stream(files.store, last.version_out):
        pass
    unnamed, unfinished = orphans(files, last.step), half_written(files)
    assert not unnamed and not unfinished, (unnamed, unfinished)
    return commits


def half_written(files: RunStore) -> list[str]:
    """Beginnings of files that nobody will finish, in a local store."""
    root = Path(files.store.uri.removeprefix("file://")) / files.run
    return [name for _, _, names in os.walk(root) for name in names if name.endswith(".tmp")]


def story(commits: list[Commit]) -> list[tuple[object, ...]]:
    """What two runs of the same settings must have in common, bit for bit, step by step."""
    return [
        (
            commit.step,
            commit.version_out.digest,
            commit.cursor,
            commit.ledger.model_dump(),
            len(commit.refs["samples"]),
        )
        for commit in commits
    ]


def causes(commits: list[Commit], stage: str) -> list[str]:
    """Causes of the failed attempts of a stage."""
    return [
        str(attempt["error"])
        for commit in commits
        for attempt in commit.attempts
        if attempt["stage"] == stage and attempt["error"]
    ]
