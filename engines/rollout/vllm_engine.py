"""The rollout engine on vLLM: the promises of engine.py in vLLM's terms."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prometheus_client import Metric

from engines.failures import WeightMismatch
from engines.models import checkpoints
from engines.models.checkpoints import build_empty, prepared
from engines.models.grammars import BegunTurn, Grammars, Progress
from engines.models.tensor_files import checkpoint_names
from engines.rollout import vllm_arguments
from engines.rollout.contract import (
    NO_EXPERTS_ON_CPU,
    NO_MASK_ON_CPU,
    RolloutRequest,
    RolloutSpec,
    Sampling,
    SyncMode,
    worker_environment,
)
from engines.rollout.engine import RolloutEngine
from engines.rollout.samples import Completion, PromptTokens
from engines.rollout.vllm_arguments import ScoredTokens
from engines.rollout.vllm_process import VllmProcess
from engines.rollout.weight_reader import HeldVersion, LoadReport
from engines.weight_transfer.offer import TransferOffer
from engines.workers.engine import Moved
from storage.batches.sampling_mask import NO_TOKENS, SamplingMask
from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreUnavailable
from storage.objects.usage import COUNTER
from storage.runs.weights import WeightsRef

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.output_processor import RequestState

    from engines.models.routers import ChosenExperts

# mode -> (what becomes of running requests, whether cached keys and values are dropped)
_PAUSES: dict[SyncMode, tuple[Literal["wait", "keep"], bool]] = {
    "idle": ("wait", True),
    "keep": ("keep", False),
    "recompute": ("keep", True),
}
# Eager means without torch.compile too: vLLM uses it for a few lines of its sampler, which takes
# seconds and a C++ compiler when the first shard comes. Not for this process, which may train.
CACHE_USE = "vllm:kv_cache_usage_perc"  # vLLM's name of the metric, a share
NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
_FAILURES = {
    kind.__name__: kind for kind in (ObjectDamaged, ObjectMissing, StoreUnavailable, WeightMismatch)
}


class _WordsLeft:
    """The words that the tokens of a request were drawn from, by its grammar."""

    def __init__(self, progress: Progress | None) -> None:
        """progress: in the grammar; None: all words are left."""
        self._progress = progress
        self._mask = NO_TOKENS

    def __call__(self, tokens: list[int]) -> SamplingMask:
        """Of the request's tokens so far."""
        if self._progress is None:
            return NO_TOKENS.extended(len(tokens))
        more = self._progress.mask(tokens[len(self._mask) :])
        self._mask = self._mask.followed_by(more)
        return self._mask


class _Row:
    """A completion in the making."""

    def __init__(
        self,
        begun: Completion,
        sampling: Sampling,
        experts: ChosenExperts | None,
        turn: BegunTurn | None,
        words: _WordsLeft | None,
    ) -> None:
        self.begun = begun
        self.sampling = sampling
        self.experts = experts  # where those of each token are wanted
        self.turn = turn  # that goes on, where its text has a grammar
        self.words = words  # that its tokens were drawn from, where vLLM does not say it
        self.request = ""  # name of its request, while it has one

    def so_far(self, states: Mapping[str, RequestState]) -> Completion:
        """As it stands, by what vLLM's output side has; `states` by the name of the request."""
        state = states.get(self.request)
        if state is None:
            return self.begun
        from vllm.outputs import RequestOutput
        from vllm.v1.engine import FinishReason

        # What an abort would give out, without aborting.
        output = state.make_request_output([], None, FinishReason.ABORT, None)
        assert isinstance(output, RequestOutput)
        return self.begun.followed_by(
            vllm_arguments.completion(output, self.sampling, self.experts, self.words)
        )


