"""Answers that the data has, as samples: the off-policy part of GKD's mixture.

What a teacher, or a person, wrote before. No policy version and no worker drew them, so weight_spans
are empty and rollout_logprobs are not known (NaN); prompt_row says where they are from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from engines.data.contract import AnswersGiven
from storage.batches.columns import GIVEN, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import Row
from storage.objects.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARED = ("prompt_ids", "group_id", "prompt_row", "state_id")  # columns of prompts; referred to


def answers_of(row: Row, column: str, n: int, where: str) -> list[str]:
    """The first n answers of a row: its only one, or those of a list. ValueError for fewer."""
    value = row.get(column)
    answers = value if isinstance(value, list) else [value]
    if len(answers) < n or not all(isinstance(answer, str) and answer for answer in answers):
        raise ValueError(
            f"{where} has {column} = {str(value)[:80]!r}, and group_size = {n} answers of the "
            "teacher are wanted in it, each a text. Set off_policy.column to a column that has "
            f"{'one in each row' if n == 1 else 'a list of so many in each row'}, or group_size."
        )
    return [str(answer) for answer in answers[:n]]


def write_answers(
    store: Store,
    prompts: BatchRef,
    column: str,
    n: int,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    out_key: str,
    attempt: int,
) -> AnswersGiven:
    """Store the answers that rows of P prompts have, as P * n samples; row i is of prompt i // n.

    Each ends with the tokenizer's end token; a longer one than `max_new_tokens` is cut there and has
    the status TRUNCATED. ValueError for a row without n answers.
    """
    rows = cast("Sequence[Row]", prompts.fetch_list(store, "row"))
    texts = [text for row in rows for text in answers_of(row, column, n, "A row of the data")]
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The model's tokenizer has no end token, with which an answer of the data has to end. "
            "Set model to a checkpoint that has one, or off_policy = null."
        )
    whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = [[*tokens, tokenizer.eos_token_id] for tokens in whole]
    truncated = np.array([len(tokens) > max_new_tokens for tokens in ids])
    ids = [tokens[:max_new_tokens] for tokens in ids]
    groups = prompts.fetch_numpy(store, "group_id")[0].astype(np.int64)
    count = len(ids)
    written = write_batch(
        store,
        out_key,
        {
            "response_ids": [np.array(tokens, np.int32) for tokens in ids],
            "rollout_logprobs": [np.full(len(tokens), np.nan, np.float32) for tokens in ids],
            "weight_spans": [np.zeros(0, np.int64)] * count,
            "response_mask": [np.ones(len(tokens), np.uint8) for tokens in ids],
            "sample_id": np.repeat(groups, n) * n + np.tile(np.arange(n), len(groups)),
            "status": np.where(truncated, SampleStatus.TRUNCATED, SampleStatus.OK).astype(np.int64),
            "finish_reason": [GIVEN] * count,
            "weights_digest": [""] * count,
            "worker": [""] * count,
            "attempt": np.full(count, attempt, np.int64),
        },
    )
    shared = prompts[[name for name in SHARED if name in prompts.names]]
    ref = shared.take(np.repeat(np.arange(len(prompts)), n)).with_columns(written)
    return AnswersGiven(
        ref=ref,
        prompt_tokens=int(prompts.lengths(store, "prompt_ids").sum()),
        truncated=int(truncated.sum()),
    )
