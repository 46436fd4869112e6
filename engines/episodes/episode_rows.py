"""Episodes as rows of stored samples: read before the environments answer, and written after.

An episode of several players is a row for each of them, which know each other.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from engines.data.chat_template import state_number
from engines.environments.protocol import Frame
from engines.models.routed_experts import OF_RESPONSE, RoutedExperts, extended, write_by_prompt
from storage.batches.columns import (
    OPPONENTS_TURN,
    PROMPT_COLUMNS,
    UNFINISHED,
    WAITING,
    Author,
    SampleStatus,
    policy_mask,
)
from storage.batches.format import DTYPES
from storage.batches.reading import read_columns
from storage.batches.ref_columns import ColumnRef
from storage.batches.refs import BatchRef
from storage.batches.sampling_mask import COUNTS, SamplingMask, mask_columns, read_masks
from storage.objects.documents import Row
from storage.objects.store import Store
from storage.prompts.source import PromptSource

POLICY = bytes([Author.POLICY])
OF_TURN = bytes([Author.POLICY, Author.BUDGET])  # authors within a turn of the policy
# Finish reasons of a sample that goes on: its own turn is next, or that of another.
GOES_ON = (UNFINISHED, OPPONENTS_TURN, WAITING)


@dataclass(slots=True)
class Episode:
    """An episode as it stands, or one player's part in it: a row of samples."""

    sample: int
    name: str  # of the episode, which no other one of the run has
    row: Row
    seed: int
    opening: str  # digest of what the environment said first
    prompt: list[int]  # token ids
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
    player: int = 0
    frozen: bool = False  # whether the opponent plays it
    state: int = 0  # number of what its player was told first
    order: list[int] = field(default_factory=list)  # number in the episode of each answered turn
    texts: list[str] = field(default_factory=list)  # of the policy's turns
    frame: Frame | None = None  # of the answer to its last turn, where frames are kept
    rewritten: float | None = None  # share of its past that the template would write otherwise
    unused: int = 0  # tokens at its end, after the action that ended it
    experts: RoutedExperts | None = None  # [T', L, k] of the first tokens, where they are stored
    mask: SamplingMask | None = None  # likewise
    others: list[Episode] = field(default_factory=list, repr=False)  # rows of the other players

    @property
    def rows(self) -> list[Episode]:
        """The rows of all players, by their numbers."""
        return sorted([self, *self.others], key=lambda row: row.player)

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Where each turn of the policy begins and ends."""
        places, place = [], 0
        for author, run in itertools.groupby(self.authors, OF_TURN.__contains__):
            stop = place + len(list(run))
            if author:
                places.append((place, stop))
            place = stop
        return places

    @property
    def past(self) -> tuple[list[int], list[tuple[int, list[int]]]]:
        """What stood after the prompt before the last turn, and the turns in it: the number of each,
        and the environment's tokens after it."""
        turns, answers = self.turns, []
        for number, ((_, stop), (start, _)) in enumerate(itertools.pairwise(turns)):
            shown = zip(self.tokens[stop:start], self.authors[stop:start], strict=True)
            answers.append((number, [id for id, author in shown if author == Author.ENVIRONMENT]))
        return self.tokens[: turns[-1][0]] if turns else [], answers

    @property
    def waits(self) -> bool:
        """Whether it is the environment's turn."""
        return not self.ended and self.finish not in GOES_ON

    def end(self, why: str, status: SampleStatus, error: str = "") -> None:
        """There is no further turn, of any player; a limit is that of this one alone."""
        for row in self.rows:
            row.ended, row.error = why, error
            row.status = status if row is self or error else SampleStatus.OK
            if row.finish in GOES_ON:
                row.finish = why

    def waits_for(self, player: Episode) -> None:
        """It is the turn of a player, this one or another."""
        self.finish, self.status = WAITING, SampleStatus.UNFINISHED
        player.finish = OPPONENTS_TURN if player.frozen else UNFINISHED

    def add_seconds(self, seconds: float) -> None:
        """The environment needed some time."""
        for row in self.rows:
            row.seconds += seconds

    def add_answer(self, digest: str, reward: float | None) -> None:
        """Its last turn was answered, with a reward or none."""
        early = not self.observations and self.rewards  # given for turns of other players
        early_reward = self.rewards.pop() if early else math.nan
        self.order.append(sum(len(row.observations) for row in self.rows))
        self.observations.append(digest)
        self.rewards.append(early_reward)
        self.add_reward(reward)

    def add_reward(self, reward: float | None) -> None:
        """A reward on top of what the last turn gave; of the first one, where there is none yet."""
        if reward is not None:
            last = self.rewards.pop() if self.rewards else math.nan
            self.rewards.append(float(np.nansum([last, reward])))


