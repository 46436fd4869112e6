"""The tokens of a sample: their text, who wrote each, and the numbers by which they are coloured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from storage.batches.columns import Author
from storage.batches.refs import BatchRef
from storage.objects.store import Store

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Values = list[float | None]  # [T], of each response token; None: not a finite number

# Columns with a number for each response token, of samples or of the batch that trained, by name.
NUMBERS = {
    "advantages": "advantage",
    "rollout_logprobs": "log-prob, engine",
    "old_logprobs": "log-prob, trainer",
    "ref_logprobs": "log-prob, reference",
    "teacher_logprobs": "log-prob, teacher",
    "values": "value",
    "returns": "return",
    "token_rewards": "token reward",
    "correction_weights": "correction weight",
    "staleness": "staleness",
}
# Log-prob ratios by name: log-probs of the numerator, and those that are taken from them.
RATIOS = {
    "log-prob ratio trainer / engine": ("old_logprobs", "rollout_logprobs"),
    "log-prob ratio policy / reference": ("old_logprobs", "ref_logprobs"),
    "log-prob ratio engine / reference": ("rollout_logprobs", "ref_logprobs"),
    "log-prob ratio teacher / engine": ("teacher_logprobs", "rollout_logprobs"),
}


def token_texts(words: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text that each token [T] adds; "" where only those after it make a whole character."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(words, token) or "" for token in tokens]


def token_authors(store: Store, sample: BatchRef) -> list[str]:
    """Who wrote each response token [T] of one sample: policy, environment or template."""
    count = int(sample.lengths(store, "response_ids")[0])
    if "author" not in sample.names:
        return ["policy"] * count
    return [Author(one).name.lower() for one in sample.fetch_numpy(store, "author")[0].tolist()]


def token_numbers(store: Store, samples: Sequence[BatchRef]) -> dict[str, Values]:
    """Numbers of each response token [T] by what they mean, ratios first.

    samples: the same sample in each batch that has it, [1] each; the last one's column counts.
    """
    found: dict[str, np.ndarray] = {}
    for one in samples:
        for name in NUMBERS:
            if name in one.names and not one.column(name).shape:
                found[name] = one.fetch_numpy(store, name)[0].astype(np.float64)
    ratios = {
        name: found[above] - found[below]
        for name, (above, below) in RATIOS.items()
        if above in found and below in found and len(found[above]) == len(found[below])
    }
    named = {NUMBERS[name]: values for name, values in found.items()}
    return {name: finite(values) for name, values in (ratios | named).items()}


def finite(values: np.ndarray) -> Values:
    """Numbers for JSON, which knows no NaN."""
    return [round(one, 6) if np.isfinite(one) else None for one in values.tolist()]
