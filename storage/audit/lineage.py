"""From a policy version to the samples that made it, and from a sample or a prompt to the versions.

Everything is read from commits and from columns of the batches that they name, across the border to
the runs that a run was forked from. Steps are found by computation (step_search.py), and only as many
are read as are shown. Of batches that retention removed it says so, and what the commit knows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import dropwhile, islice
from typing import Any

import numpy as np

from storage.audit.samples import Columns, SampleOrigin, samples_of
from storage.audit.step_search import (
    Fate,
    Segment,
    drew_group,
    drew_row,
    follow,
    group_size,
    segments,
)
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit, Outline, head, read_commit, read_outline
from storage.runs.run_store import RunStore, numbered, start_of

LIMIT = 20  # steps, and samples, that are read where nothing else is asked for
AT_ONCE = 8  # steps that are read at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOrigin:
    """One update: the samples that it was made of, in numbers."""

    run: str
    step: int
    sampled_with: str  # digest of the policy version that sampled
    gave: str  # digest of the version that the update made
    samples: int
    trained: int  # samples in the update
    sample_ids: tuple[int, int] | None  # first and last; None where they are removed
    prompt_rows: tuple[int, ...]
    span_versions: tuple[int, ...]  # versions that drew tokens
    tokens: int | None  # None where neither batches nor commit know
    reward: float | None  # mean over the samples that have one
    workers: dict[str, int]  # samples by worker
    retried: int  # samples of a later attempt than the first
    reward_code: tuple[str, ...]
    objects: tuple[str, ...]  # of the batch that trained
    removed: bool = False  # retention removed the batches: these are the numbers of the commit


@dataclass(kw_only=True, slots=True)
class VersionOrigin:
    """All that made a policy version."""

    run: str
    version: int
    digest: str
    key: str
    committed_at: float
    there: bool  # whether the weights are still in the store
    updates: int  # that made it, across forks
    steps: list[StepOrigin] = field(default_factory=list)  # the newest of them, newest first
    samples: list[SampleOrigin] = field(default_factory=list)  # first ones of the newest step
    reward_code: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by digest


def past(run: RunStore, version: int) -> Iterator[tuple[RunStore, Commit]]:
    """The commits that led to a version, newest first, through the runs it was forked from."""
    for segment in segments(run, version):
        for step in range(segment.last, segment.first - 1, -1):
            yield segment.run, read_commit(segment.run, step)


def last_version(run: RunStore) -> int:
    """The newest version of a run: that of its last commit, or the one that it begins with."""
    return head(run) or start_of(run)


def of_version(run: RunStore, version: int, limit: int = LIMIT) -> VersionOrigin:
    """From weights to samples. Raises ValueError for a version that the run does not have.

    limit: steps, and samples of the newest one, that are read. No more is held at once than
    some steps and what is told of `limit`, whatever the number of steps.
    """
    newest = last_version(run)
    if not 0 <= version <= newest:
        raise ValueError(f"Run {run.run} has no policy version {version}. {numbered(0, newest)}")
    updates = sum(map(len, segments(run, version)))
    if not updates:
        return _first_version(run, newest)
    version_origin: VersionOrigin | None = None
    for owner, commit, origin in _read_ahead(past(run, version), max(1, limit)):
        if version_origin is None:
            version_origin = VersionOrigin(
                run=owner.run,
                version=version,
                digest=commit.version_out.digest,
                key=commit.version_out.key,
                committed_at=commit.committed_at,
                there=run.store.exists(f"{commit.version_out.key}/manifest.json"),
                updates=updates,
                samples=_first_samples(owner, commit, limit),
            )
        version_origin.steps.append(origin)
        version_origin.reward_code |= commit.reward_code
    assert version_origin is not None
    return version_origin


def _read_ahead(
    commits: Iterator[tuple[RunStore, Commit]], limit: int
) -> Iterator[tuple[RunStore, Commit, StepOrigin]]:
    """The first of them with their steps in numbers, several of which are read at once.

    A step takes some dozen requests, one after the other, so a store that is far away is waited for.
    """
    with ThreadPoolExecutor(AT_ONCE) as threads:
        reading: deque[tuple[RunStore, Commit, Future[StepOrigin]]] = deque()
        for owner, commit in islice(commits, limit):
            reading.append((owner, commit, threads.submit(step_origin, owner, commit)))
            if len(reading) == AT_ONCE:
                yield _read(reading.popleft())
        while reading:
            yield _read(reading.popleft())


def _read(
    step: tuple[RunStore, Commit, Future[StepOrigin]],
) -> tuple[RunStore, Commit, StepOrigin]:
    owner, commit, origin = step
    return owner, commit, origin.result()


def _first_version(run: RunStore, newest: int) -> VersionOrigin:
    first = read_outline(run, 1).version_in if newest else None
    if first is None:
        raise ValueError(f"Run {run.run} has no commit yet, so nothing is known of its weights.")
    return VersionOrigin(
        run=run.run, version=0, digest=first.digest, key=first.key, committed_at=0.0,
        there=run.store.exists(f"{first.key}/manifest.json"), updates=0,
    )  # fmt: skip


def _first_samples(run: RunStore, commit: Commit, limit: int) -> list[SampleOrigin]:
    try:
        return samples_of(run, commit, np.arange(min(limit, len(commit.refs["samples"]))))
    except ObjectMissing:
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovedSample:
    """A sample whose batches retention removed: what its step's commit still knows."""

    run: str
    step: int  # that drew its group
    sample: int
    group: int
    removed: bool = True


