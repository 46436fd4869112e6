"""What the live line says while a run works."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.status import Status
from rich.text import Text

from configs.terminal_text import terminal_text
from tasks.reporting.output import drop_output
from tasks.reporting.run_log import LINES
from tasks.reporting.safe_console import SafeConsole
from tasks.results import Metrics

SHOWN = (
    "rollout", "reward_model", "reward", "teacher", "logprob", "values", "update", "critic_update",
    "weight_sync",
)  # fmt: skip
STAGES = {
    "prompts": "drawing prompts",
    "logprob": "computing log-probs",
    "selection": "choosing groups",
    "advantage": "estimating advantages",
    "teacher": "asking the teachers",
    "values": "asking the critic",
    "update": "updating the policy",
    "critic_update": "updating the critic",
    "weight_sync": "loading the new weights into the rollout engines",
    "snapshot": "storing the trainer's state",
}


def untrained(metrics: Mapping[str, float | None]) -> str:
    """Why a step changed nothing by its samples, for people; empty where some token has trained."""
    if metrics.get("train/optimizer_steps") == 0:
        return "no update: no sample was left to train on"
    if metrics.get("train/trained_tokens") == 0:  # older commits do not say
        left_out = (metrics.get("train/correction_left_out") or 0.0) > 0
        cause = "algorithm.correction left all of them out"
        return f"no token trained: {cause if left_out else 'none has a part in the loss'}"
    if metrics.get("train/grad_norm") != 0:
        return ""
    equal = metrics.get("groups/without_variance") == 1
    return f"no token trained: {'the rewards of each group are equal' if equal else 'gradient 0'}"


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
        self._drawn: dict[str, int] = {}  # worker -> tokens that it had drawn at the last look
        self._before: dict[str, int] = {}  # the same when the step began
        self._began: dict[int, float] = {}  # by step
        self._committed = 0.0  # when the last step was

    def step(self, step: int, shards: int) -> None:
        """A step begins."""
        with self._lock:
            self._step, self._shards, self._done, self._tokens = step, shards, 0, 0
            self._before = dict(self._drawn)
            self._began[step] = time.monotonic()
        self.stage("prompts")

    def more(self, step: int, shards: int) -> None:
        """A step samples another round, of so many shards."""
        with self._lock:
            self._shards += shards if step == self._step else 0

    def seconds(self, step: int) -> float:
        """Seconds since a step began or, where steps overlap, since the one before was committed."""
        return time.monotonic() - max(self._began[step], self._committed)

    def stage(self, text: str) -> None:
        """What is happening in the step now."""
        self._terminal.doing(f"step {self._step}/{self._steps} · {text}")

    def attempt(self, step: int, stage: str, shard: int | None) -> None:
        """A stage's call goes out; those of shards are told by what they have drawn."""
        if shard is not None:
            return
        text = STAGES.get(stage, stage)
        if 0 < step == self._step:
            self.stage(text)
        else:  # the first weights, before any step
            self._terminal.doing(text)

    def shard_done(self, tokens: int) -> None:
        """A shard of the step is sampled."""
        with self._lock:
            self._done += 1
            self._tokens += tokens
        self._sampling()

    def drawn(self, tokens: Mapping[str, int]) -> None:
        """Worker -> tokens that its engine has drawn since it was built."""
        with self._lock:
            self._drawn = dict(tokens)
            new = 0
            for worker, count in tokens.items():
                before = self._before.get(worker, 0)
                new += count - before if count >= before else count  # less: the engine is a new one
            self._tokens = max(self._tokens, new)
            sampling = self._step > 0 and self._done < self._shards
        if sampling and self._tokens:
            self._sampling()

    def _sampling(self) -> None:
        self.stage(f"sampling: {self._done}/{self._shards} shards, {self._tokens} tokens")

    @contextlib.contextmanager
    def looking(
        self, tokens: Callable[[], Mapping[str, int]], every: float = 1.0
    ) -> Iterator[None]:
        """During the body, ask for the tokens drawn every second; only where someone can see it."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(every):
                self.drawn(tokens())

        thread = threading.Thread(target=look, name="progress", daemon=True)
        if self._terminal.is_live:
            thread.start()
        try:
            yield
        finally:
            ended.set()

    def replaying(self, step: int, last: int) -> None:
        """The trainer applies a stored step's update again."""
        self._terminal.doing(f"replaying the update of step {step} of {last} from its stored batch")

    def step_done(self, step: int, metrics: Metrics) -> None:
        """The lasting line of a committed step."""
        parts = [
            f"step {step:>{len(str(self._steps))}}/{self._steps}",
            f"reward {metrics.get('reward/mean', float('nan')):.3f}",
            untrained(metrics)
            or (f"loss {metrics['train/loss']:+.4f}" if "train/loss" in metrics else "no update"),
            f"tokens {metrics.get('response/tokens_mean', float('nan')):.0f}",
        ]
        if metrics.get("sampling/rounds", 1.0) > 1:
            parts.append(f"rounds {metrics['sampling/rounds']:.0f}")
        if "train/kl_ref" in metrics:
            parts.append(f"kl {metrics['train/kl_ref']:.4f}")
        if "distillation/reverse_kl" in metrics:
            parts.append(f"from teacher {metrics['distillation/reverse_kl']:.4f}")
        times = ", ".join(
            f"{name} {metrics[f'time/{name}']:.1f}"
            for name in SHOWN
            if metrics.get(f"time/{name}", 0.0) >= 0.05
        )
        parts.append(f"{metrics['time/step']:.1f} s ({times})")
        if metrics["retries"]:
            parts.append(f"retries {metrics['retries']:.0f}")
        self._began.pop(step, None)
        self._committed = time.monotonic()
        self._terminal.say("  ".join(parts))


class Lines(SafeConsole):
    """Standard output; standard error once nobody reads it any more, as after `| head`.

    A run goes on, and what it says is not lost.
    """

    def on_broken_pipe(self) -> None:
        """Rich would end the program."""
        drop_output()
        self.file = sys.stderr
        self.print("Nobody reads standard output any more; what is printed goes here.")


class Terminal:
    """Progress for a person. Without a terminal (a log file, CI) only lasting lines are printed."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Lines(soft_wrap=True)
        self._status: Status | None = None
        self._lock = threading.Lock()
        self._since = time.monotonic()

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Keep the live line on screen during the body; within another such body nothing is new."""
        if not self.console.is_terminal or self.is_live:
            yield
            return
        with self.console.status("starting") as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None

    @property
    def is_live(self) -> bool:
        """Whether a person sees the live line."""
        return self._status is not None

    def doing(self, text: str) -> None:
        """Show what is happening now, in place of what was shown before."""
        with self._lock:
            if self._status is not None:
                self._status.update(Text(terminal_text(text)))

    def say(self, text: str, style: str = "", shown: str | None = None) -> None:
        """Print a line that stays; `shown` in its place on a terminal, and in no log."""
        with self._lock:
            terminal = shown is not None and self.console.is_terminal
            line = terminal_text(shown if terminal and shown is not None else text)
            self.console.print(Text(line, style=style))
        LINES.info("%s", text)

    def facts(self, title: str, lines: dict[str, str]) -> None:
        """Print a title and a block of name: value lines."""
        self.say(title, style="bold")
        width = max(len(name) for name in lines)
        for name, value in lines.items():
            self.say(f"  {name:<{width}}  {value}")
