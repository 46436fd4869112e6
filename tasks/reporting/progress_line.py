"""What a run says on a terminal: a line that stays for each step, and a live one while it works."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from tasks.evaluation.summary import sentence
from tasks.reporting.terminal import Terminal
from tasks.run.events import (
    AttemptBegan,
    Listeners,
    Note,
    RebuiltOtherwise,
    RoundBegan,
    RunBegan,
    RunClosing,
    RunEnded,
    ShardSampled,
    StepBegan,
    StepCommitted,
    UpdateReplayed,
    VersionEvaluated,
    WorkersAsked,
)

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


class ProgressLine:
    """What a run says on the terminal. Counts shards and tokens of the step under way."""

    def __init__(self, terminal: Terminal, steps: int) -> None:
        """`steps`: that the run is asked for."""
        self._terminal = terminal
        self._steps = steps
        self._live, self._looking = contextlib.ExitStack(), contextlib.ExitStack()
        self._lock = threading.Lock()
        self._step = 0
        self._shards = 0
        self._done = 0
        self._tokens = 0
        self._drawn: dict[str, int] = {}  # worker -> tokens that it had drawn at the last look
        self._before: dict[str, int] = {}  # the same when the step began

    def listen(self, listeners: Listeners) -> None:
        """Hear what a run, or who evaluates its versions later, says."""
        listeners.on(Note, self.note)
        listeners.on(WorkersAsked, self.workers_asked)
        listeners.on(RunBegan, self.run_began)
        listeners.on(StepBegan, self.step_began)
        listeners.on(RoundBegan, self.round_began)
        listeners.on(AttemptBegan, self.attempt_began)
        listeners.on(ShardSampled, self.shard_sampled)
        listeners.on(UpdateReplayed, self.update_replayed)
        listeners.on(RebuiltOtherwise, self.rebuilt_otherwise)
        listeners.on(StepCommitted, self.step_committed)
        listeners.on(VersionEvaluated, self.version_evaluated)
        listeners.on(RunEnded, lambda event: self._looking.close())
        listeners.on(RunClosing, lambda event: self._live.close())

    def note(self, event: Note) -> None:
        """A line that stays."""
        self._terminal.say(event.text, style="yellow" if event.warning else "")

    def workers_asked(self, event: WorkersAsked) -> None:
        """From here on there is a live line."""
        self._live.enter_context(self._terminal.live())

    def run_began(self, event: RunBegan) -> None:
        """From here on tokens are counted while they are drawn."""
        self._looking.enter_context(self.looking(event.drawn_tokens))

    def step_began(self, event: StepBegan) -> None:
        """Count anew."""
        with self._lock:
            self._step, self._shards, self._done, self._tokens = event.step, event.shards, 0, 0
            self._before = dict(self._drawn)
        self.stage("prompts")

    def round_began(self, event: RoundBegan) -> None:
        """More shards of the step that is shown."""
        with self._lock:
            self._shards += event.shards if event.step == self._step else 0

    def stage(self, text: str) -> None:
        """What is happening in the step now."""
        self._terminal.doing(f"step {self._step}/{self._steps} · {text}")

    def attempt_began(self, event: AttemptBegan) -> None:
        """Calls of shards are told by what they have drawn."""
        attempt = event.attempt
        if attempt.shard is not None:
            return
        text = STAGES.get(attempt.stage, attempt.stage)
        if 0 < attempt.step == self._step:
            self.stage(text)
        else:  # the first weights, before any step
            self._terminal.doing(text)

    def shard_sampled(self, event: ShardSampled) -> None:
        """One more, of whichever step."""
        with self._lock:
            self._done += 1
            self._tokens += event.tokens
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

    def update_replayed(self, event: UpdateReplayed) -> None:
        """Which one, of how many."""
        self._terminal.doing(
            f"replaying the update of step {event.step} of {event.last} from its stored batch"
        )

    def rebuilt_otherwise(self, event: RebuiltOtherwise) -> None:
        """Once, as a line that stays."""
        self._terminal.say(
            f"The stored updates give other weights here than version {event.version} has, by "
            f"rounding (in {event.tensors} tensors; another kind of CPU or GPU adds in another "
            "order). Its published weights are taken, and the run goes on from them."
        )

    def version_evaluated(self, event: VersionEvaluated) -> None:
        """The result in a line."""
        self._terminal.say(sentence(event.result.suite, event.version, event.result.metrics))

    def step_committed(self, event: StepCommitted) -> None:
        """The lasting line of a committed step."""
        step, metrics = event.record.step, event.metrics
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
        self._terminal.say("  ".join(parts))
