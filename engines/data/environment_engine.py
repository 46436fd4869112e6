"""The environment engine: it opens episodes, and answers the turns that the policy wrote.

Between two turns an episode is a row of stored samples: its tokens with their authors, and digests of
what the environment answered. The environments themselves are in child processes (sessions.py); one
that is lost is made anew from its seed and the stored turns. So any worker can answer any turn, and a
turn that was answered once is never stepped again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from configs.data import Source
from configs.episodes import EpisodesConfig
from engines.data.agent_prompts import AgentPrompts
from engines.data.chat_template import (
    Role,
    TokenizedPrompts,
    ids_of,
    state_number,
)
from engines.data.contract import EnvironmentHost
from engines.data.conversation import Conversation
from engines.data.episode_rows import Episode, episode_columns, read_episodes, seed_of
from engines.data.frames import (
    FIRST,
    FRAME,
    Form,
    alike,
    fitting,
    form_of,
    present_frames,
    stacked,
    unused_tokens,
    write_frames,
)
from engines.data.players import dealt, players_prompts
from engines.data.request_episodes import RequestEpisode, RequestEpisodes
from engines.data.results import (
    DONE,
    ENVIRONMENT_FAILED,
    FAILED,
    TOKENS,
    TURN_TOKENS,
    TURNS,
    AnswerResult,
    EnvironmentFailed,
    OpponentSeats,
    PromptsResult,
    RowsSpec,
    SampleFailure,
)
from engines.data.tool_calls import Malformed, tool_calls
from engines.environments.protocol import SECONDS, Outcome, PlayersTurn, Tokens, ToolCall
from engines.environments.sessions import (
    Asked,
    Environments,
    GivenTurns,
    PastTurn,
    Turn,
    digest_of,
    took_too_long,
)
from storage.batches.columns import OPPONENTS_TURN, TASK, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import Row
from storage.prompts.datasets import open_source

_MORE = (
    "the environment is not deterministic: when the episode was played again, the agent asked for "
    "more turns"
)


class EnvironmentSpec(RowsSpec):
    """From what the engine is built; max_new_tokens are those of a whole conversation."""

    episodes: EpisodesConfig = Field(description="The environment, and the limits of an episode.")
    frames: bool = Field(False, description="Whether frames are kept of what there is to see.")


class EnvironmentEngine(EnvironmentHost):
    """Opens episodes and answers them; see the module's docstring."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        from engines.models.checkpoints import load_tokenizer, materialize

        self._spec = spec
        self._store = spec.open_store()
        self._tokenizer = load_tokenizer(materialize(spec.model, Path(spec.model_cache)))
        self._source = open_source(spec.data.source)
        self._environments = Environments(spec.episodes, frames=spec.frames)
        self._code = self._environments.start()
        self._answers_as: Role = "tool" if self._code.tools else "user"
        tools = [dict(tool) for tool in self._code.tools]
        self._conversation = Conversation(self._tokenizer, spec.data, tools)
        self._conversation.check([self._answers_as])
        self._agents = AgentPrompts(self._conversation, spec.data)
        self._requests = RequestEpisodes(
            self._store,
            spec.episodes,
            spec.data,
            spec.max_new_tokens,
            self._conversation,
            self._agents,
            len(self._tokenizer),
        )

    def prompts(
        self, rows: list[int], first_group: int | None, out_key: str, source: Source | None = None
    ) -> PromptsResult:
        """Write the prompts of rows: each with what its environment says when it is reset.

        source: of the rows, where it is not the data set. All episodes of a group have one seed, and
        so one prompt; rows of another source have other seeds. Raises EnvironmentFailed where no
        row's environment can be reset.
        """
        opened_source = self._source if source is None else open_source(source)
        found = opened_source.rows(rows)
        other = "" if source is None else opened_source.digest
        seeds = [seed_of(self._spec.episodes.seed, row, other) for row in rows]
        opened = self._environments.opening(found, seeds)
        if self._code.chats:
            opened = [self._first_request(one) for one in opened]
        if self._spec.frames:
            opened = alike(opened)
        good = [number for number, one in enumerate(opened) if one.failed is None]
        if not good:
            raise EnvironmentFailed(f"No environment could be reset: {opened[0].failed}")
        made, players = self._prompts(
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
            **({"players": players} if players else {}),
        }
        if source is None and self._spec.data.tasks:
            columns[TASK] = [str(found[number][TASK]) for number in kept]
        if self._spec.frames:
            columns[FIRST] = stacked([opened[number].frame for number in kept])
        if self._spec.episodes.sees == "frames":
            columns[FRAME] = columns[FIRST]  # again, under the name that later ones have
        return PromptsResult(ref=write_batch(self._store, out_key, columns), dropped=tuple(dropped))

    def deal(
        self, prompts: BatchRef, n: int, out_key: str, opponent: OpponentSeats | None = None
    ) -> tuple[BatchRef, BatchRef]:
        """Prompts as rows of their players, and n samples of each before its first turn (`dealt`)."""
        return dealt(self._store, prompts, n, out_key, opponent)

    def _prompts(
        self, rows: list[Row], observations: list[str]
    ) -> tuple[TokenizedPrompts, list[dict[str, Any]]]:
        """The prompts of rows, of what their environments said first; those of several players."""
        if self._spec.episodes.players > 1:
            told = [PlayersTurn.of(one) for one in observations]
            longest = self._spec.data.max_prompt_tokens
            return players_prompts(self._conversation, rows, told, longest)
        if not self._code.chats:
            return self._conversation.prompts(rows, observations), []
        return self._agents.made(rows, observations), []

    def _first_request(self, outcome: Outcome) -> Outcome:
        """The opening of an agent as its first request, failed where that is of token ids that there
        are not; of several at once the one whose name is first."""
        if outcome.failed is not None:
            return outcome
        request = json.dumps(json.loads(outcome.observation)["requests"][0], ensure_ascii=False)
        try:
            self._requests.check_known(ids_of(request) or ())
        except ValueError as error:
            return replace(outcome, failed=str(error))
        return replace(outcome, observation=request)

    def answer(
        self,
        samples: BatchRef,
        out_key: str,
        stage: str = "",
        source: Source | None = None,
        frames: bool = False,
    ) -> AnswerResult:
        """Step the environments of the episodes whose turn is over, and write what they said."""
        opened = self._source if source is None else open_source(source)
        episodes = read_episodes(self._store, samples, opened, stage)
        asked = [one for one in episodes if one.waits]
        self._read(asked)
        began = time.monotonic()
        self._step([one for one in asked if not self._is_over(one)], form_of(samples))
        for one in [each for each in asked if not each.ended and self._is_over(each)]:
            one.end(self._limit(one), SampleStatus.TRUNCATED)
        self._finish([one for one in asked if one.ended and not one.error])
        if self._conversation.rewrites:
            for row in [row for one in asked for row in one.rows]:
                row.rewritten = self._rewritten(row) if row.ended else 0.0
        seconds = time.monotonic() - began
        failures = tuple(
            SampleFailure(sample=row.sample, function="environment", error=row.error)
            for one in asked
            for row in one.rows
            if row.error
        )
        written = write_batch(self._store, out_key, episode_columns(episodes, self._code.in_part))
        kept = [name for name in samples.names if name not in written.names]
        ref = samples[kept].with_columns(written)
        seen = write_frames(self._store, out_key, asked) if frames else None
        if self._spec.episodes.sees == "frames" and seen is not None:
            ref = ref.with_columns(present_frames(samples, seen, episodes))
        return AnswerResult(
            ref=ref,
            frames=seen,
            unfinished=sum(not one.ended for one in episodes),
            opponents=sum(one.finish == OPPONENTS_TURN for one in episodes),
            turns=len(asked),
            failures=failures,
            seconds=seconds,
        )

    def go_on(
        self,
        prompts: BatchRef,
        n: int,
        out_key: str,
        begun: BatchRef | None = None,
        turns: BatchRef | None = None,
        stage: str = "",
        source: Source | None = None,
    ) -> AnswerResult:
        """Give the turns that requests waited for, and write what is asked for next."""
        opened = self._source if source is None else open_source(source)
        episodes = self._requests.read(prompts, n, begun, opened, stage)
        answered = 0 if turns is None else self._requests.fold(episodes, turns)
        began = time.monotonic()
        asked = []
        if begun is None or turns is not None:
            asked = [one for one in episodes if not one.ended and not one.forest.waiting]
        self._requests.lay_out(asked)
        self._read(asked)
        for one in asked:
            if limit := self._requests.limit(one):
                one.end(limit, SampleStatus.TRUNCATED)
        going = [one for one in asked if not one.ended]
        if self._code.chats:
            self._ask_agents(going)
        elif begun is None:
            for one in going:
                self._requests.ask_first(one)
        else:
            self._step(going, None)
        self._finish([one for one in asked if one.ended and not one.error])
        for one in [each for each in asked if each.ended]:
            if self._conversation.rewrites and self._spec.episodes.past_turns == "as_sampled":
                one.rewritten = self._rewritten(one)
            if self._code.chats:
                one.forest = one.forest.in_order()
        ref, pending = self._requests.write(episodes, prompts, n, out_key, self._code.in_part)
        return AnswerResult(
            ref=ref,
            pending=pending,
            unfinished=sum(not one.ended for one in episodes),
            turns=answered,
            failures=tuple(
                SampleFailure(sample=one.sample, function="environment", error=one.error)
                for one in asked
                if one.error
            ),
            seconds=time.monotonic() - began,
        )

    def _ask_agents(self, episodes: list[RequestEpisode]) -> None:
        """Give agents their turns, until each waits for others, or its episode is over.

        One whose requests were all refused goes on at once.
        """
        while episodes:
            outcomes = self._environments.act([self._turn(one) for one in episodes])
            for one, outcome in zip(episodes, outcomes, strict=True):
                one.took(outcome.seconds)
                if outcome.failed is not None:
                    one.end(outcome.limit or FAILED, SampleStatus.FAILED, outcome.failed)
                    continue
                one.observations = [node.name for node in one.forest.nodes]
                one.rewards = [math.nan] * len(one.observations)
                one.order = list(range(len(one.observations)))
                one.earns(outcome.reward)
                if outcome.done:
                    limit = self._requests.met_limit(one, outcome.reward is not None)
                    cut = limit not in ("", TURNS)
                    one.end(limit or DONE, SampleStatus.TRUNCATED if cut else SampleStatus.OK)
                elif outcome.limit:
                    one.end(outcome.limit, SampleStatus.OK)
                else:
                    try:
                        self._requests.ask(one, outcome.observation)
                    except ValueError as error:
                        one.end(FAILED, SampleStatus.FAILED, str(error))
            episodes = [one for one in episodes if not one.ended and not one.forest.waiting]

    def replay(self, samples: BatchRef) -> list[tuple[int, str]]:
        """Step episodes again that are over: samples whose environment says something else, and what.

        Those that failed are left out: it is not known what their environments would have said.
        """
        if not self._spec.episodes.of_requests:
            every: Sequence[Episode] = read_episodes(self._store, samples, self._source, "replay")
        elif "requests" in samples.names:
            every = self._requests.read(samples, 1, samples, self._source, "replay")
            self._requests.lay_out(every)
        else:
            raise ValueError(
                "The requests of these episodes are not stored: an older Refrain played them. They "
                "cannot be played again."
            )
        episodes = [one for one in every if one.ended and not one.error and one.player == 0]
        self._read(episodes)
        turns, more = [self._turn(one) for one in episodes], {}
        if self._code.chats:
            acted = zip(episodes, self._environments.act(turns), strict=True)
            more = {one.sample: _MORE for one, o in acted if one.ended == DONE and not o.done}
        outcomes = zip(episodes, self._environments.finish(turns), strict=True)
        found = [(one, outcome.failed or more.get(one.sample)) for one, outcome in outcomes]
        return [(row.sample, said) for one, said in found if said for row in one.rows]

    def close(self) -> None:
        """End the environments' processes."""
        self._environments.close()

    def _read(self, episodes: Sequence[Episode]) -> None:
        """Decode the turns of episodes."""
        for one in [row for episode in episodes for row in episode.rows]:
            spans = [one.tokens[start:stop] for start, stop in one.turns]
            one.texts = []
            if spans:  # of none at all a tokenizer makes one empty text
                one.texts = list(self._tokenizer.batch_decode(spans, skip_special_tokens=True))

    def _step(self, episodes: Sequence[Episode], form: Form | None) -> None:
        """Have the environments answer the last turn; a call that is none is answered here."""
        asked = []
        for one in episodes:
            called = self._called(one.texts[-1])
            if isinstance(called, Malformed):
                self._take(one, Outcome(observation=f"Error: {called.mistake}"))
            else:
                asked.append(one)
        turns = [self._turn(one) for one in asked]
        for one, answered in zip(asked, self._environments.act(turns), strict=True):
            outcome = fitting(answered, form)
            one.took(outcome.seconds)
            if outcome.failed is not None:
                one.end(outcome.limit or FAILED, SampleStatus.FAILED, outcome.failed)
            else:
                self._take(one, outcome)

    def _finish(self, episodes: Sequence[Episode]) -> None:
        """Ask the environments of ended episodes for a last reward, and let go of them."""
        turns = [self._turn(one) for one in episodes]
        for one, outcome in zip(episodes, self._environments.finish(turns), strict=True):
            one.took(outcome.seconds)
            if outcome.failed is not None:
                one.end(outcome.limit or FAILED, SampleStatus.FAILED, outcome.failed)
                continue
            last = outcome.rewards if one.others else (outcome.reward,)
            for row, reward in zip(one.rows, last, strict=False):
                row.earns(reward)
            if one.ended == SECONDS and all(reward is None for reward in last):
                # How far it came by then says how slow the environment was.
                said = took_too_long(self._spec.episodes.timeout)
                one.end(SECONDS, SampleStatus.FAILED, f"{said}, and gave no reward at its end")

    def _turn(self, episode: Episode) -> Asked:
        """The turns of an episode that are answered, and its next turn, if there is one.

        The environment has not seen those that held a malformed call.
        """
        if isinstance(episode, RequestEpisode) and self._code.chats:
            return GivenTurns(
                episode=episode.name,
                row=episode.row,
                seed=episode.seed,
                turns=self._requests.given(episode, self._called),
            )
        answered = [
            turn
            for row in episode.rows
            for turn in zip(row.order, row.texts, row.observations, self._tokens(row), strict=False)
        ]
        past = []
        for _, text, digest, tokens in sorted(answered, key=itemgetter(0)):
            called = self._called(text)
            if not isinstance(called, Malformed):
                past.append(PastTurn(text=text, calls=called, digest=digest, tokens=tokens))
        number = len(episode.observations)
        text = "".join(episode.texts[number : number + 1])
        called = self._called(text)
        return Turn(
            episode=episode.name,
            row=episode.row,
            seed=episode.seed,
            opening=episode.opening,
            past=tuple(past),
            text=text,
            calls=None if isinstance(called, Malformed) else called,
            tokens=next(iter(self._tokens(episode)[number:]), None),
        )

    def _tokens(self, episode: Episode) -> list[Tokens | None]:
        """The tokens of each turn of the policy; None for environments that are not told them."""
        told = self._code.tokens
        return [
            {"written": episode.tokens[start:stop]} if told else None
            for start, stop in episode.turns
        ]

    def _called(self, text: str) -> tuple[ToolCall, ...] | Malformed | None:
        """The tools that a turn calls; None where the environment has none, and takes the text."""
        if not (self._code.tools or self._code.chats):
            return None
        found = tool_calls(text)
        if isinstance(found, Malformed):
            return () if self._code.chats else found  # an agent is given it as a text
        return tuple({"name": one.name, "arguments": one.arguments} for one in found or ())

    def _take(self, episode: Episode, outcome: Outcome) -> None:
        """What an environment answered becomes part of the episode."""
        episode.answered(digest_of(outcome.observation), outcome.reward)
        episode.frame = outcome.frame
        for row, reward in zip(episode.rows, outcome.rewards, strict=False):
            row.earns(reward)
        if outcome.done:
            episode.end(DONE, SampleStatus.OK)
            if outcome.used is not None:
                start, stop = episode.turns[-1]
                turn = episode.tokens[start:stop]
                words = None if self._code.tokens else self._tokenizer
                episode.unused = unused_tokens(words, turn, outcome.used)
            return
        if outcome.limit:
            episode.end(outcome.limit, SampleStatus.OK)
            return
        text = outcome.observation
        if episode.others:
            told = PlayersTurn.of(text)
            episode.waits_for(episode.rows[told.player])
            episode, (text,) = episode.rows[told.player], told.texts
        if len(episode.texts) >= self._spec.episodes.max_turns:
            episode.end(TURNS, SampleStatus.OK)
            return
        if isinstance(episode, RequestEpisode):
            self._requests.ask_again(episode, text, self._answers_as)
            return
        if episode.texts:
            last = episode.tokens[-1]
            ended = episode.finish != "length"
            talk = self._conversation.for_row(episode.row)
            delta = talk.delta(text, ended=ended, last=last, role=self._answers_as)
        else:
            delta = self._conversation.first(episode.row, text)
        if len(episode.tokens) + len(delta.ids) >= self._spec.max_new_tokens:
            episode.end(TOKENS, SampleStatus.TRUNCATED)
            return
        episode.tokens += delta.ids
        episode.logprobs += [0.0] * len(delta.ids)
        episode.authors += bytes(delta.authors)
        episode.waits_for(episode)

    def _rewritten(self, episode: Episode) -> float:
        """`Conversation.rewritten` of an episode; 0 where there was no earlier turn."""
        tokens, said = episode.past
        if not said:
            return 0.0
        told = self._tokenizer.batch_decode([ids for _, ids in said], skip_special_tokens=True)
        past = [(episode.texts[n], text) for (n, _), text in zip(said, told, strict=True)]
        talk = self._conversation.for_row(episode.row)
        return talk.rewritten(tokens, past, self._answers_as)

    def _is_over(self, episode: Episode) -> bool:
        """Whether the policy's turn reached a limit of tokens that ends the episode."""
        full = self._spec.episodes.full_turn == "counts" and self._limit(episode) == TURN_TOKENS
        return episode.finish == "length" and not full

    def _limit(self, episode: Episode) -> str:
        """Which limit of tokens ended the policy's turn."""
        return TOKENS if len(episode.tokens) >= self._spec.max_new_tokens else TURN_TOKENS
