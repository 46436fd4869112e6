"""What a run says while its workers and engines start."""

from __future__ import annotations

import threading
from io import StringIO

from rich.console import Console

from tasks.reporting.start_line import StartLine
from tasks.reporting.terminal import Terminal
from tasks.run.events import EnginesReady, EngineStarted, Listeners, WorkersAsked


class Clock:
    """Ten seconds pass between two looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def listening(terminal: Terminal) -> tuple[Listeners, StartLine]:
    listeners = Listeners()
    line = StartLine(terminal, clock=Clock(), look=0.001)
    line.listen(listeners)
    return listeners, line


def ended() -> bool:
    return not any(thread.name == "start line" for thread in threading.enumerate())


def wait_until_ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "start line":
            thread.join(10)
    assert ended()


def test_without_a_terminal_it_says_now_and_then_what_is_waited_for() -> None:
    out, asked = StringIO(), threading.Semaphore(0)
    listeners, _ = listening(Terminal(Console(file=out, width=400)))
    answers = [
        {},
        {"rollout-0": "vLLM: 3523536 bytes", "train-0": "rank 0 loads the model's files"},
    ]

    def starts() -> dict[str, str]:
        asked.release()
        return answers.pop(0) if answers else {}

    listeners.tell(WorkersAsked(starts=starts))
    for _ in range(3):
        assert asked.acquire(timeout=10)
    listeners.tell(EngineStarted(waiting=("rollout",)))
    for _ in range(3):
        assert asked.acquire(timeout=10)
    listeners.tell(EnginesReady(last=None, snapshot=False))
    wait_until_ended()
    lines = out.getvalue().splitlines()
    assert lines[0] == "Starting workers and engines, for 20 s", "not before it takes a while"
    assert lines[1] == (
        "Starting engines: rollout-0: vLLM: 3.4 MiB; train-0: rank 0 loads the model's files, "
        "for 40 s"
    )
    assert "Starting engines: rollout, for" in lines[-1]


def test_nothing_is_said_of_a_start_that_is_over() -> None:
    out = StringIO()
    listeners, _ = listening(Terminal(Console(file=out)))
    inside, over = threading.Event(), threading.Event()

    def starts() -> dict[str, str]:
        inside.set()
        over.wait(10)
        return {"train-0": "building the model"}

    listeners.tell(WorkersAsked(starts=starts))
    assert inside.wait(10)
    listeners.tell(EnginesReady(last=None, snapshot=False))
    over.set()
    wait_until_ended()
    assert out.getvalue() == ""


def test_on_a_terminal_the_live_line_says_it() -> None:
    terminal = Terminal(Console(file=StringIO(), force_terminal=True, width=200))
    said: list[str] = []
    terminal.doing = said.append  # type: ignore[method-assign]
    listeners, line = listening(terminal)
    enough = threading.Event()

    def starts() -> dict[str, str]:
        if len(said) > 1:
            enough.set()
        return {"train-0": "meeting the other ranks"}

    with terminal.live():
        listeners.tell(WorkersAsked(starts=starts))
        assert enough.wait(10)
        listeners.tell(EnginesReady(last=None, snapshot=False))
        wait_until_ended()
    assert said[0] == "Starting engines: train-0: meeting the other ranks · 10 s"
    assert line.text({}) == "Starting workers and engines"
    line.engine_started(EngineStarted(waiting=()))
    assert line.text({}) == "Loading the first weights into the engines that sample"