def read_episodes(
    store: Store, samples: BatchRef, source: PromptSource, stage: str
) -> list[Episode]:
    """Samples as episodes; `source`: of their rows. `stage`: what they were sampled for."""
    count = len(samples)
    rows = source.rows(samples.fetch_numpy(store, "prompt_row")[0].tolist())

    def dense(name: str) -> list[Any]:
        return read_numbers(store, samples, name)

    def lists(name: str) -> list[list[Any]]:
        return read_lists(store, samples, name)

    begun = "episode" in samples.names  # at least one turn was answered
    tokens = lists("response_ids")
    columns: dict[str, list[Any]] = {
        "sample": (numbers := dense("sample_id")),
        "seed": dense("env_seed"),
        "opening": list(samples.fetch_list(store, "opening")),
        "prompt": lists("prompt_ids"),
        "tokens": tokens,
        "logprobs": lists("rollout_logprobs"),
        "finish": list(samples.fetch_list(store, "finish_reason")),
        "status": dense("status"),
        "authors": [bytearray(POLICY) * len(ids) for ids in tokens],
        "observations": [[] for _ in tokens],
        "rewards": [[] for _ in tokens],
        "seconds": [0.0] * count,
        "ended": [""] * count,
        "error": [""] * count,
    }
    if "author" in samples.names:
        columns["authors"] = [bytearray(each) for each in lists("author")]
    if begun:
        columns |= {
            "observations": list(samples.fetch_list(store, "observations")),
            "rewards": lists("turn_rewards"),
            "seconds": dense("env_seconds"),
            "ended": list(samples.fetch_list(store, "episode")),
            "error": list(samples.fetch_list(store, "episode_error")),
        }
    if OF_RESPONSE in samples.names:
        columns["experts"] = list(samples.fetch_list(store, OF_RESPONSE))
    if COUNTS in samples.names:
        columns["mask"] = read_masks(store, samples)
    if "unused_tokens" in samples.names:
        columns["unused"] = dense("unused_tokens")
    if "past_rewritten" in samples.names:
        columns["rewritten"] = dense("past_rewritten")
    owners = numbers
    columns["order"] = [list(range(len(answers))) for answers in columns["observations"]]
    if "player" in samples.names:
        columns |= {
            "player": dense("player"),
            "state": dense("state_id"),
            "order": lists("turn_order"),
        }
        if "frozen" in samples.names:
            columns["frozen"] = [bool(seat) for seat in dense("frozen")]
        owners = first_players(dense("group_id"), columns["player"], numbers)
    episodes = [
        Episode(
            row=rows[number],
            name=f"{stage}/{owners[number]}",
            **{name: values[number] for name, values in columns.items()},
        )
        for number in range(count)
    ]
    together: dict[str, list[Episode]] = {}
    for episode in episodes:
        together.setdefault(episode.name, []).append(episode)
    for episode in episodes:
        episode.others = [other for other in together[episode.name] if other is not episode]
    return episodes


def read_numbers(store: Store, ref: BatchRef, name: str) -> list[Any]:
    """A column with a number a row, [N]."""
    values: list[Any] = ref.fetch_numpy(store, name)[0].tolist()
    return values


