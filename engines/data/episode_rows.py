"""Episodes as rows of stored samples: read before the environments answer, and written after."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engines.data.chat_template import state_number
from storage.batches.columns import UNFINISHED, Author, SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.json_values import Row
from storage.objects.store import Store
from storage.prompts.source import PromptSource

POLICY = bytes([Author.POLICY])


@dataclass(slots=True)
class Episode:
    """An episode as it stands: a row of samples."""

    sample: int
    name: str  # of the episode, which no other one of the run has
    row: Row
    seed: int
    opening: str  # digest of what the environment said first
    tokens: list[int]  # [T] after the prompt
    logprobs: list[float]  # [T]
    authors: bytearray  # [T]
    finish: str  # why the engine stopped, or that the episode goes on
    status: int  # SampleStatus
    observations: list[str]  # digests of the answers, by turn
    rewards: list[float]  # of the turns; NaN where the environment gave none
    seconds: float  # in the environment
    ended: str = ""  # why
    error: str = ""
    texts: list[str] = field(default_factory=list)  # of the policy's turns

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Where each turn of the policy begins and ends."""
        found, place = [], 0
        for author, run in itertools.groupby(self.authors):
            stop = place + len(list(run))
            if author == Author.POLICY:
                found.append((place, stop))
            place = stop
        return found

    @property
    def waits(self) -> bool:
        """Whether it is the environment's turn."""
        return not self.ended and self.finish != UNFINISHED

    def end(self, why: str, status: SampleStatus, error: str = "") -> None:
        """There is no further turn."""
        self.ended, self.status, self.error = why, status, error
        if self.finish == UNFINISHED:
            self.finish = why


def read_episodes(
    store: Store, samples: BatchRef, source: PromptSource, stage: str
) -> list[Episode]:
    """Samples as episodes; `source`: of their rows. `stage`: what they were sampled for."""
    count = len(samples)
    rows = source.rows(samples.fetch_numpy(store, "prompt_row")[0].tolist())

    def dense(name: str) -> list[Any]:
        found: list[Any] = samples.fetch_numpy(store, name)[0].tolist()
        return found

    def lists(name: str) -> list[list[Any]]:
        values, offsets = samples.fetch_numpy(store, name)
        assert offsets is not None
        return [values[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]

    begun = "episode" in samples.names  # at least one turn was answered
    tokens = lists("response_ids")
    columns: dict[str, list[Any]] = {
        "sample": dense("sample_id"),
        "seed": dense("env_seed"),
        "opening": list(samples.fetch_list(store, "opening")),
        "tokens": tokens,
        "logprobs": lists("rollout_logprobs"),
        "finish": list(samples.fetch_list(store, "finish_reason")),
        "status": dense("status"),
        "authors": [bytearray(POLICY) * len(one) for one in tokens],
        "observations": [[] for _ in tokens],
        "rewards": [[] for _ in tokens],
        "seconds": [0.0] * count,
        "ended": [""] * count,
        "error": [""] * count,
    }
    if begun:
        columns |= {
            "authors": [bytearray(each) for each in lists("author")],
            "observations": list(samples.fetch_list(store, "observations")),
            "rewards": lists("turn_rewards"),
            "seconds": dense("env_seconds"),
            "ended": list(samples.fetch_list(store, "episode")),
            "error": list(samples.fetch_list(store, "episode_error")),
        }
    return [
        Episode(
            row=rows[number],
            name=f"{stage}/{columns['sample'][number]}",
            **{name: values[number] for name, values in columns.items()},
        )
        for number in range(count)
    ]


def episode_columns(episodes: Sequence[Episode]) -> dict[str, object]:
    """The episodes as columns."""
    authors = [np.frombuffer(bytes(one.authors), np.uint8) for one in episodes]
    numbers = [_turn_numbers(each) for each in authors]
    return {
        "response_ids": [np.array(one.tokens, np.int32) for one in episodes],
        "rollout_logprobs": [np.array(one.logprobs, np.float32) for one in episodes],
        "author": authors,
        "response_mask": [(each == Author.POLICY).astype(np.uint8) for each in authors],
        "turn_ids": numbers,
        "turn_states": [_states(one, turn) for one, turn in zip(episodes, numbers, strict=True)],
        "finish_reason": [one.finish for one in episodes],
        "status": np.array([one.status for one in episodes], np.int64),
        "observations": [one.observations for one in episodes],
        "turn_rewards": [np.array(one.rewards, np.float32) for one in episodes],
        "env_seconds": np.array([one.seconds for one in episodes], np.float64),
        "episode": [one.ended for one in episodes],
        "episode_error": [one.error for one in episodes],
    }


def _turn_numbers(authors: np.ndarray) -> np.ndarray:
    """Number of the turn of each token [T], from 0; what answers a turn belongs to it.

    Authors 1 1 2 3 1: turns 0 0 0 0 1.
    """
    policy = authors == Author.POLICY
    begins = policy & ~np.concatenate([[False], policy[:-1]])
    return np.maximum(np.cumsum(begins) - 1, 0).astype(np.int64)


def _states(episode: Episode, turns: np.ndarray) -> np.ndarray:
    """Number of the state in which each token's turn began [T]: of what was said last before it."""
    said = [episode.opening, *episode.observations]
    return np.array([state_number(said[min(t, len(said) - 1)]) for t in turns], dtype=np.int64)
