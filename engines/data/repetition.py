"""How much of a sample says the same again, for a metric that every run has."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engines.algorithms.aggregation import Rows
from engines.algorithms.reward_shaping import repetition_penalty
from engines.data.column_reading import jagged
from storage.batches.refs import BatchRef
from storage.objects.store import Store

NGRAM = 4  # tokens


def repeated_ngrams(store: Store, samples: BatchRef) -> NDArray[np.float32]:
    """Of each sample's n-grams the share that came before, [N]: 1 - distinct n-grams / n-grams.

    0 for fewer than NGRAM tokens. Of an episode only what the policy wrote counts, as if its turns
    stood one after the other.
    """
    ids, offsets = jagged(store, samples, "response_ids")
    if "author" in samples.names:
        wrote = jagged(store, samples, "response_mask")[0] > 0
        ids, offsets = ids[wrote], np.concatenate([[0], np.cumsum(wrote)])[offsets]
    rows = Rows.of_offsets(torch.from_numpy(np.array(offsets)))
    penalty = repetition_penalty(torch.from_numpy(np.array(ids)), rows, ngram=NGRAM, factor=1.0)
    return (-penalty).numpy().astype(np.float32)
