"""A run's side of a teacher's service: it takes the place of a gang's trainer.

A service that is away is waited for, and asked the same again when it is back: it keeps nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx

from engines.failures import InfrastructureError, StaleCall
from engines.models.tokens import ModelTokens, check_same_tokens
from engines.teachers.messages import (
    Facts,
    Message,
    PlaceLease,
    Question,
    ServiceProbe,
    Status,
    Taught,
    Tokens,
)
from engines.workers.cluster import raise_if_set
from storage.batches.refs import BatchRef
from storage.objects.store import Store

TIMEOUT = 30.0  # seconds for an answer to any request; a digest's may take longer
DIGEST_TIMEOUT = 600.0
PAUSE = 1.0  # seconds between questions to a service that is away
# HTTP statuses: what they mean is said where a service answers by them.
WAIT, NO_KEY, STALE, NO_LEASE, FULL, LATER = 202, 401, 409, 410, 429, 503
RENEWALS = 3  # of each lease's time
Answer = TypeVar("Answer", bound=Message)
Known = TypeVar("Known")


class TeacherRefused(ValueError):
    """The service does not do what it was asked, and will not; one sentence."""


class TeacherFailed(InfrastructureError):
    """The service's workers failed; it has new ones when it is asked again."""


class TeacherAway(InfrastructureError):
    """The service does not answer, or has no place for the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a teacher's service is, and by what it is asked."""

    name: str  # of the teacher, in the run's settings; empty: no run asks
    url: str
    key: str


class Connection:
    """Requests to a service, one answer each."""

    def __init__(self, address: Address) -> None:
        self._where = f"The teacher{address.name and ' ' + address.name} at {address.url}"
        headers = {"Authorization": f"Bearer {address.key}"}
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.Client(
            base_url=address.url, headers=headers, timeout=TIMEOUT, limits=limits
        )

    def send(
        self, method: str, path: str, message: Message | None = None, timeout: float = TIMEOUT
    ) -> httpx.Response:
        """The answer, whatever it says. TeacherAway where there is none."""
        body = None if message is None else message.model_dump(mode="json")
        try:
            return self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise TeacherAway(
                f"{self._where} cannot be reached ({type(error).__name__}: {error}); start it with "
                "refrain teacher serve, or set teachers.NAME.service to where it is"
            ) from error

    def answer(
        self,
        kind: type[Answer],
        method: str,
        path: str,
        message: Message | None = None,
        timeout: float = TIMEOUT,
    ) -> Answer:
        """The answer as a message. TeacherAway, TeacherRefused."""
        return kind.model_validate_json(self.good(self.send(method, path, message, timeout)).text)

    def good(self, answer: httpx.Response) -> httpx.Response:
        """An answer that is no refusal."""
        if answer.is_success:
            return answer
        text = f"{self._where}: {_detail(answer)}"
        if answer.status_code == STALE:
            raise StaleCall(text)
        if answer.status_code == LATER:
            raise TeacherFailed(text)
        if answer.status_code in (NO_LEASE, FULL) or answer.status_code >= 500:
            raise TeacherAway(text)
        if answer.status_code == NO_KEY:
            text += "; set the variable that teachers.NAME.key_variable names to the service's key"
        raise TeacherRefused(text)

    def close(self) -> None:
        """End its connections."""
        self._http.close()


def _detail(answer: httpx.Response) -> str:
    """Why a request was refused, in a service's words; another server's are cut short."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, LookupError, TypeError):
        detail = None
    text = detail if isinstance(detail, str) else " ".join(answer.text.split())[:200]
    return text or f"it answered {answer.status_code}"


def probed(address: Address, store: Store, dtype: str) -> Facts:
    """What a service teaches by, if it can serve runs of a store. TeacherAway, TeacherRefused."""
    connection = Connection(address)
    key, text = f".teacher-probe-{uuid.uuid4().hex}", uuid.uuid4().hex
    store.write(key, text.encode())
    try:
        probe = ServiceProbe(store=store.uri, key=key, text=text, dtype=dtype)
        facts = connection.answer(Facts, "POST", "/v1/probe", probe, DIGEST_TIMEOUT)
    finally:
        store.delete([key])
        connection.close()
    return facts


def tokens_of(address: Address) -> ModelTokens:
    """The tokens of a service's teacher. TeacherAway, TeacherRefused."""
    connection = Connection(address)
    try:
        tokens = connection.answer(Tokens, "GET", "/v1/tokens")
    finally:
        connection.close()
    return ModelTokens(words=tokens.words, special=tokens.special, rows=tokens.rows)


def status_of(address: Address) -> Status:
    """How a service stands. TeacherAway, TeacherRefused."""
    connection = Connection(address)
    try:
        return connection.answer(Status, "GET", "/v1/status")
    finally:
        connection.close()


