"""Samples of a step as outcomes of rows, and the history that the engine writes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from configs.data import QuarantineConfig
from engines.rows.contract import RowHistoryRequest
from engines.rows.row_history_engine import RowHistoryEngine
from engines.rows.row_outcomes import row_outcomes
from engines.workers.engine import StoreSpec
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.rows.row_history import RowHistory

STORE = Store("memory://row-outcomes")
OK, FAILED = int(SampleStatus.OK), int(SampleStatus.FAILED)


def batches(key: str) -> tuple[BatchRef, BatchRef]:
    """Groups 8, 9, 10 and 11 of rows 30, 5, 5 and 7; of group 11 no sample was taken."""
    prompts = write_batch(
        STORE, f"{key}-prompts.safetensors",
        {"group_id": np.array([8, 9, 10, 11]), "prompt_row": np.array([30, 5, 5, 7])},
    )  # fmt: skip
    masks = [np.ones(n, np.uint8) for n in (2, 4, 3, 3, 5, 1)]
    samples = write_batch(
        STORE, f"{key}-samples.safetensors",
        {
            "group_id": np.array([10, 10, 8, 8, 9, 9]),
            "reward": np.array([1, 1, 0, 1, np.nan, np.nan], np.float32),
            "status": np.array([OK, OK, OK, OK, FAILED, FAILED]),
            "response_mask": masks,
        },
    )  # fmt: skip
    return prompts, samples


def test_groups_are_outcomes_of_their_rows() -> None:
    found = row_outcomes(STORE, *batches("plain"))
    assert found.row.tolist() == [30, 5, 5]
    assert found.reward[[0, 2]].tolist() == [0.5, 1.0] and np.isnan(found.reward[1])
    assert found.failed.tolist() == [False, True, False]
    assert found.uniform.tolist() == [False, True, True]
    assert found.tokens.tolist() == [3, 3, 3]
    assert np.isnan(found.seconds).all()


def test_players_of_a_prompt_vary_each_for_itself() -> None:
    prompts, _ = batches("players")
    rewards = np.array([0, 1, 0, 0], np.float32)
    seats = write_batch(
        STORE, "players.safetensors",
        {
            "group_id": np.array([8, 8, 8, 8]), "player": np.array([0, 1, 0, 1]),
            "reward": rewards, "status": np.full(4, OK), "response_mask": [np.ones(1, np.uint8)] * 4,
        },
    )  # fmt: skip
    assert row_outcomes(STORE, prompts, seats).uniform.tolist() == [False]  # player 1 varies
    apart = seats.take([0, 2])
    assert row_outcomes(STORE, prompts, apart).uniform.tolist() == [True]


def test_the_engine_writes_a_table_that_goes_on() -> None:
    engine = RowHistoryEngine(StoreSpec(store_uri=STORE.uri, store_options={}))
    prompts, samples = batches("engine")
    bounds = QuarantineConfig(failures=1)
    request = RowHistoryRequest(
        before=None, prompts=prompts, samples=samples, step=1, quarantine=bounds, readmitted=[]
    )
    one = engine.row_history(request, "one.safetensors")
    assert (one.quarantined, one.entered) == ({"failures": 1}, 1)
    request = replace(request, before=one.ref, samples=samples.rows(0, 4), step=2, readmitted=None)
    two = engine.row_history(request, "two.safetensors")
    assert (two.quarantined, two.entered) == ({}, 0), "all were let in, and then nothing failed"
    table = RowHistory.read(STORE, two.ref)
    assert (table.prompt_row.tolist(), table.draws.tolist()) == ([5, 30], [3, 2])
    assert RowHistory.read(STORE, None).prompt_row.tolist() == []
