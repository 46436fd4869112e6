"""A teacher in vLLM: the scores of FSDPEngine.teach, by an engine that samples for nobody.

It differs in what vLLM gives. Log-probs are at temperature 1, of the model in rollout.dtype and by
vLLM's kernels, so a student that is its own teacher is moved by the difference between the two. The
tail is 1 less the words' probabilities, which in float32 says nothing below LEAST_TAIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.failures import WeightMismatch
from engines.models.checkpoints import prepared
from engines.models.tensor_files import WEIGHTS, digest_of
from engines.models.tokens import model_tokens, tokens_of_student
from engines.rollout.contract import EngineDead
from engines.rollout.frozen_weights import published
from engines.rollout.vllm_arguments import ScoredTokens
from engines.rollout.vllm_engine import VllmEngine
from engines.start_progress import report
from engines.teachers.contract import TeacherEngine
from engines.teachers.pool import SPARE_WORDS, VllmTeacherSpec
from engines.workers.engine import Memory
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store

FOLDER = "taught/models"  # below the run's, where weights are that are no policy version
LEAST_TAIL = 2.0**-20  # probability; what float32 leaves of 1 less a sum near 1


class VllmTeacher(TeacherEngine):
    """One teacher on one worker; any of a pool's takes any shard."""

    def __init__(self, spec: VllmTeacherSpec) -> None:
        """ValueError where its tokens are not the student's; EngineDead where vLLM does not start."""
        settings = spec.engine
        self._name, cache = settings.name, Path(settings.model_cache)
        self._store = Store(settings.store_uri, settings.store_options)
        directory = prepared(settings.model, cache)
        self._readable = tokens_of_student(prepared(spec.student, cache), directory, settings.name)
        tokens = model_tokens(directory)
        self._rows = None if tokens is None else tokens.rows
        weights = spec.weights or published(
            self._store,
            spec.run,
            FOLDER,
            directory,
            digest_of(directory, WEIGHTS),
            settings.rollout.dtype,
            f"the teacher {settings.name}",
        )
        report(f"loading the teacher {settings.name}")
        self._engine = VllmEngine(settings)
        try:
            self._engine.sync(weights)
        except BaseException:
            self._engine.close()
            raise
        self.version = 0

    def digest(self) -> str:
        """Digest of the weights that vLLM loaded."""
        status = self._engine.status()
        if status.state == "dead":
            raise EngineDead(status.cause)
        return status.digest

    def teach(self, batch: BatchRef, out_key: str, top_k: int, digest: str) -> BatchRef:
        """Write teacher_logprobs of all rows [N], in their order; with `top_k` the likeliest words.

        Columns as of FSDPEngine.teach.
        """
        if (digest_held := self.digest()) != digest:
            raise WeightMismatch(
                f"The teacher {self._name} holds the weights {digest_held}, not {digest}."
            )
        prompts, responses = (
            self._rows_of(batch, f"{name}_ids") for name in ("prompt", "response")
        )
        rows = [row for row, response in enumerate(responses) if response]
        scored = self._engine.likeliest(
            [prompts[row] + responses[row] for row in rows],
            [len(prompts[row]) for row in rows],
            top_k + self._unknown if top_k else 0,
        )
        offsets = np.cumsum([0, *map(len, responses)], dtype=np.int64)
        columns = columns_of([known_words(score, self._readable, top_k) for score in scored], top_k)
        jagged = {name: Jagged(values, offsets) for name, values in columns.items()}
        return write_batch(self._store, out_key, jagged)

    def memory_held(self, memory: Memory) -> Mapping[str, int]:
        """What its engine holds."""
        return self._engine.memory_held(memory)

    @classmethod
    def memory_setting(
        cls, payload: VllmTeacherSpec, memory: Memory, held: Mapping[str, int], said: str
    ) -> str:
        name = "kv_cache_gib" if memory == "host" else "gpu_memory_utilization"
        where = f"teachers.{payload.engine.name}.engine"
        return f"Set {where}.{name} or {where}.max_sequences lower."

    def close(self) -> None:
        """End vLLM."""
        self._engine.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes that live."""
        return self._engine.status().pids

    @property
    def _unknown(self) -> int:
        """Words of the teacher that are none of the student's, as far as they are asked for."""
        if self._rows is None or self._readable is None:
            return 0
        return min(SPARE_WORDS, self._rows - self._readable)

    def _rows_of(self, batch: BatchRef, column: str) -> list[list[int]]:
        """A jagged column of token ids, row by row."""
        values, offsets = batch.fetch_numpy(self._store, column)
        assert offsets is not None, "token ids are jagged"
        ids = values.tolist()
        return [ids[first:last] for first, last in pairwise(offsets.tolist())]


def columns_of(scored: Sequence[ScoredTokens], top_k: int) -> dict[str, NDArray[np.generic]]:
    """The columns of FSDPEngine.teach, over all tokens [T] of some samples; T may be 0."""
    none = ScoredTokens(
        logprobs=np.zeros(0, np.float32),
        ids=np.zeros((0, top_k), np.int32),
        words=np.zeros((0, top_k), np.float32),
    )
    every = [none, *scored]
    columns: dict[str, NDArray[np.generic]] = {
        "teacher_logprobs": np.concatenate([score.logprobs for score in every])
    }
    if top_k:
        words = np.concatenate([score.words for score in every])
        columns["teacher_topk_ids"] = np.concatenate([score.ids for score in every])
        columns["teacher_topk_logprobs"] = words
        columns["teacher_tail_logprobs"] = tails(words)
    return columns


def known_words(scored: ScoredTokens, readable: int | None, top_k: int) -> ScoredTokens:
    """Of the likeliest words the first top_k that the student knows.

    Args:
        scored: With top_k words of each token, or some more.
        readable: How many token ids the student knows; None: all.

    Raises:
        ValueError: fewer than top_k of a token's words are the student's.
    """
    unknown = np.zeros(scored.ids.shape, bool) if readable is None else scored.ids >= readable
    places = np.argsort(unknown, axis=1, kind="stable")[:, :top_k]
    if np.take_along_axis(unknown, places, axis=1).any():
        raise ValueError(
            f"Of {scored.ids.shape[1]} likeliest words of a teacher fewer than {top_k} are the "
            "student's too. Set teachers.NAME.engine.kind = fsdp, which looks among those alone."
        )
    return ScoredTokens(
        logprobs=scored.logprobs,
        ids=np.take_along_axis(scored.ids, places, axis=1),
        words=np.take_along_axis(scored.words, places, axis=1),
    )


def tails(words: NDArray[np.float32]) -> NDArray[np.float32]:
    """log(1 - sum_b tau_b) of each token [T], with 1 - sum_b tau_b at least LEAST_TAIL.

    Two words of probability 3/4 and 1/8 leave log(1/8).

    Args:
        words: [T, k] log-probs, nats.
    """
    rest = 1.0 - np.exp(words.astype(np.float64)).sum(axis=-1)
    return np.log(np.maximum(rest, LEAST_TAIL)).astype(np.float32)