class TeacherClient:
    """A teacher that a service holds. Safe to use from several threads."""

    def __init__(
        self,
        address: Address,
        *,
        store: Store,
        run: str,
        epoch: int,
        temperature: float,
        dtype: str,
        digest: str | None,
        patience: float,
        cancel: threading.Event,
    ) -> None:
        """`digest`: of the weights that it has to hold, in `dtype`. `patience`: in seconds."""
        self._address = address
        self._connection = Connection(address)
        self._store = store
        self._run = run
        self._epoch = epoch
        self._temperature = temperature
        self._dtype = dtype
        self._digest = digest
        self._patience = patience
        self._cancel = cancel
        self._lease: PlaceLease | None = None
        self._seconds = 0.0  # of a lease
        self._over = threading.Event()
        self._renewing: threading.Thread | None = None
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}

    def attach(self, student: ModelTokens | None) -> None:
        """Take a place, and keep it until `close`. TeacherAway, TeacherRefused, StaleCall.

        student: its tokens. Raises ValueError where they are not the teacher's.
        """
        facts = self._patiently(lambda: probed(self._address, self._store, self._dtype))
        if student is None:
            raise ValueError(
                "The student has no tokenizer.json, by which its tokens are compared with a "
                "teacher's. Set model to a checkpoint that has one."
            )
        check_same_tokens(student, tokens_of(self._address), self._address.name)
        check_digest(self._address, facts, self._digest, self._dtype)
        self._digest = facts.digest
        self._seconds = facts.lease_seconds
        self._lease = PlaceLease(
            run=self._run,
            store=self._store.uri,
            epoch=self._epoch,
            tokenizer=student.digest,
            rows=student.rows,
        )
        self._patiently(self._renew)
        if self._renewing is None:
            self._renewing = threading.Thread(
                target=self._renew_always, name="teacher-lease", daemon=True
            )
            self._renewing.start()

    def digest(self, version: int, dtype: str) -> str:
        """The digest of its weights; of version 0 alone, in the number format of the run."""
        assert (version, dtype) == (0, self._dtype), "a teacher has one version"
        assert self._digest is not None, "attach comes first"
        return self._digest

    def teach(self, batch: BatchRef, out_key: str, top_k: int) -> BatchRef:
        """The teacher's scores of the responses [N, jagged], as new columns (FSDPEngine.teach).

        Waits in the service's queue. TeacherAway after `patience`; TeacherRefused, StaleCall.
        """
        assert self._digest is not None, "attach comes first"
        question = Question(
            run=self._run,
            store=self._store.uri,
            epoch=self._epoch,
            batch=batch,
            out_key=out_key,
            temperature=self._temperature,
            top_k=top_k,
            dtype=self._dtype,
            digest=self._digest,
        )

        def ask() -> Taught | None:
            answer = self._connection.send("POST", "/v1/teach", question)
            if answer.status_code == NO_LEASE:
                self._renew()
                return None
            if answer.status_code == WAIT:
                return None
            return Taught.model_validate_json(self._connection.good(answer).text)

        taught = self._patiently(ask)
        self._count(taught)
        return taught.batch

    def _patiently(self, ask: Callable[[], Known | None]) -> Known:
        """Ask until there is an answer; TeacherAway once there was none for too long."""
        heard = time.monotonic()
        while True:
            raise_if_set(self._cancel)
            try:
                answer = ask()
            except TeacherAway:
                if time.monotonic() - heard > self._patience:
                    raise
                self._cancel.wait(PAUSE)
                continue
            if answer is not None:
                return answer
            heard = time.monotonic()

    def _count(self, taught: Taught) -> None:
        with self._lock:
            for name in ("tokens", "queue_seconds", "seconds"):
                self._used[name] = self._used.get(name, 0.0) + float(getattr(taught, name))

    def used(self) -> Mapping[str, float]:
        """Tokens, and seconds in the queue and at the engine, since the last look."""
        with self._lock:
            used, self._used = self._used, {}
        return used

    def _renew(self) -> bool:
        lease = self._lease
        if lease is not None:  # else it was given back
            self._connection.good(self._connection.send("PUT", "/v1/lease", lease))
        return True

    def _renew_always(self) -> None:
        while not self._over.wait(self._seconds / RENEWALS):
            try:
                self._renew()
            except (TeacherAway, TeacherFailed, TeacherRefused, StaleCall):
                continue  # a call of the run says it

    def close(self) -> None:
        """Give the place back; a second time nothing."""
        self._over.set()
        with self._lock:
            lease, self._lease = self._lease, None
        if lease is None:
            return
        with contextlib.suppress(TeacherAway):  # then there is nothing to give back
            self._connection.send("DELETE", "/v1/lease", lease, timeout=PAUSE)


def check_digest(address: Address, facts: Facts, expected: str | None, dtype: str) -> None:
    """TeacherRefused unless a service holds the weights that a run wants, if it names any."""
    if expected is not None and facts.digest != expected:
        raise TeacherRefused(
            f"The teacher {address.name} at {address.url} ({facts.model}) holds the weights "
            f"{facts.digest} in {dtype}, and teachers.{address.name}.digest = {expected}. Set "
            f"teachers.{address.name}.service to a service of that teacher."
        )
