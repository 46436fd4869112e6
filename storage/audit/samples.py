"""The samples of a step: where each came from, what it was worth, what became of it, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from configs.terminal_text import terminal_text
from storage.batches import reading
from storage.batches.columns import EXTRA, SCORE, Author, SampleStatus
from storage.batches.forest import Forest, read_forests
from storage.batches.refs import BatchRef
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit
from storage.runs.opponents import opponent_of
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef, open_chain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from storage.evaluations.results import EvaluationResult
    from storage.objects.store import Store

TOLD = (  # columns, besides those of each reward function
    "sample_id", "group_id", "prompt_row", "worker", "attempt", "weight_spans", "weights_digest",
    "finish_reason", "status", "reward", "reward_code", "player", "episode_id",
    "frozen", "task", "teacher", "teacher_digest", "episode", "episode_error", "turn_rewards",
)  # fmt: skip

TOKENIZER = "tokenizer.json"
# What is shown of an episode; the template's words around it are in --json.
BRANCH = "branch"  # a part that says after which words the parts behind it go on
WROTE = {"policy": "wrote", "environment": "was answered", BRANCH: "went on after"}
LAST_WORDS = 16  # tokens by which a place in an episode that branches is known


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
    player: int | None = None  # of an episode of several players
    episode: int | None = None  # likewise: the sample_id of player 0, which the others name too
    opponent: str = ""  # RUN@VERSION that played it, where that was a frozen version
    episode_end: str = ""  # what ended its episode: done, failed, or a limit: docs/episodes.md
    episode_error: str = ""  # of an episode that failed: why
    turn_rewards: tuple[float | None, ...] = ()  # of its environment, by turn; None: it gave none
    task: str = ""  # of its row, where the run has several
    teacher: str | None = None  # that scored its tokens, in a distillation
    teacher_digest: str | None = None  # of the weights that the teacher held


def samples_of(
    run: RunStore, commit: Commit, rows: np.ndarray[Any, Any] | None = None
) -> list[SampleOrigin]:
    """The samples of a step, or some rows of them. Raises ObjectMissing where they were removed.

    rows: [M] numbers of rows of the step's samples.
    """
    ref = commit.refs["samples"] if rows is None else commit.refs["samples"].take(rows)
    ids = ref.fetch_numpy(run.store, "sample_id")[0]
    return origins_of(run, ref, commit.step, _advantages(run, commit, ids))


def origins_of(
    run: RunStore, ref: BatchRef, step: int, advantages: Mapping[int, float]
) -> list[SampleOrigin]:
    """The same of samples [N] that may be no step's own; an evaluation's are of step 0.

    advantages: mean advantage of those that trained, by sample_id.
    """
    columns = Columns(run, ref)
    spans = columns.lists("weight_spans")
    opponent = str(opponent_of(run)) if "frozen" in ref.names else ""
    scores = [name for name in ref.names if name.startswith(SCORE)]
    extras = [name for name in ref.names if name.startswith(EXTRA)]
    origins = []
    for row, sample in enumerate(columns.numbers("sample_id")):
        player = int(columns.numbers("player")[row])
        origins.append(
            SampleOrigin(
                run=run.run,
                step=step,
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
                reward=_finite(columns.numbers("reward")[row]) if "reward" in columns else None,
                scores={
                    name.removeprefix(SCORE): _finite(columns.numbers(name)[row]) for name in scores
                },
                extras={name.removeprefix(EXTRA): columns.text(name)[row] for name in extras},
                reward_code=columns.text("reward_code")[row],
                trained=int(sample) in advantages,
                advantage=advantages.get(int(sample)),
                player=player if player >= 0 else None,
                episode=int(columns.numbers("episode_id")[row]) if player >= 0 else None,
                opponent=opponent if columns.numbers("frozen")[row] > 0 else "",
                episode_end=columns.text("episode")[row],
                episode_error=columns.text("episode_error")[row],
                turn_rewards=tuple(map(_finite, columns.lists("turn_rewards")[row])),
                task=columns.text("task")[row],
                teacher=columns.text("teacher")[row] or None,
                teacher_digest=columns.text("teacher_digest")[row] or None,
            )
        )
    return origins


class Columns:
    """The columns of a batch that tell of samples; what it lacks reads as -1 or an empty text.

    All are read at once: a store over HTTP is asked once for an object, not once for each column.
    """

    def __init__(self, run: RunStore, ref: BatchRef) -> None:
        self._count = len(ref)
        names = [name for name in ref.names if name in TOLD or name.startswith((SCORE, EXTRA))]
        self._read = reading.read_columns(run.store, ref[names].columns)
        self._lists: dict[str, list[Any]] = {}
        self.lengths: list[int] = ref.lengths(run.store, "response_ids").tolist()

    def __contains__(self, name: str) -> bool:
        return name in self._read

    def numbers(self, name: str) -> list[float]:
        """[N] numbers of a dense column."""
        if name not in self._read:
            return [-1] * self._count
        if name not in self._lists:
            self._lists[name] = self._read[name].numpy()[0].tolist()
        return self._lists[name]

    def text(self, name: str) -> list[str]:
        """[N] values of a column of text or JSON."""
        if name not in self._read:
            return [""] * self._count
        if name not in self._lists:
            self._lists[name] = self._read[name].rows()
        return self._lists[name]

    def lists(self, name: str) -> list[list[Any]]:
        """[N] lists of numbers of a jagged column."""
        if name not in self._read:
            return [[]] * self._count
        if name not in self._lists:
            values, offsets = self._read[name].numpy()
            assert offsets is not None
            self._lists[name] = [values[a:b].tolist() for a, b in pairwise(offsets)]
        return self._lists[name]


def _spans(flat: list[int]) -> Iterator[Span]:
    for version, start, stop in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
        yield Span(version=version, start=start, stop=stop)


def _advantages(run: RunStore, commit: Commit, samples: np.ndarray[Any, Any]) -> dict[int, float]:
    """Mean advantage of those samples, [M] ids, that trained, by id."""
    batch = commit.refs["batch"]
    if not {"sample_id", "advantages"} <= set(batch.names):
        return {}
    ids = batch.fetch_numpy(run.store, "sample_id")[0]
    rows = np.flatnonzero(np.isin(ids, samples))
    ids = ids[rows]
    values, offsets = batch.take(rows).fetch_numpy(run.store, "advantages")
    numbers = cast("np.ndarray[Any, np.dtype[np.float32]]", values)
    assert offsets is not None
    means = [float(numbers[a:b].mean()) if b > a else 0.0 for a, b in pairwise(offsets)]
    return dict(zip(ids.tolist(), means, strict=True))


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """A sample as text."""

    origin: SampleOrigin
    prompt: str
    response: str  # special tokens included, as the model wrote them
    parts: tuple[tuple[str, str], ...] = ()  # of an episode: who wrote what, in order


def ending(origin: SampleOrigin) -> str:
    """How a sample came to its end, in words: of an episode what ended it, what its turns earned, and
    of one that failed why."""
    if not origin.episode_end:
        return origin.finish_reason
    text = f"episode ended: {origin.episode_end}"
    if origin.episode_error:
        return f"{text}, {origin.episode_error}"
    turns = ["-" if reward is None else f"{reward:.4g}" for reward in origin.turn_rewards]
    return f"{text}, rewards by turn {' '.join(turns)}" if set(turns) - {"-"} else text


class NoTokenizer(ValueError):
    """No version of the run that is still in the store has a tokenizer.json."""


def transcripts(run: RunStore, commit: Commit, rows: Sequence[int]) -> list[Transcript]:
    """Some rows of a step's samples, as text, in that order.

    Raises ObjectMissing where retention removed them, and NoTokenizer.
    """
    numbers = np.asarray(rows, dtype=np.int64)
    origins = samples_of(run, commit, numbers)
    words = tokenizer_of(run, (commit.version_out, commit.version_in))
    return transcribed(run, commit.refs["samples"].take(numbers), origins, words)


def transcripts_under_way(
    run: RunStore, step: int, samples: BatchRef, rows: Sequence[int]
) -> list[Transcript]:
    """The same of a step that is not committed, whose samples [N] are given. Raises NoTokenizer."""
    ref = samples.take(np.asarray(rows, dtype=np.int64))
    return transcribed(run, ref, origins_of(run, ref, step, {}), tokenizer_of(run, ()))


def evaluation_transcripts(
    run: RunStore, result: EvaluationResult, rows: Sequence[int]
) -> list[Transcript]:
    """Some rows of an evaluation's samples, as text, in that order. Raises NoTokenizer."""
    ref = result.samples.take(np.asarray(rows, dtype=np.int64))
    words = tokenizer_of(run, (result.weights,))
    return transcribed(run, ref, origins_of(run, ref, 0, {}), words)


