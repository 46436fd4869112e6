"""What a reward process and its owner say to each other, and what TRL's functions expect.

Messages go between two processes of the same program (engines/processes/user_code.py); nothing
of this is ever stored. After `Start` they are packed. Only the standard library is imported, so that
a process starts quickly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from engines.processes import user_code
from engines.processes.user_code import Broken, by_name

if TYPE_CHECKING:
    from storage.objects.documents import JsonValue, Row

Prompt: TypeAlias = "str | list[dict[str, str]]"

# What TRL 1.16's GRPOTrainer passes besides the columns, and so what no column may be called.
TRL_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
# Columns that TRL keeps back: they are the arguments above, under their names in a data set.
TRL_HIDDEN_COLUMNS = ("prompt", "completion", "completion_ids")


# What the rows of episodes have besides (engines/data/scoring.py:with_episodes).
EPISODE_COLUMNS = ("episode_reward", "turn_rewards", "episode")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where the run stands, for rewards that change with it: fields of transformers' TrainerState.

    A step is one of the run's, with all the optimizer steps that it makes; TRL counts the latter.
    What is not here is an AttributeError, never a default.
    """

    global_step: int = 0  # steps finished before the one whose samples are scored
    max_steps: int = 0  # steps of the whole run
    epoch: float = 0.0  # passes over the data when the step began

    def __getattr__(self, name: str) -> NoReturn:  # of what the class does not have
        raise AttributeError(
            f"trainer_state has no {name} in Refrain: it has global_step, max_steps and epoch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStart:
    """The first message: which function to become, a user's or a built-in scorer."""

    name: str  # what messages call the function
    path: str  # import path of the function, or of a maker of a scorer
    built_in: bool  # whether `path` makes a scorer for single samples out of settings
    params: Mapping[str, Any]  # keyword arguments of each call of a function, or of the maker
    sample_seconds: float  # longest time for one sample of a built-in scorer, in seconds
    # Samples that a built-in scorer is given at once, each in a thread; it then keeps their time
    # itself. None: one after another in the main thread, each stopped after `sample_seconds`.
    at_once: int | None = None
    packages: tuple[str, ...] = ()  # whose versions tell what the function does


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReady:
    """The function is loaded, and what it is: its lines, its file, the packages around it."""

    columns: tuple[str, ...]  # columns that it cannot be called without
    source: str  # sha256 of the function's own lines; empty where it has none to read
    module: str  # sha256 of the file that it is in; empty for what has no file
    packages: Mapping[str, str]  # version of each installed package that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """Samples to score; every list has one entry per sample.

    Two samples: prompts ["1+1=", "2+2="], completions ["2", "5"], completion_ids [[17], [20]],
    rows [{"answer": "2"}, {"answer": "4"}].
    """

    prompts: Sequence[Prompt]
    completions: Sequence[str]  # decoded text
    completion_ids: Sequence[Sequence[int]]
    rows: Sequence[Row]
    global_step: int  # these three: TrainerState
    max_steps: int
    epoch: float


class SampleTookTooLong(BaseException):
    """Raised by the alarm; no Exception, so that a scorer's own handlers let it pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScore:
    """A built-in scorer's score of one sample, and what is stored beside it as if by log_extra."""

    score: float | None  # None: not applicable
    extras: Mapping[str, JsonValue]  # column -> the sample's entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Result of a call. Where `error` is set the call failed as a whole and nothing else counts.

    Two samples: values [1.0, None], errors {1: "returned nan, …"}, metrics {"accuracy": 0.5},
    extras {"parsed": ["2", "5"]}.
    """

    values: Sequence[float | None]  # one per sample; None: not applicable, or see `errors`
    errors: Mapping[int, str]  # position of a sample that has no valid value, and why
    error: str | None  # why the whole call failed
    tracebacks: Mapping[str, str]  # of the exceptions among those errors, by the error
    metrics: Mapping[str, float]  # by name: mean of the finite values given to log_metric
    extras: Mapping[str, Sequence[JsonValue]]  # columns given to log_extra, one entry per sample
    miscounted: bool = False  # whether `error` is that there were not as many values as samples


class Logs(Protocol):
    """What a function may log during a call, by TRL's two functions."""

    def log_metric(self, name: str, value: float) -> None:
        """Log a number for the batch, or several one by one, of which the mean is taken."""

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Log values of a column, one per sample: all at once, or in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """In the place of a score: the sample is failed."""

    reason: str  # one sentence


class BatchScorer(ABC):
    """A built-in scorer that is given all samples of a call at once, as users' functions are."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that rows need."""
        return ()

    @property
    def source(self) -> str | None:
        """sha256 of what tells this scorer from another; None: the lines of its maker."""
        return None

    @abstractmethod
    def __call__(self, call: RewardCall, logs: Logs) -> Sequence[float | Unscored | None]:
        """A score, None or the reason of a failure for each sample. What it raises fails them all."""


# Takes a message apart that `packed` has made: a RewardReady, Broken, RewardCall or Reply.
unpacked = partial(user_code.unpacked, kinds=by_name(RewardReady, Broken, RewardCall, Reply))
