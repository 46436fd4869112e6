"""The environment engine: it opens episodes, and answers the turns that the policy wrote.

Between two turns an episode is a row of stored samples: its tokens with their authors, and digests of
what the environment answered. The environments themselves are in child processes (sessions.py); one
that is lost is made anew from its seed and the stored turns. So any worker can answer any turn, and a
turn that was answered once is never stepped again.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from configs.base import Settings
from configs.data import DataConfig
from configs.episodes import EpisodesConfig
from configs.model import Model
from engines.data.chat_template import state_number
from engines.data.conversation import Conversation, Role
from engines.data.results import (
    DONE,
    ENVIRONMENT_FAILED,
    FAILED,
    TOKENS,
    TURN_TOKENS,
    TURNS,
    AnswerResult,
    EnvironmentFailed,
    PromptsResult,
    SampleFailure,
)
from engines.data.tool_calls import Malformed, tool_calls
from engines.environments.protocol import Outcome, ToolCall
from engines.environments.sessions import Environments, PastTurn, Turn, digest_of
from engines.workers.engine import Engine
from storage.batches.columns import UNFINISHED, Author, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.json_values import Row
from storage.objects.store import Store
from storage.prompts.datasets import open_source

POLICY = bytes([Author.POLICY])


class EnvironmentSpec(Settings):
    """From what the engine is built."""

    model: Model = Field(description="The model, for its tokenizer.")
    model_cache: str = Field(description="Directory for models that are converted or drawn.")
    data: DataConfig = Field(description="Rows and their template.")
    episodes: EpisodesConfig = Field(description="The environment, and the limits of an episode.")
    max_new_tokens: int = Field(description="Longest conversation after its prompt, in tokens.")
    store_uri: str = Field(description="Store of batches.")
    store_options: dict[str, str | int | float | bool] = Field(description="Its arguments.")
    cache_bytes: int = Field(0, ge=0, description="Batch cache of this process, in bytes.")


@dataclass(slots=True)
class Episode:
    """An episode as it stands: a row of samples."""

    sample: int
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


class EnvironmentEngine(Engine):
    """Opens episodes and answers them; see the module's docstring."""

    REMOTE: ClassVar[tuple[str, ...]] = ("prompts", "answer")

    def __init__(self, spec: EnvironmentSpec) -> None:
        from engines.models import load_tokenizer, materialize

        self._spec = spec
        self._store = Store(spec.store_uri, spec.store_options, cache_bytes=spec.cache_bytes)
        self._tokenizer = load_tokenizer(materialize(spec.model, Path(spec.model_cache)))
        self._source = open_source(spec.data.source)
        self._environments = Environments(spec.episodes)
        self._code = self._environments.start()
        self._answers_as: Role = "tool" if self._code.tools else "user"
        tools = [dict(tool) for tool in self._code.tools]
        self._conversation = Conversation(self._tokenizer, spec.data, tools)
        self._conversation.check([self._answers_as])

    def prompts(self, rows: list[int], first_group: int | None, out_key: str) -> PromptsResult:
        """Write the prompts of rows: each with what its environment says when it is reset.

        All episodes of a group have one seed, and so one prompt. Raises EnvironmentFailed where no
        row's environment can be reset.
        """
        found = self._source.rows(rows)
        seeds = [seed_of(self._spec.episodes.seed, row) for row in rows]
        opened = self._environments.opening(found, seeds)
        good = [number for number, one in enumerate(opened) if one.failed is None]
        if not good:
            raise EnvironmentFailed(f"No environment could be reset: {opened[0].failed}")
        made = self._conversation.prompts(
            [found[number] for number in good], [opened[number].observation for number in good]
        )
        dropped = [(rows[n], ENVIRONMENT_FAILED) for n in range(len(rows)) if n not in set(good)]
        dropped += [(rows[good[position]], reason) for position, reason in made.dropped]
        kept = [good[position] for position in made.kept]
        if not kept:
            return PromptsResult(ref=None, dropped=tuple(dropped))
        digests = [digest_of(opened[number].observation) for number in kept]
        columns: dict[str, object] = {
            "prompt_ids": made.prompt_ids,
            **({} if first_group is None else {"group_id": first_group + np.arange(len(kept))}),
            "prompt_row": np.asarray([rows[number] for number in kept], dtype=np.int64),
            "row": [found[number] for number in kept],
            "env_seed": np.asarray([seeds[number] for number in kept], dtype=np.int64),
            "env_code": [self._code.digest] * len(kept),
            "opening": digests,
            "state_id": np.asarray([state_number(one) for one in digests], dtype=np.int64),
        }
        return PromptsResult(ref=write_batch(self._store, out_key, columns), dropped=tuple(dropped))

    def answer(self, samples: BatchRef, out_key: str) -> AnswerResult:
        """Step the environments of the episodes whose turn is over, and write what they said.

        samples: as the rollout engine wrote them. An environment that fails makes its sample FAILED;
        one that ends, or a limit, ends the episode.
        """
        episodes = self._read(samples)
        before = [len(one.tokens) for one in episodes]
        asked = [one for one in episodes if one.waits]
        for one in asked:
            one.texts = self._texts(one)
        began = time.monotonic()
        self._step([one for one in asked if one.finish != "length"])
        for one in asked:
            if one.finish == "length":
                one.end(self._limit(one), SampleStatus.TRUNCATED)
        self._finish([one for one in asked if one.ended and not one.error])
        seconds = time.monotonic() - began
        failures = tuple(
            SampleFailure(sample=one.sample, function="environment", error=one.error)
            for one in asked
            if one.error
        )
        written = write_batch(self._store, out_key, _columns(episodes, before))
        kept = [name for name in samples.names if name not in written.names]
        return AnswerResult(
            ref=samples[kept].with_columns(written),
            unfinished=sum(not one.ended for one in episodes),
            turns=len(asked),
            failures=failures,
            seconds=seconds,
        )

    def replay(self, samples: BatchRef) -> list[tuple[int, str]]:
        """Step episodes again that are over: samples whose environment says something else, and what.

        Those that failed are left out: it is not known what their environments would have said.
        """
        episodes = [one for one in self._read(samples) if one.ended and not one.error]
        for one in episodes:
            one.texts = self._texts(one)
        turns = [self._turn(one, answered=len(one.observations)) for one in episodes]
        outcomes = self._environments.finish(turns)
        return [
            (one.sample, outcome.failed)
            for one, outcome in zip(episodes, outcomes, strict=True)
            if outcome.failed is not None
        ]

    def close(self) -> None:
        """End the environments' processes."""
        self._environments.close()

    def _texts(self, episode: Episode) -> list[str]:
        spans = [episode.tokens[start:stop] for start, stop in episode.turns]
        return list(self._tokenizer.batch_decode(spans, skip_special_tokens=True))

    def _step(self, episodes: list[Episode]) -> None:
        """Have the environments answer the last turn; a call that is none is answered here."""
        asked = []
        for one in episodes:
            called = self._called(one.texts[-1])
            if isinstance(called, Malformed):
                self._take(one, Outcome(observation=f"Error: {called.mistake}"))
            else:
                asked.append(one)
        turns = [self._turn(one, answered=len(one.texts) - 1) for one in asked]
        for one, outcome in zip(asked, self._environments.act(turns), strict=True):
            one.seconds += outcome.seconds
            if outcome.failed is not None:
                one.end(FAILED, SampleStatus.FAILED, outcome.failed)
            else:
                self._take(one, outcome)

    def _finish(self, episodes: list[Episode]) -> None:
        """Ask the environments of ended episodes for a last reward, and let go of them."""
        turns = [self._turn(one, answered=len(one.observations)) for one in episodes]
        for one, outcome in zip(episodes, self._environments.finish(turns), strict=True):
            one.seconds += outcome.seconds
            if outcome.failed is not None:
                one.end(FAILED, SampleStatus.FAILED, outcome.failed)
            elif outcome.reward is not None:
                given = one.rewards.pop() if one.rewards else math.nan
                one.rewards.append(float(np.nansum([given, outcome.reward])))

    def _turn(self, episode: Episode, answered: int) -> Turn:
        """An episode of which so many turns are answered, and the next turn, if there is one.

        The environment has not seen those that held a malformed call.
        """
        past = []
        for text, digest in zip(episode.texts[:answered], episode.observations, strict=False):
            called = self._called(text)
            if not isinstance(called, Malformed):
                past.append(PastTurn(text=text, calls=called, digest=digest))
        text = "".join(episode.texts[answered : answered + 1])
        called = self._called(text)
        return Turn(
            episode=str(episode.sample),
            row=episode.row,
            seed=episode.seed,
            opening=episode.opening,
            past=tuple(past),
            text=text,
            calls=None if isinstance(called, Malformed) else called,
        )

    def _called(self, text: str) -> tuple[ToolCall, ...] | Malformed | None:
        """The tools that a turn calls; None where the environment has none, and takes the text."""
        if not self._code.tools:
            return None
        found = tool_calls(text)
        if isinstance(found, Malformed):
            return found
        return tuple({"name": one.name, "arguments": one.arguments} for one in found or ())

    def _take(self, episode: Episode, outcome: Outcome) -> None:
        """What an environment answered becomes part of the episode."""
        episode.rewards.append(math.nan if outcome.reward is None else outcome.reward)
        episode.observations.append(digest_of(outcome.observation))
        if outcome.done:
            episode.end(DONE, SampleStatus.OK)
            return
        if len(episode.texts) >= self._spec.episodes.max_turns:
            episode.end(TURNS, SampleStatus.OK)
            return
        delta = self._conversation.delta(
            outcome.observation, ended=True, last=episode.tokens[-1], role=self._answers_as
        )
        if len(episode.tokens) + len(delta.ids) >= self._spec.max_new_tokens:
            episode.end(TOKENS, SampleStatus.TRUNCATED)
            return
        episode.tokens += delta.ids
        episode.logprobs += [0.0] * len(delta.ids)
        episode.authors += bytes(delta.authors)
        episode.finish, episode.status = UNFINISHED, SampleStatus.UNFINISHED

    def _limit(self, episode: Episode) -> str:
        """Which limit of tokens ended the policy's turn."""
        return TOKENS if len(episode.tokens) >= self._spec.max_new_tokens else TURN_TOKENS

    def _read(self, samples: BatchRef) -> list[Episode]:
        store, count = self._store, len(samples)
        rows = self._source.rows(samples.fetch_numpy(store, "prompt_row")[0].tolist())

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
                **{name: values[number] for name, values in columns.items()},
            )
            for number in range(count)
        ]


def seed_of(seed: int, row: int) -> int:
    """Seed of a row's environments, in [0, 2**31): libraries take no larger ones."""
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


def _columns(episodes: Sequence[Episode], before: Sequence[int]) -> dict[str, object]:
    """The episodes as columns; `before`: tokens that each had before the environment answered."""
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
