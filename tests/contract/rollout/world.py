"""What the rollout contract is tested with: a tiny model, its versions, prompts, a reference.

The reference is a plain transformers forward pass in float32, one sequence at a time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from configs.imports import imported_class
from configs.lora import LoraConfig
from configs.model import RandomModel
from configs.rollout import NgramSpeculation, RolloutConfig
from engines.models import checkpoints
from engines.rollout.contract import (
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    Sampling,
    engine_class,
)
from engines.rollout.engine import RolloutEngine
from engines.rollout.vllm_own_process import VllmInOwnProcess
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.weights import WeightsRef
from storage.runs.weights_writing import publish

MODEL = RandomModel(seed=3)
MAX_MODEL_LEN = 256
RUN = "run"
PROPOSED = NgramSpeculation(tokens=3, longest_match=3, shortest_match=1)
SHORT = Sampling(n=3, max_new_tokens=24, seed=5)
# Long enough to be disturbed on its way: 8 samples of the default prompts, 200 tokens each.
LONG = Sampling(n=2, max_new_tokens=200, seed=5, ignore_eos=True)


class World:
    """A store with policy versions 0 and 1 of a tiny model, and the means to use engines on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(f"file://{folder}/store")
        self.cache = folder / "models"
        self.directory = checkpoints.materialize(MODEL, self.cache)
        self.tokenizer = checkpoints.load_tokenizer(self.directory)
        self.policies = [checkpoints.load_for_training(self.directory) for _ in range(2)]
        disturb(self.policies[1])
        self.weights = [self.publish(v, policy) for v, policy in enumerate(self.policies)]
        self._keys = itertools.count()

    def publish(self, version: int, policy: PreTrainedModel) -> WeightsRef:
        return publish(
            self.store,
            RUN,
            version,
            policy.state_dict().items(),
            checkpoints.companion_files(self.directory),
        )

    def spec(self, kind: str) -> RolloutSpec:
        """Of an engine of a kind; `vllm-adapter` has adapters beside their base, `vllm-ngram`
        proposes tokens, and `vllm-own` has its front end in a process of its own."""
        engine, _, with_ = kind.partition("-")
        return RolloutSpec(
            name=f"{kind}-0",
            model=MODEL,
            model_cache=str(self.cache),
            rollout=RolloutConfig(
                engine=engine,
                dtype="float32",
                kv_cache_gib=0.1,
                seed=1,
                speculative=PROPOSED if with_ == "ngram" else None,
                own_process=with_ == "own",
                engine_args={"max_num_batched_tokens": 2048} if engine == "vllm" else {},
            ),
            lora=LoraConfig(rank=3, serving="adapter") if with_ == "adapter" else None,
            store_uri=self.store.uri,
            measured=with_ == "ngram",
            max_model_len=MAX_MODEL_LEN,
        )

    def build(self, kind: str) -> RolloutEngine:
        spec = self.spec(kind)
        cls = imported_class(engine_class(spec.rollout))
        if cls is VllmInOwnProcess:
            return cast("RolloutEngine", InOwnProcess(spec))
        return cls(spec)

    def prompts(self, lengths: tuple[int, ...] = (5, 9, 3, 17)) -> BatchRef:
        """Prompts of the given lengths; group g is always the same prompt."""
        return write_batch(
            self.store,
            f"prompts/{next(self._keys)}.safetensors",
            {
                "prompt_ids": [4 + (np.arange(n) * (g + 7)) % 90 for g, n in enumerate(lengths)],
                "group_id": np.arange(len(lengths)) + 100,
                "prompt_row": np.arange(len(lengths)),
            },
        )

    def request(self, prompts: BatchRef, sampling: Sampling, step: int = 4) -> RolloutRequest:
        return RolloutRequest(
            prompts=prompts,
            sampling=sampling,
            out_key=f"samples/{next(self._keys)}.safetensors",
            step=step,
            shard=0,
            attempt=2,
            worker="w1",
        )

    def column(self, result: RolloutResult, name: str) -> list:
        """A column as plain Python values, a row each."""
        rows = result.ref.fetch_list(self.store, name)
        return [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]

    @torch.no_grad()
    def logprobs(
        self, version: int, prompt: list[int], response: list[int], sampling: Sampling
    ) -> list[float]:
        """Of the response under a policy version, filtered and tempered as `sampling` says."""
        found = self.distribution(version, prompt, response, sampling)
        return found.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()

    @torch.no_grad()
    def distribution(
        self,
        version: int,
        prompt: list[int],
        response: list[int],
        sampling: Sampling,
        left: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Log-probs [R, V] of which each token of the response is to be drawn.

        left: bool [R, V], words that a grammar leaves; None: all.
        """
        logits = self.policies[version](torch.tensor([prompt + response])).logits[0]
        logits = logits[len(prompt) - 1 : -1] / sampling.temperature
        if left is not None:
            logits = logits.masked_fill(~left, -torch.inf)
        if sampling.min_p:
            probs = logits.softmax(1)
            least_likely = sampling.min_p * probs.amax(1, keepdim=True)
            logits = logits.masked_fill(probs < least_likely, -torch.inf)
        if sampling.top_k:
            least = logits.topk(sampling.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if sampling.top_p < 1:
            for row in logits:
                order = row.argsort(descending=True)
                before = row[order].softmax(0).cumsum(0) - row[order].softmax(0)
                row[order[before >= sampling.top_p]] = -torch.inf
        return logits.log_softmax(1)


class InOwnProcess(VllmInOwnProcess):
    """With what tests ask of an engine beside what a flow may."""

    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        return self._process.call(
            RolloutEngine.score, token_ids=token_ids, prompt_lengths=prompt_lengths
        )

    def pause(self) -> None:
        self._process.call(RolloutEngine.pause)

    def resume(self) -> None:
        self._process.call(RolloutEngine.resume)

    def cancel(self) -> int:
        return self._process.call(RolloutEngine.cancel)


def disturb(policy: PreTrainedModel, seed: int = 9) -> None:
    """Change every weight enough to change what is sampled."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=noise))


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for `condition`; fail saying `what` did not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.005)


def begun(
    engine: RolloutEngine, threads: ThreadPoolExecutor, request: RolloutRequest
) -> Future[RolloutResult]:
    """The shard in flight, some tokens of its samples drawn, most of them not."""
    before = engine.status().tokens
    shard = threads.submit(engine.generate, request)
    until(lambda: engine.status().tokens > before + 32 or shard.done(), "sampling")
    assert not shard.done(), "the shard ended before it could be disturbed"
    return shard
