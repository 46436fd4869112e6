"""Which of a step's samples people see, as text: from the best to the worst of the first ones."""

from __future__ import annotations

import numpy as np

from storage.audit.samples import (
    NoTokenizer,
    Transcript,
    few,
    judged,
    origins_of,
    tokenizer_of,
    transcribed,
)
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit
from storage.runs.run_store import RunStore

LOOKED_AT = 64  # samples of a step among which those shown are chosen


def shown_samples(files: RunStore, commit: Commit, count: int) -> list[Transcript]:
    """So many samples of a step. None where they are gone, or no tokenizer says what they are."""
    all_of_them = commit.refs.get("samples")
    if not count or not all_of_them:
        return []
    # The first objects alone are read, however many samples the step has.
    first = all_of_them.take(np.arange(min(len(all_of_them), LOOKED_AT)))
    try:
        rewards, failed, _ = judged(files, first)
        by_reward = [row for row in np.argsort(-rewards, kind="stable").tolist() if not failed[row]]
        shown = first.take(few(by_reward, np.flatnonzero(failed).tolist(), count))
        words = tokenizer_of(files, (commit.version_out, commit.version_in))
        # Their advantages are not shown, and would have the whole batch read.
        origins = origins_of(files, shown, commit.step, {})
        return transcribed(files, shown, origins, words)
    except (NoTokenizer, ObjectMissing):
        return []
