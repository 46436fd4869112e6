"""Which version wrote a token, as staleness."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engines.data.advantages import token_staleness
from engines.data.sample_metrics import staleness_metrics
from storage.batches.writing import write_batch
from storage.objects.store import Store


def test_staleness_goes_by_the_oldest_token(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    spans = [[3, 0, 4], [5, 0, 2, 6, 2, 9], [], [4, 0, 1, 6, 1, 2]]
    made = write_batch(
        store, "run/spans.safetensors", {"weight_spans": [np.array(one, np.int64) for one in spans]}
    )
    assert staleness_metrics(store, made, 6) == {"staleness/mean": 2.0, "staleness/max": 3.0}
    assert staleness_metrics(store, made.take(np.array([2])), 6) == {}


def test_each_token_has_the_staleness_of_its_version() -> None:
    """An answer under one version, one that three versions wrote with a tool between, none, one."""
    spans = [[3, 0, 2], [4, 0, 1, 5, 1, 2, 6, 4, 5], [], [6, 0, 1]]
    found = token_staleness(
        np.concatenate([np.array(one, np.int64) for one in spans]),
        np.cumsum([0, *map(len, spans)]),
        np.array([0, 2, 7, 7, 8]),
        6,
    )
    assert found.dtype == np.int32
    assert found.tolist() == [3, 3, 2, 1, 0, 0, 0, 0]


def test_no_tokens_at_all() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert token_staleness(nothing, np.array([0, 0]), np.array([0, 0]), 6).tolist() == []
