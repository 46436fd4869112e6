"""The words from which each token was drawn, where top_p, top_k, min_p or a grammar left out others.

With them the trainer's distribution is that of the sampler: both are renormalised over the same words
(Keep Sampling Mask: DeepSeek-V3.2, arXiv:2512.02556, 3.1).

Stored are two jagged columns. A count n > 0 is that of the token's words, which are next in the
other column; 0 says all. Within a grammar they are nearly all words, or the same as of an earlier
token: so words may be those left out, each w as -1 - w, and a count -1 - t says that the words are
those of token t of the row. Batches of an older Refrain have neither.
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
class Words:
    """Some words of the vocabulary, but not all.

    Example: all words but 3 and 9
        Words(ids=[3, 9], left_out=True)
    """

    ids: NDArray[np.int32]  # in rising order, at least one
    left_out: bool = False  # whether they are all others

    @classmethod
    def of(cls, left: NDArray[np.bool_]) -> Words | None:
        """The words that are left, bool [V], by the shorter list; None: all."""
        if left.all():
            return None
        left_out = 2 * int(left.sum()) > len(left)
        return cls(ids=np.flatnonzero(left != left_out).astype(np.int32), left_out=left_out)

    def have(self, tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of some tokens are among them."""
        return np.isin(tokens, self.ids) != self.left_out

    @property
    def coded(self) -> NDArray[np.int32]:
        """As they are stored."""
        return -1 - self.ids if self.left_out else self.ids


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingMask:
    """Of each of T tokens the words that were left.

    Example: the first and last of three tokens were drawn from words 3 and 9, the second from all
        SamplingMask(numbers=[1, 0, 1], sets=(Words(ids=[3, 9]),))
    """

    numbers: NDArray[np.int32]  # [T] of each token's set, from 1; 0: all words, or nobody drew it
    sets: tuple[Words, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def after(self, start: int) -> SamplingMask:
        """That of the tokens from number `start` on."""
        return self.between(start, len(self))

    def between(self, start: int, stop: int) -> SamplingMask:
        """That of the tokens from number `start` to before number `stop`."""
        return SamplingMask(numbers=self.numbers[start:stop], sets=self.sets)

    def extended(self, tokens: int) -> SamplingMask:
        """That of `tokens` tokens, of which the further ones have all words."""
        more = np.zeros(tokens - len(self), np.int32)
        return SamplingMask(numbers=np.concatenate([self.numbers, more]), sets=self.sets)

    def followed_by(self, other: SamplingMask) -> SamplingMask:
        """That of these tokens and of others after them."""
        theirs = np.where(other.numbers, other.numbers + len(self.sets), 0).astype(np.int32)
        numbers = np.concatenate([self.numbers, theirs])
        return SamplingMask(numbers=numbers, sets=self.sets + other.sets)

    @classmethod
    def of(cls, words: Sequence[Words | None]) -> SamplingMask:
        """From each token's words; None: all."""
        distinct = {id(one): one for one in words if one is not None}
        places = {key: number for number, key in enumerate(distinct, start=1)}
        numbers = [0 if one is None else places[id(one)] for one in words]
        return cls(numbers=np.array(numbers, np.int32), sets=tuple(distinct.values()))

    def check_holds(self, tokens: NDArray[np.integer]) -> None:
        """ValueError unless each token [T] is among its own words."""
        if len(tokens) != len(self):
            raise ValueError(
                f"A sample of {len(tokens)} tokens has a sampling mask of {len(self)} tokens."
            )
        order = np.argsort(self.numbers, kind="stable")
        starts = np.searchsorted(self.numbers[order], np.arange(1, len(self.sets) + 2))
        missing = 0
        for words, start, stop in zip(self.sets, starts, starts[1:], strict=False):
            missing += int(np.count_nonzero(~words.have(tokens[order[start:stop]])))
        if missing:
            raise ValueError(
                f"{missing} tokens of a sample are not among the words that they were drawn from."
            )

    # -- as columns --------------------------------------------------------------------------------

    def columns(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """A row's values of the columns of counts and of words."""
        counts, parts = np.zeros(len(self), np.int32), [np.zeros(0, np.int32)]
        first: dict[bytes, int] = {}  # token that first had the words, by what they are
        coded = {number: words.coded for number, words in enumerate(self.sets, start=1)}
        keys = {number: words.tobytes() for number, words in coded.items()}
        for place, number in enumerate(self.numbers.tolist()):
            if not number:
                continue
            before = first.setdefault(keys[number], place)
            if before < place:
                counts[place] = -1 - before
            else:
                counts[place] = len(coded[number])
                parts.append(coded[number])
        return counts, np.concatenate(parts)

    @classmethod
    def of_columns(cls, counts: NDArray[np.integer], words: NDArray[np.integer]) -> SamplingMask:
        """As `columns` has them. ValueError where they do not go together."""
        own = np.flatnonzero(counts > 0)
        ends = counts[own].cumsum()
        again = np.flatnonzero(counts < 0)
        before = -1 - counts[again]
        counted = int(counts[own].sum())
        if counted != len(words) or (before >= again).any() or (counts[before] <= 0).any():
            raise ValueError(
                f"A sampling mask has {len(words)} words, where {counted} are counted, or a token "
                "has the words of one that has none."
            )
        numbers = np.zeros(len(counts), np.int32)
        numbers[own] = np.arange(1, len(own) + 1)
        numbers[again] = numbers[before]
        parts = np.split(words.astype(np.int32), ends[:-1]) if len(own) else []
        sets = [
            Words(ids=-1 - part, left_out=True) if part[0] < 0 else Words(ids=part)
            for part in parts
        ]
        return cls(numbers=numbers, sets=tuple(sets))


NO_TOKENS = SamplingMask.of([])


def read_masks(store: Store, samples: BatchRef) -> list[SamplingMask]:
    """[N] of stored samples that have them."""
    counts, words = (samples.fetch_list(store, name) for name in (COUNTS, WORDS))
    return [
        SamplingMask.of_columns(cast("NDArray[np.int32]", own), cast("NDArray[np.int32]", left))
        for own, left in zip(counts, words, strict=True)
    ]


def mask_columns(masks: Sequence[SamplingMask | None], lengths: Sequence[int]) -> dict[str, object]:
    """The words that the tokens of N samples were drawn from; empty where they are not wanted.

    lengths: [N] tokens of each; those beyond its mask are not the policy's.
    """
    known = [mask for mask in masks if mask is not None]
    if len(known) < len(masks):
        return {}
    whole = [mask.extended(length).columns() for mask, length in zip(known, lengths, strict=True)]
    return {COUNTS: [counts for counts, _ in whole], WORDS: [words for _, words in whole]}
