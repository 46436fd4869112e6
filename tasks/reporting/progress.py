"""Where a run stands, for people: a line for each step, and what goes on between two commits.

By what the run tells, and by looks at its engines now and then, for its screen and for who watches it
from elsewhere.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from configs.terminal_text import bytes_text
from storage.objects.errors import StoreError
from storage.runs.live import Phase, Progress, remove_progress, write_progress
from storage.runs.run_store import RunStore
from tasks.evaluation.summary import sentence
from tasks.reporting.terminal import Terminal, screen
from tasks.run.events import (
    AttemptBegan,
    AttemptEnded,
    EnginesReady,
    EngineStarted,
    Listeners,
    Note,
    RebuiltOtherwise,
    RoundBegan,
    RunBegan,
    RunClosing,
    ShardSampled,
    ShardsScored,
    StepBegan,
    StepCommitted,
    UpdateReplayed,
    VersionEvaluated,
    WeightsPublished,
    WorkersAsked,
)
from tasks.run.machinery import Work

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
    seconds_text = f"{_number(metrics, 'time/step'):.1f} s"

    def line() -> str:
        of = f" ({', '.join(times)})" if times or width is None else ""
        return "  ".join([*head, trained, *more, seconds_text + of, *last])

    shortest = sorted(times, key=lambda text: float(text.split()[1]))
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
    value = metrics.get(name, missing)
    return float("nan") if value is None else value


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


STAGES = {  # of which a call is the whole stage, for people
    "prompts": "drawing prompts",
    "logprob": "log-probs",
    "selection": "choosing groups",
    "advantage": "advantages",
    "teacher": "teachers",
    "values": "values",
    "update": "update",
    "critic_update": "critic update",
    "weight_sync": "weight sync",
    "snapshot": "snapshot",
    "evaluate": "evaluation",
}
SCORING = ("reward", "reward_model")  # stages of which each shard has calls
# Stage -> roles and methods of the engines' calls that say how far it is.
CALLS = {
    "logprob": (("ref", "actor"), "logprobs"),
    "update": (("actor",), "update"),
    "values": (("critic",), "values"),
    "critic_update": (("critic",), "update"),
}
COUNT = re.compile(r"(\d+) of (\d+)$")  # in what an engine reports
BYTES = re.compile(r"\b(\d+) bytes\b")
RATE_WINDOW = 15.0  # seconds over which tokens per second are counted
STEPS = 8  # last ones by which the time left is told


@dataclass(kw_only=True, slots=True)
class _Step:
    """A step that is under way."""

    began: float
    shards: int  # to sample
    sampled: int = 0
    scored: int = 0
    scoring: float | None = None  # since when
    tokens: int = 0
    before: Mapping[str, int] | None = None  # worker -> drawn when it began; None: not seen yet


class ProgressTracker:
    """Hears what a run tells, and sums it up at any moment. Safe in several threads."""

    def __init__(
        self, steps: int, epoch: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """steps: that the run is asked for. epoch: of its lease."""
        self._total, self._epoch, self._clock = steps, epoch, clock
        self._lock = threading.Lock()
        self._doing, self._since = "", clock()
        self._waiting: tuple[str, ...] | None = None  # roles whose engines start; None: workers do
        # Worker -> what its engine's start is at, and when it was first seen.
        self._starts: dict[str, tuple[str, float]] = {}
        self._newest = 0
        self._steps: dict[int, _Step] = {}  # by number, those under way
        # Step and stage -> when the first of its calls that are under way began, and how many are.
        self._calls: dict[tuple[int, str], tuple[float, int]] = {}
        self._nbytes: int | None = None  # of the version that is loaded
        self._work, self._looked = Work(), clock()
        self._shard_ended = self._looked  # the last one that was sampled
        self._drawn: deque[tuple[float, int]] = deque()  # when, tokens of all workers
        self._ends: deque[float] = deque(maxlen=STEPS + 1)  # of the last steps

    def listen(self, listeners: Listeners) -> None:
        """Hear what a run, or who evaluates its versions later, says."""
        listeners.on(WorkersAsked, lambda event: self.start_seen({}))
        listeners.on(EngineStarted, self.engine_started)
        listeners.on(EnginesReady, self.engines_ready)
        listeners.on(RunBegan, self.run_began)
        listeners.on(UpdateReplayed, self.update_replayed)
        listeners.on(StepBegan, self.step_began)
        listeners.on(RoundBegan, self.round_began)
        listeners.on(ShardSampled, self.shard_sampled)
        listeners.on(ShardsScored, self.shards_scored)
        listeners.on(WeightsPublished, self.weights_published)
        listeners.on(AttemptBegan, self.attempt_began)
        listeners.on(AttemptEnded, self.attempt_ended)
        listeners.on(StepCommitted, self.step_committed)

    def doing(self, text: str) -> None:
        """What goes on where no phase of a step does."""
        with self._lock:
            if text != self._doing:
                self._doing, self._since = text, self._clock()

    def engine_started(self, event: EngineStarted) -> None:
        """One less is waited for."""
        self._waiting = event.waiting

    def engines_ready(self, event: EnginesReady) -> None:
        """None starts any more."""
        self.doing("")
        with self._lock:
            self._starts = {}

    def start_seen(self, phases: Mapping[str, str]) -> str:
        """A look at workers and engines that start: in words what they are at.

        phases: by worker, what its engine reports.
        """
        text = self._start()
        starts = {worker: BYTES.sub(_size, phase) for worker, phase in sorted(phases.items())}
        self.doing("Starting engines" if starts else text)
        with self._lock:
            now = self._clock()
            self._starts = {
                worker: (phase, self._starts.get(worker, ("", now))[1])
                for worker, phase in starts.items()
            }
        lines = [f"{worker}: {phase}" for worker, phase in starts.items()]
        return f"Starting engines: {'; '.join(lines)}" if lines else text

    def _start(self) -> str:
        if self._waiting is None:
            return "Starting workers and engines"
        if not self._waiting:
            return "Loading the first weights into the engines that sample"
        return f"Starting engines: {', '.join(self._waiting)}"

    def run_began(self, event: RunBegan) -> None:
        """From here on the steps count."""
        with self._lock:
            self._newest = event.head

    def update_replayed(self, event: UpdateReplayed) -> None:
        """Which one, of how many."""
        self.doing(f"replaying the update of step {event.step} of {event.last} from its batch")

    def step_began(self, event: StepBegan) -> None:
        """Count anew."""
        with self._lock:
            now = self._clock()
            if not self._ends:
                self._ends.append(now)
            self._newest, self._doing = event.step, ""
            before = self._work.tokens if self._looked >= self._shard_ended else None
            self._steps[event.step] = _Step(began=now, shards=event.shards, before=before)

    def round_began(self, event: RoundBegan) -> None:
        """More shards of a step."""
        with self._lock:
            if event.step in self._steps:
                self._steps[event.step].shards += event.shards

    def shard_sampled(self, event: ShardSampled) -> None:
        """One more, of whichever step."""
        with self._lock:
            if event.step in self._steps:
                self._steps[event.step].sampled += 1
                self._steps[event.step].tokens += event.tokens
                self._shard_ended = self._clock()

    def shards_scored(self, event: ShardsScored) -> None:
        """Some more."""
        with self._lock:
            if event.step in self._steps:
                self._steps[event.step].scored += event.shards

    def weights_published(self, event: WeightsPublished) -> None:
        """How much is loaded."""
        with self._lock:
            self._nbytes = event.nbytes

    def attempt_began(self, event: AttemptBegan) -> None:
        """Of a stage's calls, all that are under way count as one phase."""
        attempt = event.attempt
        with self._lock:
            now = self._clock()
            step = self._steps.get(attempt.step)
            if attempt.stage in SCORING and step is not None and step.scoring is None:
                step.scoring = now
            if attempt.stage == "weight_sync":
                self._nbytes = None
            since, calls = self._calls.get((attempt.step, attempt.stage), (now, 0))
            self._calls[attempt.step, attempt.stage] = since, calls + 1

    def attempt_ended(self, event: AttemptEnded) -> None:
        """One less is under way."""
        key = (event.attempt.step, event.attempt.stage)
        with self._lock:
            since, calls = self._calls.pop(key, (0.0, 0))
            if calls > 1:
                self._calls[key] = since, calls - 1

    def step_committed(self, event: StepCommitted) -> None:
        """It is no longer under way."""
        with self._lock:
            self._steps.pop(event.record.step, None)
            self._ends.append(self._clock())
            if event.record.step == self._total:
                self._doing, self._since = "ending the run", self._clock()

    def seen(self, work: Work) -> None:
        """A look at the engines."""
        with self._lock:
            now = self._clock()
            self._work, self._looked = work, now
            for step in self._steps.values():
                step.before = work.tokens if step.before is None else step.before
            self._drawn.append((now, sum(work.tokens.values())))
            while now - self._drawn[0][0] > RATE_WINDOW:
                self._drawn.popleft()

    def progress(self) -> Progress:
        """Now."""
        with self._lock:
            now = self._clock()
            current = min(self._steps, default=self._newest)
            phases = [*self._sampling_and_scoring(now), *self._stages(now)]
            phases.sort(key=lambda phase: -phase.seconds)
            phases += [
                Phase(name=worker, note=phase, seconds=now - since)
                for worker, (phase, since) in self._starts.items()
            ]
            doing = None
            if self._doing:
                doing = Phase(name=self._doing, seconds=now - self._since)
            return Progress(
                epoch=self._epoch,
                step=current,
                steps=self._total,
                doing=doing,
                phases=tuple(phases),
                seconds_left=self._left(now),
            )

    def _sampling_and_scoring(self, now: float) -> list[Phase]:
        phases = []
        for number, step in self._steps.items():
            of = self._of(number)
            if step.sampled < step.shards:
                seconds = now - step.began
                phases.append(
                    Phase(
                        name=f"sampling{of}",
                        done=step.sampled,
                        total=step.shards,
                        unit="shards",
                        note=self._tokens(step, seconds),
                        seconds=seconds,
                    )
                )
            under_way = any((number, stage) in self._calls for stage in SCORING)
            if step.scoring is not None and (under_way or step.scored < step.sampled):
                phases.append(
                    Phase(
                        name=f"scoring{of}",
                        done=step.scored,
                        total=step.shards,
                        unit="shards",
                        seconds=now - step.scoring,
                    )
                )
        return phases

    def _tokens(self, step: _Step, seconds: float) -> str:
        """Drawn for a step so far, and by the second."""
        tokens = step.tokens
        if sum(other.sampled < other.shards for other in self._steps.values()) == 1:
            tokens = max(tokens, self._drawn_since(step.before))
        rate = tokens / max(seconds, 1.0)
        if len(self._drawn) > 1:
            (then, first), (last, count) = self._drawn[0], self._drawn[-1]
            if count > first:
                rate = (count - first) / (last - then)
        return f"{tokens:,} tokens, {rate:,.0f}/s" if tokens else ""

    def _drawn_since(self, before: Mapping[str, int] | None) -> int:
        if before is None:
            return 0
        new = 0
        for worker, count in self._work.tokens.items():
            then = before.get(worker, 0)
            new += count - then if count >= then else count  # less: the engine is a new one
        return new

    def _stages(self, now: float) -> list[Phase]:
        phases = []
        for (number, stage), (since, _) in self._calls.items():
            if stage not in STAGES:
                continue
            done, total = self._counted(stage) if self._looked >= since else (None, None)
            size = self._nbytes if stage == "weight_sync" else None
            phases.append(
                Phase(
                    name=f"{STAGES[stage]}{self._of(number)}",
                    done=done,
                    total=total,
                    unit="micro-batches" if total else "",
                    note=f"loading {bytes_text(size)}" if size else "",
                    seconds=now - since,
                )
            )
        return phases

    def _counted(self, stage: str) -> tuple[int | None, int | None]:
        """How far its engines are, by what the first that says so reported last."""
        roles, method = CALLS.get(stage, ((), ""))
        for call in self._work.calls:
            if call.role in roles and call.method == method and (count := COUNT.search(call.phase)):
                return int(count[1]) - 1, int(count[2])  # the one that is under way is not done
        return None, None

    def _of(self, step: int) -> str:
        """Said of a phase where it is not of the oldest step under way."""
        return "" if step == min(self._steps, default=step) or step <= 0 else f", step {step}"

    def _left(self, now: float) -> float | None:
        """Seconds until the last step, by the last ones; None where none has ended yet."""
        times = [after - before for before, after in pairwise(self._ends)]
        if len(times) > 2:
            times = times[1:]  # the first one compiles, and fills caches
        steps_left = self._total - max(self._newest - len(self._steps), 0)
        if not times or self._total == 0:
            return None
        mean = sum(times) / len(times)
        return max(steps_left * mean - (now - self._ends[-1]), 0.0)


