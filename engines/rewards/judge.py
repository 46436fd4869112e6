"""A judge as a reward: a model is asked about every sample, and its answers are the votes.

Runs in a reward process (engines/rewards/child.py). All samples of a call are asked about at once,
as far as the settings allow. A sample fails, and is never 0, where a request fails for good, where no
more than half of its votes give a score (each is asked once more with another seed), or where the
call's deadline comes first.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from configs.rewards import JudgeReward, Judging
from engines.rewards.judge_answers import JudgeAnswers
from engines.rewards.judge_endpoint import (
    Endpoint,
    EndpointCounts,
    Pace,
    RequestFailed,
    key_of_judge,
)
from engines.rewards.judge_rubric import read_rubric, score_of
from engines.rewards.protocol import BatchScorer, Logs, RewardCall, Unscored

KEPT_CHARACTERS = 2000  # of an answer, beside the sample: its end, where the score stands


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One vote on a sample."""

    score: float | None  # in [0, 1]; None: neither answer gave one
    answer: str  # the last


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeVerdict:
    """What became of one sample's votes."""

    votes: tuple[Vote | None, ...]  # None: its request failed
    score: float | None
    error: str | None  # why there is no score

    @property
    def spread(self) -> float | None:
        """Standard deviation of the votes; None where there are not two."""
        scores = [vote.score for vote in self.votes if vote and vote.score is not None]
        return statistics.pstdev(scores) if len(scores) > 1 else None


def verdict_on(reward: Judging, votes: Sequence[Vote | None], twice: bool = True) -> JudgeVerdict:
    """What a sample's votes come to, none of which failed; `twice`: those without a score had two."""
    scores = [vote.score for vote in votes if vote is not None and vote.score is not None]
    if 2 * len(scores) <= reward.votes:
        low, high = reward.scale
        reason = (
            f"{reward.votes - len(scores)} of {reward.votes} votes gave no score between {low:g} "
            f"and {high:g}{', though asked twice' if twice else ''}"
        )
        return JudgeVerdict(votes=tuple(votes), score=None, error=reason)
    combined = statistics.median(scores) if reward.combine == "median" else _mean(scores)
    return JudgeVerdict(votes=tuple(votes), score=combined, error=None)


def judge_scorer(
    reward: JudgeReward, answers: JudgeAnswers | None = None, sharers: int = 1
) -> JudgeScorer:
    """The judge of these settings. ValueError when its rubric or its key cannot be had.

    answers: those that are stored, and where to; None: nothing is kept. sharers: processes that share
    what the endpoint allows.
    """
    return JudgeScorer(reward, answers, sharers)


