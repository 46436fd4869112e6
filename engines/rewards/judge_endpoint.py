"""Requests to a judge's endpoint: how many at once, how often, and what is tried again.

An OpenAI-compatible API: POST URL/chat/completions
(platform.openai.com/docs/api-reference/chat/create). What cannot be answered is a RequestFailed whose
text is one sentence, in which the key never stands.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self

import httpx

from configs.environment import given
from configs.rewards import JudgeReward

_PASSING = (408, 425, 429)  # statuses that may pass, besides those from 500 on
_LONGEST_PAUSE = 60.0  # seconds, where the endpoint asks for no longer one
_BODY_CHARACTERS = 200  # of an endpoint's complaint that are told
_HIDDEN = "[key]"

Sleep = Callable[[float], Awaitable[None]]


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
        asked = 0
        while True:
            pause = min(reward.retry_pause * 2**asked, _LONGEST_PAUSE)
            asked += 1
            try:
                return await self._once(text, seed)
            except _MayPass as error:
                pause = max(pause, error.retry_after)
                if asked > reward.retries:
                    again = f", asked {asked} times" if asked > 1 else ""
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
            said = f"{where} answered {answer.status_code} {answer.reason_phrase}".rstrip()
            words = self._clean(" ".join(answer.text.split()))
            said += f": {words[:_BODY_CHARACTERS]}" if words else ""
            if answer.status_code not in _PASSING and answer.status_code < 500:
                raise RequestFailed(said)
            wait = retry_after(answer.headers.get("Retry-After"))
            if wait:
                self._pace.hold(wait)
            raise _MayPass(said, wait)
        content = _content(answer)
        if content is None:
            words = self._clean(" ".join(answer.text.split()))[:_BODY_CHARACTERS]
            raise _MayPass(f"{where} answered what is no chat completion: {words!r}")
        self.counts.answered += 1
        self.counts.seconds += took
        return self._clean(content)

    def _clean(self, text: str) -> str:
        """A text from outside that can be stored and shown: an endpoint may repeat the key."""
        found = text.encode(errors="replace").decode()
        return found if self._key is None else found.replace(self._key, _HIDDEN)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def retry_after(said: str | None) -> float:
    """Seconds that a Retry-After header asks to wait (RFC 9110, 10.2.3); 0 where it says nothing."""
    if said is None:
        return 0.0
    if said.strip().isdigit():
        return float(said)
    try:
        when = parsedate_to_datetime(said)
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
