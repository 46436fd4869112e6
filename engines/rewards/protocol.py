"""What a reward process and its owner say to each other.

Messages are pickled over a socket pair between two processes of the same program; nothing of this
is ever stored. Only the standard library is imported, so that a process starts quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from storage.objects.json_values import Row

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Progress of the run, for rewards that change with it; TRL's names."""

    global_step: int = 0  # steps finished before this one
    max_steps: int = 0  # steps of the whole run
    epoch: float = 0.0  # passes over the data


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: which function to become, a user's or a built-in scorer."""

    name: str  # what messages call the function
    path: str  # package.module:name of the function, or of a maker of a scorer
    built_in: bool  # whether `path` makes a scorer for single samples out of settings
    params: Mapping[str, Any]  # keyword arguments of each call of a function, or of the maker
    sample_seconds: float  # longest time for one sample of a built-in scorer, in seconds
    packages: tuple[str, ...] = ()  # whose versions tell what the function does


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What a loaded function is: its lines, those of its module, the packages around it."""

    source: str  # sha256 of the function's own lines; empty where it has none to read
    module: str  # sha256 of the file that it is in; empty for what has no file
    packages: Mapping[str, str]  # version of each installed package that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The function is loaded."""

    columns: tuple[str, ...]  # columns that it cannot be called without
    code: Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The function cannot be loaded: the user's mistake."""

    error: str  # one sentence for the user


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """Samples to score; every list has one entry per sample."""

    prompts: Sequence[Prompt]
    completions: Sequence[str]  # decoded text
    completion_ids: Sequence[Sequence[int]]
    rows: Sequence[Row]
    trainer_state: TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Result of a call. Where `error` is set the call failed as a whole and nothing else counts."""

    values: Sequence[float | None]  # one per sample; None: not applicable, or see `errors`
    errors: Mapping[int, str]  # position of a sample that has no valid value, and why
    error: str | None  # why the whole call failed
    tracebacks: Mapping[str, str]  # of the exceptions among those errors, by the error
    metrics: Mapping[str, Sequence[float]]  # values given to log_metric
    extras: Mapping[str, Sequence[Any]]  # columns given to log_extra, one entry per sample