def _size(count: re.Match[str]) -> str:
    return bytes_text(float(count[1]))


LOOK = 1.0  # seconds between looks that somebody sees
STORE = 5.0  # seconds between words to the store
CLOSE = 1.0  # seconds for which the store is waited for
PLAIN = 15.0  # seconds between lines that stay while engines start, where nothing else is seen


class ProgressWatch:
    """Between the first word of a run and its last, in a thread of its own."""

    def __init__(
        self,
        terminal: Terminal,
        tracker: ProgressTracker,
        files: RunStore,
        clock: Callable[[], float] = time.monotonic,
        look: float = LOOK,
    ) -> None:
        """files: the run, whose store is told too."""
        self._terminal, self._tracker, self._files = terminal, tracker, files
        self._clock, self._look = clock, look
        self._ready, self._over = threading.Event(), threading.Event()
        self._starts: Callable[[], Mapping[str, str]] = dict
        self._at_work: Callable[[], Work] | None = None
        self._live = contextlib.ExitStack()
        self._writing = threading.Lock()
        self._begun = False

    def listen(self, listeners: Listeners) -> None:
        """Hear when a run begins and ends."""
        listeners.on(WorkersAsked, self.workers_asked)
        listeners.on(RunBegan, self.run_began)
        listeners.on(EnginesReady, lambda event: self._ready.set())
        listeners.on(RunClosing, self.run_closing)

    def workers_asked(self, event: WorkersAsked) -> None:
        """Look from here on, and show it."""
        self._starts = event.starts
        self._ready.clear()
        self._live.enter_context(self._terminal.live(lambda: screen(self._tracker.progress())))
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._watch, name="progress", daemon=True).start()

    def run_began(self, event: RunBegan) -> None:
        """From here on engines may be at work."""
        self._at_work = event.at_work

    def run_closing(self, event: RunClosing) -> None:
        """Nothing more is said."""
        self._over.set()
        self._live.close()
        leaving = threading.Thread(target=self._leave, name="progress-end", daemon=True)
        leaving.start()
        leaving.join(CLOSE)  # while the lease is held

    def _watch(self) -> None:
        began = last_line = last_write = self._clock()
        last_write -= STORE
        while not self._over.wait(self._look):
            now = self._clock()
            due = now - last_write >= STORE
            if not self._ready.is_set():
                plain = not self._terminal.is_live and now - last_line >= PLAIN
                if plain or due or self._terminal.is_live:
                    starts = self._starts()
                    if self._ready.is_set() or self._over.is_set():
                        continue
                    text = self._tracker.start_seen(starts)
                    if plain:
                        self._terminal.say(f"{text}, for {now - began:.0f} s")
                        last_line = now
            elif self._at_work is not None and (due or self._terminal.is_live):
                self._tracker.seen(self._at_work())
            if due:
                last_write = now
                self._tell()

    def _tell(self) -> None:
        """A store that is away is no matter: who watches sees that nothing is said."""
        with self._writing, contextlib.suppress(StoreError):
            if not self._over.is_set():
                write_progress(self._files, self._tracker.progress())

    def _leave(self) -> None:
        with self._writing, contextlib.suppress(StoreError):
            remove_progress(self._files)
