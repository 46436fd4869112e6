"""What `--check` prints: the findings by what they are about, and the memory plan as tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text

from configs.grpo import GRPOConfig
from configs.terminal_text import terminal_text
from engines.workers.engine import size_of
from tasks.memory.holders import Place
from tasks.reporting.terminal import SafeConsole
from tasks.run.features import Finding

# By group, the checks whose findings it has; what is of no other group is of the last.
GROUPS = {
    "Model": ("model", "self-test"),
    "Data": ("data", "template", "references"),
    "Rewards": ("rewards", "encoder", "teachers"),
    "Rollout": ("rollout",),
    "Training": ("training",),
    "Memory": ("memory",),
    "Storage": ("store",),
    "Tracking": ("tracking",),
    "Servers": ("server",),
    "Decided for this machine": ("settings",),
    "Workers and machine": ("placement", "packages"),
}
BAR = 12  # characters, for all that a place has
SMALL = 0.005  # share of a place below which its parts stand together


def print_checks(config: GRPOConfig, findings: Iterable[Finding], server: str) -> None:
    """Print what was found, wrapped where there is a terminal.

    server: what Prefect's will be.
    """
    console = SafeConsole(soft_wrap=True)
    width = console.width if console.is_terminal else None
    for heading, lines in page(config, [*findings, Finding(check="server", found=server)], width):
        console.print(Text(heading, style="bold yellow" if heading == "Warnings" else "bold"))
        for line in lines:
            console.print(Text(terminal_text(line)))


def page(
    config: GRPOConfig, findings: Sequence[Finding], width: int | None
) -> Iterator[tuple[str, list[str]]]:
    """Headings, each with its lines, of at most `width` characters where that can be."""
    summaries = {"Rollout": _sampling(config), "Training": _training(config)}
    of = {check: group for group, checks in GROUPS.items() for check in checks}
    warnings = [finding for finding in findings if finding.warning or finding.check == "warning"]
    for group in GROUPS:
        its = [
            finding
            for finding in findings
            if finding not in warnings
            and of.get(finding.check, "Workers and machine") == group
            and finding.found
        ]
        lines = list(_wrapped(summaries[group], width)) if group in summaries else []
        for entry in sorted(its, key=lambda finding: finding.place is None):
            lines += _wrapped(entry.found, width)
            if entry.place is not None:
                lines += memory_table(entry.place)
        if lines:
            yield group, lines
    if warnings:
        yield "Warnings", [line for warning in warnings for line in _wrapped(warning.found, width)]


def memory_table(place: Place) -> list[str]:
    """A line for each part of what a place has to hold, the largest first, and what is left."""
    whole = max(place.limit or place.planned, 1)
    parts = sorted(place.taken.items(), key=lambda part: -part[1])
    rows = [part for part in parts if part[1] >= SMALL * whole]
    if small := sum(size for _, size in parts[len(rows) :]):
        rows.append((f"{len(parts) - len(rows)} smaller ones", small))
    if place.limit is not None:
        rest = place.limit - place.planned
        rows.append(("free", rest) if rest >= 0 else ("too much", -rest))
    longest = max((len(name) for name, _ in rows), default=0)
    width = min(longest, 80 - BAR - 24)
    return [
        f"    {textwrap.shorten(name, width, placeholder='…'):<{width}}  {size_of(size):>11}  "
        f"{_bar(size / whole):<{BAR}} {size / whole:>4.0%}"
        for name, size in rows
    ]


def _bar(share: float) -> str:
    return "█" * min(round(BAR * share), BAR)


def _sampling(config: GRPOConfig) -> str:
    rollout = config.rollout
    most = "" if config.same_sizes else "up to "
    return (
        f"{most}{config.samples_per_step} samples a step ({config.prompts_per_step} prompts x "
        f"{most}{config.group_size}) by {rollout.engine}, of up to {rollout.max_new_tokens} new "
        f"tokens at temperature {rollout.temperature:g}"
    )


def _training(config: GRPOConfig) -> str:
    train, algorithm = config.train, config.algorithm
    adapter = "" if config.lora is None else f", adapter of rank {config.lora.rank}"
    minis = "1 mini-batch" if train.mini_batches == 1 else f"{train.mini_batches} mini-batches"
    return (
        f"{config.steps} steps: advantages {algorithm.advantage.kind}, loss {algorithm.loss.kind}, "
        f"learning rate {train.learning_rate:g}, {minis} in micro-batches of up to "
        f"{train.micro_batch_tokens} tokens{adapter}"
    )


def _wrapped(text: str, width: int | None) -> Iterator[str]:
    if width is None:
        yield f"  {text}"
        return
    yield from textwrap.wrap(
        text,
        max(width, 20),
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
