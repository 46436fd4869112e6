"""Stored samples as reward functions see them, and their scores as columns."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from configs.data import DataConfig
from engines.data.chat_template import Prompt, prompts_of
from engines.data.contract import ModelScores
from engines.rewards.protocol import EPISODE_COLUMNS
from engines.rewards.runner import Column, Scores
from storage.batches.columns import EXTRA, SCORE, SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.documents import Row
from storage.objects.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PLAYER = "player"  # what reward functions get besides of several players: whose sample it is
ERROR = "error"  # extra/<reward model>/error: why a sample has no score


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
    prompt_rows = cast("list[Row]", prompts.fetch_list(store, "row"))
    rows = [prompt_rows[place] for place in samples.prompts_in(store, prompts).tolist()]
    ids, offsets = samples.fetch_numpy(store, "response_ids")
    assert offsets is not None
    completion_ids = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    return SampleTexts(
        prompts=prompts_of(rows, data),
        completions=tokenizer.batch_decode(completion_ids, skip_special_tokens=True),
        completion_ids=completion_ids,
        rows=rows,
    )


def model_columns(store: Store, models: ModelScores) -> dict[str, Column]:
    """What reward models gave, by function, as a function's view of N samples."""
    columns = {}
    for function in models.code:
        values = models.ref.fetch_numpy(store, f"{SCORE}{function.name}")[0].astype(np.float64)
        errors = models.ref.fetch_list(store, f"{EXTRA}{function.name}/{ERROR}")
        applied = np.isfinite(values)
        columns[function.name] = Column(
            values=np.where(applied, values, 0.0),
            applied=applied,
            errors={int(i): str(errors[i]) for i in np.flatnonzero(~applied)},
        )
    return columns


def with_episodes(store: Store, samples: BatchRef, rows: list[Row]) -> list[Row]:
    """Rows with what their episodes came to, for reward functions; N of each.

    EPISODE_COLUMNS: the sum of the turns' rewards (None where the environment gave none), the rewards
    of the turns, and why the episode ended. With several players also `player`, its number.
    """
    values, offsets = samples.fetch_numpy(store, "turn_rewards")
    assert offsets is not None
    ended = samples.fetch_list(store, "episode")
    extended: list[Row] = []
    for row, why, (start, stop) in zip(rows, ended, itertools.pairwise(offsets), strict=True):
        turns = [None if math.isnan(reward) else reward for reward in values[start:stop].tolist()]
        rewards = [reward for reward in turns if reward is not None]
        total = sum(rewards) if rewards else None
        columns = dict(zip(EPISODE_COLUMNS, (total, turns, str(why)), strict=True))
        extended.append({**row, **cast("Row", columns)})
    if PLAYER in samples.names:
        players = samples.fetch_numpy(store, PLAYER)[0].tolist()
        extended = [{**row, PLAYER: player} for row, player in zip(extended, players, strict=True)]
    return extended


def score_columns(scores: Scores, status: NDArray[Any], reward_code: str) -> dict[str, object]:
    """The scores of N samples as columns of a batch.

    Args:
        scores: of the N samples.
        status: int64 [N], SampleStatus before they were scored.
        reward_code: digest of the functions that scored.
    """
    failed = scores.failed | (status == SampleStatus.FAILED)
    columns: dict[str, object] = {
        # A failed sample's reward is not a number, so that no mistake can make it count as 0.
        "reward": np.where(failed, np.float32("nan"), scores.rewards),
        "status": np.where(failed, np.int64(SampleStatus.FAILED), status),
        "reward_code": [reward_code] * len(status),
    }
    for position, name in enumerate(scores.names):
        scored = scores.applied[:, position] & ~failed
        columns[f"{SCORE}{name}"] = np.where(
            scored, scores.components[:, position], np.float32("nan")
        )
    for name, values in scores.extras.items():
        columns[f"{EXTRA}{name}"] = values
    return columns
