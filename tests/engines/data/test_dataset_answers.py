"""Answers of the data as samples: their tokens, what is not known of them, and rows without one."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from configs.model import RandomModel
from engines.data.dataset_answers import answers_of, write_answers
from engines.models.checkpoints import load_tokenizer, materialize
from storage.batches.columns import SampleStatus
from storage.batches.writing import write_batch
from storage.objects.store import Store


def test_answers_become_samples_that_no_version_drew(tmp_path: Path) -> None:
    store, tokenizer = (
        Store(f"file://{tmp_path}/store"),
        load_tokenizer(materialize(RandomModel(), tmp_path / "models")),
    )
    rows = [{"answers": ["four", "4", "unused"]}, {"answers": ["six is the one", "6"]}]
    prompts = write_batch(
        store,
        "run/prompts.safetensors",
        {
            "prompt_ids": [np.array([5, 6]), np.array([7])],
            "group_id": np.array([10, 11]),
            "prompt_row": np.array([3, 9]),
            "row": rows,
        },
    )
    found = write_answers(
        store, prompts, "answers", 2, tokenizer, 5, "run/given.safetensors", attempt=2
    )
    ids, offsets = found.ref.fetch_numpy(store, "response_ids")
    assert offsets is not None
    texts = [tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise(offsets)]
    assert texts == ["four<eos>", "4<eos>", "six i", "6<eos>"]
    assert found.ref.fetch_numpy(store, "status")[0].tolist() == [
        SampleStatus.OK, SampleStatus.OK, SampleStatus.TRUNCATED, SampleStatus.OK,
    ]  # fmt: skip
    assert (found.truncated, found.prompt_tokens) == (1, 3)
    assert found.ref.fetch_numpy(store, "sample_id")[0].tolist() == [20, 21, 22, 23]
    assert found.ref.fetch_numpy(store, "prompt_row")[0].tolist() == [3, 3, 9, 9]
    assert found.ref.fetch_list(store, "finish_reason") == ["given"] * 4
    assert np.isnan(found.ref.fetch_numpy(store, "rollout_logprobs")[0]).all()
    assert len(found.ref.fetch_numpy(store, "weight_spans")[0]) == 0


@pytest.mark.parametrize("value", [None, "", "one", ["one"], ["one", ""], ["one", 2], 7])
def test_a_row_without_enough_answers_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="^Row 4 has answers = [^\n]+$"):
        answers_of({"answers": value}, "answers", 2, "Row 4")
    if value == "one":
        assert answers_of({"answers": value}, "answers", 1, "Row 4") == ["one"]
