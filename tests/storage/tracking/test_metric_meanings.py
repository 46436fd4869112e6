"""Every metric that runs have stored has a meaning."""

from __future__ import annotations

import json
import tarfile

import pytest

from storage.tracking.metric_meanings import MEANINGS, meaning_of
from tests.stored_runs.test_stored_runs import ARCHIVE


def test_metrics_of_stored_runs_are_in_the_table() -> None:
    found = set()
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            if member.name.endswith("/commit.json"):
                file = archive.extractfile(member)
                assert file is not None
                found |= json.load(file)["body"]["metrics"].keys()
    assert len(found) > 150
    assert sorted(name for name in found if meaning_of(name) is None) == []


@pytest.mark.parametrize(
    ("metric", "row"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/my_function", "reward/FUNCTION"),
        ("cost/device_seconds/rollout/idle", "cost/device_seconds/POOL/idle"),
        ("cost/device_seconds/rollout/weight_sync", "cost/device_seconds/POOL/STAGE"),
        ("task/sums/right", "task/TASK/right"),
        ("task/sums/reward/mean", "task/TASK/NAME"),
        ("eval/gsm8k/pass@16", "eval/SUITE/pass@K"),
        ("critic/value_loss", "critic/value_loss"),
        ("train/plan_seconds", "train/PHASE_seconds"),
    ],
)
def test_a_metric_has_the_row_that_names_most_of_it(metric: str, row: str) -> None:
    assert meaning_of(metric) == MEANINGS[row]


def test_a_metric_that_no_row_fits_has_no_meaning() -> None:
    assert meaning_of("train/unheard_of") is None
    assert meaning_of("accuracy") is None
