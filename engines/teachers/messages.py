"""What a run and a teacher's service say to each other over HTTP: JSON, with no tensor in it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from storage.batches.refs import BatchRef


class Refused(Exception):
    """A service does not do what it was asked; the text goes on "the teacher at ADDRESS: "."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status  # of HTTP


class Message(BaseModel):
    """Base of what is sent."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Probe(Message):
    """A question before a run: what is there, and does it see the run's store?"""

    store: str  # address
    key: str  # of an object that the run has written there
    text: str  # that is in it
    dtype: str  # number format of which the digest is asked


class Facts(Message):
    """What a service teaches by."""

    name: str
    model: str  # for people
    digest: str  # of the weights held, in the number format asked for; empty: not asked
    rows: int | None  # token ids that it reads; None: not known
    positions: int | None  # longest sequence that it reads, in tokens; None: not known
    places: int  # runs that may hold a lease at once
    taken: int
    lease_seconds: float
    tokens_per_minute: int | None  # quota of each run


class Tokens(Message):
    """A model's tokens (engines/model_tokens.py)."""

    words: dict[str, int]
    special: dict[str, int]
    rows: int | None


class Lease(Message):
    """By what right a run asks: a place, renewed by sending it again."""

    run: str
    store: str  # address
    epoch: int  # of the run's lease on itself: a newer flow's is larger
    tokenizer: str  # digest of the student's tokens
    rows: int | None  # token ids that the student knows

    @property
    def address(self) -> str:
        """Names the run in all stores."""
        return f"{self.store}/{self.run}"


class Question(Message):
    """Samples to score; sent again until there is an answer, which it is by its out_key."""

    run: str
    store: str
    epoch: int
    batch: BatchRef
    out_key: str  # of the object that is written into the run's store
    temperature: float
    top_k: int  # likeliest words that are wanted for each token
    dtype: str  # number format of the digest
    digest: str  # of the weights that have to be held

    @property
    def address(self) -> str:
        """Names the run in all stores."""
        return f"{self.store}/{self.run}"


class Taught(Message):
    """An answer."""

    batch: BatchRef  # the new columns
    tokens: int  # scored, of prompts and answers
    queue_seconds: float
    seconds: float  # of the engine


class RunUse(Message):
    """What a service has done for a run since the run took its place."""

    run: str
    store: str
    epoch: int
    heard: float  # seconds ago
    calls: int
    tokens: int
    queue_seconds: float
    seconds: float
    waiting: int  # calls
    waiting_tokens: int


class Status(Message):
    """A service for a person's look."""

    facts: Facts
    seconds: float  # since it began
    runs: list[RunUse]
