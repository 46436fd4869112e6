"""What the live line says while a run works."""

from __future__ import annotations

import threading
import time

from tasks.results import Metrics
from tasks.terminal import Terminal

SHOWN = ("rollout", "reward", "logprob", "values", "update", "critic_update", "weight_sync")


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

    def replaying(self, step: int, last: int) -> None:
        """The trainer applies a stored step's update again."""
        self._terminal.doing(f"replaying the update of step {step} of {last} from its stored batch")

    def step_done(self, step: int, metrics: Metrics) -> None:
        """The lasting line of a committed step."""
        parts = [
            f"step {step:>{len(str(self._steps))}}/{self._steps}",
            f"reward {metrics.get('reward/mean', float('nan')):.3f}",
            f"loss {metrics.get('train/loss', float('nan')):+.4f}",
            f"tokens {metrics.get('response/tokens_mean', float('nan')):.0f}",
        ]
        if "train/kl_ref" in metrics:
            parts.append(f"kl {metrics['train/kl_ref']:.4f}")
        times = ", ".join(
            f"{name} {metrics[f'time/{name}']:.1f}"
            for name in SHOWN
            if metrics.get(f"time/{name}", 0.0) >= 0.05
        )
        parts.append(f"{metrics['time/step']:.1f} s ({times})")
        if metrics["retries"]:
            parts.append(f"retries {metrics['retries']:.0f}")
        self._terminal.say("  ".join(parts))