def _experts_of(directory: Path) -> ChosenExperts:
    """Of a model's routers; ValueError where vLLM does not say what they choose."""
    from engines.models.routers import chosen_experts

    if not _on_gpu():
        raise ValueError(NO_EXPERTS_ON_CPU)
    return chosen_experts(build_empty(directory))


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class VllmEngine(RolloutEngine):
    """A rollout engine on vLLM, which runs its model in processes of its own."""

    def __init__(self, spec: RolloutSpec) -> None:
        """Start vLLM with weights of no meaning; the first `sync` brings version 0.

        Takes half a minute. Raises EngineDead with vLLM's own cause if it does not start.
        """
        if spec.store_uri.startswith("memory:"):
            raise ValueError(
                f"store.uri = {spec.store_uri} cannot be read by vLLM's own processes. "
                "Set store.uri to file:// or s3://, or rollout.engine = transformers."
            )
        for name, value in worker_environment(spec.rollout).items():
            os.environ.setdefault(name, value)
        directory = prepared(spec.model, Path(spec.model_cache))
        shapes, names = checkpoints.tensor_shapes(directory), checkpoint_names(directory)
        experts = _experts_of(directory) if spec.routed_experts else None
        self._masks = vllm_arguments.gives_masks(spec.rollout)
        if self._masks and not _on_gpu():
            raise ValueError(NO_MASK_ON_CPU)
        super().__init__(spec, shapes, names, experts)
        self._ends = checkpoints.end_token_ids(directory)
        self._requests = 0
        # Shards in flight, each with the error that it must end with, if it must.
        self._shards: dict[asyncio.Task[list[Completion]], Exception | None] = {}
        self._rows: dict[str, list[_Row]] = {}  # of the shards in flight, by out_key
        self._base = ""  # digest of the base that vLLM has, where an adapter is beside it
        self._cache_asleep = False  # whether only the weights have been woken
        self._process = VllmProcess(
            spec.name,
            lambda: vllm_arguments.engine_arguments(spec, directory),
            NOT_COMPILED if spec.rollout.enforce_eager else {},
        )
        self._process.run(self._prepare())

    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """Log-probs, at temperature 1 and unfiltered, of each sequence's tokens past its prompt."""
        scores = self.likeliest(token_ids, prompt_lengths)
        return [score.logprobs.tolist() for score in scores]

    def likeliest(
        self, token_ids: list[list[int]], prompt_lengths: list[int], top_k: int = 0
    ) -> list[ScoredTokens]:
        """The same, and the `top_k` likeliest words in each place.

        More than 20 words need engine_args.max_logprobs. Prefixes that others have are computed anew:
        vLLM keeps no logits beside the keys and values of its cache.
        """
        self._check_awake()
        return self._process.run(self._score(token_ids, prompt_lengths, top_k))

    def pause(self) -> None:
        """Stop decoding; shards in flight keep their place. Waits for a running sync."""
        self._process.run(self._pause())

    def resume(self) -> None:
        """Go on decoding."""
        self._process.run(self._resume())

    def metrics(self) -> Sequence[Metric]:
        """vLLM's own, where the spec says so."""
        return self._process.metrics()

    def _cache_use(self) -> float | None:
        metrics = self._process.metrics()
        shares = [one.value for each in metrics if each.name == CACHE_USE for one in each.samples]
        return max(shares, default=None)

    def close(self) -> None:
        """End vLLM and its processes; shards in flight end with RolloutCancelled."""
        if not self._closed:
            if not self._cause:
                self.cancel()
            self._process.close()

    def _sample(
        self, prompts: PromptTokens, request: RolloutRequest, begun: list[Completion]
    ) -> list[Completion]:
        # Here, in the caller's thread: to compile a grammar would hold up all shards.
        rows = [self._row(prompts, request, number, one) for number, one in enumerate(begun)]
        return self._process.run(self._sample_shard(prompts, request, rows))

    def _cut_shards(self) -> None:
        self._process.run(self._abort_cut())

    def _so_far(self, out_key: str) -> list[Completion] | None:
        return self._process.run(self._look_at(out_key))

    def _load(self, weights: WeightsRef, mode: SyncMode, offer: TransferOffer | None) -> LoadReport:
        return self._process.run(self._sync(weights, mode, offer))

    def _end_shards(self, error: Exception) -> int:
        return self._process.run(self._cancel_tasks(error))

    def _counts(self) -> tuple[int, int, int]:
        requests = self._process.requests.values()
        decoding = [r for r in requests if not r.is_prefilling]
        tokens = sum(r.detokenizer.num_output_tokens() for r in decoding if r.detokenizer)
        return len(decoding), len(requests) - len(decoding), tokens

    def _put_away(self, level: int) -> Moved:
        return self._process.run(self._fall_asleep(level))

    def _bring_back(self, level: int) -> Moved:
        return self._process.run(self._wake_up(level))

    def _checksum(self) -> str:
        checksums = self._process.run(self._process.llm.compute_weight_checksums())
        return json.dumps(checksums, sort_keys=True)

    @property
    def _cause(self) -> str:
        return self._process.cause

    @property
    def _pids(self) -> tuple[int, ...]:
        return self._process.pids

    @property
    def _closed(self) -> bool:
        return self._process.closed

    async def _prepare(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._syncing = asyncio.Lock()
        self._admitted = asyncio.Event()
        self._admitted.set()
        address = {
            "uri": self._store.uri,
            "options": self._store.options,
            "node_cache_bytes": self._spec.node_cache_bytes,
        }
        await self._process.llm.init_weight_transfer_engine(
            WeightTransferInitRequest(init_info=address)
        )

    async def _sample_shard(
        self, prompts: PromptTokens, request: RolloutRequest, rows: list[_Row]
    ) -> list[Completion]:
        """All completions of a shard, row i of prompt i // n; may be ended by _cancel_tasks."""
        task = asyncio.create_task(self._sample_all(prompts, request, rows))
        self._shards[task] = None
        try:
            return await task
        except asyncio.CancelledError:
            ended = self._shards[task]
            if ended is None:
                task.cancel()
                raise
            raise ended from None
        finally:
            del self._shards[task]

    async def _sample_all(
        self, prompts: PromptTokens, request: RolloutRequest, rows: list[_Row]
    ) -> list[Completion]:
        # While a sync runs nothing is admitted, so that a request's salt is the version whose keys
        # and values it may share with others.
        await self._admitted.wait()
        salt = f"v{self._holding().version}"
        if request.out_key in self._cut:
            return [row.begun for row in rows]
        self._rows[request.out_key] = rows
        tasks = [
            asyncio.create_task(
                self._sample_row(
                    row,
                    prompts.tokens_of(i),
                    salt,
                    prompts.sampling(request, i),
                    prompts.seed(request, i, len(row.begun.tokens)),
                )
            )
            for i, row in enumerate(rows)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            self._rows.pop(request.out_key, None)
            for task in tasks:
                task.cancel()

    def _row(
        self, prompts: PromptTokens, request: RolloutRequest, number: int, begun: Completion
    ) -> _Row:
        experts = self._experts if request.sampling.routed_experts else None
        turn = begun.turn_in(prompts.grammar_of(number))
        words = None
        if request.sampling.sampling_mask and not self._masks:
            words = _WordsLeft(None if turn is None else self._grammars.begin(turn))
        return _Row(begun, request.sampling, experts, turn, words)

    @functools.cached_property
    def _grammars(self) -> Grammars:
        words = self._process.llm.model_config.get_vocab_size()
        return Grammars(self._tokenizer, self._ends, words)

    async def _sample_row(
        self, row: _Row, tokens: list[int], salt: str, sampling: Sampling, seed: int | None
    ) -> Completion:
        before = row.begun
        if before.ended:
            return before
        params = vllm_arguments.sampling_params(
            sampling, self._ends, seed, before, self._masks, row.turn
        )
        prompt: TokensPrompt = {"prompt_token_ids": tokens + before.tokens, "cache_salt": salt}
        row.request = self._new_request()
        answer = await self._answer(prompt, params, row.request)
        # In a thread: to find the words of long answers again would hold up all others.
        read = vllm_arguments.completion
        turn = await asyncio.to_thread(read, answer, sampling, row.experts, row.words)
        whole = before.followed_by(turn)
        if whole.finish_reason == "length":
            whole = replace(whole, finish_reason=sampling.limit(len(whole.tokens)))
        row.begun, row.request = whole, ""
        self._drawn += len(turn.tokens)
        return row.begun

    async def _abort_cut(self) -> None:
        """Abort the requests of the shards in `_cut`, those that are just being added too."""
        while open_rows := [
            row.request
            for key, rows in self._rows.items()
            if key in self._cut
            for row in rows
            if row.request
        ]:
            await self._process.llm.abort(open_rows)
            await asyncio.sleep(0.02)

    async def _look_at(self, out_key: str) -> list[Completion] | None:
        states = {state.external_req_id: state for state in self._process.requests.values()}
        rows = self._rows.get(out_key)
        return None if rows is None else [row.so_far(states) for row in rows]

    def _new_request(self) -> str:
        self._requests += 1
        return f"{self._spec.name}-{self._requests}"

    async def _answer(
        self, prompt: TokensPrompt, params: SamplingParams, name: str
    ) -> RequestOutput:
        adapter: LoRARequest | None = None
        if self._spec.lora is not None:
            from engines.rollout.vllm_adapters import REQUEST

            adapter = REQUEST
        async for output in self._process.llm.generate(prompt, params, name, lora_request=adapter):
            if output.finished:
                if output.outputs[0].finish_reason == "error":
                    raise RuntimeError(
                        f"{self._label}: vLLM ended a request with an error, which its log "
                        f"{self._process.log} has"
                    )
                return output
        raise AssertionError("vLLM ended a request without its last output")

    async def _score(
        self, token_ids: list[list[int]], starts: list[int], top_k: int
    ) -> list[ScoredTokens]:
        await self._admitted.wait()
        params = vllm_arguments.scoring_params(top_k, self._masks)
        answers = await asyncio.gather(
            *(
                self._answer({"prompt_token_ids": tokens}, params, self._new_request())
                for tokens in token_ids
            )
        )
        return [
            vllm_arguments.scores(answer, start)
            for answer, start in zip(answers, starts, strict=True)
        ]

    async def _pause(self) -> None:
        async with self._syncing:
            await self._process.llm.pause_generation(mode="keep", clear_cache=False)
            self._paused = True

    async def _resume(self) -> None:
        async with self._syncing:
            self._paused = False
            await self._process.llm.resume_generation()

    async def _cancel_tasks(self, error: Exception) -> int:
        for task in self._shards:
            self._shards[task] = error
            task.cancel()
        return len(self._shards)

    async def _sync(
        self, weights: WeightsRef, mode: SyncMode, offer: TransferOffer | None
    ) -> LoadReport:
        async with self._syncing:
            self._refuse_endless_wait(mode, bool(self._shards))
            how, drop_cache = _PAUSES[mode]
            self._admitted.clear()
            try:
                await self._process.llm.pause_generation(mode=how, clear_cache=drop_cache)
                report = await self._load_into_vllm(weights, offer)
                await self._wake_cache()
                return report
            except Exception as error:
                self._let_go()
                await self._cancel_tasks(error)
                raise
            finally:
                self._admitted.set()
                if not self._paused:
                    await self._process.llm.resume_generation()

    async def _fall_asleep(self, level: int) -> Moved:
        async with self._syncing:
            began, llm = time.monotonic(), self._process.llm
            await self._wake_cache()  # vLLM takes no half of itself to sleep
            free = await self._free_memory()
            await llm.sleep(level=level, mode="abort")
            freed = await self._free_memory() - free
            return Moved(nbytes=freed, seconds=time.monotonic() - began)

    async def _wake_up(self, level: int) -> Moved:
        """After level 2 the weights alone: room for keys and values is taken once they are loaded."""
        async with self._syncing:
            began, free = time.monotonic(), await self._free_memory()
            self._cache_asleep = level > 1
            await self._process.llm.wake_up(["weights"] if level > 1 else None)
            used = free - await self._free_memory()
            return Moved(nbytes=used, seconds=time.monotonic() - began)

    async def _wake_cache(self) -> None:
        if self._cache_asleep:
            await self._process.llm.wake_up(["kv_cache"])
            self._cache_asleep = False

    async def _free_memory(self) -> int:
        """Bytes of all the engine's devices."""
        return sum(await self._process.llm.collective_rpc("free_memory"))

    async def _load_into_vllm(self, weights: WeightsRef, offer: TransferOffer | None) -> LoadReport:
        """Have vLLM load `weights`; what its workers report counts, not that they were told."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        began, llm = time.monotonic(), self._process.llm
        base, self._base = self._base, ""
        update = WeightTransferUpdateRequest(
            update_info={
                "weights": weights.model_dump(mode="json"),
                "base_held": base,
                "offer": None if offer is None else offer.model_dump(mode="json"),
            }
        )
        try:
            await llm.start_weight_update()
            await llm.update_weights(update)
            await llm.finish_weight_update(weight_version=str(weights.version))
            if self._spec.lora is not None:
                await llm.collective_rpc("load_adapter")
        except Exception as error:
            for report in await llm.collective_rpc("weights_report"):
                if "failure" in report:
                    kind = _FAILURES.get(report["failure"], RuntimeError)
                    raise kind(report["message"]) from error
            raise
        reports = await llm.collective_rpc("weights_report")
        version = await llm.get_weight_version()
        if version != str(weights.version):
            raise WeightMismatch(f"vLLM reports policy version {version}, not {weights.version}.")
        loaded = [HeldVersion(version=one["version"], digest=one["digest"]) for one in reports]
        self._base = reports[0]["base"]
        COUNTER.add(bytes_read=reports[0]["bytes_read"])  # by vLLM's own process
        return LoadReport(
            held=self._hold(weights, *loaded),
            tensors=reports[0]["tensors"],
            nbytes=reports[0]["nbytes"],
            seconds=time.monotonic() - began,
            waited=max(one["waited"] for one in reports),
            transferred=all(one["transferred"] for one in reports),
            missed=next((one["missed"] for one in reports if one["missed"]), ""),
        )
