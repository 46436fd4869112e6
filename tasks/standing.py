"""What a run is and where it stands, as the parts of a run see it.

A run (tasks/run.py) is made of its engines, its page in MLflow and its artifacts. These know of it
only what is here, so that none of them imports the run.
"""

from __future__ import annotations

import threading
from typing import Protocol

from configs.grpo import GRPOConfig
from storage.commits import Commit
from storage.cursor import Cursor
from storage.origins import Origin
from storage.prompt_source import PromptSource
from storage.runs import RunStore
from storage.store import Store
from tasks.attempts import Attempt
from tasks.progress import Progress
from tasks.terminal import Terminal


class Standing(Protocol):
    """Facts of a run; see the attributes of the same names in tasks.run.Run."""

    name: str
    config: GRPOConfig
    store: Store
    files: RunStore
    source: PromptSource
    origin: Origin | None
    epoch: int
    head: int
    last: Commit | None
    cursor: Cursor
    attempts: list[Attempt]
    cancelled: threading.Event
    terminal: Terminal
    progress: Progress

    def snapshot_due(self, step: int) -> bool:
        """Whether the trainer's state is stored after a step."""