def transcribed(
    run: RunStore, ref: BatchRef, origins: Sequence[SampleOrigin], words: Tokenizer
) -> list[Transcript]:
    """Samples [N] as text."""
    prompts, responses = texts_of(run, ref, words)
    parts: list[tuple[tuple[str, str], ...]] = [()] * len(responses)
    if "author" in ref.names:
        columns = (_lists(run, ref, name) for name in ("prompt_ids", "response_ids", "author"))
        forests: Sequence[Forest | None] = read_forests(run.store, ref) or [None] * len(responses)
        parts = [by_author(words, *row) for row in zip(*columns, forests, strict=True)]
    return [
        Transcript(origin=origin, prompt=prompt, response=response, parts=turns)
        for origin, prompt, response, turns in zip(origins, prompts, responses, parts, strict=True)
    ]


def texts_of(run: RunStore, ref: BatchRef, words: Tokenizer) -> tuple[list[str], list[str]]:
    """Prompts and responses of samples [N], special tokens included."""
    prompts, responses = (
        words.decode_batch(_lists(run, ref, name), skip_special_tokens=False)
        for name in ("prompt_ids", "response_ids")
    )
    return prompts, responses


def by_author(
    words: Tokenizer,
    prompt: list[int],
    tokens: list[int],
    authors: list[int],
    forest: Forest | None = None,
) -> tuple[tuple[str, str], ...]:
    """Who wrote what of a response [T]: policy, environment and template, as text.

    Where a forest's node does not go on after the one before it, a BRANCH with the last words of what
    it goes on after; none: it is a conversation of its own.
    """
    branches = {} if forest is None else forest.branches()
    cut = sorted({0, *(np.flatnonzero(np.diff(authors)) + 1).tolist(), *branches, len(tokens)})
    runs: list[tuple[str, list[int]]] = []
    sequence = np.array([*prompt, *tokens], np.int64)
    for a, b in pairwise(cut):
        if a in branches:
            runs.append((BRANCH, sequence[branches[a][-LAST_WORDS:]].tolist()))
        runs.append((Author(authors[a]).name.lower(), tokens[a:b]))
    texts = words.decode_batch([ids for _, ids in runs], skip_special_tokens=False)
    return tuple((author, text) for (author, _), text in zip(runs, texts, strict=True))


