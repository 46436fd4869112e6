"""Stored samples as reward functions see them: prompts, completions, rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from configs.data import DataConfig
from engines.data.chat_template import prompts_of
from storage.batches.refs import BatchRef
from storage.objects.documents import Row
from storage.objects.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engines.rewards.protocol import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTexts:
    """N samples as text."""

    prompts: list[Prompt]
    completions: list[str]  # without special tokens
    completion_ids: list[list[int]]
    rows: list[Row]  # of the data set


def read_texts(
    store: Store,
    prompts: BatchRef,
    samples: BatchRef,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> SampleTexts:
    """The samples of a shard, of these prompts.

    tokenizer: the policy's.
    """
    found = cast("list[Row]", prompts.fetch_list(store, "row"))
    rows = [found[place] for place in samples.prompts_in(store, prompts).tolist()]
    ids, offsets = samples.fetch_numpy(store, "response_ids")
    assert offsets is not None
    completion_ids = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    return SampleTexts(
        prompts=prompts_of(rows, data),
        completions=tokenizer.batch_decode(completion_ids, skip_special_tokens=True),
        completion_ids=completion_ids,
        rows=rows,
    )
