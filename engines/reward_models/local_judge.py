"""A frozen judge in a rollout engine: samples become questions by its rubric, its answers votes.

The engine is one of engines/rollout, which takes weights from a stored version only: the judge's are
published once, below RUN/judged/models. An answer depends on the question and the settings alone,
not on where and beside what it is asked: its seed is made of them.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from configs.imports import imported_class
from configs.rewards import LocalJudgeReward
from engines.data.scoring import SampleTexts
from engines.models import checkpoints
from engines.models.tensor_files import WEIGHTS, WORDS, digest_of
from engines.processes.user_code import installed
from engines.reward_models.contract import RewardModelSpec
from engines.reward_models.engine import RewardModelEngine, ScoresOfModel
from engines.reward_models.model import named
from engines.rewards.judge import (
    KEPT_CHARACTERS,
    EndpointCounts,
    JudgeAnswers,
    JudgeVerdict,
    Vote,
    verdict_on,
)
from engines.rewards.judge_rubric import read_rubric, score_of
from engines.rewards.protocol import Unscored
from engines.rewards.runner import LoggedMetric, RewardCode
from engines.rollout.contract import (
    EngineDead,
    RolloutRequest,
    RolloutSpec,
    Sampler,
    Sampling,
    engine_class,
)
from engines.rollout.frozen_weights import published
from engines.start_progress import report
from engines.workers.engine import Memory
from storage.batches.columns import UNFINISHED
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.run_store import RunStore

# What an answer does not depend on.
_HOW_RUN = {"max_sequences", "kv_cache_gib", "gpu_memory_utilization", "deadline"}
_GROUPS = 2**40  # numbers that questions get, by their texts


class LocalJudge:
    """One judge on one worker."""

    def __init__(self, reward: LocalJudgeReward, spec: RewardModelSpec) -> None:
        """ValueError where its files hold no language model, or its rubric cannot be read."""
        self._reward, self._spec = reward, spec
        self._store = Store(spec.store_uri, spec.store_options)
        self._rubric = read_rubric(reward.rubric)
        try:
            self._directory = checkpoints.prepared(reward.checkpoint, Path(spec.model_cache))
        except ValueError as error:
            raise ValueError(named(error)) from None
        self._tokenizer = checkpoints.load_tokenizer(self._directory)
        if reward.template == "chat" and not self._tokenizer.chat_template:
            raise ValueError(
                f"The reward {reward.label}: the tokenizer of {reward.model} has no chat template. "
                "Set rewards.functions[].template = plain."
            )
        self._answers = JudgeAnswers(store=self._store, run=spec.run)
        self._answers.keep_rubric(self._rubric)
        self.code = RewardCode(
            name=reward.label,
            settings=reward.model_dump(mode="json", exclude=_HOW_RUN),
            source=self._rubric.digest,
            module=digest_of(self._directory, (*WEIGHTS, *WORDS)),
            packages=installed(("transformers", "torch", *(["vllm"] * (reward.engine == "vllm")))),
        )
        self._engine: Sampler | None = self._built()
        self._building = threading.Lock()

    def scored(self, texts: SampleTexts) -> ScoresOfModel:
        """Scores in [0, 1], with the columns `votes` and `answers` of each sample."""
        questions: list[str | None] = []
        verdicts: dict[int, JudgeVerdict] = {}
        samples = zip(texts.prompts, texts.completions, texts.rows, strict=True)
        for number, (prompt, completion, row) in enumerate(samples):
            try:
                questions.append(self._rubric.filled(prompt, completion, row))
            except ValueError as error:
                questions.append(None)
                verdicts[number] = _none(str(error))
        began = time.monotonic()
        counts = EndpointCounts()
        judged = self.judged([one for one in dict.fromkeys(questions) if one is not None], counts)
        seconds = time.monotonic() - began
        judged_scores = [
            verdicts[number] if question is None else judged[question]
            for number, question in enumerate(questions)
        ]
        return ScoresOfModel(
            name=self._reward.label,
            scores=[
                Unscored(reason=one.error or "") if one.score is None else one.score
                for one in judged_scores
            ],
            columns={
                "votes": [[vote and vote.score for vote in one.votes] for one in judged_scores],
                "answers": [
                    [vote.answer[-KEPT_CHARACTERS:] for vote in one.votes if vote]
                    for one in judged_scores
                ],
            },
            metrics=_metrics(judged_scores, counts, seconds),
        )

    def judged(self, questions: Sequence[str], counts: EndpointCounts) -> dict[str, JudgeVerdict]:
        """What the judge makes of different questions; adds to `counts`. EngineDead."""
        reward = self._reward
        verdicts: dict[str, JudgeVerdict] = {}
        for question in questions:
            length = len(self.tokens(question))
            if length + reward.max_tokens > reward.max_length:
                verdicts[question] = _none(
                    f"{length} tokens of the judge and max_tokens = {reward.max_tokens} are more "
                    f"than max_length = {reward.max_length}"
                )
        unanswered = [one for one in questions if one not in verdicts]
        late = f"not judged within rewards.functions[].deadline = {reward.deadline:g} s"
        until = time.monotonic() + reward.deadline
        votes: dict[str, list[Vote]] = {}
        twice = reward.temperature > 0  # the likeliest tokens would be the same again
        for again in (False, True) if twice else (False,):
            for question, answers in self._asked(unanswered, again, until, counts).items():
                if answers is None:
                    verdicts[question] = _none(late)
                    continue
                given = [Vote(score=self._score(one), answer=one) for one in answers]
                before = votes.get(question, given)
                votes[question] = [
                    new if old.score is None else old
                    for old, new in zip(before, given, strict=True)
                ]
            unanswered = [
                one
                for one in unanswered
                if one not in verdicts and any(vote.score is None for vote in votes[one])
            ]
        for question, given in votes.items():
            verdicts.setdefault(question, verdict_on(reward, given, twice))
        return verdicts

    def tokens(self, question: str) -> list[int]:
        """A question as the judge's tokens."""
        if self._reward.template == "plain":
            return cast("list[int]", self._tokenizer(question)["input_ids"])
        chat = [{"role": "user", "content": question}]
        ids = self._tokenizer.apply_chat_template(
            chat, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return cast("list[int]", ids)

    def memory_held(self, memory: Memory) -> Mapping[str, int]:
        """What its engine holds."""
        return {} if self._engine is None else self._engine.memory_held(memory)

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()

    def _score(self, answer: str) -> float | None:
        return score_of(answer, self._reward.score, self._reward.scale)

    def _asked(
        self, questions: Sequence[str], again: bool, until: float, counts: EndpointCounts
    ) -> dict[str, list[str] | None]:
        """The answers to each question, one a vote, stored ones first; None: not in time."""
        reward = self._reward
        seed = reward.seed + (reward.votes if again else 0)
        keys = {
            question: [
                self._answers.key_of(
                    [self.code.module, self.code.settings, self.code.source, question, seed, vote]
                )
                for vote in range(reward.votes)
            ]
            for question in questions
        }
        answers_of: dict[str, list[str] | None] = {}
        for question in questions:
            stored = [self._answers.read(key) for key in keys[question]]
            if None not in stored:
                answers_of[question] = cast("list[str]", stored)
        counts.votes += reward.votes * len(questions)
        counts.cached += reward.votes * len(answers_of)
        missing = [question for question in questions if question not in answers_of]
        generated = self._generated(missing, seed, until)
        for question, answers in zip(missing, generated, strict=True):
            answers_of[question] = answers and [
                self._answers.keep(key, text)
                for key, text in zip(keys[question], answers, strict=True)
            ]
        return answers_of

    def _generated(
        self, questions: Sequence[str], seed: int, until: float
    ) -> list[list[str] | None]:
        """What the engine writes to each question; None where it is not done in time.

        until: by time.monotonic, when it is cut.
        """
        if not questions:
            return []
        reward, count = self._reward, self._reward.votes
        folder = f"{RunStore(self._store, self._spec.run).questions_key}/{uuid.uuid4().hex}"
        prompts = write_batch(
            self._store,
            f"{folder}/questions.safetensors",
            {
                "prompt_ids": [np.array(self.tokens(question), np.int32) for question in questions],
                "group_id": np.array([_number(question) for question in questions], np.int64),
                "prompt_row": np.arange(len(questions)),
            },
        )
        sampling = Sampling(
            n=count,
            max_new_tokens=reward.max_tokens,
            temperature=reward.temperature or 1.0,
            top_k=0 if reward.temperature else 1,  # the likeliest token
            seed=seed,
        )
        out_key = f"{folder}/answers.safetensors"
        request = RolloutRequest(
            prompts=prompts, sampling=sampling, out_key=out_key, step=0, shard=0
        )
        engine = self._running()
        late = threading.Timer(max(0.0, until - time.monotonic()), engine.cut, [[out_key]])
        late.daemon = True
        late.start()
        try:
            ref = engine.generate(request).ref
        except EngineDead:
            self._forget(engine)
            raise
        finally:
            late.cancel()
            self._store.delete([*prompts.objects])
        ids = cast("list[list[int]]", ref.fetch_list(self._store, "response_ids"))
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        ends = ref.fetch_list(self._store, "finish_reason")
        self._store.delete([*ref.objects])
        answers: list[list[str] | None] = []
        for start in range(0, len(texts), count):
            cut = UNFINISHED in ends[start : start + count]
            answers.append(None if cut else [_storable(t) for t in texts[start : start + count]])
        return answers

    def _running(self) -> Sampler:
        with self._building:
            if self._engine is None:
                self._engine = self._built()
            return self._engine

    def _forget(self, dead: Sampler) -> None:
        """Have the next call build another engine."""
        with self._building:
            if self._engine is dead:
                self._engine = None
        dead.close()

    def _built(self) -> Sampler:
        reward, spec = self._reward, self._spec
        weights = published(
            self._store,
            spec.run,
            "judged/models",
            self._directory,
            self.code.module,
            reward.dtype,
            f"the judge {reward.label}",
        )
        report(f"loading the judge {reward.label}")
        rollout = RolloutSpec(
            name=reward.label,
            model=reward.checkpoint,
            model_cache=spec.model_cache,
            rollout=reward.rollout,
            store_uri=spec.store_uri,
            store_options=spec.store_options,
            max_model_len=reward.max_length,
        )
        engine: Sampler = imported_class(engine_class(reward.rollout))(rollout)
        engine.sync(weights)
        return engine


class JudgingEngine(RewardModelEngine):
    """Scores samples by all reward models and judges of a run."""

    def __init__(self, spec: RewardModelSpec) -> None:
        super().__init__(spec)
        self._judges = [LocalJudge(settings, spec) for settings in spec.judges]

    def scored(self, texts: SampleTexts, samples: BatchRef) -> Iterator[ScoresOfModel]:
        """What each of the models and judges makes of samples."""
        yield from super().scored(texts, samples)
        for judge in self._judges:
            yield judge.scored(texts)

    @property
    def code(self) -> tuple[RewardCode, ...]:
        """What each of them is."""
        return (*super().code, *(judge.code for judge in self._judges))

    def memory_held(self, memory: Memory) -> Mapping[str, int]:
        """What each model and each judge's engine holds."""
        sizes = dict(super().memory_held(memory))
        for judge in self._judges:
            for what, size in judge.memory_held(memory).items():
                sizes[f"{judge.code.name}'s {what}"] = size
        return sizes

    def close(self) -> None:
        """End the judges' engines."""
        for judge in self._judges:
            judge.close()


def _none(error: str) -> JudgeVerdict:
    return JudgeVerdict(votes=(), score=None, error=error)


def _metrics(
    verdicts: Sequence[JudgeVerdict], asked: EndpointCounts, seconds: float
) -> dict[str, LoggedMetric]:
    """Of a call's verdicts, one a sample; `seconds`: that judging them all took."""
    metrics = {}
    if verdicts:
        metrics["seconds_per_sample"] = LoggedMetric(total=seconds, samples=len(verdicts))
    if asked.votes:
        metrics["answers_from_store"] = LoggedMetric(total=asked.cached, samples=asked.votes)
    if spreads := [verdict.spread for verdict in verdicts if verdict.spread is not None]:
        metrics["vote_spread"] = LoggedMetric.over(spreads)
    return metrics


def _number(question: str) -> int:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _GROUPS


def _storable(text: str) -> str:
    return text.encode(errors="replace").decode()
