"""What a run and a teacher's service say to each other over HTTP: JSON, with no tensor in it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from storage.batches.refs import BatchRef

MOST_ROWS = 2**20  # of a question
MOST_SOURCES = 4096  # objects that hold a question's rows; each is looked at
MOST_HEAD = 2**27  # bytes of such an object's head, all of which is read
MOST_NUMBERS = 2**29  # log-probs that a question may ask for: tokens times the likeliest words

NumberFormat = Literal["bfloat16", "float16", "float32"]
Name = Annotated[str, Field(max_length=1024)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class ServiceRefused(Exception):
    """A service does not do what it was asked; the text goes on "the teacher at ADDRESS: "."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status  # of HTTP


def _bounded(value: object) -> BatchRef:
    """A batch that is small enough to be asked about, looked at before anything is made of it."""
    ref = value if isinstance(value, BatchRef) else BatchRef.from_json(value, MOST_ROWS)
    sources = {source for column in ref.columns.values() for source in column.sources}
    if len(ref) > MOST_ROWS or len(sources) > MOST_SOURCES:
        raise ValueError(
            f"a question has {len(ref)} rows in {len(sources)} objects, and may have {MOST_ROWS} in "
            f"{MOST_SOURCES}"
        )
    if any(source.head > MOST_HEAD for source in sources):
        raise ValueError(f"an object's head has more than {MOST_HEAD} bytes")
    return ref


class Message(BaseModel):
    """Base of what is sent."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ServiceProbe(Message):
    """A question before a run: what is there, and does it see the run's store?"""

    store: Name  # address
    key: Name  # of an object that the run has written there
    text: Name  # that is in it
    dtype: NumberFormat  # number format of which the digest is asked


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
    """A model's tokens (engines/models/tokens.py)."""

    words: dict[str, int]
    special: dict[str, int]
    rows: int | None


class PlaceLease(Message):
    """By what right a run asks: a place, renewed by sending it again."""

    run: Name
    store: Name  # address
    epoch: Count  # of the run's lease on itself: a newer flow's is larger
    tokenizer: Name  # digest of the student's tokens
    rows: Count | None  # token ids that the student knows

    @property
    def address(self) -> str:
        """Names the run in all stores."""
        return f"{self.store}/{self.run}"


class Question(Message):
    """Samples to score; sent again until there is an answer, which it is by its out_key."""

    run: Name
    store: Name
    epoch: Count
    batch: Annotated[BatchRef, BeforeValidator(_bounded)]
    out_key: Name  # of the object that is written into the run's store
    temperature: float = Field(gt=0, allow_inf_nan=False)
    top_k: Count  # likeliest words that are wanted for each token
    dtype: NumberFormat  # number format of the digest
    digest: Name  # of the weights that have to be held

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
