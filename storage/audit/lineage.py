"""From a policy version to the samples that made it, and from a sample or a prompt to the versions.

Everything is read from commits and from columns of the batches that they name, across the border to
the runs that a run was forked from. Batches that retention removed are said to be so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np

from storage.batches.columns import EXTRA, SCORE
from storage.batches.refs import BatchRef
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit, head, read_commit
from storage.runs.origins import origin_of, parent_of, start_of
from storage.runs.run_store import RunStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Response tokens drawn under one policy version."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrigin:
    """One completion: where it came from, what it was worth, what became of it."""

    run: str
    step: int
    sample: int  # sample_id
    group: int
    prompt_row: int  # of the dataset
    worker: str
    attempt: int
    spans: tuple[Span, ...]
    weights_digest: str  # of the weights that the engine held at the sample's end
    tokens: int  # of the response
    finish_reason: str
    status: int
    reward: float | None  # None: scoring failed
    scores: dict[str, float | None]  # by reward function
    extras: dict[str, Any]  # what reward functions gave to log_extra, by function/column
    reward_code: str  # digest of the functions; empty where the run did not record it
    trained: bool  # whether it was part of the update
    advantage: float | None  # mean over its tokens, where it trained


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOrigin:
    """One update: the samples that it was made of, in numbers."""

    run: str
    step: int
    sampled_with: str  # digest of the policy version that sampled
    gave: str  # digest of the version that the update made
    samples: int
    trained: int  # samples in the update
    sample_ids: tuple[int, int]  # first and last
    prompt_rows: tuple[int, ...]
    span_versions: tuple[int, ...]  # versions that drew tokens
    tokens: int
    reward: float | None  # mean over the samples that have one
    workers: dict[str, int]  # samples by worker
    retried: int  # samples of a later attempt than the first
    reward_code: tuple[str, ...]
    objects: tuple[str, ...]  # of the batch that trained
    removed: bool = False  # retention removed the batches: the numbers are empty


@dataclass(kw_only=True, slots=True)
class VersionOrigin:
    """All that made a policy version."""

    run: str
    version: int
    digest: str
    key: str
    committed_at: float
    there: bool  # whether the weights are still in the store
    steps: list[StepOrigin] = field(default_factory=list)  # newest first, across forks
    samples: list[SampleOrigin] = field(default_factory=list)  # of the step that made it
    reward_code: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by digest


def past(run: RunStore, version: int) -> Iterator[tuple[RunStore, Commit]]:
    """The commits that led to a version, newest first, through the runs it was forked from."""
    current, step = run, version
    while True:
        origin = origin_of(current)
        start = 0 if origin is None else origin.at
        for number in range(step, start, -1):
            yield current, read_commit(current, number)
        if origin is None:
            return
        current, step = parent_of(current, origin), origin.step


def last_version(run: RunStore) -> int:
    """The newest version of a run: that of its last commit, or the one that it begins with."""
    return head(run) or start_of(run)


def of_version(run: RunStore, version: int) -> VersionOrigin:
    """From weights to samples. Raises ValueError for a version that the run does not have."""
    newest = last_version(run)
    if not 0 <= version <= newest:
        raise ValueError(f"Run {run.run} has no policy version {version}; it has 0 to {newest}.")
    commits = list(past(run, version))
    if not commits:
        first = read_commit(run, 1).version_in if newest else None
        if first is None:
            raise ValueError(
                f"Run {run.run} has no commit yet, so nothing is known of its weights."
            )
        return VersionOrigin(
            run=run.run, version=0, digest=first.digest, key=first.key, committed_at=0.0,
            there=run.store.exists(f"{first.key}/manifest.json"),
        )  # fmt: skip
    owner, made = commits[0]
    found = VersionOrigin(
        run=owner.run,
        version=version,
        digest=made.version_out.digest,
        key=made.version_out.key,
        committed_at=made.committed_at,
        there=run.store.exists(f"{made.version_out.key}/manifest.json"),
    )
    for where, commit in commits:
        found.steps.append(step_origin(where, commit))
        found.reward_code |= commit.reward_code
    if not found.steps[0].removed:
        found.samples = samples_of(owner, made)
    return found


def of_sample(run: RunStore, sample: int) -> tuple[SampleOrigin, Commit]:
    """From a sample to its origin and its step's commit. Raises ValueError if there is none."""
    for owner, commit in past(run, last_version(run)):
        ref = commit.refs.get("samples")
        if ref is None:
            continue
        try:
            found = np.flatnonzero(ref.fetch_numpy(run.store, "sample_id")[0] == sample)
        except ObjectMissing:
            continue  # retention removed it
        if len(found):
            return samples_of(owner, commit, found)[0], commit
    raise ValueError(
        f"No stored batch of run {run.run} has sample {sample}. Its samples are named by "
        "--version; those of steps that retention removed are gone."
    )


@dataclass(kw_only=True, slots=True)
class PromptOrigin:
    """What became of a row of the dataset, each time it was drawn."""

    row: int
    samples: list[SampleOrigin] = field(default_factory=list)
    dropped: list[tuple[str, int, str]] = field(default_factory=list)  # run, step, reason


def of_prompt(run: RunStore, row: int) -> PromptOrigin:
    """From a dataset row to every sample of it, oldest first. Raises ValueError if never drawn."""
    found = PromptOrigin(row=row)
    for owner, commit in reversed(list(past(run, last_version(run)))):
        for reason, rows in commit.dropped_rows.items():
            found.dropped += [(owner.run, commit.step, reason) for one in rows if one == row]
        ref = commit.refs.get("samples")
        if ref is None or "prompt_row" not in ref.names:
            continue
        try:
            index = np.flatnonzero(ref.fetch_numpy(run.store, "prompt_row")[0] == row)
            found.samples += samples_of(owner, commit, index) if len(index) else []
        except ObjectMissing:
            continue
    if not found.samples and not found.dropped:
        raise ValueError(f"Run {run.run} has not drawn row {row} of its data, in what is stored.")
    return found


