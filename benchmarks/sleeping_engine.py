"""A rollout engine that sleeps for a drawn time instead of decoding, and a flow that has such.

    python -m benchmarks.sleeping_engine flows.grpo WORDS

Weights are loaded as ever, and scored once in a process; the answers are made up. How long: the
variable below.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

from engines.rollout.contract import RolloutRequest
from engines.rollout.hf_engine import HFEngine, _Shard
from engines.rollout.samples import Completion, PromptTokens
from storage.batches.columns import UNFINISHED

VARIABLE = "REFRAIN_BENCHMARK_DRAW"  # NAME:SECONDS, the distribution and its mean
LOGPROB = -4.0  # nats, of every made-up token


def seconds(draw: str, group: int) -> float:
    """How long a group, which is a shard, takes from its first token to its last."""
    name, mean = draw.split(":")
    chance = random.Random(f"{name}/{group}")
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
    """Takes as long as drawn for a shard, whatever its prompts; goes on where it was cut.

    Each engine loads its weights and attests their digest; engines of one process that hold the same
    ones score a probe once for all, since a thousand of them share two cores here.
    """

    _scores: ClassVar[
        dict[str, list[list[float]]]
    ] = {}  # of the last probe, by the weights' digest
    _scoring: ClassVar = threading.Lock()

    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """As ever, or as another engine of this process found with the same weights."""
        key = f"{self._holding().digest} {token_ids} {prompt_lengths}"
        with self._scoring:
            if key not in self._scores:
                self._scores.clear()
                self._scores[key] = super().score(token_ids, prompt_lengths)
            return self._scores[key]

    def _sample(
        self, prompts: PromptTokens, request: RolloutRequest, begun: list[Completion]
    ) -> list[Completion]:
        whole, drawn = request.sampling.max_new_tokens, len(begun[0].tokens)
        if begun[0].ended:
            return begun
        each = seconds(os.environ[VARIABLE], prompts.numbers[0]) / whole  # of a token
        start, first = time.monotonic(), self._holding().version
        with self._in_flight(_Shard(request.out_key, [])) as shard, self._changed:
            while (
                (left := start + (whole - drawn) * each - time.monotonic()) > 0
                and shard.ended is None
                and request.out_key not in self._cut
            ):
                self._changed.wait(left)
            if shard.ended is not None:
                raise shard.ended
        last = self._holding().version
        slept = time.monotonic() - start
        new = min(whole - drawn, int(slept / each)) if each else whole - drawn
        reason = "length" if drawn + new == whole else UNFINISHED
        half = new // 2 if last != first else 0
        spans = [(first, 0, half), (last, half, new)]
        chance = random.Random(f"{prompts.numbers[0]}/{drawn}")
        more = Completion(
            tokens=[chance.randrange(10, 90) for _ in range(new)],
            logprobs=[LOGPROB] * new,
            spans=[span for span in spans if span[2] > span[1]],
            finish_reason=reason,
        )
        return [one.followed_by(more) for one in begun]

    def _so_far(self, out_key: str) -> None:
        """Nothing is saved of answers that are made up at the end."""

    def _cut_shards(self) -> None:
        with self._changed:
            self._changed.notify_all()


def run(words: Sequence[str]) -> int:
    """GRPO in this process with such engines, by the words of its command line; the exit code."""
    import tasks.run.roles as made
    from configs.grpo import GRPOConfig
    from tasks.launch.command_line import main

    made.engine_class = lambda config: "benchmarks.sleeping_engine:SleepingEngine"
    return main("flows.grpo:grpo", GRPOConfig, words)


if __name__ == "__main__":
    sys.exit(run(sys.argv[2:]))
