"""A run of which `refrain gc` removed all that may go: every command goes on, or says what is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.runs.commit_log import read_commit
from storage.runs.run_store import RunStore
from tests.faults.ledger import story
from tests.faults.planted import Faults
from tests.flows.conftest import AFTER_STEP_3, ROOT, Launch, Launched

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LEAST = [f"store.keep_{what}" for what in ("versions=1", "steps=1", "snapshots=1")]


def said(run: Launched, command: str, *words: str) -> tuple[int, str]:
    """Exit code and all that a command about the run printed."""
    done = subprocess.run(
        [sys.executable, "-m", "flows", command, *words],
        cwd=run.folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_what_gc_left_goes_on_and_what_is_gone_is_said(
    launch: Launch, tmp_path: Path, undisturbed: RunStore
) -> None:
    words = ["store.snapshot_every=2", "store.keep_versions=9", "tracking.system_metrics=0"]
    faults = Faults(tmp_path / "faults", [AFTER_STEP_3])
    run = launch("tiny", "steps=6", *words, environment=faults.environment)
    assert run.end()[0] != 0, "killed after its third step"
    name = run.files.run
    code, out = said(run, "gc", name, "--delete", "--without-registry", *LEAST)
    assert code == 0 and "were removed" in out, out
    assert run.files.versions() == [0, 2, 3], "of the snapshot, its first and its last"

    for command, asked, why in (
        ("export", [name, "--version", "1", "--to", "model"], "version 1 of run"),
        ("serve", [f"{name}@1"], "version 1 of run"),
        ("replay", [name, "1"], "Step 1 of run"),
        ("samples", [f"{name}@1"], "batches of step 1"),
        ("rescore", [name, "--reward", "engines.rewards.builtin:share_of_digits", "--steps", "1"],
         "Retention removed the samples"),
        ("grpo", ["--fork", f"{name}@1"], "The trainer state of"),
        ("grpo", ["tiny", f"continue_from={name}@1"], "The policy version of"),
    ):  # fmt: skip
        code, out = said(run, command, *asked)
        assert code == 2 and why in out and "Traceback" not in out, out
        assert "retention" in out.lower() or "no longer in the store" in out, out
        assert len(out.strip().splitlines()) == 1, "one sentence, on one line"
    code, out = said(run, "audit", name)
    assert code == 0 and "All is good" in out, out
    assert out.count("no: batches are removed by retention") == 2
    for command, asked in (
        ("export", [name, "--to", "model"]),
        ("replay", [name, "3"]),
        ("lineage", [name, "--version", "3"]),
        ("inspect", [name]),
        ("curves", [name, "--to", "csv"]),
        ("dossier", [name, "--to", "dossier"]),
    ):
        code, out = said(run, command, *asked)
        assert code == 0, out

    launch("--resume", name).whole()
    whole = [read_commit(undisturbed, step) for step in range(1, 7)]
    assert story(run.commits()) == story(whole)
    code, out = said(run, "replay", name, "6")
    assert code == 0 and "Equal, to the bit" in out, out
    assert said(run, "audit", name)[0] == 0
