"""What a model was asked and what it wrote, as an answer on the command line."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from storage.audit.transcripts import BRANCH, WROTE, Transcript, ending, few, printable
from tasks.commands import sample_diff
from tasks.commands.command import Answer, Request, heading, text
from tasks.commands.lineage import spans
from tasks.commands.stored_samples import (
    Matches,
    StoredSamples,
    samples_of_evaluation,
    samples_of_step,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


def answer(request: Request) -> Answer:
    """Show the samples that were asked for."""
    asked, files = request.arguments, request.files
    if asked.limit < 1:
        raise ValueError(f"--limit {asked.limit} shows nothing. Give it a number from 1.")
    samples = asked_for(request, asked.evaluation, asked.step)
    if asked.diff is not None:
        suite = (asked.evaluation or "").rpartition("@")[0]
        other = asked_for(request, f"{suite}@{asked.diff}" if suite else None, asked.diff)
        return sample_diff.answer(samples, other, asked.row, asked.limit, asked.characters)
    if asked.row is not None:
        raise ValueError("--row goes with --diff. Name the other step: --diff STEP.")
    rows, matches = chosen(asked, samples)
    found = samples.transcripts(rows)
    state = (
        f"{int(samples.failed.sum())} of which could not be scored"
        if samples.scored
        else "none of which is scored"
    )
    if samples.step and samples.commit is None:
        state += "; the step is not committed"
    if matches is not None:
        state += (
            f"; {len(matches.rows)} have {asked.grep}, {matches.responses} times in answers and "
            f"{matches.prompts} in prompts"
        )
    of = f"{samples.name} of {files.run}"
    shown: list[RenderableType] = [
        heading(f"{len(found)} of {len(samples.ref)} samples of {of}, {state}")
    ]
    for one in found:
        shown += told(one, asked.characters, samples.scored, asked.grep)
    return Answer(record=[record(one) for one in found], shown=shown)


def asked_for(request: Request, evaluation: str | None, step: int | None) -> StoredSamples:
    """The samples of an evaluation, or of a step where none is named. Raises ValueError."""
    if evaluation is not None:
        return samples_of_evaluation(request.files, evaluation)
    return samples_of_step(request.files, step)


def chosen(asked: argparse.Namespace, samples: StoredSamples) -> tuple[list[int], Matches | None]:
    """Rows of the samples that were asked for, at most asked.limit, and where asked.grep was found.

    Raises ValueError for none.
    """
    wanted, narrowed = np.ones(len(samples.ref), bool), []
    if asked.episode is not None:
        wanted[:] = False
        wanted[rows_of_episode(episodes_of(samples), asked.episode)] = True
        narrowed.append(f"{asked.episode}")
    if asked.group is not None:
        wanted &= samples.groups == asked.group
        narrowed.append(f"of group {asked.group}")
    if asked.failed:
        wanted &= samples.failed
        narrowed.append("whose scoring failed")
    if asked.status is not None:
        wanted &= samples.with_status(asked.status)
        narrowed.append(f"of status {asked.status}")
    if asked.reward is not None:
        wanted &= samples.with_reward(*bounds(asked.reward))
        narrowed.append(f"with a reward of {asked.reward}")
    if asked.where is not None:
        name, equals, value = asked.where.partition("=")
        if not name or not equals:
            raise ValueError(f"--where {asked.where} names no value. Write FIELD=VALUE.")
        wanted &= samples.with_field(name, value)
        narrowed.append(f"with {asked.where}")
    matches = None
    if asked.grep is not None:
        matches = samples.containing(pattern_of(asked.grep), np.flatnonzero(wanted).tolist())
        wanted = np.isin(np.arange(len(wanted)), matches.rows)
        narrowed.append(f"with {asked.grep} in prompt or answer")
    rows = in_order(asked, samples, wanted)
    if not rows:
        of = samples.name[0].upper() + samples.name[1:]
        there = (
            f" Its groups are {samples.groups.min()} to {samples.groups.max()}."
            if asked.group is not None
            else ""
        )
        raise ValueError(f"{of} has no sample {', '.join(narrowed) or 'with a reward'}.{there}")
    return rows[: asked.limit], matches


def in_order(asked: argparse.Namespace, samples: StoredSamples, wanted: np.ndarray) -> list[int]:
    """The rows that are wanted, [N] whether each is, in the order in which they are shown."""
    scored = np.flatnonzero(wanted & ~samples.failed)
    by_reward = scored[np.argsort(-samples.rewards[scored], kind="stable")].tolist()
    if asked.worst:
        return by_reward[::-1]
    if asked.best:
        return by_reward
    if asked.failed or asked.group is not None or asked.episode is not None:
        return np.flatnonzero(wanted).tolist()
    return few(by_reward, np.flatnonzero(wanted & samples.failed).tolist(), asked.limit)


def bounds(written: str) -> tuple[float, float]:
    """The rewards LOW:HIGH, of which either may be left out; one number is both. ValueError."""
    low, colon, high = written.partition(":")
    try:
        least = float(low) if low else -math.inf
        return least, (float(high) if high else math.inf) if colon else least
    except ValueError:
        raise ValueError(
            f"--reward {written} names no rewards. Write LOW:HIGH, such as 0.5: or 0:0.9."
        ) from None


def pattern_of(written: str) -> re.Pattern[str]:
    """The regular expression of a search. Raises ValueError."""
    try:
        return re.compile(written)
    except re.error as error:
        raise ValueError(
            f"{written!r} is no regular expression: {error}. Put a backslash before what is meant "
            "as it stands."
        ) from None


def episodes_of(samples: StoredSamples) -> np.ndarray:
    """[K, N]: sample_id of each sample, and with several players that of its episode's player 0."""
    names = [name for name in ("sample_id", "episode_id") if name in samples.ref.names]
    return np.stack([samples.column(name) for name in names])