def of_sample(run: RunStore, sample: int) -> tuple[SampleOrigin | RemovedSample, Outline]:
    """From a sample to its origin and its step's commit. Raises ValueError if there is none.

    A commit.json is read for each halving of the number of steps, then the step's batches, and those
    of the steps that handed its group on.
    """
    past = segments(run)
    sizes = dict.fromkeys(size for size in map(group_size, past) if size is not None)
    settled: Fate | None = None
    for size in sizes:  # a fork may have another
        fate = _fate(past, sample // size)
        if fate is None:
            continue
        if fate.state == "sampled":
            ids = fate.commit.refs["samples"].fetch_numpy(run.store, "sample_id")[0]
            if len(rows := np.flatnonzero(ids == sample)):
                return samples_of(fate.run, fate.commit, rows)[0], fate.commit
        elif settled is None or fate.state == "left_out":
            settled, group = fate, sample // size
    if settled is None:
        raise ValueError(
            f"No stored batch of run {run.run} has sample {sample}. Its samples are named by "
            "--version; those of steps that retention removed are gone."
        )
    if settled.state == "left_out":
        raise ValueError(
            f"Sample {sample} of run {run.run} trained nothing: its group {group} was under way in "
            f"step {settled.commit.step}, which did not wait for it, and no step went on with it."
        )
    removed = RemovedSample(
        run=settled.run.run, step=settled.commit.step, sample=sample, group=group
    )
    return removed, settled.commit


def _fate(past: list[Segment], group: int) -> Fate | None:
    """What became of a group; None where no step drew it, or none that is known."""
    for number, segment in enumerate(past):
        if (step := drew_group(segment, group)) is not None:
            return follow(past, number, step, group)
    return None


@dataclass(kw_only=True, slots=True)
class PromptOrigin:
    """What became of a row of the dataset, each time it was drawn."""

    row: int
    samples: list[SampleOrigin] = field(default_factory=list)
    dropped: list[tuple[str, int, str]] = field(default_factory=list)  # run, step, reason
    removed: list[tuple[str, int]] = field(default_factory=list)  # run, step; by retention
    more: bool = False  # whether it was drawn later, too, or may have been


def of_prompt(run: RunStore, row: int, limit: int = LIMIT) -> PromptOrigin:
    """From a dataset row to every sample of it, oldest first. Raises ValueError if never drawn.

    limit: samples and drops after which no further step is read.
    """
    prompt = PromptOrigin(row=row)
    past = segments(run)
    for number in reversed(range(len(past))):
        for step, sure in drew_row(past[number], row):
            if len(prompt.samples) + len(prompt.dropped) + len(prompt.removed) >= limit:
                prompt.more = True
                return prompt
            _add_draw(prompt, past, number, step, sure, limit)
    if not prompt.samples and not prompt.dropped and not prompt.removed:
        raise ValueError(f"Run {run.run} has not drawn row {row} of its data, in what is stored.")
    return prompt


def _add_draw(
    prompt: PromptOrigin, past: list[Segment], number: int, step: int, sure: bool, limit: int
) -> None:
    """What became of a row in a step of the segment past[number], if that step drew it.

    sure: whether it is known that it did.
    """
    run, row = past[number].run, prompt.row
    commit = read_commit(run, step)
    reasons = [reason for reason, rows in commit.dropped_rows.items() if row in rows]
    prompt.dropped += [(run.run, step, reason) for reason in reasons]
    prompts = commit.refs.get("prompts")
    try:
        if prompts is None or not {"prompt_row", "group_id"} <= set(prompts.names):
            groups = []
        else:
            rows = prompts.fetch_numpy(run.store, "prompt_row")[0]
            ids = prompts.fetch_numpy(run.store, "group_id")[0]
            groups = ids[rows == row].tolist()
    except ObjectMissing:
        if sure and not reasons:
            prompt.removed.append((run.run, step))
        return
    for group in groups:
        _add_group(prompt, follow(past, number, step, group), group, limit)


def _add_group(prompt: PromptOrigin, fate: Fate, group: int, limit: int) -> None:
    if fate.state == "left_out":
        prompt.dropped.append((fate.run.run, fate.commit.step, "not waited for"))
    elif fate.state == "removed":
        prompt.removed.append((fate.run.run, fate.commit.step))
    else:
        ids = fate.commit.refs["samples"].fetch_numpy(fate.run.store, "group_id")[0]
        rows = np.flatnonzero(ids == group)
        room = max(0, limit - len(prompt.samples))
        prompt.more = prompt.more or len(rows) > room
        prompt.samples += samples_of(fate.run, fate.commit, rows[:room]) if room else []


def prompt_of(run: RunStore, sample: SampleOrigin) -> object:
    """The dataset row of a sample's group, as it was stored; None where the batch has none.

    It lies with the step that drew the group, which another one may have trained.
    """
    owner, step = RunStore(run.store, sample.run), sample.step
    # Runs that continue another one without being its fork number from 0 again.
    for segment in dropwhile(lambda segment: segment.run.run != sample.run, segments(run)):
        if (drew := drew_group(segment, sample.group)) is not None:
            owner, step = segment.run, drew
            break
    prompts = read_commit(owner, step).refs.get("prompts")
    if prompts is None or "row" not in prompts.names:
        return None
    try:
        at = np.flatnonzero(prompts.fetch_numpy(run.store, "group_id")[0] == sample.group)
        return prompts.take(at[:1]).fetch_list(run.store, "row")[0] if len(at) else None
    except ObjectMissing:
        return None


def step_origin(run: RunStore, commit: Commit) -> StepOrigin:
    """A step in numbers."""
    try:
        return _counted(run, commit)
    except ObjectMissing:
        tokens = commit.metrics.get("rollout/tokens")
        return StepOrigin(
            run=run.run,
            step=commit.step,
            sampled_with=commit.version_in.digest,
            gave=commit.version_out.digest,
            samples=commit.rows.get("samples", 0),
            trained=commit.rows.get("batch", 0),
            sample_ids=None,
            prompt_rows=(),
            span_versions=(),
            tokens=None if tokens is None else int(tokens),
            reward=commit.metrics.get("reward/mean"),
            workers={},
            retried=0,
            reward_code=tuple(sorted(commit.reward_code)),
            objects=tuple(sorted(commit.refs["batch"].objects)) if "batch" in commit.refs else (),
            removed=True,
        )


def _counted(run: RunStore, commit: Commit) -> StepOrigin:
    """The same, counted from its batches. Raises ObjectMissing."""
    columns = Columns(run, commit.refs["samples"])
    ids = np.asarray(columns.numbers("sample_id"), np.int64)
    spans = columns.lists("weight_spans")
    frozen = np.asarray(columns.numbers("frozen")) > 0  # -1: nobody is an opponent
    rewards = np.asarray(columns.numbers("reward"), np.float64)
    rewards = rewards[np.isfinite(rewards) & ~frozen]
    batch = commit.refs.get("batch")
    has_advantages = batch is not None and {"sample_id", "advantages"} <= set(batch.names)
    used = (
        batch.fetch_numpy(run.store, "sample_id")[0]
        if batch is not None and has_advantages
        else ids[:0]
    )
    return StepOrigin(
        run=run.run,
        step=commit.step,
        sampled_with=commit.version_in.digest,
        gave=commit.version_out.digest,
        samples=len(ids),
        trained=int(np.isin(ids, used).sum()),
        sample_ids=(int(ids.min()), int(ids.max())) if len(ids) else None,
        prompt_rows=tuple(dict.fromkeys(int(row) for row in columns.numbers("prompt_row"))),
        span_versions=tuple(
            sorted(
                {v for flat, its in zip(spans, frozen, strict=True) if not its for v in flat[::3]}
            )
        ),
        tokens=sum(columns.lengths),
        reward=float(rewards.mean()) if len(rewards) else None,
        workers=dict(Counter(columns.text("worker"))),
        retried=sum(attempt > 1 for attempt in columns.numbers("attempt")),
        reward_code=tuple(sorted({*columns.text("reward_code")} - {""})),
        objects=() if batch is None else tuple(sorted(batch.objects)),
    )
