"""A judge as a reward: a model is asked about every sample, and its answers are the votes.

Runs in a reward process (engines/rewards/child.py). All samples of a call are asked about at once,
as far as the settings allow. A sample fails, and is never 0, where a request fails for good, where no
more than half of its votes give a score (each is asked once more with another seed), or where the
call's deadline comes first.

The endpoint has an OpenAI-compatible API: POST URL/chat/completions
(platform.openai.com/docs/api-reference/chat/create). What cannot be answered is a RequestFailed whose
text is one sentence, in which the key never stands.

What judges answered is stored, so that nothing is asked, and paid, twice: one small object per answer
below RUN/judged/, named by all that was sent and to whom. The text is stored and not the score, so
another scale or pattern finds its answers there. It is a cache: whoever removes it only pays again.
Beside the answers lie the rubrics that were used, by digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self

import httpx

from configs.environment import given
from configs.rewards import JudgeReward, Judging
from engines.rewards.judge_rubric import Rubric, read_rubric, score_of
from engines.rewards.protocol import BatchScorer, Logs, RewardCall, Unscored
from storage.objects import documents
from storage.objects.documents import JsonValue, canonical
from storage.objects.errors import ObjectMissing, StoreError
from storage.objects.store import Store

KEPT_CHARACTERS = 2000  # of an answer, beside the sample: its end, where the score stands
_PASSING = (408, 425, 429)  # statuses that may pass, besides those from 500 on
_LONGEST_PAUSE = 60.0  # seconds, where the endpoint asks for no longer one
_BODY_CHARACTERS = 200  # of an endpoint's complaint that are told
_HIDDEN = "[key]"

Sleep = Callable[[float], Awaitable[None]]
log = logging.getLogger(__name__)

FORMAT = "refrain.judged/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAnswers:
    """The stored answers of a run, shared by its workers: the first answer to a question stands."""

    store: Store
    run: str

    def key(self, reward: JudgeReward, rubric: Rubric, text: str, seed: int) -> str:
        """Where an endpoint's answer to a question lies."""
        return self.key_of([reward.url, rubric.digest, request_body(reward, text, seed)])

    def key_of(self, question: JsonValue) -> str:
        """Where the answer lies to all that was asked, and of whom."""
        name = hashlib.sha256(canonical(question)).hexdigest()
        return f"{self.run}/judged/{name[:2]}/{name[2:]}.json"

    def read(self, key: str) -> str | None:
        """The answer that is stored; None where there is none that can be read."""
        try:
            return str(documents.read(self.store, key, FORMAT)["answer"])
        except ObjectMissing:
            return None
        except StoreError as error:
            log.warning("A judge's stored answer is of no use, and is asked for again: %s", error)
            return None

    def keep(self, key: str, answer: str) -> str:
        """Store an answer, unless another worker was faster; the one that stands is returned."""
        try:
            if self.store.create(key, documents.encode(FORMAT, {"answer": answer})):
                return answer
            standing = self.read(key)
            if standing is None:  # damaged
                self.store.write(key, documents.encode(FORMAT, {"answer": answer}))
        except StoreError as error:
            log.warning("A judge's answer could not be stored, and may be paid again: %s", error)
            return answer
        return answer if standing is None else standing

    def keep_rubric(self, rubric: Rubric) -> None:
        """Store the text of a rubric, which commits name by its digest."""
        name = rubric.digest.removeprefix("sha256:")
        try:
            self.store.create(f"{self.run}/judged/rubrics/{name}.txt", rubric.text.encode())
        except StoreError as error:
            log.warning("A judge's rubric could not be stored: %s", error)


class RequestFailed(RuntimeError):
    """The endpoint gave no answer, though it was asked again; one sentence."""


@dataclass(slots=True, kw_only=True)
class EndpointCounts:
    """What a scoring call asked of the endpoint."""

    votes: int = 0  # answers that were needed
    cached: int = 0  # of these: answered earlier, and stored
    requests: int = 0  # retries included
    retries: int = 0
    answered: int = 0  # requests that got an answer
    seconds: float = 0.0  # in those, together