def judged(run: RunStore, samples: BatchRef) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each of a step's samples: its reward, whether it failed, its group; [N] each."""
    names = [name for name in ("reward", "status", "group_id") if name in samples.names]
    read = reading.read_columns(run.store, samples[names].columns)
    status, groups = (read[name].numpy()[0] for name in ("status", "group_id"))
    rewards = read["reward"].numpy()[0] if "reward" in read else np.full(len(samples), np.nan)
    return rewards, (status == SampleStatus.FAILED) | ~np.isfinite(rewards), groups


def few(by_reward: list[int], failed: list[int], count: int) -> list[int]:
    """So many rows that show what there is: from the best to the worst, then one that failed."""
    if failed and (count > 1 or not by_reward):
        return [*few(by_reward, [], count - 1), failed[0]]
    places = np.linspace(0, len(by_reward) - 1, min(count, len(by_reward)))
    return [by_reward[round(place)] for place in places]


def printable(text: str, characters: int) -> str:
    """Text of a model, made harmless for a terminal; the middle of a long one is left out.

    characters: that are left; 0: all.
    """
    if characters and len(text) > characters:
        half = max(1, characters // 2)
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[… {left_out} characters …]\n{text[-half:]}"
    return terminal_text(text)


_TOKENIZERS: dict[tuple[Store, str], Tokenizer] = {}  # of the last run that was asked for


def tokenizer_of(run: RunStore, versions: Sequence[WeightsRef]) -> Tokenizer:
    """The tokenizer that was stored with one of these versions, or with others of the run."""
    key = (run.store, run.run)
    if key not in _TOKENIZERS:
        tokenizer = _stored_tokenizer(run, versions)
        _TOKENIZERS.clear()
        _TOKENIZERS[key] = tokenizer
    return _TOKENIZERS[key]


def _stored_tokenizer(run: RunStore, versions: Sequence[WeightsRef]) -> Tokenizer:
    from tokenizers import Tokenizer

    for version in versions:
        text = _beside(run, version)
        if text is not None:
            return Tokenizer.from_str(text)
    for number in reversed(run.versions()):
        key = f"{run.weights_key(number)}/{TOKENIZER}"
        if run.store.exists(key):
            return Tokenizer.from_str(run.store.read(key).decode())
    raise NoTokenizer(
        f"No policy version of {run.run} in the store has a {TOKENIZER}: its model's tokenizer is of "
        "another kind. Its samples are there as token ids: refrain lineage shows the rest."
    )


def _beside(run: RunStore, version: WeightsRef) -> str | None:
    try:
        folder, _ = open_chain(run.store, version)[-1]
        return run.store.read(f"{folder}/{TOKENIZER}").decode()
    except ObjectMissing:
        return None


def _lists(run: RunStore, ref: BatchRef, column: str) -> list[list[int]]:
    values, offsets = ref.fetch_numpy(run.store, column)
    assert offsets is not None
    return [values[a:b].tolist() for a, b in pairwise(offsets)]
