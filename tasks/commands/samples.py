"""What a model was asked and what it wrote, as an answer on the command line.

The samples of a step or of an evaluation: named, narrowed, and read no further than asked; and what
two policy versions made of the same rows of the data, word by word.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from storage.audit.samples import (
    BRANCH,
    WROTE,
    Transcript,
    ending,
    evaluation_transcripts,
    few,
    judged,
    printable,
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
from tasks.commands.command import Answer, Request, heading, text
from tasks.commands.lineage import spans

if TYPE_CHECKING:
    from rich.console import RenderableType


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
        groups_with, texts = set[int](), set[str]()
        for ref in self._prompts():
            if {"row", "group_id"} <= set(ref.names):
                with unless_removed(self.files, self.step):
                    groups = ref.fetch_numpy(self.files.store, "group_id")[0].tolist()
                    rows = ref.fetch_list(self.files.store, "row")
                for group, row in zip(groups, rows, strict=True):
                    fields = row if isinstance(row, dict) else {}
                    texts |= set(fields)
                    if name in fields and str(fields[name]) == value:
                        groups_with.add(group)
        if name not in texts:
            there = ", ".join(sorted(texts)) or "none in the store"
            raise ValueError(f"The data of {self.name} have no field {name!r}; they have {there}.")
        return np.isin(self.groups, sorted(groups_with))

    def _prompts(self) -> Iterable[BatchRef]:
        """Batches with the dataset rows of the groups; the step before handed some of them on."""
        if self.result is not None:
            yield self.result.prompts
        if self.commit is not None:
            yield from (
                self.commit.refs[ref_name]
                for ref_name in ("prompts",)
                if ref_name in self.commit.refs
            )
            if self.step > start_of(self.files) + 1:
                earlier = read_commit(self.files, self.step - 1).refs
                yield from (earlier[ref_name] for ref_name in ("carried",) if ref_name in earlier)

    def containing(self, pattern: re.Pattern[str], rows: Sequence[int]) -> Matches:
        """Which of some rows have a text in prompt or response. Raises as `transcripts` does."""
        ref = self.ref.take(np.asarray(rows, dtype=np.int64))
        words = tokenizer_of(self.files, self.versions)
        with unless_removed(self.files, self.step):
            both = texts_of(self.files, ref, words)
        counts = [[sum(1 for _ in pattern.finditer(text)) for text in texts] for texts in both]
        hits = [row for row, *times in zip(rows, *counts, strict=True) if any(times)]
        return Matches(rows=sorted(hits), prompts=sum(counts[0]), responses=sum(counts[1]))


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
    results = evaluations_of(files, suite, int(version))
    if results:
        return results[-1]
    there = [f"{suite_name}@{number}" for suite_name, number, _ in notes_of(files).values()]
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


def diff_answer(
    first: StoredSamples, second: StoredSamples, row: int | None, limit: int, characters: int
) -> Answer:
    """The samples of a row of the data side by side, or of every row that both have.

    Raises ValueError where they have none in common, or are removed.
    """
    pairs = pairs_of(first, second, row)[:limit]
    befores = first.transcripts([pair.first for pair in pairs])
    afters = second.transcripts([pair.second for pair in pairs])
    title = f"{first.name} and {second.name} of {first.files.run}"
    lines: list[RenderableType] = [heading(f"{len(pairs)} pairs of samples of {title}")]
    records = []
    for pair, before, after in zip(pairs, befores, afters, strict=True):
        changes = list(changes_of(before.response, after.response))
        lines += _told(pair, before, after, characters)
        records.append({**asdict(pair), "first": _record(before), "second": _record(after)})
        records[-1]["changes"] = changes
    return Answer(record=records, shown=lines)


def pairs_of(first: StoredSamples, second: StoredSamples, row: int | None) -> list[Pair]:
    """Samples of the same rows of the data, the k-th with the k-th of each row.

    The row whose mean reward changed most comes first. Raises ValueError for none.
    """
    data_rows = [samples.column("prompt_row") for samples in (first, second)]
    common = np.intersect1d(data_rows[0], data_rows[1]) if row is None else np.array([row])
    for samples, rows in zip((first, second), data_rows, strict=True):
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
    pairs = []
    for data_row in common.tolist():
        places = [np.flatnonzero(rows == data_row) for rows in data_rows]
        before, after = (
            _mean(samples, at) for samples, at in zip((first, second), places, strict=True)
        )
        pairs += [
            Pair(row=data_row, before=before, after=after, first=int(a), second=int(b))
            for a, b in zip(*places, strict=False)
        ]
    return sorted(pairs, key=lambda pair: -abs((pair.after or 0.0) - (pair.before or 0.0)))


def _mean(samples: StoredSamples, rows: np.ndarray) -> float | None:
    scored = samples.rewards[rows][~samples.failed[rows]]
    return float(scored.mean()) if len(scored) else None


def changes_of(before: str, after: str) -> Iterator[tuple[Change, str]]:
    """How one text becomes the other: what is the same, removed and added, in order."""
    units = [WORDS.findall(answer) for answer in (before, after)]
    if sum(map(len, units)) > MOST_WORDS:
        units = [LINES.findall(answer) for answer in (before, after)]
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
    cut = [printable(transcript.response, characters) for transcript in (before, after)]
    for change, part in changes_of(*cut):
        line.append(FORMS[change].format(part), STYLES[change])
    means = " to ".join(
        "none" if reward is None else f"{reward:.4g}" for reward in (pair.before, pair.after)
    )
    return [
        text(""),
        heading(f"Row {pair.row} of the data, mean reward {means}"),
        *(
            text(
                f"{sign} sample {origin.sample}, "
                f"{'no reward' if origin.reward is None else f'reward {origin.reward:.4g}'}, "
                f"{origin.tokens} tokens, {spans(origin)}",
                STYLES[change],
            )
            for sign, origin, change in (
                ("-", before.origin, "removed"),
                ("+", after.origin, "added"),
            )
        ),
        text("asked", "cyan"),
        text(printable(before.prompt, characters)),
        text("wrote", "cyan"),
        line,
    ]


def _record(transcript: Transcript) -> dict[str, object]:
    return {
        **asdict(transcript.origin),
        "prompt": transcript.prompt,
        "response": transcript.response,
    }


def answer(request: Request) -> Answer:
    """Show the samples that were asked for."""
    arguments, files = request.arguments, request.files
    if arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit} shows nothing. Give it a number from 1.")
    samples = asked_for(request, arguments.evaluation, arguments.step)
    if arguments.diff is not None:
        suite = (arguments.evaluation or "").rpartition("@")[0]
        other = asked_for(request, f"{suite}@{arguments.diff}" if suite else None, arguments.diff)
        return diff_answer(samples, other, arguments.row, arguments.limit, arguments.characters)
    if arguments.row is not None:
        raise ValueError("--row goes with --diff. Name the other step: --diff STEP.")
    rows, matches = chosen(arguments, samples)
    transcripts = samples.transcripts(rows)
    state = (
        f"{int(samples.failed.sum())} of which could not be scored"
        if samples.scored
        else "none of which is scored"
    )
    if samples.step and samples.commit is None:
        state += "; the step is not committed"
    if matches is not None:
        state += (
            f"; {len(matches.rows)} have {arguments.grep}, {matches.responses} times in answers and "
            f"{matches.prompts} in prompts"
        )
    of = f"{samples.name} of {files.run}"
    lines: list[RenderableType] = [
        heading(f"{len(transcripts)} of {len(samples.ref)} samples of {of}, {state}")
    ]
    for transcript in transcripts:
        lines += told(transcript, arguments.characters, samples.scored, arguments.grep)
    return Answer(record=[record(transcript) for transcript in transcripts], shown=lines)


def asked_for(request: Request, evaluation: str | None, step: int | None) -> StoredSamples:
    """The samples of an evaluation, or of a step where none is named. Raises ValueError."""
    if evaluation is not None:
        return samples_of_evaluation(request.files, evaluation)
    return samples_of_step(request.files, step)


def chosen(
    arguments: argparse.Namespace, samples: StoredSamples
) -> tuple[list[int], Matches | None]:
    """Rows of the samples that were asked for, at most asked.limit, and where asked.grep was found.

    Raises ValueError for none.
    """
    selected, narrowed = np.ones(len(samples.ref), bool), []
    if arguments.episode is not None:
        selected[:] = False
        selected[rows_of_episode(episodes_of(samples), arguments.episode)] = True
        narrowed.append(f"{arguments.episode}")
    if arguments.group is not None:
        selected &= samples.groups == arguments.group
        narrowed.append(f"of group {arguments.group}")
    if arguments.failed:
        selected &= samples.failed
        narrowed.append("whose scoring failed")
    if arguments.status is not None:
        selected &= samples.with_status(arguments.status)
        narrowed.append(f"of status {arguments.status}")
    if arguments.reward is not None:
        selected &= samples.with_reward(*bounds(arguments.reward))
        narrowed.append(f"with a reward of {arguments.reward}")
    if arguments.where is not None:
        name, equals, value = arguments.where.partition("=")
        if not name or not equals:
            raise ValueError(f"--where {arguments.where} names no value. Write FIELD=VALUE.")
        selected &= samples.with_field(name, value)
        narrowed.append(f"with {arguments.where}")
    matches = None
    if arguments.grep is not None:
        matches = samples.containing(pattern_of(arguments.grep), np.flatnonzero(selected).tolist())
        selected = np.isin(np.arange(len(selected)), matches.rows)
        narrowed.append(f"with {arguments.grep} in prompt or answer")
    rows = in_order(arguments, samples, selected)
    if not rows:
        of = samples.name[0].upper() + samples.name[1:]
        there = (
            f" Its groups are {samples.groups.min()} to {samples.groups.max()}."
            if arguments.group is not None
            else ""
        )
        raise ValueError(f"{of} has no sample {', '.join(narrowed) or 'with a reward'}.{there}")
    return rows[: arguments.limit], matches


def in_order(
    arguments: argparse.Namespace, samples: StoredSamples, selected: np.ndarray
) -> list[int]:
    """The rows that are wanted, [N] whether each is, in the order in which they are shown."""
    scored = np.flatnonzero(selected & ~samples.failed)
    by_reward = scored[np.argsort(-samples.rewards[scored], kind="stable")].tolist()
    if arguments.worst:
        return by_reward[::-1]
    if arguments.best:
        return by_reward
    if arguments.failed or arguments.group is not None or arguments.episode is not None:
        return np.flatnonzero(selected).tolist()
    return few(by_reward, np.flatnonzero(selected & samples.failed).tolist(), arguments.limit)


def bounds(span: str) -> tuple[float, float]:
    """The rewards LOW:HIGH, of which either may be left out; one number is both. ValueError."""
    low, colon, high = span.partition(":")
    try:
        least = float(low) if low else -math.inf
        return least, (float(high) if high else math.inf) if colon else least
    except ValueError:
        raise ValueError(
            f"--reward {span} names no rewards. Write LOW:HIGH, such as 0.5: or 0:0.9."
        ) from None


def pattern_of(regex: str) -> re.Pattern[str]:
    """The regular expression of a search. Raises ValueError."""
    try:
        return re.compile(regex)
    except re.error as error:
        raise ValueError(
            f"{regex!r} is no regular expression: {error}. Put a backslash before what is meant "
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
    transcript: Transcript, characters: int, scored: bool = True, searched: str | None = None
) -> list[RenderableType]:
    """A sample for people.

    scored: whether its step's samples are; searched: an expression that is marked in its texts.
    """
    origin = transcript.origin
    reward = "scoring failed" if origin.reward is None else f"reward {origin.reward:.4g}"
    reward = reward if scored else "not scored"
    scores = ", ".join(f"{name} {value}" for name, value in origin.scores.items())
    trained = "did not train" if origin.advantage is None else f"advantage {origin.advantage:+.3f}"
    facts = (
        f"{reward} ({scores}), {trained}; {origin.tokens} tokens, {ending(origin)}; "
        f"{spans(origin)}; {origin.worker}, attempt {origin.attempt}"
    )
    parts = transcript.parts or (("policy", transcript.response),)
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
        marked(transcript.prompt, characters, searched),
        *(
            line
            for who, part in parts
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


def marked(answer_text: str, characters: int, searched: str | None) -> RenderableType:
    """A text of a model, with what was searched for marked."""
    from rich.text import Text

    line = Text(printable(answer_text, characters))
    if searched is not None:
        line.highlight_regex(pattern_of(searched), "reverse")
    return line


def as_lines(value: object) -> str:
    """What a reward function logged of a sample, as text: of a list a line for each entry."""
    if isinstance(value, list):
        return "\n".join(map(as_lines, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def record(transcript: Transcript) -> dict[str, object]:
    """A sample for --json; its texts are whole."""
    texts = {"prompt": transcript.prompt, "response": transcript.response}
    parts = [{"author": who, "text": part} for who, part in transcript.parts]
    return {**asdict(transcript.origin), **texts, **({"parts": parts} if parts else {})}
