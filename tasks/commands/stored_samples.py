"""The samples of a step or of an evaluation: named, narrowed, and read no further than asked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.audit.samples import (
    Transcript,
    evaluation_transcripts,
    judged,
    texts_of,
    tokenizer_of,
    transcripts,
    transcripts_under_way,
)
from storage.audit.uncommitted import samples_under_way
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.evaluations.results import EvaluationResult, evaluations_of, notes_of
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit, head, read_commit
from storage.runs.run_store import RunStore, numbered, start_of
from storage.runs.weights import WeightsRef

STATUS = {"ok": SampleStatus.OK, "truncated": SampleStatus.TRUNCATED, "failed": SampleStatus.FAILED}


class NoSamples(ValueError):
    """The step that was named, or any, has no samples."""

    def __init__(self, files: RunStore, step: int | None) -> None:
        first, last = start_of(files) + 1, head(files) or start_of(files)
        what = "committed step yet, and no samples" if step is None else f"committed step {step}"
        super().__init__(f"Run {files.run} has no {what}. {numbered(first, last)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches:
    """Where a text was found among samples."""

    rows: list[int]  # of samples whose prompt or response has it, ascending
    prompts: int  # times that it is in prompts of samples; one for each sample of a group
    responses: int  # and in responses


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSamples:
    """All samples of a step, or of an evaluation, [N]; of their columns only three are read yet."""

    files: RunStore
    name: str  # such as "step 3", or "gsm8k on version 10"
    step: int  # 0: an evaluation's
    ref: BatchRef
    commit: Commit | None = None  # of the step; None while it is not committed
    result: EvaluationResult | None = None
    rewards: NDArray[np.floating]  # [N]
    failed: NDArray[np.bool_]  # [N], whether it could not be scored, or is not yet
    groups: NDArray[np.integer]  # [N]

    @property
    def scored(self) -> bool:
        """Whether the step has scored them."""
        return "reward" in self.ref.names

    @property
    def versions(self) -> tuple[WeightsRef, ...]:
        """Policy versions with which a tokenizer may lie."""
        if self.result is not None:
            return (self.result.weights,)
        return () if self.commit is None else (self.commit.version_out, self.commit.version_in)

    def transcripts(self, rows: Sequence[int]) -> list[Transcript]:
        """Some of them as text. Raises ValueError if removed, ObjectDamaged, NoTokenizer."""
        with unless_removed(self.files, self.step):
            if self.result is not None:
                return evaluation_transcripts(self.files, self.result, rows)
            if self.commit is not None:
                return transcripts(self.files, self.commit, rows)
            return transcripts_under_way(self.files, self.step, self.ref, rows)

    def column(self, name: str) -> NDArray[np.generic]:
        """[N] numbers of a dense column. Raises ValueError if removed."""
        with unless_removed(self.files, self.step):
            return self.ref.fetch_numpy(self.files.store, name)[0]

    def with_status(self, name: str) -> NDArray[np.bool_]:
        """[N]: whether a sample's status is this one; of `failed`, whether it has no reward."""
        if name == "failed":
            return self.failed
        return (self.column("status") == STATUS[name]) & ~self.failed

    def with_reward(self, low: float, high: float) -> NDArray[np.bool_]:
        """[N]: whether a sample has a reward from low to high."""
        return ~self.failed & (self.rewards >= low) & (self.rewards <= high)

    def with_field(self, name: str, value: str) -> NDArray[np.bool_]:
        """[N]: whether a field of the sample's dataset row is this, as text. ValueError: no field."""
        wanted, known = set[int](), set[str]()
        for ref in self._prompts():
            if {"row", "group_id"} <= set(ref.names):
                with unless_removed(self.files, self.step):
                    groups = ref.fetch_numpy(self.files.store, "group_id")[0].tolist()
                    rows = ref.fetch_list(self.files.store, "row")
                for group, row in zip(groups, rows, strict=True):
                    fields = row if isinstance(row, dict) else {}
                    known |= set(fields)
                    if name in fields and str(fields[name]) == value:
                        wanted.add(group)
        if name not in known:
            there = ", ".join(sorted(known)) or "none in the store"
            raise ValueError(f"The data of {self.name} have no field {name!r}; they have {there}.")
        return np.isin(self.groups, sorted(wanted))

    def _prompts(self) -> Iterable[BatchRef]:
        """Batches with the dataset rows of the groups; the step before handed some of them on."""
        if self.result is not None:
            yield self.result.prompts
        if self.commit is not None:
            yield from (self.commit.refs[one] for one in ("prompts",) if one in self.commit.refs)
            if self.step > start_of(self.files) + 1:
                earlier = read_commit(self.files, self.step - 1).refs
                yield from (earlier[one] for one in ("carried",) if one in earlier)

    def containing(self, pattern: re.Pattern[str], rows: Sequence[int]) -> Matches:
        """Which of some rows have a text in prompt or response. Raises as `transcripts` does."""
        ref = self.ref.take(np.asarray(rows, dtype=np.int64))
        words = tokenizer_of(self.files, self.versions)
        with unless_removed(self.files, self.step):
            both = texts_of(self.files, ref, words)
        counts = [[sum(1 for _ in pattern.finditer(text)) for text in texts] for texts in both]
        found = [row for row, *times in zip(rows, *counts, strict=True) if any(times)]
        return Matches(rows=sorted(found), prompts=sum(counts[0]), responses=sum(counts[1]))


def samples_of_step(files: RunStore, step: int | None) -> StoredSamples:
    """Those of a step, the last where none is named. Raises NoSamples, ValueError if removed."""
    number, commit = named_step(files, step)
    with unless_removed(files, number):
        ref = samples_under_way(files, number) if commit is None else commit.refs["samples"]
        if ref is None:
            raise NoSamples(files, step)
        rewards, failed, groups = judged(files, ref)
    return StoredSamples(
        files=files,
        name=f"step {number}",
        step=number,
        ref=ref,
        commit=commit,
        rewards=rewards,
        failed=failed,
        groups=groups,
    )


@contextmanager
def unless_removed(files: RunStore, step: int) -> Iterator[None]:
    """ValueError where batches of a step are gone; of step 0, an evaluation's."""
    try:
        yield
    except ObjectMissing as error:
        if not step:
            raise ValueError(
                f"The evaluation's samples are no longer in the store ({error}). Make them again: "
                "refrain evaluate."
            ) from error
        raise ValueError(
            f"The batches of step {step} of {files.run} are no longer in the store ({error}). "
            "Name a later step, or set store.keep_steps higher."
        ) from error


def samples_of_evaluation(files: RunStore, name: str) -> StoredSamples:
    """Those of the newest evaluation that SUITE@VERSION names. Raises ValueError."""
    result = evaluation_of(files, name)
    with unless_removed(files, 0):
        rewards, failed, groups = judged(files, result.samples)
    return StoredSamples(
        files=files,
        name=f"{result.suite} on version {result.version}",
        step=0,
        ref=result.samples,
        result=result,
        rewards=rewards,
        failed=failed,
        groups=groups,
    )


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
