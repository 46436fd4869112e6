"""A rollout engine that sleeps for a drawn time instead of decoding, for benchmarks.asynchrony.

Weights are loaded and scored as ever; the answers are made up.
"""

from __future__ import annotations

import os
import random
import time

from engines.rollout.contract import RolloutRequest
from engines.rollout.hf_engine import HFEngine, _Shard
from engines.rollout.samples import Completion, PromptTokens

VARIABLE = "REFRAIN_BENCHMARK_DRAW"  # NAME:SECONDS, the distribution and its mean
LOGPROB = -4.0  # nats, of every made-up token


def seconds(draw: str, step: int, shard: int) -> float:
    """How long a shard of a step takes."""
    name, mean = draw.split(":")
    chance = random.Random(f"{name}/{step}/{shard}")
    if name == "equal":
        return float(mean)
    if name == "uniform":
        return chance.uniform(0.0, 2.0) * float(mean)
    if name == "bimodal":  # 95 % short, the others 20 times as long
        short = float(mean) / (0.95 + 0.05 * 20)
        return short * (20 if chance.random() < 0.05 else 1)
    sigma = float(name.removeprefix("lognormal"))
    return float(mean) * chance.lognormvariate(-sigma * sigma / 2, sigma)


class SleepingEngine(HFEngine):
    """Takes as long as drawn for a shard, whatever its prompts."""

    def _sample(
        self, prompts: PromptTokens, request: RolloutRequest, begun: list[Completion]
    ) -> list[Completion]:
        until = time.monotonic() + seconds(os.environ[VARIABLE], request.step, request.shard)
        began = self._holding().version
        with self._in_flight(_Shard(request.out_key, begun)) as shard, self._changed:
            while (left := until - time.monotonic()) > 0 and shard.ended is None:
                self._changed.wait(left)
            if shard.ended is not None:
                raise shard.ended
        ended = self._holding().version
        half = request.sampling.max_new_tokens // 2
        whole = request.sampling.max_new_tokens
        spans = [(began, 0, half), (ended, half, whole)] if ended != began else [(began, 0, whole)]
        chance = random.Random(f"{request.step}/{request.shard}")
        return [
            Completion(
                tokens=[chance.randrange(10, 90) for _ in range(whole)],
                logprobs=[LOGPROB] * whole,
                spans=spans,
                finish_reason="length",
            )
            for _ in range(len(prompts.tokens) * request.sampling.n)
        ]
