"""The bottom of a terminal of 80 columns, and the lines above it, as a terminal shows them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from io import StringIO
from typing import Any

import pyte
import pytest
from rich.console import Console

from storage.runs.live import Phase, Progress
from tasks.reporting.progress import step_line
from tasks.reporting.terminal import Terminal, aged, duration, headline, plain, screen

BUSY = Progress(
    epoch=1,
    step=12,
    steps=2000,
    phases=(
        Phase(
            name="sampling, step 13",
            done=12,
            total=64,
            unit="shards",
            note="123,456 tokens, 3,402/s",
            seconds=75,
        ),
        Phase(name="scoring", done=3, total=64, unit="shards", seconds=4),
        Phase(name="update", done=3, total=8, unit="micro-batches", seconds=31),
        Phase(name="weight sync", note="loading 14.2 GiB", seconds=3),
    ),
    seconds_left=7 * 3600 + 260,
)


def shown(*lines: Any, columns: int = 80) -> list[str]:
    """What a terminal of so many columns shows of what rich prints."""
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=columns, color_system="256")
    for line in lines:
        console.print(line)
    emulated = pyte.Screen(columns, 24)
    pyte.Stream(emulated).feed(out.getvalue().replace("\n", "\r\n"))
    return [line.rstrip() for line in emulated.display if line.strip()]


def test_each_phase_has_a_line_of_80_columns() -> None:
    lines = shown(screen(BUSY))
    assert lines[0] == "step 12/2000 · 7 h 4 min left"
    assert len(lines) == 1 + len(BUSY.phases)
    names = ["sampling, step 13", "scoring", "update", "weight sync"]
    for line, name in zip(lines[1:], names, strict=True):
        assert line.startswith(f"  {name} ")
    assert lines[1].endswith(" 1 min 15 s 12/64 shards, 123,456 tokens, 3,402…")
    assert lines[3].endswith(" 31 s       3/8 micro-batches")
    assert lines[3].count("━") == 11, "and a half"
    assert lines[4].endswith(" 3 s        loading 14.2 GiB")


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_no_line_is_wrapped_at_any_width(columns: int) -> None:
    told = BUSY.model_copy(update={"doing": Phase(name="Starting engines: " + "x" * 300)})
    assert len(shown(screen(told), columns=columns)) == 1 + len(BUSY.phases)


def test_of_many_phases_the_oldest_are_shown() -> None:
    many = tuple(Phase(name=f"phase {number}") for number in range(30))
    lines = shown(screen(Progress(epoch=1, phases=many)))
    assert [line.split() for line in lines] == [
        ["starting"],
        *(["phase", str(number), "0", "s"] for number in range(8)),
    ]


def test_control_characters_of_a_worker_are_not_obeyed() -> None:
    told = Progress(epoch=1, doing=Phase(name="Starting engines: a\x1b[2Jb", seconds=3))
    assert shown(screen(told)) == [r"Starting engines: a\x1b[2Jb · 3 s"]


def test_what_is_told_of_the_past_goes_on() -> None:
    later = aged(BUSY, 60.0)
    assert [phase.seconds for phase in later.phases] == [135, 64, 91, 63]
    assert headline(later) == "step 12/2000 · 7 h 3 min left"
    assert aged(BUSY, 1e6).seconds_left == 0
    assert plain(BUSY).startswith(
        "step 12/2000 · 7 h 4 min left · sampling, step 13 12/64 shards, 123,456 tokens, 3,402/s, "
        "1 min 15 s · scoring 3/64 shards, 4 s"
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.9, "0 s"), (61, "1 min 1 s"), (3599, "59 min"), (7265, "2 h 1 min"), (90000, "1 d 1 h")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


METRICS: dict[str, float | None] = {
    "reward/mean": 0.513,
    "train/loss": -0.0012,
    "response/tokens_mean": 1312.0,
    "time/step": 123.4,
    "retries": 0.0,
    **{
        f"time/{stage}": 10.0 + number
        for number, stage in enumerate(["rollout", "reward", "logprob", "update", "weight_sync"])
    },
}
FLOWS: dict[str, dict[str, float | None]] = {
    "grpo": {},
    "ppo": {"time/values": 3.0, "time/critic_update": 9.0, "train/kl_ref": 0.0123},
    "dapo": {"sampling/rounds": 3.0, "retries": 2.0},
    "tree": {"train/kl_ref": 0.0123, "response/tokens_mean": 31.0},
    "distill": {"distillation/reverse_kl": 0.4312, "time/teacher": 44.0, "train/kl_ref": 0.01},
    "srpo": {"train/optimizer_steps": 0.0},
    "equal": {"train/grad_norm": 0.0, "groups/without_variance": 1.0, "train/kl_ref": 0.01},
    "nothing": {"reward/mean": None, "train/loss": None, "retries": 12.0},
}


@pytest.mark.parametrize("flow", FLOWS)
def test_the_line_of_a_step_fits_80_columns_and_keeps_what_matters(flow: str) -> None:
    metrics = METRICS | FLOWS[flow]
    line = step_line(812, 2000, metrics, 80)
    assert len(line) <= 80
    assert line.startswith("step  812/2000  reward ")
    assert "123.4 s" in line
    assert any(word in line for word in ("loss", "no update", "no token trained"))
    wide = step_line(812, 2000, metrics, 300)
    assert wide == step_line(812, 2000, metrics), "all that there is, where there is room"
    assert len(wide) > 100
    assert all(part.partition(" (")[0] in wide for part in line.split("  "))


def test_the_longest_times_stay() -> None:
    assert step_line(1, 9, METRICS, 80) == (
        "step 1/9  reward 0.513  loss -0.0012  tokens 1312  123.4 s (weight_sync 14.0)"
    )


def emulated(out: StringIO, columns: int = 80) -> tuple[list[str], bool]:
    """What is on the screen, and whether the cursor is seen."""
    terminal = pyte.Screen(columns, 24)
    pyte.Stream(terminal).feed(out.getvalue().replace("\r\n", "\n").replace("\n", "\r\n"))
    return [line.rstrip() for line in terminal.display if line.strip()], not terminal.cursor.hidden


def live_terminal(out: StringIO) -> Terminal:
    return Terminal(Console(file=out, force_terminal=True, width=80, soft_wrap=True))


def seen_soon(seen: threading.Event) -> Callable[[], Any]:
    """What is shown, and `seen` once it was asked for twice."""
    looks = itertools.count(1)

    def show() -> Any:
        if next(looks) > 2:
            seen.set()
        return screen(BUSY)

    return show


def test_lines_that_stay_are_above_the_live_ones_which_leave_nothing() -> None:
    out, seen = StringIO(), threading.Event()
    terminal = live_terminal(out)
    with terminal.live(seen_soon(seen)):
        assert terminal.is_live
        assert seen.wait(10)
        terminal.say("a listener's words")
        lines, cursor = emulated(out)
        assert lines[0] == "a listener's words"
        assert lines[1:] == shown(screen(BUSY))
        assert not cursor
        with terminal.live(lambda: "another"):
            assert terminal.is_live
        assert terminal.is_live
    assert not terminal.is_live
    assert emulated(out) == (["a listener's words"], True)


def test_the_live_lines_can_be_ended_before_their_body() -> None:
    out = StringIO()
    terminal = live_terminal(out)
    with terminal.live(lambda: screen(BUSY)):
        terminal.end_live()
        terminal.say("Stopped.")
        assert emulated(out) == (["Stopped."], True)
    assert emulated(out) == (["Stopped."], True)


@pytest.mark.parametrize("terminal", ["xterm-256color", "dumb"])
def test_no_control_character_goes_where_there_is_no_terminal(
    terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = StringIO()
    monkeypatch.setenv("TERM", terminal)
    said = Terminal(Console(file=out, force_terminal=terminal == "dumb", width=80))
    with said.live(lambda: screen(BUSY)):
        said.say("step 1/9", style="red")
    assert out.getvalue() == "step 1/9\n"
