"""Pages whose every number is a field of a stored record: change the field, and that number changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engines.workers.pool import Assignment
from storage.runs.commit_log import Commit
from tasks.run.attempts import Attempt

Record = dict[str, Any]
WITH_DIGIT = re.compile(r"\S*\d\S*")


@dataclass(frozen=True)
class Figure:
    """A field, another value of it, and the texts of the page that have it: (before, after)."""

    fields: dict[tuple[str | int, ...], Any]  # path -> value; several where one alone is refused
    shown: Sequence[tuple[str, str]]  # each with the label that tells which number it is


def figure(*path: str | int, value: Any, shown: Sequence[tuple[str, str]]) -> Figure:
    """One field's."""
    return Figure({path: value}, shown)


def check_figures(
    record: Record,
    page: Callable[[Record], str],
    figures: Sequence[Figure],
    labels: frozenset[str] = frozenset(),
) -> None:
    """Each figure's field changes its texts and nothing else; every word with a digit is some field's.

    labels: words with a digit that name a figure, such as pass@4, and are none.
    """
    before = page(record)
    words = WITH_DIGIT.findall(before)
    traced: set[int] = set()
    for one in figures:
        changed = record
        for path, value in one.fields.items():
            changed = replaced(changed, path, value)
        after, expected = page(changed), before
        for old, new in one.shown:
            assert before.count(old) == 1, (old, before)
            expected = expected.replace(old, new)
        assert after == expected, (one.fields, after)
        pairs = zip(words, WITH_DIGIT.findall(after), strict=True)
        traced |= {place for place, (old, new) in enumerate(pairs) if old != new}
    untraced = [
        word for place, word in enumerate(words) if place not in traced and word not in labels
    ]
    assert not untraced, f"numbers of no field: {untraced}\n{before}"


def replaced(record: Any, path: Sequence[str | int], value: Any) -> Any:
    """The record with another value at a path; the record itself stays as it is."""
    first, rest = path[0], path[1:]
    changed = record.copy()
    changed[first] = replaced(record[first], rest, value) if rest else value
    return changed


def attempts_of(commit: Commit) -> list[Attempt]:
    """As the flow had them that stored them in the commit."""
    records: list[Any] = commit.attempts
    return [
        Attempt(
            step=commit.step,
            stage=one["stage"],
            shard=one["shard"],
            number=one["number"],
            started=one["started"],
            ended=one["started"] + one["seconds"],
            error=one["error"],
            assignment=Assignment(worker=one["worker"]),
        )
        for one in records
    ]
