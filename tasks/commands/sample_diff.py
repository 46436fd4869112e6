"""What two policy versions made of the same rows of the data, word by word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from storage.audit.samples import Transcript, printable
from tasks.commands.command import Answer, heading, text
from tasks.commands.lineage import spans
from tasks.commands.stored_samples import StoredSamples

if TYPE_CHECKING:
    from rich.console import RenderableType

WORDS = re.compile(r"\w+|\s+|[^\w\s]")
LINES = re.compile(r".*\n|.+")
MOST_WORDS = 4000  # of both texts; longer ones are compared line by line
STYLES = {"same": "", "removed": "red", "added": "green"}
FORMS = {"same": "{}", "removed": "[-{}-]", "added": "{{+{}+}}"}  # as git diff --word-diff has them

Change = Literal["same", "removed", "added"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A sample of each of two versions, of the same row of the data."""

    row: int  # of the data
    before: float | None  # mean reward of the row's samples in the first; None: none is scored
    after: float | None
    first: int  # row of the samples of the first
    second: int


def answer(
    first: StoredSamples, second: StoredSamples, row: int | None, limit: int, characters: int
) -> Answer:
    """The samples of a row of the data side by side, or of every row that both have.

    Raises ValueError where they have none in common, or are removed.
    """
    pairs = pairs_of(first, second, row)[:limit]
    befores = first.transcripts([one.first for one in pairs])
    afters = second.transcripts([one.second for one in pairs])
    named = f"{first.name} and {second.name} of {first.files.run}"
    shown: list[RenderableType] = [heading(f"{len(pairs)} pairs of samples of {named}")]
    records = []
    for pair, before, after in zip(pairs, befores, afters, strict=True):
        changes = list(changes_of(before.response, after.response))
        shown += _told(pair, before, after, characters)
        records.append({**asdict(pair), "first": _record(before), "second": _record(after)})
        records[-1]["changes"] = changes
    return Answer(record=records, shown=shown)


def pairs_of(first: StoredSamples, second: StoredSamples, row: int | None) -> list[Pair]:
    """Samples of the same rows of the data, the k-th with the k-th of each row.

    The row whose mean reward changed most comes first. Raises ValueError for none.
    """
    drawn = [one.column("prompt_row") for one in (first, second)]
    common = np.intersect1d(drawn[0], drawn[1]) if row is None else np.array([row])
    for samples, rows in zip((first, second), drawn, strict=True):
        if row is not None and row not in rows:
            some = ", ".join(map(str, np.unique(rows)[:8].tolist()))
            raise ValueError(
                f"Row {row} of the data has no sample in {samples.name}. It has samples of rows "
                f"{some}…; refrain lineage {first.files.run} --prompt {row} names the steps that "
                "drew the row."
            )
    if not len(common):
        raise ValueError(
            f"No row of the data has samples in {first.name} and in {second.name}. Evaluations ask "
            "each version the same: refrain samples RUN --evaluation SUITE@VERSION --diff VERSION."
        )
    found = []
    for one in common.tolist():
        places = [np.flatnonzero(rows == one) for rows in drawn]
        before, after = (
            _mean(samples, at) for samples, at in zip((first, second), places, strict=True)
        )
        found += [
            Pair(row=one, before=before, after=after, first=int(a), second=int(b))
            for a, b in zip(*places, strict=False)
        ]
    return sorted(found, key=lambda pair: -abs((pair.after or 0.0) - (pair.before or 0.0)))


def _mean(samples: StoredSamples, rows: np.ndarray) -> float | None:
    scored = samples.rewards[rows][~samples.failed[rows]]
    return float(scored.mean()) if len(scored) else None


def changes_of(before: str, after: str) -> Iterator[tuple[Change, str]]:
    """How one text becomes the other: what is the same, removed and added, in order."""
    units = [WORDS.findall(one) for one in (before, after)]
    if sum(map(len, units)) > MOST_WORDS:
        units = [LINES.findall(one) for one in (before, after)]
    a, b = units
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            yield "same", "".join(a[i:j])
            continue
        if i < j:
            yield "removed", "".join(a[i:j])
        if k < m:
            yield "added", "".join(b[k:m])


def _told(
    pair: Pair, before: Transcript, after: Transcript, characters: int
) -> list[RenderableType]:
    from rich.text import Text

    line = Text()
    cut = [printable(one.response, characters) for one in (before, after)]
    for change, part in changes_of(*cut):
        line.append(FORMS[change].format(part), STYLES[change])
    means = " to ".join(
        "none" if one is None else f"{one:.4g}" for one in (pair.before, pair.after)
    )
    return [
        text(""),
        heading(f"Row {pair.row} of the data, mean reward {means}"),
        *(
            text(
                f"{sign} sample {one.origin.sample}, "
                f"{'no reward' if one.origin.reward is None else f'reward {one.origin.reward:.4g}'}, "
                f"{one.origin.tokens} tokens, {spans(one.origin)}",
                STYLES[change],
            )
            for sign, one, change in (("-", before, "removed"), ("+", after, "added"))
        ),
        text("asked", "cyan"),
        text(printable(before.prompt, characters)),
        text("wrote", "cyan"),
        line,
    ]


def _record(found: Transcript) -> dict[str, object]:
    return {**asdict(found.origin), "prompt": found.prompt, "response": found.response}
