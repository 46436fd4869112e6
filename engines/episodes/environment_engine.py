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
from typing import Any

import numpy as np

from configs.data import Source
from engines.data.chat_template import TokenizedPrompts, put_together, state_number
from engines.data.contract import PromptsResult, SampleFailure
from engines.environments.one_turn import OneTurn, open_environments
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
from engines.episodes.contract import (
    DEADLINE,
    DONE,
    ENVIRONMENT_FAILED,
    FAILED,
    TOKENS,
    TURN_TOKENS,
    TURNS,
    AnswerRequest,
    AnswerResult,
    EnvironmentFailed,
    EnvironmentHost,
    EnvironmentSpec,
    OpponentSeats,
    RoundRequest,
)
from engines.episodes.episode_rows import Episode, episode_columns, gather, read_episodes, seed_of
from engines.episodes.frames import (
    FIRST,
    FRAME,
    Form,
    check_first_frames,
    check_frame,
    form_of,
    present_frames,
    stack_frames,
    unused_tokens,
    write_frames,
)
from engines.episodes.players import deal, prompts_of_players
from engines.episodes.request_episodes import RequestEpisode, RequestEpisodes
from engines.episodes.task_environment import TaskEnvironment, ids_of
from engines.episodes.tool_calls import Malformed, tool_calls
from storage.batches.columns import OPPONENTS_TURN, TASK, TURN_LIMIT, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import Row
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource

ANY_LENGTH = 2**31  # tokens, more than any prompt has
_MORE = (
    "the environment is not deterministic: when the episode was played again, the agent asked for "
    "more turns"
)


