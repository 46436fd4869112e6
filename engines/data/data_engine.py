"""The data engine: rows to prompts, completions to rewards, rewards to advantages.

It lives on the workers of the pool that cluster.roles.reward names: whole batches, no device. The
reward functions themselves run in child processes (engines/rewards/runner.py), so that one that
hangs or crashes fails its samples and nothing else.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from configs.algorithm.algorithm import AlgorithmConfig
from configs.data import Source
from engines.data.advantage_parts import parts_of, write_part, write_statistics
from engines.data.advantages import write_advantages
from engines.data.chat_template import state_number, tokenize
from engines.data.contract import (
    PROBE_TOKENS,
    AdvantagePartRequest,
    AdvantageParts,
    AdvantagesRequest,
    AdvantagesResult,
    AnswersGiven,
    DataSpec,
    InformativeResult,
    PartResult,
    PromptsResult,
    SampleFailure,
    Scorer,
    ScoreRequest,
    ScoreResult,
)
from engines.data.dataset_answers import write_answers
from engines.data.sample_metrics import repeated_ngrams
from engines.data.scoring import model_columns, read_texts, score_columns, with_episodes
from engines.data.training_batch import Choice, choose, write_repetition
from engines.rewards.judge import JudgeAnswers
from engines.rewards.runner import RewardCode, RewardRunner, code_digest, pooled
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.prompts.datasets import open_source


class DataEngine(Scorer):
    """Makes prompts, rewards and advantages out of stored batches, and stores them."""

    def __init__(self, spec: DataSpec) -> None:
        from engines.models.checkpoints import load_tokenizer, materialize

        self._spec = spec
        self._store = spec.open_store()
        self._tokenizer = load_tokenizer(materialize(spec.model, Path(spec.model_cache)))
        self._source = open_source(spec.data.source)
        answers = JudgeAnswers(store=self._store, run=spec.run)
        self._rewards = RewardRunner(spec.rewards, spec.data, answers, spec.scorers)
        self._rewards.start()

    def prompts(
        self, rows: list[int], first_group: int | None, out_key: str, source: Source | None = None
    ) -> PromptsResult:
        """Write the prompts of rows, of the data set or of another source with the same columns."""
        opened = self._source if source is None else open_source(source)
        contents = opened.rows(rows)
        tokenized = tokenize(contents, self._spec.data, self._tokenizer)
        dropped = tuple((rows[position], reason) for position, reason in tokenized.dropped)
        if not tokenized.kept:
            return PromptsResult(ref=None, dropped=dropped)
        count = len(tokenized.kept)
        columns: dict[str, object] = {
            "prompt_ids": tokenized.prompt_ids,
            **({} if first_group is None else {"group_id": first_group + np.arange(count)}),
            "prompt_row": np.asarray([rows[p] for p in tokenized.kept], dtype=np.int64),
            "row": [contents[p] for p in tokenized.kept],
        }
        if source is None:
            columns |= self._spec.task_columns([contents[p] for p in tokenized.kept])
        state = self._spec.data.state_column
        if state is not None:
            columns["state_id"] = np.asarray(
                [state_number(contents[p][state]) for p in tokenized.kept], dtype=np.int64
            )
        return PromptsResult(ref=write_batch(self._store, out_key, columns), dropped=dropped)

    def row_digests(self, start: int, stop: int) -> NDArray[np.uint64]:
        """What tells the rows start … stop of the data set apart (storage/runs/seen_rows.py)."""
        return self._source.row_digests(range(start, stop))

    def probe(self) -> tuple[list[list[int]], list[int]]:
        """Sequences of the dataset of several lengths, and how many tokens of each are the prompt."""
        rows = list(range(min(len(PROBE_TOKENS), len(self._source))))
        tokenized = tokenize(self._source.rows(rows), self._spec.data, self._tokenizer)
        prompts = [ids for ids in tokenized.prompt_ids if len(ids) > 1]
        if not prompts:
            longest = self._spec.data.max_prompt_tokens
            raise ValueError(
                f"The first {len(rows)} rows of {self._source.name} give no prompt of 2 to {longest} "
                "tokens. Set data.max_prompt_tokens higher where they are longer, else "
                "data.prompt_column to the column that holds the prompts."
            )
        cut = {
            tuple(prompts[number % len(prompts)][:most]) for number, most in enumerate(PROBE_TOKENS)
        }
        tokens = [list(ids) for ids in sorted(cut)]
        return tokens, [len(ids) // 2 for ids in tokens]

    def given(
        self, prompts: BatchRef, column: str, n: int, out_key: str, attempt: int
    ) -> AnswersGiven:
        """Write the answers that the rows of some prompts have, as n samples of each."""
        return write_answers(
            self._store,
            prompts,
            column,
            n,
            self._tokenizer,
            self._spec.max_new_tokens,
            out_key,
            attempt,
        )

    def reward_code(self) -> dict[str, RewardCode]:
        """What the functions are that are called here, by name."""
        return self._rewards.called_code()

    def score(self, request: ScoreRequest, out_key: str) -> ScoreResult:
        """Score the completions of a shard.

        What the functions give to log_extra becomes columns extra/<function>/<column>, one JSON
        value per sample; null for a sample of which nothing was logged.
        """
        samples, models, source = request.samples, request.models, request.source
        texts = read_texts(self._store, request.prompts, samples, self._spec.data, self._tokenizer)
        rows = texts.rows
        status, _ = samples.fetch_numpy(self._store, "status")
        sample_ids, _ = samples.fetch_numpy(self._store, "sample_id")
        if "episode" in samples.names:
            rows = with_episodes(self._store, samples, rows)
        model_scores = {} if models is None else model_columns(self._store, models)
        began = time.monotonic()
        scores = self._rewards.score(
            texts.prompts,
            texts.completions,
            rows,
            texts.completion_ids,
            request.trainer_state,
            model_scores,
            lambda: self._source if source is None else open_source(source),
        )
        seconds = time.monotonic() - began
        code = self._rewards.code(() if models is None else models.code)
        failed = scores.failed | (status == SampleStatus.FAILED)  # of episodes, said already
        columns = score_columns(scores, status, code_digest(code))
        columns["repeated_ngrams"] = repeated_ngrams(self._store, samples)
        return ScoreResult(
            ref=write_batch(self._store, out_key, columns),
            failures=tuple(
                SampleFailure(sample=int(sample_ids[f.index]), function=f.function, error=f.error)
                for f in scores.failures
                if status[f.index] != SampleStatus.FAILED
            ),
            tracebacks=scores.tracebacks,
            failed=int(failed.sum()),
            metrics=pooled([scores.metrics, {} if models is None else models.metrics]),
            code=code,
            seconds=seconds,
        )

    def advantages(
        self, request: AdvantagesRequest, out_key: str
    ) -> AdvantagesResult | AdvantageParts:
        """Choose the samples that train, and write their advantages."""
        algorithm, part_tokens = request.algorithm, request.part_tokens
        choice = self._choose(request)
        choice.check()
        if request.kept is not None:
            choice = choice.with_columns(self._store, request.kept)
        if not choice.trained:
            return choice.result(choice.training.samples, {})
        if part_tokens is not None:
            parts = parts_of(self._store, choice, algorithm, part_tokens, out_key)
            if parts is not None:
                return parts
        ref, metrics = write_advantages(
            self._store, choice.training, algorithm, out_key, request.version
        )
        return choice.result(ref, metrics)

    def _choose(self, request: AdvantagesRequest) -> Choice:
        spec = self._spec
        return choose(self._store, request, spec.rewards, spec.max_new_tokens, spec.data.right_from)

    def informative(self, request: AdvantagesRequest) -> InformativeResult:
        """Which groups of a step's samples so far `advantages` would choose."""
        choice = self._choose(request)
        return InformativeResult(groups=choice.informative, kept=choice.training.samples)

    def repetition(self, samples: BatchRef, algorithm: AlgorithmConfig, out_key: str) -> BatchRef:
        """Write the repetition penalties of some of a step's samples."""
        return write_repetition(self._store, samples, algorithm, out_key)

    def advantage_statistics(
        self, samples: BatchRef, rows: BatchRef, algorithm: AlgorithmConfig, out_key: str
    ) -> BatchRef:
        """Write what a part adds to a statistic over the whole batch, by row."""
        return write_statistics(self._store, samples, rows, algorithm, out_key)

    def advantage_part(self, request: AdvantagePartRequest, out_key: str) -> PartResult:
        """Write the advantages of a part."""
        return write_part(self._store, request, out_key)

    def close(self) -> None:
        """End the reward functions' processes."""
        self._rewards.close()
