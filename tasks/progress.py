"""What the live line says while a run works."""

from __future__ import annotations

import threading
import time

from tasks.terminal import Terminal


class Progress:
    """Counts shards and tokens of the step under way."""

    def __init__(self, terminal: Terminal, steps: int) -> None:
        self._terminal = terminal
        self._steps = steps
        self._lock = threading.Lock()
        self._step = 0
        self._shards = 0
        self._done = 0
        self._tokens = 0
        self.began = time.monotonic()

    def step(self, step: int, shards: int) -> None:
        """A step begins."""
        with self._lock:
            self._step, self._shards, self._done, self._tokens = step, shards, 0, 0
            self.began = time.monotonic()
        self.stage("prompts")

    def stage(self, text: str) -> None:
        """What is happening in the step now."""
        self._terminal.doing(f"step {self._step}/{self._steps} · {text}")

    def shard_done(self, tokens: int) -> None:
        """A shard of the step is sampled."""
        with self._lock:
            self._done += 1
            self._tokens += tokens
            text = f"sampling: {self._done}/{self._shards} shards, {self._tokens} tokens"
        self.stage(text)
