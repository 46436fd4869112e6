"""A teacher that several runs ask: one gang, a fair queue before it, and a place for each run.

Nothing of a run lives here for longer than its call: what is written goes by the run's keys into
the run's store, and a question has all that its answer is made of. So a service that is killed loses
nothing; the runs ask its successor again. A run holds its place for as long as it renews its lease.
HTTP is in engines/teachers/api.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from engines.failures import CallCancelled, ClusterLost, InfrastructureError
from engines.models.tokens import ModelTokens
from engines.teachers.fair_queue import FairQueue
from engines.teachers.messages import (
    MOST_NUMBERS,
    Facts,
    PlaceLease,
    Question,
    RunUse,
    ServiceProbe,
    ServiceRefused,
    Status,
    Taught,
)
from engines.train.batching.packing import read_lengths
from engines.train.contract import TeachRequest, TrainEngine
from engines.workers.engine import CallId
from engines.workers.gang import Gang
from storage.batches.forest import read_forests
from storage.batches.refs import BatchRef
from storage.objects.errors import StoreError, StoreUnavailable
from storage.objects.store import Store

# HTTP statuses. What fails LATER may go well when it is asked again, of this service or the next.
BAD_REQUEST, OTHER_WEIGHTS, FAILED, ENDING, LATER = 400, 412, 422, 502, 503
GONE, CONFLICT, FULL = 410, 409, 429  # no lease; another flow has it; no place
MOST_WAITING = 4096  # questions of one run
LOOK_EVERY = 1.0  # seconds between looks for leases that have run out


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What each run may have."""

    places: int  # runs at once
    lease_seconds: float
    tokens_per_minute: int | None


@dataclass(kw_only=True, slots=True)
class _Waiting:
    """A question that waits for its answer, or has it."""

    question: Question
    readable: int | None  # token ids that the student knows
    tokens: int
    since: float  # by the clock
    answer: Future[Taught] = field(default_factory=Future)


@dataclass(slots=True, kw_only=True)
class TakenPlace:
    """A place that a run has."""

    lease: PlaceLease
    until: float  # by the clock
    # What has been done for the run since it took the place.
    calls: int = 0
    tokens: int = 0  # of prompts and answers
    queue_seconds: float = 0.0
    seconds: float = 0.0  # of the engine


