"""What samples say: the text of a prompt and of each answer to it, by the run's own tokenizer.

The tokenizer lies beside the run's policy versions, so nothing but the store is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from configs.terminal_text import terminal_text
from storage.audit.sample_origins import SampleOrigin, origins_of, samples_of
from storage.batches import reading
from storage.batches.columns import Author, SampleStatus
from storage.batches.forest import Forest, read_forests
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import Commit
from storage.runs.run_store import RunStore
from storage.runs.weights import WeightsRef, open_chain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from storage.batches.refs import BatchRef
    from storage.evaluations.results import EvaluationResult
    from storage.objects.store import Store

TOKENIZER = "tokenizer.json"
# What is shown of an episode; the template's words around it are in --json.
BRANCH = "branch"  # a part that says after which words the parts behind it go on
WROTE = {"policy": "wrote", "environment": "was answered", BRANCH: "went on after"}
LAST_WORDS = 16  # tokens by which a place in an episode that branches is known


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
    said = f"episode ended: {origin.episode_end}"
    if origin.episode_error:
        return f"{said}, {origin.episode_error}"
    turns = ["-" if one is None else f"{one:.4g}" for one in origin.turn_rewards]
    return f"{said}, rewards by turn {' '.join(turns)}" if set(turns) - {"-"} else said


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
        known = read_forests(run.store, ref)
        forests: Sequence[Forest | None] = known or [None] * len(responses)
        parts = [by_author(words, *one) for one in zip(*columns, forests, strict=True)]
    return [
        Transcript(origin=origin, prompt=prompt, response=response, parts=said)
        for origin, prompt, response, said in zip(origins, prompts, responses, parts, strict=True)
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
    laid = np.array([*prompt, *tokens], np.int64)
    for a, b in pairwise(cut):
        if a in branches:
            runs.append((BRANCH, laid[branches[a][-LAST_WORDS:]].tolist()))
        runs.append((Author(authors[a]).name.lower(), tokens[a:b]))
    said = words.decode_batch([ids for _, ids in runs], skip_special_tokens=False)
    return tuple((who, text) for (who, _), text in zip(runs, said, strict=True))


def judged(run: RunStore, samples: BatchRef) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each of a step's samples: its reward, whether it failed, its group; [N] each."""
    wanted = [name for name in ("reward", "status", "group_id") if name in samples.names]
    read = reading.read_columns(run.store, samples[wanted].columns)
    status, groups = (read[name].numpy()[0] for name in ("status", "group_id"))
    rewards = read["reward"].numpy()[0] if "reward" in read else np.full(len(samples), np.nan)
    return rewards, (status == SampleStatus.FAILED) | ~np.isfinite(rewards), groups


def few(by_reward: list[int], failed: list[int], count: int) -> list[int]:
    """So many rows that show what there is: from the best to the worst, then one that failed."""
    if failed and (count > 1 or not by_reward):
        return [*few(by_reward, [], count - 1), failed[0]]
    places = np.linspace(0, len(by_reward) - 1, min(count, len(by_reward)))
    return [by_reward[round(place)] for place in places]


def printable(said: str, characters: int) -> str:
    """Text of a model, made harmless for a terminal; the middle of a long one is left out.

    characters: that are left; 0: all.
    """
    if characters and len(said) > characters:
        half = max(1, characters // 2)
        left_out = len(said) - 2 * half
        said = f"{said[:half]}\n[… {left_out} characters …]\n{said[-half:]}"
    return terminal_text(said)


_TOKENIZERS: dict[tuple[Store, str], Tokenizer] = {}  # of the last run that was asked for


def tokenizer_of(run: RunStore, versions: Sequence[WeightsRef]) -> Tokenizer:
    """The tokenizer that was stored with one of these versions, or with others of the run."""
    known = (run.store, run.run)
    if known not in _TOKENIZERS:
        found = _stored_tokenizer(run, versions)
        _TOKENIZERS.clear()
        _TOKENIZERS[known] = found
    return _TOKENIZERS[known]


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
