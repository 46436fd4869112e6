"""The environment engine: it opens episodes, and answers the turns that the policy wrote.

Between two turns an episode is a row of stored samples: its tokens with their authors, and digests of
what the environment answered. The environments themselves are in child processes (sessions.py); one
that is lost is made anew from its seed and the stored turns. So any worker can answer any turn, and a
turn that was answered once is never stepped again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from configs.data import Source
from configs.episodes import EpisodesConfig
from engines.data.chat_template import (
    TokenizedPrompts,
    ids_of,
    put_together,
    state_number,
)
from engines.data.contract import EnvironmentHost
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
from engines.data.gathering import gathered
from engines.data.played import Played
from engines.data.players import dealt, players_prompts
from engines.data.request_episodes import RequestEpisode, RequestEpisodes, read_by
from engines.data.results import (
    DEADLINE,
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
from engines.environments.one_turn import OneTurn, open_environments
from engines.environments.protocol import (
    SECONDS,
    Outcome,
    PlayersTurn,
    Tokens,
    ToolCall,
)
from engines.environments.sessions import (
    Asked,
    Environments,
    GivenTurns,
    PastTurn,
    Turn,
    digest_of,
    took_too_long,
)
from storage.batches.columns import OPPONENTS_TURN, TASK, TURN_LIMIT, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import Row
from storage.prompts.datasets import open_source

if TYPE_CHECKING:
    pass


ANY_LENGTH = 2**31  # tokens, more than any prompt has
_MORE = (
    "the environment is not deterministic: when the episode was played again, the agent asked for "
    "more turns"
)


class EnvironmentSpec(RowsSpec):
    """From what the engine is built; max_new_tokens are those of a whole conversation."""

    path_tokens: int | None = Field(
        None,
        description="Tokens of an episode's paths together, those that they share counted in each.",
    )
    episodes: EpisodesConfig = Field(description="The environment, and the limits of an episode.")
    frames: bool = Field(False, description="Whether frames are kept of what there is to see.")


class EnvironmentEngine(EnvironmentHost):
    """Opens episodes and answers them; see the module's docstring."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        from engines.models.checkpoints import load_tokenizer, materialize

        self._spec = spec
        self._store = spec.open_store()
        self._tokenizer = load_tokenizer(materialize(spec.model, Path(spec.model_cache)))
        self._tokenizing = threading.Lock()  # held by the thread of an agent that asks for tokens
        self._source = open_source(spec.data.source)
        self._played: dict[str, Played] = {}  # by task; of one task under no name
        opened: dict[str, Environments | OneTurn] = {}  # tasks that are played alike share them
        limits = spec.data.limits(spec.max_new_tokens)
        for name, settings in spec.data.played(spec.episodes).items():
            key = settings.model_dump_json()
            if key not in opened:
                opened[key] = open_environments(settings, spec.frames, self._tokenized)
            data = spec.data.tasks[name] if name else spec.data
            most = limits.get(name, spec.max_new_tokens)
            self._played[name] = Played.of(self._tokenizer, data, settings, opened[key], most)
        settings_of = [one.settings for one in self._played.values()]
        self._requests = RequestEpisodes(
            self._store,
            self._of,
            words=len(self._tokenizer),
            forests=any(one.are_forests for one in settings_of),
            path_tokens=spec.path_tokens,
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
        opened = self._opened(found, seeds)
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
            "env_code": [self._of(found[number]).code.digest for number in kept],
            "opening": digests,
            "state_id": np.asarray([state_number(one) for one in digests], dtype=np.int64),
            **({"players": players} if players else {}),
        }
        if source is None:
            columns |= self._spec.task_columns([found[number] for number in kept])
            turns = {name: one.settings.max_turn_tokens or 0 for name, one in self._played.items()}
            if len(set(turns.values())) > 1:
                columns[TURN_LIMIT] = np.array(
                    [turns[str(found[number][TASK])] for number in kept], np.int64
                )
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
            return players_prompts(self._played[""].conversation, rows, told, longest)
        parts = []
        for played, places in self._by_task(rows):
            own = [rows[place] for place in places], [observations[place] for place in places]
            make = played.agents.made if played.code.chats else played.conversation.prompts
            parts.append((places, make(*own)))
        return put_together(parts), []

    def _of(self, row: Row) -> Played:
        """How a row is played."""
        return self._played[""] if "" in self._played else self._played[str(row[TASK])]

    def _by_task(self, rows: Sequence[Row]) -> list[tuple[Played, list[int]]]:
        """The positions of rows that are played in one way."""
        if "" in self._played:
            return [(self._played[""], list(range(len(rows))))] if rows else []
        places: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(str(row[TASK]), []).append(place)
        return [(self._played[name], own) for name, own in places.items()]

    def _asked(
        self, rows: Sequence[Row], ask: Callable[[Played, list[int]], list[Outcome]]
    ) -> list[Outcome]:
        """What the environments of rows say, all at once; `ask`: those of some of the rows."""
        parts = self._by_task(rows)
        if len(parts) == 1:
            return ask(*parts[0])
        found: dict[int, Outcome] = {}
        with ThreadPoolExecutor(max_workers=max(1, len(parts))) as pool:
            for (_, places), said in zip(
                parts, pool.map(lambda one: ask(*one), parts), strict=True
            ):
                found |= zip(places, said, strict=True)
        return [found[place] for place in range(len(rows))]

    def _opened(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[Outcome]:
        """What the environments of rows say first."""

        def ask(played: Played, places: list[int]) -> list[Outcome]:
            own = [rows[place] for place in places], [seeds[place] for place in places]
            outcomes = played.environments.opening(*own)
            return [*map(self._first_request, outcomes)] if played.code.chats else outcomes

        return self._asked(rows, ask)

    def _acted(self, episodes: Sequence[Episode]) -> list[Outcome]:
        """The answers to the next turns of episodes."""
        turns = [self._turn(one) for one in episodes]
        return self._asked(
            [one.row for one in episodes],
            lambda played, places: played.environments.act([turns[place] for place in places]),
        )

    def _finished(self, episodes: Sequence[Episode]) -> list[Outcome]:
        """The last rewards of episodes that are over."""
        turns = [self._turn(one) for one in episodes]
        return self._asked(
            [one.row for one in episodes],
            lambda played, places: played.environments.finish([turns[place] for place in places]),
        )

    def _tokenized(self, row: Row, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """What an agent asks the tokenizer (protocol.TokenizerAnswers), in an episode of the row."""
        words, played = self._tokenizer, self._of(row)
        with self._tokenizing:
            try:
                if (given := asked.get("of_ids")) is not None:
                    self._requests.check_known(given)
                    return {"text": words.decode(given)}
                if (request := asked.get("request")) is not None:
                    read = read_by(played, row, request, asked["past"], asked["ended"], ANY_LENGTH)
                    ids = list(read[0])
                else:
                    ids = words(asked["text"], add_special_tokens=asked["special"])["input_ids"]
            except ValueError as error:
                return {"refused": str(error)}
        made = {"ids": ids, "max_model_len": played.data.max_prompt_tokens + played.max_new_tokens}
        return {**made, "tokens": words.convert_ids_to_tokens(ids)} if asked["texts"] else made

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
        sampled_seconds: float = 0.0,
    ) -> AnswerResult:
        """Step the environments of the episodes whose turn is over, and write what they said."""
        opened = self._source if source is None else open_source(source)
        episodes = read_episodes(self._store, samples, opened, stage)
        asked = [one for one in episodes if one.waits]
        self._read(asked)
        began = time.monotonic()
        stepped = [one for one in asked if not self._is_over(one)]
        self._step(stepped, form_of(samples), sampled_seconds)
        for one in [each for each in asked if not each.ended and self._is_over(each)]:
            one.end(self._limit(one), SampleStatus.TRUNCATED)
        self._finish([one for one in asked if one.ended and not one.error])
        if any(one.conversation.rewrites for one in self._played.values()):
            for row in [row for one in asked for row in one.rows]:
                row.rewritten = self._rewritten(row) if row.ended else 0.0
        seconds = time.monotonic() - began
        failures = tuple(
            SampleFailure(sample=row.sample, function="environment", error=row.error)
            for one in asked
            for row in one.rows
            if row.error
        )
        in_part = any(one.code.in_part for one in self._played.values())
        written = write_batch(self._store, out_key, episode_columns(episodes, in_part))
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
        sampled_seconds: float = 0.0,
        group: int = 0,
        first: int = 0,
    ) -> AnswerResult:
        """Give the turns that requests waited for, and write what is asked for next."""
        opened, requests = self._source if source is None else open_source(source), self._requests
        episodes = requests.read(prompts, n, begun, opened, stage, group or n, first)
        answered = 0 if turns is None else requests.fold(episodes, turns)
        began = time.monotonic()
        asked = []
        if begun is None or turns is not None:
            asked = [one for one in episodes if not one.ended and not one.forest.waiting]
        requests.lay_out(asked)
        self._read(asked)
        for one in asked:
            if limit := requests.limit(one):
                one.end(limit, SampleStatus.TRUNCATED)
        going = [one for one in asked if not one.ended]
        self._ask_agents([one for one in going if one.played.code.chats], sampled_seconds)
        others = [one for one in going if not one.played.code.chats]
        if begun is None:
            for one in others:
                requests.ask_first(one)
        else:
            self._step(others, None, sampled_seconds)
        self._finish([one for one in asked if one.ended and not one.error])
        for one in [each for each in asked if each.ended]:
            if one.played.conversation.rewrites and one.played.settings.past_turns == "as_sampled":
                one.rewritten = self._rewritten(one)
            if one.played.code.chats:
                one.settle()
        in_part = any(one.code.in_part for one in self._played.values())
        ref, pending = requests.write(episodes, prompts, n, out_key, in_part)
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

    def _ask_agents(self, episodes: list[RequestEpisode], sampled_seconds: float) -> None:
        """Give agents their turns, until each waits for others, or its episode is over.

        One whose requests were all refused goes on at once.
        """
        while episodes:
            for one, outcome in zip(episodes, self._acted(episodes), strict=True):
                one.took(outcome.seconds)
                if outcome.failed is not None:
                    one.end(outcome.limit or FAILED, SampleStatus.FAILED, outcome.failed)
                    continue
                one.earn(outcome.reward, outcome.by_branch)
                if outcome.done:
                    limit = self._requests.met_limit(one)
                    cut = limit not in ("", TURNS)
                    one.end(limit or DONE, SampleStatus.TRUNCATED if cut else SampleStatus.OK)
                elif limit := outcome.limit or self._late(one, sampled_seconds):
                    one.end(limit, SampleStatus.OK)
                else:
                    try:
                        self._requests.ask(one, outcome.observation)
                    except ValueError as error:
                        one.end(FAILED, SampleStatus.FAILED, str(error))
            episodes = [one for one in episodes if not one.ended and not one.forest.waiting]

    def gather(
        self, prompts: BatchRef, n: int, samples: Sequence[BatchRef | None], out_key: str
    ) -> BatchRef:
        return gathered(self._store, prompts, n, samples, out_key)

    def replay(self, samples: BatchRef) -> list[tuple[int, str]]:
        """Step episodes again that are over: samples whose environment says something else, and what.

        Those that failed are left out: it is not known what their environments would have said.
        """
        if not any(one.settings.of_requests for one in self._played.values()):
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
        agents = [one for one in episodes if self._of(one.row).code.chats]
        acted = zip(agents, self._acted(agents), strict=True)
        more = {one.sample: _MORE for one, last in acted if one.ended == DONE and not last.done}
        outcomes = zip(episodes, self._finished(episodes), strict=True)
        found = [(one, outcome.failed or more.get(one.sample)) for one, outcome in outcomes]
        return [(row.sample, said) for one, said in found if said for row in one.rows]

    def close(self) -> None:
        """End the environments' processes."""
        for one in self._played.values():
            one.environments.close()

    def _read(self, episodes: Sequence[Episode]) -> None:
        """Decode the turns of episodes."""
        for one in [row for episode in episodes for row in episode.rows]:
            spans = [one.tokens[start:stop] for start, stop in one.turns]
            one.texts = []
            if spans:  # of none at all a tokenizer makes one empty text
                one.texts = list(self._tokenizer.batch_decode(spans, skip_special_tokens=True))

    def _step(self, episodes: Sequence[Episode], form: Form | None, sampled_seconds: float) -> None:
        """Have the environments answer the last turn; a call that is none is answered here."""

        def take(one: Episode, outcome: Outcome) -> None:
            limit = outcome.limit or self._late(one, sampled_seconds)
            self._take(one, replace(outcome, limit=limit))

        asked = []
        for one in episodes:
            called = self._called(one, one.texts[-1])
            if isinstance(called, Malformed):
                take(one, Outcome(observation=f"Error: {called.mistake}"))
            else:
                asked.append(one)
        for one, answered in zip(asked, self._acted(asked), strict=True):
            outcome = fitting(answered, form)
            one.took(outcome.seconds)
            if outcome.failed is not None:
                one.end(outcome.limit or FAILED, SampleStatus.FAILED, outcome.failed)
            else:
                take(one, outcome)

    def _late(self, episode: Episode, sampled_seconds: float) -> str:
        """The limit that an episode has reached that has used up its time; empty: it has not."""
        deadline = self._of(episode.row).settings.deadline
        late = deadline is not None and episode.seconds + sampled_seconds >= deadline
        return DEADLINE if late else ""

    def _finish(self, episodes: Sequence[Episode]) -> None:
        """Ask the environments of ended episodes for a last reward, and let go of them."""
        for one, outcome in zip(episodes, self._finished(episodes), strict=True):
            one.took(outcome.seconds)
            if outcome.failed is not None:
                one.end(outcome.limit or FAILED, SampleStatus.FAILED, outcome.failed)
                continue
            last = outcome.rewards if one.others else (outcome.reward,)
            if isinstance(one, RequestEpisode) and one.played.code.chats:
                one.earn(outcome.reward, outcome.by_branch)
                last = tuple(one.forest.given.values()) or (None,)
            else:
                for row, reward in zip(one.rows, last, strict=False):
                    row.earns(reward)
            if one.ended in (SECONDS, DEADLINE) and all(reward is None for reward in last):
                # How far it came by then says how slow the environment was.
                limits = self._of(one.row).settings
                said = took_too_long(limits.timeout)
                if one.ended == DEADLINE:
                    said = f"the environment played until episodes.deadline = {limits.deadline} s"
                said += ", and gave no reward at its end"
                one.end(one.ended, SampleStatus.FAILED, said)

    def _turn(self, episode: Episode) -> Asked:
        """The turns of an episode that are answered, and its next turn, if there is one.

        The environment has not seen those that held a malformed call.
        """
        if isinstance(episode, RequestEpisode) and episode.played.code.chats:
            return GivenTurns(
                episode=episode.name,
                row=episode.row,
                seed=episode.seed,
                turns=self._requests.given(episode, lambda text: self._called(episode, text)),
            )
        answered = [
            turn
            for row in episode.rows
            for turn in zip(row.order, row.texts, row.observations, self._tokens(row), strict=False)
        ]
        past = []
        for _, text, digest, tokens in sorted(answered, key=itemgetter(0)):
            called = self._called(episode, text)
            if not isinstance(called, Malformed):
                past.append(PastTurn(text=text, calls=called, digest=digest, tokens=tokens))
        number = len(episode.observations)
        text = "".join(episode.texts[number : number + 1])
        called = self._called(episode, text)
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
        told = self._of(episode.row).code.tokens
        return [
            {"written": episode.tokens[start:stop]} if told else None
            for start, stop in episode.turns
        ]

    def _called(self, episode: Episode, text: str) -> tuple[ToolCall, ...] | Malformed | None:
        """The tools that a turn calls; None where the environment has none, and takes the text."""
        code = self._of(episode.row).code
        if not (code.tools or code.chats):
            return None
        found = tool_calls(text)
        if isinstance(found, Malformed):
            return () if code.chats else found  # an agent is given it as a text
        return tuple({"name": one.name, "arguments": one.arguments} for one in found or ())

    def _take(self, episode: Episode, outcome: Outcome) -> None:
        """What an environment answered becomes part of the episode."""
        played = self._of(episode.row)
        episode.answered(digest_of(outcome.observation), outcome.reward)
        episode.frame = outcome.frame
        for row, reward in zip(episode.rows, outcome.rewards, strict=False):
            row.earns(reward)
        if outcome.done:
            episode.end(DONE, SampleStatus.OK)
            if outcome.used is not None:
                start, stop = episode.turns[-1]
                turn = episode.tokens[start:stop]
                words = None if played.code.tokens else self._tokenizer
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
        if len(episode.texts) >= played.settings.max_turns:
            episode.end(TURNS, SampleStatus.OK)
            return
        if isinstance(episode, RequestEpisode):
            self._requests.ask_again(episode, text)
            return
        if episode.texts:
            last = episode.tokens[-1]
            ended = episode.finish != "length"
            talk = played.conversation.for_row(episode.row)
            delta = talk.delta(text, ended=ended, last=last, role=played.answers_as)
        else:
            delta = played.conversation.first(episode.row, text)
        if len(episode.tokens) + len(delta.ids) >= played.max_new_tokens:
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
        played = self._of(episode.row)
        talk = played.conversation.for_row(episode.row)
        return talk.rewritten(tokens, past, played.answers_as)

    def _is_over(self, episode: Episode) -> bool:
        """Whether the policy's turn reached a limit of tokens that ends the episode."""
        counts = self._of(episode.row).settings.full_turn == "counts"
        full = counts and self._limit(episode) == TURN_TOKENS
        return episode.finish == "length" and not full

    def _limit(self, episode: Episode) -> str:
        """Which limit of tokens ended the policy's turn."""
        most = self._of(episode.row).max_new_tokens
        return TOKENS if len(episode.tokens) >= most else TURN_TOKENS