class Places:
    """Places by run; not safe to use from several threads at once."""

    def __init__(
        self, places: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`seconds`: that a lease lasts beyond its last renewal."""
        self._number = places
        self._seconds = seconds
        self._clock = clock
        self._taken: dict[str, TakenPlace] = {}

    def renew(self, lease: PlaceLease) -> bool:
        """Give a run its place, or let it keep it; whether it is a new one.

        Refused where a newer flow of the run has it, and where there is no place.
        """
        place = self._taken.get(lease.address)
        if place is None and len(self._taken) >= self._number:
            runs = ", ".join(sorted(place.lease.run for place in self._taken.values()))
            raise ServiceRefused(
                FULL,
                f"it has places = {self._number}, all taken by other runs ({runs}); wait for one of "
                "them to end, or start it with more places",
            )
        if place is not None:
            self._check(place, lease.epoch)
        fresh = place is None or lease.epoch > place.lease.epoch
        if place is None or fresh:
            place = self._taken[lease.address] = TakenPlace(lease=lease, until=0.0)
        place.until = self._clock() + self._seconds
        return fresh

    def place_of(self, address: str, epoch: int) -> TakenPlace:
        """The place from which a flow of a run asks. Refused where it has none."""
        place = self._taken.get(address)
        if place is None or epoch > place.lease.epoch:
            raise ServiceRefused(GONE, "the run has no lease there")
        self._check(place, epoch)
        place.until = self._clock() + self._seconds
        return place

    def release(self, address: str, epoch: int) -> bool:
        """Give a place back; False where the flow has none."""
        place = self._taken.get(address)
        if place is None or place.lease.epoch != epoch:
            return False
        del self._taken[address]
        return True

    def ended(self) -> list[str]:
        """Take the places of runs that were not heard of for too long; their addresses."""
        now = self._clock()
        over = [address for address, place in self._taken.items() if place.until < now]
        for address in over:
            del self._taken[address]
        return over

    @property
    def all(self) -> Mapping[str, TakenPlace]:
        """The places that are taken, by the run's address."""
        return dict(self._taken)

    @staticmethod
    def _check(place: TakenPlace, epoch: int) -> None:
        if epoch < place.lease.epoch:
            raise ServiceRefused(
                CONFLICT,
                f"a flow with epoch {place.lease.epoch} has taken the run {place.lease.run} over, "
                f"and this one has epoch {epoch}",
            )


class TeacherService:
    """See the module's docstring. Safe to use from several threads."""

    def __init__(
        self,
        gang: Gang[TrainEngine],
        stores: Mapping[str, Store],
        limits: Limits,
        *,
        name: str,
        model: str,
        positions: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stores`: whose runs may ask, by address. `positions`: the longest sequence, in tokens."""
        self._gang = gang
        self._stores = stores
        self._limits = limits
        self._name = name
        self._model = model
        self._positions = positions
        self._clock = clock
        self._began = clock()
        self._queue: FairQueue[_Waiting] = FairQueue(limits.tokens_per_minute, clock)
        self._places = Places(limits.places, limits.lease_seconds, clock)
        self._unanswered: dict[tuple[str, str], _Waiting] = {}  # by run and out_key
        self._digests: dict[str, str] = {}  # by number format, of the gang as it is formed
        self._tokens: ModelTokens | None = None
        self._changed = threading.Condition()
        self._forming = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="teacher", daemon=True)

    def start(self) -> None:
        """Build the teacher, then answer. Raises what the gang does, ValueError without tokens."""
        self._gang.form(self._over)
        self._tokens = self._gang.call(TrainEngine.tokens, None, self._over)
        if self._tokens is None:
            raise ValueError(
                "The teacher has no tokenizer.json, by which its tokens are compared with a "
                "student's. Set model to a checkpoint that has one."
            )
        self._thread.start()

    def close(self) -> None:
        """Answer nothing more; a call under way is ended."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    # -- what runs ask ---------------------------------------------------------------------------

    @property
    def tokens(self) -> ModelTokens:
        """The teacher's tokens."""
        assert self._tokens is not None, "the service has not started"
        return self._tokens

    def probe(self, probe: ServiceProbe) -> Facts:
        """What is taught by, for a run that can be served. Refused, in a sentence."""
        store = self._store(probe.store)
        try:  # of another size it is not read: it may be anything in the store
            whole = store.size(probe.key) == len(probe.text.encode())
            text = store.read(probe.key).decode(errors="replace") if whole else ""
        except (StoreError, ValueError):
            text = ""
        if text != probe.text:
            raise ServiceRefused(
                BAD_REQUEST,
                f"it does not see what this run has just written to {probe.store}; set store.uri to "
                "an address that means the same place on both machines",
            )
        return self.facts(probe.dtype)

    def facts(self, dtype: str | None = None) -> Facts:
        """What is taught by; with the digest of the weights in a number format."""
        with self._changed:
            places = len(self._places.all)
        return Facts(
            name=self._name,
            model=self._model,
            digest="" if dtype is None else self._digest(dtype),
            rows=self.tokens.rows,
            positions=self._positions,
            places=self._limits.places,
            taken=places,
            lease_seconds=self._limits.lease_seconds,
            tokens_per_minute=self._limits.tokens_per_minute,
        )

    def renew(self, lease: PlaceLease) -> None:
        """Give a run its place, or let it keep it. Refused, in a sentence."""
        self._store(lease.store)
        rows = self.tokens.rows
        fewer = lease.rows is not None and rows is not None and rows < lease.rows
        if lease.tokenizer != self.tokens.digest or fewer:
            raise ServiceRefused(
                FAILED,
                f"its tokenizer is another than the student's ({self.tokens.digest} of "
                f"{rows} ids, and {lease.tokenizer} of {lease.rows})",
            )
        with self._changed:
            self._places.ended()
            if self._places.renew(lease):
                self._drop(lease.address)

    def release(self, lease: PlaceLease) -> None:
        """Give a run's place to others; what it asked is forgotten."""
        with self._changed:
            if self._places.release(lease.address, lease.epoch):
                self._drop(lease.address)

    def ask(self, question: Question) -> Future[Taught]:
        """The answer to come; a question that is asked again is the same one. Refused."""
        key = (question.address, question.out_key)
        with self._changed:
            place = self._places.place_of(question.address, question.epoch)
            if (pending := self._unanswered.get(key)) is not None:
                return pending.answer
        tokens = self._checked(question)
        waiting = _Waiting(
            question=question, readable=place.lease.rows, tokens=tokens, since=self._clock()
        )
        with self._changed:
            if (pending := self._unanswered.get(key)) is not None:  # asked twice at once
                return pending.answer
            self._places.place_of(question.address, question.epoch)  # still
            if self._queue.waiting(question.address)[0] >= MOST_WAITING:
                raise ServiceRefused(LATER, f"{MOST_WAITING} questions of the run wait already")
            self._unanswered[key] = waiting
            self._queue.put(question.address, tokens, waiting)
            self._changed.notify_all()
        return waiting.answer

    def forget(self, question: Question) -> None:
        """An answer has been given: asked once more, it is made again."""
        with self._changed:
            self._unanswered.pop((question.address, question.out_key), None)

    def status(self) -> Status:
        """For a person's look."""
        facts = self.facts()
        with self._changed:
            now, places = self._clock(), self._places.all
            runs = []
            for address, place in sorted(places.items()):
                calls, tokens = self._queue.waiting(address)
                runs.append(
                    RunUse(
                        run=place.lease.run,
                        store=place.lease.store,
                        epoch=place.lease.epoch,
                        heard=max(0.0, now - place.until + self._limits.lease_seconds),
                        calls=place.calls,
                        tokens=place.tokens,
                        queue_seconds=place.queue_seconds,
                        seconds=place.seconds,
                        waiting=calls,
                        waiting_tokens=tokens,
                    )
                )
        return Status(facts=facts, seconds=now - self._began, runs=runs)

    # -- checks ----------------------------------------------------------------------------------

    def _store(self, uri: str) -> Store:
        store = self._stores.get(uri)
        if store is None:
            raise ServiceRefused(
                BAD_REQUEST,
                f"it serves runs of the stores {', '.join(self._stores)}, and this run's is {uri}; "
                f"start it with other_stores=[{uri}], or set store.uri",
            )
        return store

    def _checked(self, question: Question) -> int:
        """The tokens of a question that the gang can answer, so that a bad one does not break it."""
        if not question.out_key.startswith(f"{question.run}/"):
            raise ServiceRefused(
                BAD_REQUEST, f"{question.out_key} is no key of the run {question.run}"
            )
        rows = self.tokens.rows or len(self.tokens.words)
        if question.top_k >= rows:
            raise ServiceRefused(BAD_REQUEST, f"top_k = {question.top_k}, and it has {rows} words")
        try:
            store = self._store(question.store)
            for key in question.batch.objects:
                store.size(key)
            lengths = read_lengths(store, question.batch)
            forests = read_forests(store, question.batch)
        except (StoreError, ValueError) as error:
            raise ServiceRefused(FAILED, f"the samples cannot be read: {error}") from error
        each = lengths.prompts + lengths.responses
        longest = int(each.max(initial=0))
        if forests is not None:  # of a forest no token has more before it than its path
            paths = (int(forest.path_lengths().max(initial=0)) for forest in forests)
            longest = max(paths, default=0)
        if self._positions is not None and longest > self._positions:
            raise ServiceRefused(
                BAD_REQUEST, f"a sample has {longest} tokens, and it reads {self._positions}"
            )
        tokens = int(each.sum())
        if tokens * question.top_k > MOST_NUMBERS:
            raise ServiceRefused(
                BAD_REQUEST,
                f"{tokens} tokens with top_k = {question.top_k} are {tokens * question.top_k} "
                f"numbers, and one question may have {MOST_NUMBERS}",
            )
        return tokens

    def _drop(self, address: str) -> None:
        """Forget what a run has asked."""
        for waiting in self._queue.drop(address):
            waiting.answer.set_exception(ServiceRefused(GONE, "the run's place was given away"))
        for key in [key for key in self._unanswered if key[0] == address]:
            del self._unanswered[key]

    # -- the work --------------------------------------------------------------------------------

    def _work(self) -> None:
        """Answer one question after the other; a thread of its own."""
        while not self._over.is_set():
            with self._changed:
                for address in self._places.ended():
                    self._drop(address)
                waiting = self._queue.take()
                if waiting is None:
                    pause = self._queue.pause()
                    self._changed.wait(LOOK_EVERY if pause is None else min(pause, LOOK_EVERY))
                    continue
            self._answer(waiting)

    def _answer(self, waiting: _Waiting) -> None:
        """Carry a question out: the boundary where what went wrong becomes a refusal."""
        question, began = waiting.question, self._clock()
        try:
            batch = self._taught(question, waiting.readable)
        except ServiceRefused as refusal:
            waiting.answer.set_exception(refusal)
            return
        except (CallCancelled, ClusterLost) as error:
            waiting.answer.set_exception(ServiceRefused(ENDING, f"it is ending: {error}"))
            return
        except (InfrastructureError, StoreUnavailable) as error:
            waiting.answer.set_exception(ServiceRefused(LATER, str(error)))
            return
        except Exception as error:
            waiting.answer.set_exception(ServiceRefused(FAILED, f"{type(error).__name__}: {error}"))
            return
        ended = self._clock()
        taught = Taught(
            batch=batch,
            tokens=waiting.tokens,
            queue_seconds=began - waiting.since,
            seconds=ended - began,
        )
        with self._changed:
            place = self._places.all.get(question.address)
            if place is not None and place.lease.epoch == question.epoch:
                place.calls += 1
                place.tokens += taught.tokens
                place.queue_seconds += taught.queue_seconds
                place.seconds += taught.seconds
        waiting.answer.set_result(taught)

    def _taught(self, question: Question, readable: int | None) -> BatchRef:
        digest = self._digest(question.dtype)
        if digest != question.digest:
            raise ServiceRefused(
                OTHER_WEIGHTS,
                f"it holds the weights {digest}, and this run is taught by {question.digest}; start "
                "it with that model, or begin a new run",
            )
        call = CallId(
            run=question.address,
            epoch=question.epoch,
            step=0,
            call=f"teach-{question.out_key}@{self._gang.generation}",
        )
        request = TeachRequest(
            batch=question.batch,
            out_key=question.out_key,
            temperature=question.temperature,
            top_k=question.top_k,
            store=self._store(question.store),
            readable=readable,
        )
        result = self._gang.call(TrainEngine.teach, call, self._over, request=request)
        assert result.batch is not None, "the samples have rows"
        return result.batch

    def _digest(self, dtype: str) -> str:
        """Digest of the weights that the gang holds, which is formed anew if it was lost."""
        digest = self._digests.get(dtype)
        if digest is not None and self._gang.formed:
            return digest
        with self._forming:
            if not self._gang.formed:
                self._digests = {}
                self._gang.form(self._over)
            if dtype not in self._digests:
                digest = self._gang.call(TrainEngine.digest, None, self._over, dtype=dtype)
                self._digests[dtype] = digest
            return self._digests[dtype]