class EnvironmentEngine(EnvironmentHost):
    """Opens episodes and answers them; see the module's docstring."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        from engines.models.checkpoints import load_tokenizer, materialize

        self._spec = spec
        self._store = spec.open_store()
        self._tokenizer = load_tokenizer(materialize(spec.model, Path(spec.model_cache)))
        self._tokenizing = threading.Lock()  # held by the thread of an agent that asks for tokens
        self._source = open_source(spec.data.source)
        self._tasks: dict[str, TaskEnvironment] = {}  # by task; of one task under no name
        opened: dict[str, Environments | OneTurn] = {}  # tasks that are played alike share them
        limits = spec.data.limits(spec.max_new_tokens)
        for name, settings in spec.data.played(spec.episodes).items():
            key = settings.model_dump_json()
            if key not in opened:
                opened[key] = open_environments(settings, spec.frames, self._answer_tokenizer)
            data = spec.data.tasks[name] if name else spec.data
            most = limits.get(name, spec.max_new_tokens)
            self._tasks[name] = TaskEnvironment.of(
                self._tokenizer, data, settings, opened[key], most
            )
        settings_of = [task.settings for task in self._tasks.values()]
        self._requests = RequestEpisodes(
            self._store,
            self._task_of,
            words=len(self._tokenizer),
            forests=any(task.are_forests for task in settings_of),
            path_tokens=spec.path_tokens,
        )
        self._in_part = any(task.code.in_part for task in self._tasks.values())

    def prompts(
        self, rows: list[int], first_group: int | None, out_key: str, source: Source | None = None
    ) -> PromptsResult:
        """Write the prompts of rows: each with what its environment says when it is reset.

        source: of the rows, where it is not the data set. All episodes of a group have one seed, and
        so one prompt; rows of another source have other seeds. Raises EnvironmentFailed where no
        row's environment can be reset.
        """
        numbered = self._source_of(source)
        contents = numbered.rows(rows)
        other = "" if source is None else numbered.digest
        seeds = [seed_of(self._spec.episodes.seed, row, other) for row in rows]
        opened = self._reset(contents, seeds)
        if self._spec.frames:
            opened = check_first_frames(opened)
        ready = [number for number, outcome in enumerate(opened) if outcome.failed is None]
        if not ready:
            raise EnvironmentFailed(f"No environment could be reset: {opened[0].failed}")
        tokenized, players = self._prompts(
            [contents[number] for number in ready], [opened[number].observation for number in ready]
        )
        dropped = [(rows[n], ENVIRONMENT_FAILED) for n in range(len(rows)) if n not in set(ready)]
        dropped += [(rows[ready[position]], reason) for position, reason in tokenized.dropped]
        kept = [ready[position] for position in tokenized.kept]
        if not kept:
            return PromptsResult(ref=None, dropped=tuple(dropped))
        digests = [digest_of(opened[number].observation) for number in kept]
        columns: dict[str, object] = {
            "prompt_ids": tokenized.prompt_ids,
            **({} if first_group is None else {"group_id": first_group + np.arange(len(kept))}),
            "prompt_row": np.asarray([rows[number] for number in kept], dtype=np.int64),
            "row": [contents[number] for number in kept],
            "env_seed": np.asarray([seeds[number] for number in kept], dtype=np.int64),
            "env_code": [self._task_of(contents[number]).code.digest for number in kept],
            "opening": digests,
            "state_id": np.asarray([state_number(digest) for digest in digests], dtype=np.int64),
            **({"players": players} if players else {}),
        }
        if source is None:
            columns |= self._spec.task_columns([contents[number] for number in kept])
            turns = {name: task.settings.max_turn_tokens or 0 for name, task in self._tasks.items()}
            if len(set(turns.values())) > 1:
                columns[TURN_LIMIT] = np.array(
                    [turns[str(contents[number][TASK])] for number in kept], np.int64
                )
        if self._spec.frames:
            columns[FIRST] = stack_frames([opened[number].frame for number in kept])
        if self._spec.episodes.sees == "frames":
            columns[FRAME] = columns[FIRST]  # again, under the name that later ones have
        return PromptsResult(ref=write_batch(self._store, out_key, columns), dropped=tuple(dropped))

    def _source_of(self, source: Source | None) -> PromptSource:
        """The rows of a source; None: of the data set."""
        return self._source if source is None else open_source(source)

    def deal(
        self, prompts: BatchRef, n: int, out_key: str, opponent: OpponentSeats | None = None
    ) -> tuple[BatchRef, BatchRef]:
        """Prompts as rows of their players, and n samples of each before its first turn (`deal`)."""
        return deal(self._store, prompts, n, out_key, opponent)

    def _prompts(
        self, rows: list[Row], observations: list[str]
    ) -> tuple[TokenizedPrompts, list[dict[str, Any]]]:
        """The prompts of rows, of what their environments said first; those of several players."""
        if self._spec.episodes.players > 1:
            told = [PlayersTurn.of(text) for text in observations]
            longest = self._spec.data.max_prompt_tokens
            return prompts_of_players(self._tasks[""].conversation, rows, told, longest)
        parts = []
        for task, places in self._by_task(rows):
            own = [rows[place] for place in places], [observations[place] for place in places]
            make = task.agents.prompts if task.code.chats else task.conversation.prompts
            parts.append((places, make(*own)))
        return put_together(parts), []

    def _task_of(self, row: Row) -> TaskEnvironment:
        """How a row is played."""
        return self._tasks[""] if "" in self._tasks else self._tasks[str(row[TASK])]

    def _by_task(self, rows: Sequence[Row]) -> list[tuple[TaskEnvironment, list[int]]]:
        """The positions of rows that are played in one way."""
        if "" in self._tasks:
            return [(self._tasks[""], list(range(len(rows))))] if rows else []
        places: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(str(row[TASK]), []).append(place)
        return [(self._tasks[name], own) for name, own in places.items()]

    def _ask_all(
        self, rows: Sequence[Row], ask: Callable[[TaskEnvironment, list[int]], list[Outcome]]
    ) -> list[Outcome]:
        """What the environments of rows say, all at once; `ask`: those of some of the rows."""
        parts = self._by_task(rows)
        if len(parts) == 1:
            return ask(*parts[0])
        outcomes: dict[int, Outcome] = {}
        with ThreadPoolExecutor(max_workers=max(1, len(parts))) as pool:
            for (_, places), answers in zip(
                parts, pool.map(lambda part: ask(*part), parts), strict=True
            ):
                outcomes |= zip(places, answers, strict=True)
        return [outcomes[place] for place in range(len(rows))]

    def _reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[Outcome]:
        """What the environments of rows say first."""

        def ask(task: TaskEnvironment, places: list[int]) -> list[Outcome]:
            own = [rows[place] for place in places], [seeds[place] for place in places]
            outcomes = task.environments.opening(*own)
            return [*map(self._first_request, outcomes)] if task.code.chats else outcomes

        return self._ask_all(rows, ask)

    def _act(self, episodes: Sequence[Episode]) -> list[Outcome]:
        """The answers to the next turns of episodes."""
        turns = [self._turn(episode) for episode in episodes]
        return self._ask_all(
            [episode.row for episode in episodes],
            lambda task, places: task.environments.act([turns[place] for place in places]),
        )

    def _last_rewards(self, episodes: Sequence[Episode]) -> list[Outcome]:
        """The last rewards of episodes that are over."""
        turns = [self._turn(episode) for episode in episodes]
        return self._ask_all(
            [episode.row for episode in episodes],
            lambda task, places: task.environments.finish([turns[place] for place in places]),
        )

    def _answer_tokenizer(self, row: Row, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """What an agent asks the tokenizer (protocol.TokenizerAnswers), in an episode of the row."""
        tokenizer, task = self._tokenizer, self._task_of(row)
        with self._tokenizing:
            try:
                if (tokens := asked.get("of_ids")) is not None:
                    self._requests.check_known(tokens)
                    return {"text": tokenizer.decode(tokens)}
                if (request := asked.get("request")) is not None:
                    past, ended = asked["past"], asked["ended"]
                    ids, _ = task.read_request(row, request, past, ended, ANY_LENGTH)
                else:
                    ids = tokenizer(asked["text"], add_special_tokens=asked["special"])["input_ids"]
            except ValueError as error:
                return {"refused": str(error)}
        answer = {"ids": ids, "max_model_len": task.data.max_prompt_tokens + task.max_new_tokens}
        return (
            {**answer, "tokens": tokenizer.convert_ids_to_tokens(ids)} if asked["texts"] else answer
        )

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

    def answer(self, request: AnswerRequest, out_key: str) -> AnswerResult:
        """Step the environments of the episodes whose turn is over, and write what they said."""
        samples = request.samples
        source = self._source_of(request.source)
        episodes = read_episodes(self._store, samples, source, request.stage)
        asked = [episode for episode in episodes if episode.waits]
        self._read(asked)
        began = time.monotonic()
        stepped = [episode for episode in asked if not self._is_over(episode)]
        self._step(stepped, form_of(samples), request.sampled_seconds)
        for episode in [each for each in asked if not each.ended and self._is_over(each)]:
            episode.end(self._limit(episode), SampleStatus.TRUNCATED)
        self._finish([episode for episode in asked if episode.ended and not episode.error])
        if any(task.conversation.rewrites for task in self._tasks.values()):
            for row in [row for episode in asked for row in episode.rows]:
                row.rewritten = self._rewritten(row) if row.ended else 0.0
        seconds = time.monotonic() - began
        written = write_batch(self._store, out_key, episode_columns(episodes, self._in_part))
        names = [name for name in samples.names if name not in written.names]
        ref = samples[names].with_columns(written)
        shown = write_frames(self._store, out_key, asked) if request.frames else None
        if self._spec.episodes.sees == "frames" and shown is not None:
            ref = ref.with_columns(present_frames(samples, shown, episodes))
        return AnswerResult(
            ref=ref,
            frames=shown,
            unfinished=sum(not episode.ended for episode in episodes),
            opponents=sum(episode.finish == OPPONENTS_TURN for episode in episodes),
            turns=len(asked),
            failures=_failures(asked),
            seconds=seconds,
        )

    def go_on(self, request: RoundRequest, out_key: str) -> AnswerResult:
        """Give the turns that requests waited for, and write what is asked for next."""
        requests, begun, turns = self._requests, request.begun, request.turns
        episodes = requests.read(
            request.prompts,
            request.n,
            begun,
            self._source_of(request.source),
            request.stage,
            request.group or request.n,
            request.first,
        )
        answered = 0 if turns is None else requests.fold(episodes, turns)
        began = time.monotonic()
        asked = []
        if begun is None or turns is not None:
            asked = [
                episode for episode in episodes if not episode.ended and not episode.forest.waiting
            ]
        requests.lay_out(asked)
        self._read(asked)
        for episode in asked:
            if limit := requests.limit(episode):
                episode.end(limit, SampleStatus.TRUNCATED)
        going = [episode for episode in asked if not episode.ended]
        self._ask_agents(
            [episode for episode in going if episode.task.code.chats], request.sampled_seconds
        )
        others = [episode for episode in going if not episode.task.code.chats]
        if begun is None:
            for episode in others:
                requests.ask_first(episode)
        else:
            self._step(others, None, request.sampled_seconds)
        self._finish([episode for episode in asked if episode.ended and not episode.error])
        for episode in [each for each in asked if each.ended]:
            if (
                episode.task.conversation.rewrites
                and episode.task.settings.past_turns == "as_sampled"
            ):
                episode.rewritten = self._rewritten(episode)
            if episode.task.code.chats:
                episode.settle()
        ref, pending = requests.write(episodes, request.prompts, request.n, out_key, self._in_part)
        return AnswerResult(
            ref=ref,
            pending=pending,
            unfinished=sum(not episode.ended for episode in episodes),
            turns=answered,
            failures=_failures(asked),
            seconds=time.monotonic() - began,
        )

    def _ask_agents(self, episodes: list[RequestEpisode], sampled_seconds: float) -> None:
        """Give agents their turns, until each waits for others, or its episode is over.

        One whose requests were all refused goes on at once.
        """
        while episodes:
            for episode, outcome in zip(episodes, self._act(episodes), strict=True):
                episode.add_seconds(outcome.seconds)
                if outcome.failed is not None:
                    episode.end(outcome.limit or FAILED, SampleStatus.FAILED, outcome.failed)
                    continue
                episode.add_branch_rewards(outcome.reward, outcome.by_branch)
                if outcome.done:
                    limit = self._requests.met_limit(episode)
                    cut = limit not in ("", TURNS)
                    episode.end(limit or DONE, SampleStatus.TRUNCATED if cut else SampleStatus.OK)
                elif limit := outcome.limit or self._late_limit(episode, sampled_seconds):
                    episode.end(limit, SampleStatus.OK)
                else:
                    try:
                        self._requests.ask(episode, outcome.observation)
                    except ValueError as error:
                        episode.end(FAILED, SampleStatus.FAILED, str(error))
            episodes = [
                episode for episode in episodes if not episode.ended and not episode.forest.waiting
            ]

    def gather(
        self, prompts: BatchRef, n: int, samples: Sequence[BatchRef | None], out_key: str
    ) -> BatchRef:
        return gather(self._store, prompts, n, samples, out_key)

    def replay(self, samples: BatchRef) -> list[tuple[int, str]]:
        """Step episodes again that are over: samples whose environment says something else, and what.

        Those that failed are left out: it is not known what their environments would have said.
        """
        if not any(task.settings.of_requests for task in self._tasks.values()):
            every: Sequence[Episode] = read_episodes(self._store, samples, self._source, "replay")
        elif "requests" in samples.names:
            every = self._requests.read(samples, 1, samples, self._source, "replay")
            self._requests.lay_out(every)
        else:
            raise ValueError(
                "The requests of these episodes are not stored: an older Refrain played them. They "
                "cannot be played again."
            )
        episodes = [
            episode
            for episode in every
            if episode.ended and not episode.error and episode.player == 0
        ]
        self._read(episodes)
        agents = [episode for episode in episodes if self._task_of(episode.row).code.chats]
        acted = zip(agents, self._act(agents), strict=True)
        more = {
            episode.sample: _MORE
            for episode, last in acted
            if episode.ended == DONE and not last.done
        }
        outcomes = zip(episodes, self._last_rewards(episodes), strict=True)
        answers = [
            (episode, outcome.failed or more.get(episode.sample)) for episode, outcome in outcomes
        ]
        return [(row.sample, cause) for episode, cause in answers if cause for row in episode.rows]

    def close(self) -> None:
        """End the environments' processes."""
        for task in self._tasks.values():
            task.environments.close()

    def _read(self, episodes: Sequence[Episode]) -> None:
        """Decode the turns of episodes."""
        for row in [row for episode in episodes for row in episode.rows]:
            spans = [row.tokens[start:stop] for start, stop in row.turns]
            row.texts = []
            if spans:  # of none at all a tokenizer makes one empty text
                row.texts = list(self._tokenizer.batch_decode(spans, skip_special_tokens=True))

    def _step(self, episodes: Sequence[Episode], form: Form | None, sampled_seconds: float) -> None:
        """Have the environments answer the last turn; a call that is none is answered here."""

        def take(episode: Episode, outcome: Outcome) -> None:
            limit = outcome.limit or self._late_limit(episode, sampled_seconds)
            self._take(episode, replace(outcome, limit=limit))

        asked = []
        for episode in episodes:
            called = self._calls_of(episode, episode.texts[-1])
            if isinstance(called, Malformed):
                take(episode, Outcome(observation=f"Error: {called.mistake}"))
            else:
                asked.append(episode)
        for episode, answered in zip(asked, self._act(asked), strict=True):
            outcome = check_frame(answered, form)
            episode.add_seconds(outcome.seconds)
            if outcome.failed is not None:
                episode.end(outcome.limit or FAILED, SampleStatus.FAILED, outcome.failed)
            else:
                take(episode, outcome)

    def _late_limit(self, episode: Episode, sampled_seconds: float) -> str:
        """The limit that an episode has reached that has used up its time; empty: it has not."""
        deadline = self._task_of(episode.row).settings.deadline
        late = deadline is not None and episode.seconds + sampled_seconds >= deadline
        return DEADLINE if late else ""

    def _finish(self, episodes: Sequence[Episode]) -> None:
        """Ask the environments of ended episodes for a last reward, and let go of them."""
        for episode, outcome in zip(episodes, self._last_rewards(episodes), strict=True):
            episode.add_seconds(outcome.seconds)
            if outcome.failed is not None:
                episode.end(outcome.limit or FAILED, SampleStatus.FAILED, outcome.failed)
                continue
            last = outcome.rewards if episode.others else (outcome.reward,)
            if isinstance(episode, RequestEpisode) and episode.task.code.chats:
                episode.add_branch_rewards(outcome.reward, outcome.by_branch)
                last = tuple(episode.forest.given.values()) or (None,)
            else:
                for row, reward in zip(episode.rows, last, strict=False):
                    row.add_reward(reward)
            if episode.ended in (SECONDS, DEADLINE) and all(reward is None for reward in last):
                # How far it came by then says how slow the environment was.
                limits = self._task_of(episode.row).settings
                cause = took_too_long(limits.timeout)
                if episode.ended == DEADLINE:
                    cause = f"the environment played until episodes.deadline = {limits.deadline} s"
                cause += ", and gave no reward at its end"
                episode.end(episode.ended, SampleStatus.FAILED, cause)

    def _turn(self, episode: Episode) -> Asked:
        """The turns of an episode that are answered, and its next turn, if there is one.

        The environment has not seen those that held a malformed call.
        """
        if isinstance(episode, RequestEpisode) and episode.task.code.chats:
            return GivenTurns(
                episode=episode.name,
                row=episode.row,
                seed=episode.seed,
                turns=self._requests.given(episode, lambda text: self._calls_of(episode, text)),
            )
        answered = [
            turn
            for row in episode.rows
            for turn in zip(row.order, row.texts, row.observations, self._tokens(row), strict=False)
        ]
        past = []
        for _, text, digest, tokens in sorted(answered, key=itemgetter(0)):
            called = self._calls_of(episode, text)
            if not isinstance(called, Malformed):
                past.append(PastTurn(text=text, calls=called, digest=digest, tokens=tokens))
        number = len(episode.observations)
        text = "".join(episode.texts[number : number + 1])
        called = self._calls_of(episode, text)
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
        told = self._task_of(episode.row).code.tokens
        return [
            {"written": episode.tokens[start:stop]} if told else None
            for start, stop in episode.turns
        ]

    def _calls_of(self, episode: Episode, text: str) -> tuple[ToolCall, ...] | Malformed | None:
        """The tools that a turn calls; None where the environment has none, and takes the text."""
        code = self._task_of(episode.row).code
        if not (code.tools or code.chats):
            return None
        calls = tool_calls(text)
        if isinstance(calls, Malformed):
            return () if code.chats else calls  # an agent is given it as a text
        return tuple({"name": call.name, "arguments": call.arguments} for call in calls or ())

    def _take(self, episode: Episode, outcome: Outcome) -> None:
        """What an environment answered becomes part of the episode."""
        task = self._task_of(episode.row)
        episode.add_answer(digest_of(outcome.observation), outcome.reward)
        episode.frame = outcome.frame
        for row, reward in zip(episode.rows, outcome.rewards, strict=False):
            row.add_reward(reward)
        if outcome.done:
            episode.end(DONE, SampleStatus.OK)
            if outcome.used is not None:
                start, stop = episode.turns[-1]
                turn = episode.tokens[start:stop]
                words = None if task.code.tokens else self._tokenizer
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
        if len(episode.texts) >= task.settings.max_turns:
            episode.end(TURNS, SampleStatus.OK)
            return
        if isinstance(episode, RequestEpisode):
            self._requests.ask_again(episode, text)
            return
        if episode.texts:
            last = episode.tokens[-1]
            ended = episode.finish != "length"
            talk = task.conversation.for_row(episode.row)
            delta = talk.delta(text, ended=ended, last=last, role=task.answers_as)
        else:
            delta = task.conversation.first(episode.row, text)
        if len(episode.tokens) + len(delta.ids) >= task.max_new_tokens:
            episode.end(TOKENS, SampleStatus.TRUNCATED)
            return
        episode.tokens += delta.ids
        episode.logprobs += [0.0] * len(delta.ids)
        episode.authors += bytes(delta.authors)
        episode.waits_for(episode)

    def _rewritten(self, episode: Episode) -> float:
        """`Conversation.rewritten` of an episode; 0 where there was no earlier turn."""
        tokens, answers = episode.past
        if not answers:
            return 0.0
        told = self._tokenizer.batch_decode([ids for _, ids in answers], skip_special_tokens=True)
        past = [(episode.texts[n], text) for (n, _), text in zip(answers, told, strict=True)]
        task = self._task_of(episode.row)
        talk = task.conversation.for_row(episode.row)
        return talk.rewritten(tokens, past, task.answers_as)

    def _is_over(self, episode: Episode) -> bool:
        """Whether the policy's turn reached a limit of tokens that ends the episode."""
        counts = self._task_of(episode.row).settings.full_turn == "counts"
        full = counts and self._limit(episode) == TURN_TOKENS
        return episode.finish == "length" and not full

    def _limit(self, episode: Episode) -> str:
        """Which limit of tokens ended the policy's turn."""
        most = self._task_of(episode.row).max_new_tokens
        return TOKENS if len(episode.tokens) >= most else TURN_TOKENS


def _failures(episodes: Sequence[Episode]) -> tuple[SampleFailure, ...]:
    """Of the environments of episodes, for the samples of all their players."""
    return tuple(
        SampleFailure(sample=row.sample, function="environment", error=row.error)
        for episode in episodes
        for row in episode.rows
        if row.error
    )