def rows_of_episode(numbers: np.ndarray, sample: int) -> list[int]:
    """The rows of all players of the episode that a sample belongs to; [] where there is none.

    numbers: as `episodes_of` gives them.
    """
    there = np.flatnonzero(numbers[0] == sample)
    return np.flatnonzero(np.isin(numbers[-1], numbers[-1][there])).tolist()


def told(
    found: Transcript, characters: int, scored: bool = True, searched: str | None = None
) -> list[RenderableType]:
    """A sample for people.

    scored: whether its step's samples are; searched: an expression that is marked in its texts.
    """
    origin = found.origin
    reward = "scoring failed" if origin.reward is None else f"reward {origin.reward:.4g}"
    reward = reward if scored else "not scored"
    scores = ", ".join(f"{name} {value}" for name, value in origin.scores.items())
    trained = "did not train" if origin.advantage is None else f"advantage {origin.advantage:+.3f}"
    facts = (
        f"{reward} ({scores}), {trained}; {origin.tokens} tokens, {ending(origin)}; "
        f"{spans(origin)}; {origin.worker}, attempt {origin.attempt}"
    )
    said = found.parts or (("policy", found.response),)
    seat = "" if origin.player is None else f" (player {origin.player} of {origin.episode})"
    seat += f", played by the opponent {origin.opponent}" if origin.opponent else ""
    return [
        text(""),
        heading(
            f"Sample {origin.sample}{seat}, group {origin.group}, "
            f"row {origin.prompt_row} of the data{origin.task and f', task {origin.task}'}"
        ),
        text(facts, "dim"),
        text("asked", "cyan"),
        marked(found.prompt, characters, searched),
        *(
            line
            for who, part in said
            if who in WROTE
            for line in (
                [text(WROTE[who], "cyan"), marked(part, characters, searched)]
                if part or who != BRANCH
                else [text("began a conversation of its own", "cyan")]
            )
        ),
        *(
            line
            for name, value in origin.extras.items()
            if value is not None
            for line in (text(name, "cyan"), text(printable(as_lines(value), characters)))
        ),
    ]


def marked(said: str, characters: int, searched: str | None) -> RenderableType:
    """A text of a model, with what was searched for marked."""
    from rich.text import Text

    line = Text(printable(said, characters))
    if searched is not None:
        line.highlight_regex(pattern_of(searched), "reverse")
    return line


def as_lines(value: object) -> str:
    """What a reward function logged of a sample, as text: of a list a line for each entry."""
    if isinstance(value, list):
        return "\n".join(map(as_lines, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def record(found: Transcript) -> dict[str, object]:
    """A sample for --json; its texts are whole."""
    texts = {"prompt": found.prompt, "response": found.response}
    parts = [{"author": who, "text": part} for who, part in found.parts]
    return {**asdict(found.origin), **texts, **({"parts": parts} if parts else {})}