class JudgeScorer(BatchScorer):
    """Asks a judge about all samples of a call."""

    def __init__(self, reward: JudgeReward, answers: JudgeAnswers | None, sharers: int) -> None:
        self._reward = reward
        self._answers = answers
        self._rubric = read_rubric(reward.rubric)
        self._key = key_of_judge(reward)
        per_minute = reward.requests_per_minute
        self._pace = Pace(None if per_minute is None else per_minute / sharers)
        self._at_once = max(1, reward.at_once // sharers)
        self._loop = asyncio.Runner()
        # The store is read and written beside the requests, in threads.
        self._threads = ThreadPoolExecutor(self._at_once, thread_name_prefix="judged")
        if answers is not None:
            answers.keep_rubric(self._rubric)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the rubric names."""
        return self._rubric.columns

    @property
    def source(self) -> str:
        """The digest of the rubric: another one is another reward."""
        return self._rubric.digest

    def __call__(self, call: RewardCall, logs: Logs) -> Sequence[float | Unscored]:
        """Scores in [0, 1]; `votes` and `answers` of each sample are logged as columns."""
        verdicts, counts = self._loop.run(self._judged(call))
        self._log(verdicts, counts, logs)
        return [
            Unscored(reason=one.error or "") if one.score is None else one.score for one in verdicts
        ]

    async def _judged(self, call: RewardCall) -> tuple[list[JudgeVerdict], EndpointCounts]:
        until = time.monotonic() + self._reward.deadline
        async with Endpoint(self._reward, self._key, self._pace, self._at_once) as endpoint:
            asking = _Asking(self, endpoint, until)
            tasks = [
                asyncio.create_task(asking.verdict(call, number))
                for number in range(len(call.completions))
            ]
            late: set[asyncio.Task[JudgeVerdict]] = set()
            if tasks:
                _, late = await asyncio.wait(tasks, timeout=self._reward.deadline)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            await asking.end()
            none = JudgeVerdict(
                votes=(),
                score=None,
                error=f"not judged within rewards.functions[].deadline = {self._reward.deadline:g} s",
            )
            return [none if task in late else task.result() for task in tasks], endpoint.counts

    def _log(self, verdicts: Sequence[JudgeVerdict], counts: EndpointCounts, logs: Logs) -> None:
        if not verdicts:
            return
        logs.log_extra(
            "votes", [[vote and vote.score for vote in verdict.votes] for verdict in verdicts]
        )
        logs.log_extra(
            "answers",
            [
                [vote and vote.answer[-KEPT_CHARACTERS:] for vote in verdict.votes]
                for verdict in verdicts
            ],
        )
        name, samples = self._reward.label, len(verdicts)
        logs.log_metric(f"{name}/requests_per_sample", counts.requests / samples)
        logs.log_metric(f"{name}/retries_per_sample", counts.retries / samples)
        if counts.votes:
            logs.log_metric(f"{name}/answers_from_store", counts.cached / counts.votes)
        if counts.answered:
            logs.log_metric(f"{name}/request_seconds", counts.seconds / counts.answered)
        for verdict in verdicts:
            if verdict.spread is not None:
                logs.log_metric(f"{name}/vote_spread", verdict.spread)


class _Asking:
    """One scoring call: a question that several samples share is asked once."""

    def __init__(self, scorer: JudgeScorer, endpoint: Endpoint, until: float) -> None:
        self._reward = scorer._reward
        self._rubric = scorer._rubric
        self._answers = scorer._answers
        self._threads = scorer._threads
        self._endpoint = endpoint
        self._until = until
        self._asked: dict[tuple[str, int], asyncio.Task[str]] = {}

    async def verdict(self, call: RewardCall, number: int) -> JudgeVerdict:
        """What becomes of sample `number`."""
        reward = self._reward
        try:
            text = self._rubric.filled(
                call.prompts[number], call.completions[number], call.rows[number]
            )
        except ValueError as error:
            return JudgeVerdict(votes=(), score=None, error=str(error))
        results = await asyncio.gather(
            *(self._vote(text, vote) for vote in range(reward.votes)), return_exceptions=True
        )
        failures = [one for one in results if isinstance(one, BaseException)]
        for one in failures:
            if not isinstance(one, RequestFailed):
                raise one
        votes = tuple(None if isinstance(one, BaseException) else one for one in results)
        if failures:
            return JudgeVerdict(votes=votes, score=None, error=str(failures[0]))
        return verdict_on(reward, votes)

    async def _vote(self, text: str, number: int) -> Vote:
        """RequestFailed."""
        reward = self._reward
        answer = ""
        for seed in (reward.seed + number, reward.seed + reward.votes + number):
            answer = await self._answer(text, seed)
            score = score_of(answer, reward.score, reward.scale)
            if score is not None:
                return Vote(score=score, answer=answer)
        return Vote(score=None, answer=answer)

    async def _answer(self, text: str, seed: int) -> str:
        question = (text, seed)
        if question not in self._asked:
            self._asked[question] = asyncio.create_task(self._stored_or_asked(text, seed))
        # A sample that is given up takes nobody's answer along.
        return await asyncio.shield(self._asked[question])

    async def _stored_or_asked(self, text: str, seed: int) -> str:
        counts, answers = self._endpoint.counts, self._answers
        counts.votes += 1
        if answers is None:
            return await self._endpoint.answer(text, seed, self._until)
        loop = asyncio.get_running_loop()
        key = answers.key(self._reward, self._rubric, text, seed)
        stored = await loop.run_in_executor(self._threads, answers.read, key)
        if stored is not None:
            counts.cached += 1
            return stored
        answer = await self._endpoint.answer(text, seed, self._until)
        return await loop.run_in_executor(self._threads, answers.keep, key, answer)

    async def end(self) -> None:
        """Cancel what is still asked."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)


def check_judge(reward: JudgeReward) -> None:
    """Ask the endpoint once, before a run. That it is busy (429) will do.

    ValueError, one sentence, where the key is missing or the endpoint gives no answer.
    """
    key = key_of_judge(reward)
    once = reward.model_copy(update={"retries": 0})

    async def ask() -> None:
        async with Endpoint(once, key, Pace(None), at_once=1) as endpoint:
            await endpoint.answer("Say: ready.", reward.seed, time.monotonic() + reward.timeout)

    with ThreadPoolExecutor(1) as thread:  # a loop may run in this one
        try:
            thread.submit(asyncio.run, ask()).result()
        except RequestFailed as error:
            if " answered 429" not in str(error):
                raise ValueError(
                    f"The reward {reward.label} cannot be had: {error}. Set url, model and "
                    "key_variable of rewards.functions[] to an endpoint that answers, or start it."
                ) from None


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)