class Pace:
    """When the next request may be sent: evenly spaced, and after what the endpoint asked for."""

    def __init__(
        self,
        per_minute: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._interval = 60.0 / per_minute if per_minute else 0.0
        self._clock = clock
        self._sleep = sleep
        self._next = 0.0
        self._first = asyncio.Lock()  # of whoever waits for the next turn; who gives up took none

    async def turn(self) -> None:
        """Return when a request may be sent."""
        async with self._first:
            while (wait := self._next - self._clock()) > 0:
                await self._sleep(wait)
            self._next = self._clock() + self._interval

    def hold(self, seconds: float) -> None:
        """Nobody's turn comes within so many seconds."""
        self._next = max(self._next, self._clock() + seconds)


class Endpoint:
    """A judge's endpoint during one scoring call; a context, for its connections.

    Its limits outlast it: `pace` and `key` belong to the process.
    """

    def __init__(self, reward: JudgeReward, key: str | None, pace: Pace, at_once: int) -> None:
        self._reward = reward
        self._key = key
        self._pace = pace
        self._slots = asyncio.Semaphore(at_once)
        self._where = f"the judge at {reward.url}"
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
        self.counts = EndpointCounts()

    async def answer(self, text: str, seed: int, until: float) -> str:
        """What the judge says to a text. RequestFailed.

        seed: of its sampling. until: by time.monotonic, when a retry comes too late.
        """
        reward = self._reward
        requests = 0
        while True:
            pause = min(reward.retry_pause * 2**requests, _LONGEST_PAUSE)
            requests += 1
            try:
                return await self._once(text, seed)
            except _MayPass as error:
                pause = max(pause, error.retry_after)
                if requests > reward.retries:
                    again = f", asked {requests} times" if requests > 1 else ""
                    raise RequestFailed(f"{error}{again}") from None
                if time.monotonic() + pause > until:
                    raise RequestFailed(
                        f"{error}; another try would come after rewards.functions[].deadline = "
                        f"{reward.deadline:g} s"
                    ) from None
            self.counts.retries += 1
            await asyncio.sleep(pause)

    async def _once(self, text: str, seed: int) -> str:
        """One request. RequestFailed, or _MayPass where another may go well."""
        reward, where = self._reward, self._where
        body = request_body(reward, text, seed)
        async with self._slots:
            await self._pace.turn()
            self.counts.requests += 1
            began = time.monotonic()
            try:
                async with asyncio.timeout(reward.timeout):
                    answer = await self._client.post(f"{reward.url}/chat/completions", json=body)
            except TimeoutError:
                raise _MayPass(f"{where} did not answer within {reward.timeout:g} s") from None
            except httpx.HTTPError as error:
                reason = self._clean(str(error)) or "no reason given"
                raise _MayPass(
                    f"{where} cannot be reached ({type(error).__name__}: {reason})"
                ) from None
            took = time.monotonic() - began
        if not answer.is_success:
            complaint = f"{where} answered {answer.status_code} {answer.reason_phrase}".rstrip()
            words = self._clean(" ".join(answer.text.split()))
            complaint += f": {words[:_BODY_CHARACTERS]}" if words else ""
            if answer.status_code not in _PASSING and answer.status_code < 500:
                raise RequestFailed(complaint)
            wait = retry_after(answer.headers.get("Retry-After"))
            if wait:
                self._pace.hold(wait)
            raise _MayPass(complaint, wait)
        content = _content(answer)
        if content is None:
            words = self._clean(" ".join(answer.text.split()))[:_BODY_CHARACTERS]
            raise _MayPass(f"{where} answered what is no chat completion: {words!r}")
        self.counts.answered += 1
        self.counts.seconds += took
        return self._clean(content)

    def _clean(self, text: str) -> str:
        """A text from outside that can be stored and shown: an endpoint may repeat the key."""
        clean = text.encode(errors="replace").decode()
        return clean if self._key is None else clean.replace(self._key, _HIDDEN)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()


class _MayPass(Exception):
    """A failure after which another request may go well; the text is a sentence."""

    def __init__(self, text: str, after: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after = after  # seconds that the endpoint asked for


def request_body(reward: JudgeReward, text: str, seed: int) -> dict[str, Any]:
    """What is sent."""
    return {
        "model": reward.model,
        "messages": [{"role": "user", "content": text}],
        "temperature": reward.temperature,
        "max_tokens": reward.max_tokens,
        "seed": seed,
        **reward.options,
    }


def retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header asks to wait (RFC 9110, 10.2.3); 0 where it says nothing."""
    if header is None:
        return 0.0
    if header.strip().isdigit():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def key_of_judge(reward: JudgeReward) -> str | None:
    """The key that the settings name a variable of; ValueError, without the value, if it is none."""
    name = reward.key_variable
    if name is None:
        return None
    key = given([name]).get(name, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        what = "holds what is no key" if key else "is not set"
        raise ValueError(
            f"The judge {reward.label} takes its key from the environment variable {name}, which "
            f"{what} on {os.uname().nodename}. Set it where the run starts and where its workers "
            "score (docs/security.md says how workers get it), or key_variable to another name."
        )
    return key


def _content(answer: httpx.Response) -> str | None:
    """The text of a chat completion, empty where the model said none; None: it is no completion."""
    try:
        message = answer.json()["choices"][0]["message"]
        content = message["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    if content is None:  # a refusal, or a model that thought until the end of its tokens
        return ""
    return content if isinstance(content, str) else None


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
            Unscored(reason=verdict.error or "") if verdict.score is None else verdict.score
            for verdict in verdicts
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
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, RequestFailed):
                raise failure
        votes = tuple(None if isinstance(result, BaseException) else result for result in results)
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