def prompt_of(run: RunStore, commit: Commit, group: int) -> object:
    """The dataset row of a group, as it was stored; None where the batch has none."""
    prompts = commit.refs.get("prompts")
    if prompts is None or "row" not in prompts.names:
        return None
    at = np.flatnonzero(prompts.fetch_numpy(run.store, "group_id")[0] == group)
    return prompts.take(at[:1]).fetch_list(run.store, "row")[0] if len(at) else None


def step_origin(run: RunStore, commit: Commit) -> StepOrigin:
    """A step in numbers."""
    try:
        samples = samples_of(run, commit)
    except ObjectMissing:
        samples = []
    rewards = [one.reward for one in samples if one.reward is not None]
    ids = [one.sample for one in samples]
    return StepOrigin(
        run=run.run,
        step=commit.step,
        sampled_with=commit.version_in.digest,
        gave=commit.version_out.digest,
        samples=len(samples),
        trained=sum(one.trained for one in samples),
        sample_ids=(min(ids, default=0), max(ids, default=0)),
        prompt_rows=tuple(dict.fromkeys(one.prompt_row for one in samples)),
        span_versions=tuple(sorted({span.version for one in samples for span in one.spans})),
        tokens=sum(one.tokens for one in samples),
        reward=float(np.mean(rewards)) if rewards else None,
        workers=dict(Counter(one.worker for one in samples)),
        retried=sum(one.attempt > 1 for one in samples),
        reward_code=tuple(sorted({one.reward_code for one in samples} - {""})),
        objects=tuple(sorted(commit.refs["batch"].objects)) if "batch" in commit.refs else (),
        removed=not samples,
    )


def samples_of(
    run: RunStore, commit: Commit, rows: np.ndarray[Any, Any] | None = None
) -> list[SampleOrigin]:
    """The samples of a step, or some rows of them. Raises ObjectMissing where they were removed."""
    ref = commit.refs["samples"] if rows is None else commit.refs["samples"].take(rows)
    columns = _Columns(run, ref)
    advantages = _advantages(run, commit)
    spans = columns.lists("weight_spans")
    scores = [name for name in ref.names if name.startswith(SCORE)]
    extras = [name for name in ref.names if name.startswith(EXTRA)]
    found = []
    for row, sample in enumerate(columns.numbers("sample_id")):
        found.append(
            SampleOrigin(
                run=run.run,
                step=commit.step,
                sample=int(sample),
                group=int(columns.numbers("group_id")[row]),
                prompt_row=int(columns.numbers("prompt_row")[row]),
                worker=columns.text("worker")[row],
                attempt=int(columns.numbers("attempt")[row]),
                spans=tuple(_spans(spans[row])),
                weights_digest=columns.text("weights_digest")[row],
                tokens=columns.lengths[row],
                finish_reason=columns.text("finish_reason")[row],
                status=int(columns.numbers("status")[row]),
                reward=_finite(columns.numbers("reward")[row]),
                scores={
                    name.removeprefix(SCORE): _finite(columns.numbers(name)[row]) for name in scores
                },
                extras={name.removeprefix(EXTRA): columns.text(name)[row] for name in extras},
                reward_code=columns.text("reward_code")[row],
                trained=int(sample) in advantages,
                advantage=advantages.get(int(sample)),
            )
        )
    return found


class _Columns:
    """Columns of a batch, each read once; what a batch lacks reads as -1 or an empty text."""

    def __init__(self, run: RunStore, ref: BatchRef) -> None:
        self._store, self._ref = run.store, ref
        self._read: dict[str, list[Any]] = {}
        self.lengths = ref.lengths(run.store, "response_ids").tolist()

    def numbers(self, name: str) -> list[float]:
        if name not in self._read:
            there = name in self._ref.names
            self._read[name] = (
                self._ref.fetch_numpy(self._store, name)[0].tolist()
                if there
                else [-1] * len(self._ref)
            )
        return self._read[name]

    def text(self, name: str) -> list[str]:
        if name not in self._read:
            there = name in self._ref.names
            self._read[name] = (
                self._ref.fetch_list(self._store, name) if there else [""] * len(self._ref)
            )
        return self._read[name]

    def lists(self, name: str) -> list[list[int]]:
        values, offsets = self._ref.fetch_numpy(self._store, name)
        assert offsets is not None
        return [values[a:b].tolist() for a, b in pairwise(offsets)]


def _spans(flat: list[int]) -> Iterator[Span]:
    for version, start, stop in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
        yield Span(version=version, start=start, stop=stop)


def _advantages(run: RunStore, commit: Commit) -> dict[int, float]:
    """Mean advantage of each sample that trained, by its id."""
    batch = commit.refs["batch"]
    if not {"sample_id", "advantages"} <= set(batch.names):
        return {}
    ids = batch.fetch_numpy(run.store, "sample_id")[0]
    values, offsets = batch.fetch_numpy(run.store, "advantages")
    numbers = cast("np.ndarray[Any, np.dtype[np.float32]]", values)
    assert offsets is not None
    means = [float(numbers[a:b].mean()) if b > a else 0.0 for a, b in pairwise(offsets)]
    return dict(zip(ids.tolist(), means, strict=True))


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
