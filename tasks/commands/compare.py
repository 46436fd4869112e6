"""What changed between two runs, as an answer on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from pydantic import JsonValue

from configs.overrides import ConfigError
from storage.audit.comparison import Comparison, FirstStep, compare, matched
from storage.evaluations.results import newest_evaluations
from storage.objects.errors import ObjectMissing
from storage.runs.run_store import RunStore
from tasks.commands.command import Answer, Request, find_run, heading, table, text
from tasks.commands.evaluate import compared_table
from tasks.evaluation.summary import Compared, tested

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = (
    "reward/mean", "train/loss", "train/kl_ref", "train/entropy", "response/tokens_mean", "time/step",
    "cost/so_far/device_hours", "cost/so_far/money",
)  # fmt: skip
LONGEST = 60  # characters of a setting's value


def answer(request: Request) -> Answer:
    """Compare the runs that were named."""
    files, asked = request.files, request.arguments
    other = find_run(files.store, asked.other)
    found = compare(files, other)
    unknown = [name for name in asked.of if name not in found.curves]
    if unknown:
        raise ConfigError(
            f"--of {unknown[0]}: the runs have no such metric in common. They have "
            f"{', '.join(sorted(found.curves))}."
        )
    names = (files.run, other.run)
    shown = [heading(f"{names[0]} (first) and {names[1]} (second)"), *_differs(found, names)]
    shown += [heading("Curves"), _curves(found), *(_by_step(found, name) for name in asked.of)]
    tests = tests_of(files, other)
    if found.evaluations:
        shown += [heading("Evaluations"), _evaluations(found)]
    if tests:
        shown += [heading(f"{other.run} less {files.run}, prompt by prompt")]
        shown += compared_table(tests, files.run)
    record = {"runs": names, **asdict(found), "tests": [asdict(one) for one in tests]}
    return Answer(record=record, shown=shown, good=same(found))


def tests_of(first: RunStore, second: RunStore) -> list[Compared]:
    """The second run less the first, prompt by prompt, where both have a suite on one version.

    Not of evaluations whose samples a person has removed.
    """
    results = (list(newest_evaluations(run).values()) for run in (first, second))
    tests = []
    for one, other in matched(*results):
        try:
            found = tested(first.store, other, one)
        except ObjectMissing:
            continue
        if found is not None:
            tests.append(
                Compared(suite=one.suite, version=one.version, against=one.version, found=found)
            )
    return tests


def same(found: Comparison) -> bool:
    """Whether the runs did the same, as far as both went."""
    return found.differs is None


def _differs(found: Comparison, names: tuple[str, str]) -> list[RenderableType]:
    shown: list[RenderableType] = [text(_first(found.differs, found.steps))]
    for what, differing in (
        ("settings", found.settings),
        ("code", found.code),
        ("data", found.data),
    ):
        if not differing:
            shown.append(text(f"No difference: {what}."))
            continue
        made = table(what, "first", "second")
        for one in differing:
            made.add_row(text(one.name), text(_short(one.first)), text(_short(one.second)))
        shown.append(made)
    return shown


def _first(differs: FirstStep | None, steps: tuple[int, int]) -> str:
    if differs is None:
        return f"No step differs: both made the same up to step {min(steps)}."
    unread = ""
    if differs.unread:
        unread = f" No longer in the store, so not compared: {', '.join(differs.unread)}."
    if not differs.parts:
        return f"The first step that differs is {differs.step}, by its metrics.{unread}"
    first, *rest = differs.parts
    then = f"; what follows from that: {', '.join(rest)}" if rest else ""
    return f"The first step that differs is {differs.step}, in its {first}{then}.{unread}"


def _short(value: JsonValue) -> str:
    said = value if isinstance(value, str) else json.dumps(value)
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"


def _curves(found: Comparison) -> RenderableType:
    made = table(
        "metric", "steps", "first", "second", "difference", "last first", "last second",
        right=("steps", "first", "second", "difference", "last first", "last second"),
    )  # fmt: skip
    for name in SHOWN:
        rows = found.curves.get(name, [])
        if not rows:
            continue
        a, b = (sum(row[n] for row in rows) / len(rows) for n in (1, 2))
        numbers = (a, b, b - a, rows[-1][1], rows[-1][2])
        made.add_row(name, str(len(rows)), *(f"{number:.5g}" for number in numbers))
    return made


def _by_step(found: Comparison, name: str) -> RenderableType:
    made = table(name, "first", "second", "difference", right=("first", "second", "difference"))
    for step, a, b in found.curves[name]:
        made.add_row(str(step), f"{a:.6g}", f"{b:.6g}", f"{b - a:+.6g}")
    return made


def _evaluations(found: Comparison) -> RenderableType:
    numbers = ("version", "first", "second", "difference")
    made = table("suite", "metric", *numbers, right=numbers)
    for one in found.evaluations:
        first, second = (
            f"{value:.4g}" + ("" if bounds is None else f" [{bounds[0]:.3g}, {bounds[1]:.3g}]")
            for value, bounds in zip((one.first, one.second), one.intervals, strict=True)
        )
        made.add_row(
            one.suite, one.metric, str(one.version), first, second, f"{one.second - one.first:+.4g}"
        )
    return made
