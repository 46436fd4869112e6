"""The words from which each token was drawn, where top_p, top_k or min_p left out others.

With them the trainer's distribution is that of the sampler: both are renormalised over the same words
(Keep Sampling Mask: DeepSeek-V3.2, arXiv:2512.02556, 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from storage.batches.refs import BatchRef
from storage.objects.store import Store

# Their columns; see storage/batches/columns.py.
COUNTS, WORDS = "sampling_mask_counts", "sampling_mask_words"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingMask:
    """Of each of T tokens the words that were left.

    Example: the first of two tokens was drawn from words 3 and 9, the second from all
        SamplingMask(counts=[2, 0], words=[3, 9])
    """

    counts: NDArray[np.int32]  # [T]; 0: all words, or nobody drew it
    words: NDArray[np.int32]  # [sum of counts] token ids, each token's in rising order

    def __len__(self) -> int:
        return len(self.counts)

    def after(self, start: int) -> SamplingMask:
        """That of the tokens from number `start` on."""
        return self.between(start, len(self))

    def between(self, start: int, stop: int) -> SamplingMask:
        """That of the tokens from number `start` to before number `stop`."""
        first, last = int(self.counts[:start].sum()), int(self.counts[:stop].sum())
        return SamplingMask(counts=self.counts[start:stop], words=self.words[first:last])

    def extended(self, tokens: int) -> SamplingMask:
        """That of `tokens` tokens, of which the further ones have all words."""
        more = np.zeros(tokens - len(self), np.int32)
        return SamplingMask(counts=np.concatenate([self.counts, more]), words=self.words)

    def followed_by(self, other: SamplingMask) -> SamplingMask:
        """That of these tokens and of others after them."""
        return SamplingMask(
            counts=np.concatenate([self.counts, other.counts]),
            words=np.concatenate([self.words, other.words]),
        )

    @classmethod
    def of(cls, words: Sequence[NDArray[np.integer]]) -> SamplingMask:
        """From each token's words."""
        return cls(
            counts=np.array([len(each) for each in words], np.int32),
            words=np.concatenate([np.zeros(0, np.int32), *words]).astype(np.int32),
        )

    def check_holds(self, tokens: NDArray[np.integer]) -> None:
        """ValueError unless each token [T] is among its own words."""
        if len(tokens) != len(self) or int(self.counts.sum()) != len(self.words):
            raise ValueError(
                f"A sample of {len(tokens)} tokens has a sampling mask of {len(self)} tokens and "
                f"{len(self.words)} words, where {self.counts.sum()} are counted."
            )
        own = np.repeat(np.arange(len(self)), self.counts)
        among = np.zeros(len(self), bool)
        among[own[self.words == tokens[own]]] = True
        if missing := int(np.count_nonzero(~among & (self.counts > 0))):
            raise ValueError(
                f"{missing} tokens of a sample are not among the words that they were drawn from."
            )


NO_TOKENS = SamplingMask.of([])


def read_masks(store: Store, samples: BatchRef) -> list[SamplingMask]:
    """[N] of stored samples that have them."""
    counts, words = (samples.fetch_list(store, name) for name in (COUNTS, WORDS))
    return [
        SamplingMask(counts=cast("NDArray[np.int32]", own), words=cast("NDArray[np.int32]", left))
        for own, left in zip(counts, words, strict=True)
    ]


def mask_columns(masks: Sequence[SamplingMask | None], lengths: Sequence[int]) -> dict[str, object]:
    """The words that the tokens of N samples were drawn from; empty where they are not wanted.

    lengths: [N] tokens of each; those beyond its mask are not the policy's.
    """
    known = [mask for mask in masks if mask is not None]
    if len(known) < len(masks):
        return {}
    whole = [mask.extended(length) for mask, length in zip(known, lengths, strict=True)]
    return {COUNTS: [mask.counts for mask in whole], WORDS: [mask.words for mask in whole]}
