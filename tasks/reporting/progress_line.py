"""The lines of a run that stay: one for each step, and what it has to say besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tasks.evaluation.summary import sentence
from tasks.reporting.terminal import Terminal
from tasks.run.events import (
    Listeners,
    Note,
    RebuiltOtherwise,
    StepCommitted,
    VersionEvaluated,
)

SHOWN = (
    "rollout", "reward_model", "reward", "teacher", "logprob", "values", "update", "critic_update",
    "weight_sync",
)  # fmt: skip


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


def step_line(
    step: int, steps: int, metrics: Mapping[str, float | None], width: int | None = None
) -> str:
    """A committed step in a line, of `width` characters if that is possible; None: of all there is.

    What people look for first is left out last.
    """
    head = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"reward {_number(metrics, 'reward/mean'):.3f}",
    ]
    trained = untrained(metrics) or (
        f"loss {_number(metrics, 'train/loss'):+.4f}" if "train/loss" in metrics else "no update"
    )
    more = list(_more(metrics))
    times = [
        f"{name} {seconds:.1f}"
        for name in SHOWN
        if (seconds := metrics.get(f"time/{name}") or 0.0) >= 0.05
    ]
    retries = _number(metrics, "retries", 0.0)
    last = [f"retries {retries:.0f}"] if retries else []
    taken = f"{_number(metrics, 'time/step'):.1f} s"

    def line() -> str:
        of = f" ({', '.join(times)})" if times or width is None else ""
        return "  ".join([*head, trained, *more, taken + of, *last])

    shortest = sorted(times, key=lambda one: float(one.split()[1]))
    while width is not None and len(line()) > width and (shortest or more):
        if shortest:
            times.remove(shortest.pop(0))
        else:
            more.pop()
    if width is not None and len(line()) > width:
        trained = trained.partition(":")[0]
    return line()


def _more(metrics: Mapping[str, float | None]) -> Iterator[str]:
    """What is left out where there is no room, the last one first."""
    yield f"tokens {_number(metrics, 'response/tokens_mean'):.0f}"
    if (rounds := _number(metrics, "sampling/rounds", 1.0)) > 1:
        yield f"rounds {rounds:.0f}"
    if "train/kl_ref" in metrics:
        yield f"kl {_number(metrics, 'train/kl_ref'):.4f}"
    if "distillation/reverse_kl" in metrics:
        yield f"from teacher {_number(metrics, 'distillation/reverse_kl'):.4f}"


def _number(metrics: Mapping[str, float | None], name: str, missing: float = float("nan")) -> float:
    """A metric; not a number where a stored one was none."""
    found = metrics.get(name, missing)
    return float("nan") if found is None else found


class ProgressLine:
    """What a run says on the terminal, line by line."""

    def __init__(self, terminal: Terminal, steps: int) -> None:
        """`steps`: that the run is asked for."""
        self._terminal = terminal
        self._steps = steps

    def listen(self, listeners: Listeners) -> None:
        """Hear what a run, or who evaluates its versions later, says."""
        listeners.on(Note, self.note)
        listeners.on(RebuiltOtherwise, self.rebuilt_otherwise)
        listeners.on(StepCommitted, self.step_committed)
        listeners.on(VersionEvaluated, self.version_evaluated)

    def note(self, event: Note) -> None:
        """A line that stays."""
        self._terminal.say(event.text, style="yellow" if event.warning else "")

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
        narrow = step_line(step, self._steps, metrics, self._terminal.width)
        self._terminal.say(step_line(step, self._steps, metrics), shown=narrow)
