"""What a model was asked and what it wrote, as an answer on the command line."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from storage.audit.transcripts import (
    WROTE,
    Transcript,
    ending,
    evaluation_transcripts,
    few,
    judged,
    printable,
    transcripts,
    transcripts_under_way,
)
from storage.audit.uncommitted import samples_under_way
from storage.batches.columns import TASK
from storage.batches.refs import BatchRef
from storage.evaluations.results import EvaluationResult, evaluations_of, notes_of
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit, head, read_commit
from storage.runs.origins import numbered, start_of
from storage.runs.run_store import RunStore
from tasks.commands.command import Answer, Request, heading, text
from tasks.commands.lineage import spans

if TYPE_CHECKING:
    from rich.console import RenderableType


def answer(request: Request) -> Answer:
    """Show the samples that were asked for."""
    asked, files = request.arguments, request.files
    if asked.limit < 1:
        raise ValueError(f"--limit {asked.limit} shows nothing. Give it a number from 1.")
    if asked.evaluation is not None:
        return of_evaluation(request)
    step, commit = named_step(files, asked.step)
    try:
        samples = samples_under_way(files, step) if commit is None else commit.refs["samples"]
        if samples is None:
            raise NoSamples(files, asked.step)
        rewards, failed, groups = judged(files, samples)
        numbers = episodes_of(files, samples)
        there = of_task(files, samples, asked.task, f"Step {step}")
        rows = chosen(asked, rewards, failed, groups, numbers, f"Step {step}", there)
        if commit is None:
            found = transcripts_under_way(files, step, samples, rows)
        else:
            found = transcripts(files, commit, rows)
    except ObjectMissing as error:
        raise ValueError(
            f"The batches of step {step} of {files.run} are no longer in the store "
            f"({error}). Name a later step, or set store.keep_steps higher."
        ) from error
    scored = "reward" in samples.names
    state = (
        f"{int(failed.sum())} of which could not be scored" if scored else "none of which is scored"
    )
    if commit is None:
        state += "; the step is not committed"
    shown: list[RenderableType] = [
        heading(f"{len(found)} of {len(rewards)} samples of step {step} of {files.run}, {state}")
    ]
    for one in found:
        shown += told(one, asked.characters, scored)
    return Answer(record=[record(one) for one in found], shown=shown)


class NoSamples(ValueError):
    """The step that was named, or any, has no samples."""

    def __init__(self, files: RunStore, step: int | None) -> None:
        first, last = start_of(files) + 1, head(files) or start_of(files)
        what = "committed step yet, and no samples" if step is None else f"committed step {step}"
        super().__init__(f"Run {files.run} has no {what}. {numbered(first, last)}")


def of_evaluation(request: Request) -> Answer:
    """The same of the samples of an evaluation. Raises ValueError where the run has none such."""
    asked, files = request.arguments, request.files
    result = evaluation_of(files, asked.evaluation)
    rewards, failed, groups = judged(files, result.samples)
    numbers = episodes_of(files, result.samples)
    there = of_task(files, result.samples, asked.task, asked.evaluation)
    rows = chosen(asked, rewards, failed, groups, numbers, asked.evaluation, there)
    found = evaluation_transcripts(files, result, rows)
    shown: list[RenderableType] = [
        heading(
            f"{len(found)} of {len(rewards)} samples of {result.suite} on version "
            f"{asked.evaluation.rpartition('@')[2]} of {files.run}, {int(failed.sum())} of which "
            "could not be scored"
        )
    ]
    for one in found:
        shown += told(one, asked.characters)
    return Answer(record=[record(one) for one in found], shown=shown)


def evaluation_of(files: RunStore, name: str) -> EvaluationResult:
    """The newest evaluation that SUITE@VERSION names. Raises ValueError."""
    suite, _, version = name.rpartition("@")
    if not suite or not version.isdigit():
        raise ValueError(f"--evaluation {name} names none. Write SUITE@VERSION, such as gsm8k@10.")
    found = evaluations_of(files, suite, int(version))
    if found:
        return found[-1]
    there = [f"{one}@{number}" for one, number, _ in notes_of(files).values()]
    hint = f"It has {', '.join(there[:8])}." if there else "It has none: see flows.evaluate."
    raise ValueError(f"Run {files.run} has no evaluation {name}. {hint}")


def named_step(files: RunStore, step: int | None) -> tuple[int, Commit | None]:
    """A step of the run, with its commit if there is one: the last where none is named.

    Without any commit that is the first, which may be under way or have failed. NoSamples for a step
    that cannot have begun.
    """
    first, last = start_of(files) + 1, head(files) or start_of(files)
    number = max(first, last) if step is None else step
    if number < first:
        raise NoSamples(files, step)
    return number, read_commit(files, number) if number <= last else None


def chosen(
    asked: argparse.Namespace,
    rewards: np.ndarray,
    failed: np.ndarray,
    groups: np.ndarray,
    numbers: np.ndarray,
    of: str,
    named: np.ndarray,
) -> list[int]:
    """Rows of the samples that were asked for, at most asked.limit. Raises ValueError for none.

    numbers: [K, N], numbers by which each sample's episode is named; of: whose samples they are;
    named: bool [N], those of the task that was named.
    """
    scored = np.flatnonzero(~failed & named)
    by_reward = scored[np.argsort(-rewards[scored], kind="stable")].tolist()
    if asked.episode is not None:
        rows, what = rows_of_episode(numbers, asked.episode), f"{asked.episode}"
    elif asked.group is not None:
        inside = (groups == asked.group) & named
        rows, what = np.flatnonzero(inside).tolist(), f"of group {asked.group}"
    elif asked.failed:
        rows, what = np.flatnonzero(failed & named).tolist(), "whose scoring failed"
    elif asked.worst:
        rows, what = by_reward[::-1], "with a reward"
    elif asked.best:
        rows, what = by_reward, "with a reward"
    else:
        rows, what = few(by_reward, np.flatnonzero(failed & named).tolist(), asked.limit), ""
    if not rows:
        there = (
            f" Its groups are {groups.min()} to {groups.max()}." if asked.group is not None else ""
        )
        raise ValueError(f"{of} has no sample {what}.{there}")
    return rows[: asked.limit]


def of_task(files: RunStore, ref: BatchRef, task: str | None, of: str) -> np.ndarray:
    """bool [N]: the samples of a task, by its name; all where none is named. ValueError for none."""
    if task is None:
        return np.ones(len(ref), bool)
    names = ref.fetch_list(files.store, TASK) if TASK in ref.names else []
    if task not in names:
        known = ", ".join(sorted(set(map(str, names)))) or "none: its run has one task"
        raise ValueError(f"{of} has no samples of a task {task}; its tasks are {known}.")
    return np.array([name == task for name in names])


def episodes_of(files: RunStore, ref: BatchRef) -> np.ndarray:
    """[K, N]: sample_id of each sample, and with several players that of its episode's player 0."""
    names = [name for name in ("sample_id", "episode_id") if name in ref.names]
    return np.stack([ref.fetch_numpy(files.store, name)[0] for name in names])


def rows_of_episode(numbers: np.ndarray, sample: int) -> list[int]:
    """The rows of all players of the episode that a sample belongs to; [] where there is none.

    numbers: as `episodes_of` gives them.
    """
    there = np.flatnonzero(numbers[0] == sample)
    return np.flatnonzero(np.isin(numbers[-1], numbers[-1][there])).tolist()


def told(found: Transcript, characters: int, scored: bool = True) -> list[RenderableType]:
    """A sample for people. scored: whether its step's samples are."""
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
        text(printable(found.prompt, characters)),
        *(
            line
            for who, part in said
            if who in WROTE
            for line in (text(WROTE[who], "cyan"), text(printable(part, characters)))
        ),
        *(
            line
            for name, value in origin.extras.items()
            if value is not None
            for line in (text(name, "cyan"), text(printable(as_lines(value), characters)))
        ),
    ]


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
