"""Repeated n-grams of samples, and the metrics that guards look at."""

from __future__ import annotations

import numpy as np

from engines.data.sample_metrics import SampleValues, repeated_ngrams, sample_metrics
from storage.batches.writing import write_batch
from storage.objects.store import Store

STORE = Store("memory://repetition")


def test_repeated_ngrams_are_a_share_of_all() -> None:
    ids = [
        np.array(row, np.int32) for row in ([1] * 7, [1, 2, 3, 4, 5], [1, 2, 3, 4, 1, 2, 3, 4], [9])
    ]
    ref = write_batch(STORE, "ngrams.safetensors", {"response_ids": ids})
    assert repeated_ngrams(STORE, ref).tolist() == [np.float32(0.75), 0.0, np.float32(0.2), 0.0]
    said = {"author": [np.ones(len(one), np.uint8) for one in ids]}
    said["response_mask"] = [np.array([1, 1, 1, 1, 0, 0, 0]), *(np.ones(len(x)) for x in ids[1:])]
    said["response_mask"] = [one.astype(np.uint8) for one in said["response_mask"]]
    own = ref.with_columns(write_batch(STORE, "authors.safetensors", said))
    assert repeated_ngrams(STORE, own).tolist()[0] == 0.0, "only what the policy wrote counts"


def test_the_metrics_of_guards_leave_failed_samples_out() -> None:
    found = sample_metrics(
        SampleValues(
            rewards=np.array([1, 0, np.nan, 1], np.float32),
            components={},
            failed=np.array([False, False, True, False]),
            truncated=np.zeros(4, bool),
            lengths=np.ones(4, np.int64),
            groups=np.zeros(4, np.int64),
            repeated=np.array([0.5, 0.25, 1.0, 0.0], np.float32),
        )
    )
    assert (found["samples/failed_fraction"], found["response/repeated_ngrams"]) == (0.25, 0.25)
