"""By how many policy versions samples and their tokens lag behind the version that trains on them.

Read from weight_spans, which says for each sample which tokens each version wrote. Step k trains
version k - 1, so a token that version v wrote has the staleness k - 1 - v.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage.batches.refs import BatchRef
from storage.objects.store import Store


def staleness_metrics(store: Store, samples: BatchRef, version: int) -> dict[str, float]:
    """By how many versions the samples' oldest tokens lag behind the version that trains.

    Samples without a token, or whose versions are not known, are left out.
    """
    if "weight_spans" not in samples.names:
        return {}
    spans, offsets = samples.fetch_numpy(store, "weight_spans")
    assert offsets is not None
    first = np.asarray(offsets[:-1])[np.diff(offsets) > 0]  # of a sample's spans, in order
    if not len(first):
        return {}
    lags = version - np.asarray(spans)[first]
    return {"staleness/mean": float(lags.mean()), "staleness/max": float(lags.max())}


def token_staleness(
    spans: NDArray[np.int64],
    span_offsets: NDArray[np.int64],
    offsets: NDArray[np.int64],
    version: int,
) -> NDArray[np.int32]:
    """The staleness of each response token, in versions: int32 [T]; 0 for a token of no span.

    Two samples of 3 and 1 tokens, version 6 trains; the first was begun by version 4:

        token_staleness([4, 0, 2, 5, 2, 3, 6, 0, 1], [0, 6, 9], [0, 3, 4], 6)  # [2, 2, 1, 0]

    Args:
        spans: weight_spans of all samples, flat triples of version, start, stop.
        span_offsets: int64 [N + 1], where those of each sample begin.
        offsets: int64 [N + 1], where the response tokens of each sample begin; T is the last.
        version: the version that trains.
    """
    found = np.zeros(int(offsets[-1]), dtype=np.int32)
    triples = np.asarray(spans, dtype=np.int64).reshape(-1, 3)
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(span_offsets) // 3)
    begins = np.asarray(offsets)[owners]
    for (wrote, start, stop), begin in zip(triples.tolist(), begins.tolist(), strict=True):
        found[begin + start : begin + stop] = version - wrote
    return found
