"""A run that was opened, and where it stands between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from configs.grpo import GRPOConfig
from storage.prompts.cursor import Cursor
from storage.prompts.source import PromptSource
from storage.runs.commit_log import Commit, Ledger
from storage.runs.opponents import Opponent
from storage.runs.run_store import Origin, RunStore
from tasks.results import Carried


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedRun:
    """A run by its settings and by what the store says of it. Nothing is written, nobody kept out."""

    name: str
    flow: str  # package.module:function that makes it
    config: GRPOConfig
    files: RunStore
    source: PromptSource
    resumed: bool  # it is in the store already
    origin: Origin | None  # where it began, if not with the model's own weights
    seen: np.ndarray  # uint64 [rows], digests of the rows drawn before it began
    first: Cursor  # where its first step draws
    opponent: Opponent | None = None  # of another run; None: its own first version, or nobody

    @property
    def start(self) -> int:
        """The version that the run begins with."""
        return 0 if self.origin is None else self.origin.at


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a run stands between two steps."""

    head: int  # the last committed step; before the first, the version that the run begins with
    last: Commit | None  # of the step before the next one, which a fork inherits
    cursor: Cursor  # where the next step draws
    ledger: Ledger  # of all steps so far
    carried: Carried = field(default_factory=Carried)  # groups that go on in the next step

    @classmethod
    def after(cls, commit: Commit) -> Position:
        """Where the run stands once a step is committed."""
        cursor = Cursor.from_json(commit.cursor)
        return cls(
            head=commit.step,
            last=commit,
            cursor=cursor,
            ledger=commit.ledger,
            carried=Carried.of(commit),
        )