def read_lists(store: Store, ref: BatchRef, name: str) -> list[list[Any]]:
    """A jagged column, [N] lists."""
    values, offsets = ref.fetch_numpy(store, name)
    assert offsets is not None, name
    return [values[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]


def first_players(groups: list[int], players: list[int], samples: list[int]) -> list[int]:
    """The sample of player 0 in the episode of each sample, [N]: the k-th of every player are one.

    Groups [5, 5, 5, 5], players [0, 0, 1, 1], samples [20, 21, 22, 23]: [20, 21, 20, 21].
    """
    own: dict[tuple[int, int], list[int]] = {}
    for group, player, sample in zip(groups, players, samples, strict=True):
        own.setdefault((group, player), []).append(sample)
    for members in own.values():
        members.sort()
    return [
        own[group, 0][own[group, player].index(sample)]
        for group, player, sample in zip(groups, players, samples, strict=True)
    ]


def episode_columns(episodes: Sequence[Episode], in_part: bool = False) -> dict[str, object]:
    """The episodes as columns; `in_part`: whether it is kept how much of a turn was acted on."""
    optional: dict[str, object] = {}
    if any(episode.others for episode in episodes):
        optional = {
            "turn_order": [np.array(episode.order, np.int64) for episode in episodes],
            "episode_id": np.array([episode.rows[0].sample for episode in episodes], np.int64),
        }
    experts = [episode.experts for episode in episodes if episode.experts is not None]
    if experts:
        optional[OF_RESPONSE] = [
            extended(own, len(episode.tokens))
            for own, episode in zip(experts, episodes, strict=True)
        ]
    optional |= mask_columns(
        [episode.mask for episode in episodes], [len(episode.tokens) for episode in episodes]
    )
    if any(episode.rewritten is not None for episode in episodes):
        optional["past_rewritten"] = np.array(
            [episode.rewritten or 0.0 for episode in episodes], np.float32
        )
    if in_part:
        optional["unused_tokens"] = np.array([episode.unused for episode in episodes], np.int64)
    authors = [np.frombuffer(bytes(episode.authors), np.uint8) for episode in episodes]
    numbers = [_turn_numbers(each) for each in authors]
    return {
        "response_ids": [np.array(episode.tokens, np.int32) for episode in episodes],
        "rollout_logprobs": [np.array(episode.logprobs, np.float32) for episode in episodes],
        "author": authors,
        "response_mask": [
            policy_mask(each, episode.unused)
            for episode, each in zip(episodes, authors, strict=True)
        ],
        "turn_ids": numbers,
        "turn_states": [
            _states(episode, turn) for episode, turn in zip(episodes, numbers, strict=True)
        ],
        "finish_reason": [episode.finish for episode in episodes],
        "status": np.array([episode.status for episode in episodes], np.int64),
        "observations": [episode.observations for episode in episodes],
        "turn_rewards": [np.array(episode.rewards, np.float32) for episode in episodes],
        "env_seconds": np.array([episode.seconds for episode in episodes], np.float64),
        "episode": [episode.ended for episode in episodes],
        "episode_error": [episode.error for episode in episodes],
        **optional,
    }


def _turn_numbers(authors: np.ndarray) -> np.ndarray:
    """Number of the turn of each token [T], from 0; what answers a turn belongs to it.

    Authors 1 1 2 3 1: turns 0 0 0 0 1.
    """
    policy = np.isin(authors, list(OF_TURN))
    begins = policy & ~np.concatenate([[False], policy[:-1]])
    return np.maximum(np.cumsum(begins) - 1, 0).astype(np.int64)


def _states(episode: Episode, turns: np.ndarray) -> np.ndarray:
    """Number of the state in which each token's turn began [T]: of what was said last before it.

    Of several players it is told by the tokens that the player was shown since its last turn.
    """
    if episode.others:
        return _states_shown(episode, turns)
    answers = [episode.opening, *episode.observations]
    return np.array(
        [state_number(answers[min(t, len(answers) - 1)]) for t in turns], dtype=np.int64
    )


def _states_shown(episode: Episode, turns: np.ndarray) -> np.ndarray:
    begins = [start for start, _ in episode.turns]
    ends = [0, *(stop for _, stop in episode.turns)]
    states = [
        state_number([episode.state if turn == 0 else episode.player, episode.tokens[end:start]])
        for turn, (end, start) in enumerate(zip(ends, begins, strict=False))
    ]
    last = len(states) - 1
    return np.array([states[min(t, last)] if states else episode.state for t in turns], np.int64)


def seed_of(seed: int, row: int, source: str = "") -> int:
    """Seed of a row's environments, in [0, 2**31): libraries take no larger ones.

    source: digest of the rows' source, where it is not the data set.
    """
    digest = hashlib.blake2b(f"{seed}/{row}{source}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


def gather(
    store: Store, prompts: BatchRef, n: int, samples: Sequence[BatchRef | None], out_key: str
) -> BatchRef:
    """Write N samples under one key; columns of their prompts, and frames, stay by reference.

    Args:
        store: of the batches.
        prompts: [P], with n samples each, or as many as their column says, one prompt after another.
        n: that are asked of a prompt.
        samples: [N] of a row each, all with the same columns; None: nothing of it was sampled.
        out_key: of the batch.
    """
    sampled = BatchRef.concat([sample for sample in samples if sample is not None])
    own = [name for name in sampled.names if name not in PROMPT_COLUMNS]
    sizes = prompts.group_sizes(store, n)
    places = np.repeat(np.arange(len(prompts)), sizes)
    numbers = prompts.own_groups(store)[places] * n + np.concatenate([*map(np.arange, sizes)])
    unbegun: dict[str, Sequence[object]] = {
        "sample_id": list(numbers),
        "status": [np.int64(SampleStatus.UNFINISHED)] * len(samples),
        "finish_reason": [UNFINISHED] * len(samples),
    }
    values_read = read_columns(store, sampled[own].columns)
    columns: dict[str, object] = {}
    for name in own:
        column, values = sampled.column(name), iter(values_read[name].rows())
        nothing = unbegun.get(name, [_nothing(column)] * len(samples))
        cells = [
            next(values) if sample is not None else instead
            for sample, instead in zip(samples, nothing, strict=True)
        ]
        columns[name] = np.stack(cast("Any", cells)) if column.kind == "dense" else cells
    written = write_by_prompt(store, out_key, columns, places)
    # Referred to: of the samples that there are, which may see others by now, else of their prompts.
    shared = [name for name in sampled.names if name in PROMPT_COLUMNS]
    every = BatchRef.concat([sampled[shared], prompts[shared].take(places)])
    begun = np.array([sample is not None for sample in samples])
    rows = np.where(begun, np.cumsum(begun) - 1, len(sampled) + np.arange(len(samples)))
    return every.take(rows).with_columns(written)


def _nothing(column: ColumnRef) -> object:
    """What a column says of a sample that was not begun."""
    if column.kind == "str":
        return ""
    if column.kind == "json":
        return []
    dtype = DTYPES[column.dtype][1]
    return np.zeros((0, *column.shape) if column.kind == "jagged" else column.shape, dtype)
