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
    files, arguments = request.files, request.arguments
    other = find_run(files.store, arguments.other)
    comparison = compare(files, other)
    unknown = [name for name in arguments.of if name not in comparison.curves]
    if unknown:
        raise ConfigError(
            f"--of {unknown[0]}: the runs have no such metric in common. They have "
            f"{', '.join(sorted(comparison.curves))}."
        )
    names = (files.run, other.run)
    lines = [heading(f"{names[0]} (first) and {names[1]} (second)"), *_differs(comparison, names)]
    lines += [
        heading("Curves"),
        _curves(comparison),
        *(_by_step(comparison, name) for name in arguments.of),
    ]
    tests = tests_of(files, other)
    if comparison.evaluations:
        lines += [heading("Evaluations"), _evaluations(comparison)]
    if tests:
        lines += [heading(f"{other.run} less {files.run}, prompt by prompt")]
        lines += compared_table(tests, files.run)
    record = {"runs": names, **asdict(comparison), "tests": [asdict(test) for test in tests]}
    return Answer(record=record, shown=lines, good=same(comparison))


def tests_of(first: RunStore, second: RunStore) -> list[Compared]:
    """The second run less the first, prompt by prompt, where both have a suite on one version.

    Not of evaluations whose samples a person has removed.
    """
    results = (list(newest_evaluations(run).values()) for run in (first, second))
    tests = []
    for result, other in matched(*results):
        try:
            test = tested(first.store, other, result)
        except ObjectMissing:
            continue
        if test is not None:
            tests.append(
                Compared(
                    suite=result.suite, version=result.version, against=result.version, found=test
                )
            )
    return tests


def same(comparison: Comparison) -> bool:
    """Whether the runs did the same, as far as both went."""
    return comparison.differs is None


def _differs(comparison: Comparison, names: tuple[str, str]) -> list[RenderableType]:
    lines: list[RenderableType] = [text(_first(comparison.differs, comparison.steps))]
    for what, differing in (
        ("settings", comparison.settings),
        ("code", comparison.code),
        ("data", comparison.data),
    ):
        if not differing:
            lines.append(text(f"No difference: {what}."))
            continue
        rows = table(what, "first", "second")
        for difference in differing:
            rows.add_row(
                text(difference.name),
                text(_short(difference.first)),
                text(_short(difference.second)),
            )
        lines.append(rows)
    return lines


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
    line = value if isinstance(value, str) else json.dumps(value)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _curves(comparison: Comparison) -> RenderableType:
    curves = table(
        "metric", "steps", "first", "second", "difference", "last first", "last second",
        right=("steps", "first", "second", "difference", "last first", "last second"),
    )  # fmt: skip
    for name in SHOWN:
        rows = comparison.curves.get(name, [])
        if not rows:
            continue
        a, b = (sum(row[n] for row in rows) / len(rows) for n in (1, 2))
        numbers = (a, b, b - a, rows[-1][1], rows[-1][2])
        curves.add_row(name, str(len(rows)), *(f"{number:.5g}" for number in numbers))
    return curves


def _by_step(comparison: Comparison, name: str) -> RenderableType:
    rows = table(name, "first", "second", "difference", right=("first", "second", "difference"))
    for step, a, b in comparison.curves[name]:
        rows.add_row(str(step), f"{a:.6g}", f"{b:.6g}", f"{b - a:+.6g}")
    return rows


def _evaluations(comparison: Comparison) -> RenderableType:
    numbers = ("version", "first", "second", "difference")
    rows = table("suite", "metric", *numbers, right=numbers)
    for evaluation in comparison.evaluations:
        first, second = (
            f"{value:.4g}" + ("" if bounds is None else f" [{bounds[0]:.3g}, {bounds[1]:.3g}]")
            for value, bounds in zip(
                (evaluation.first, evaluation.second), evaluation.intervals, strict=True
            )
        )
        rows.add_row(
            evaluation.suite,
            evaluation.metric,
            str(evaluation.version),
            first,
            second,
            f"{evaluation.second - evaluation.first:+.4g}",
        )
    return rows
