"""The rollout engine on vLLM: the contract (contract.py) in vLLM's terms."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engines import models
from engines.failures import WeightMismatch
from engines.rollout import vllm_arguments as vllm_terms
from engines.rollout.contract import (
    REMOTE,
    EngineState,
    NoWeights,
    RolloutCancelled,
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    RolloutStatus,
    SyncMode,
    SyncReport,
    sample_seed,
    worker_environment,
)
from engines.rollout.samples import Completion, PromptTokens, read_prompts, write_samples
from engines.rollout.vllm_process import VllmProcess
from engines.rollout.weight_reader import Held, check_manifest
from engines.workers.engine import Engine
from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreUnavailable
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.runs.weights import WeightsRef

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import RequestOutput

# mode -> (what becomes of running requests, whether cached keys and values are dropped)
_PAUSES: dict[SyncMode, tuple[Literal["wait", "keep"], bool]] = {
    "idle": ("wait", True),
    "keep": ("keep", False),
    "recompute": ("keep", True),
}
_FAILURES = {kind.__name__: kind for kind in (ObjectDamaged, ObjectMissing, StoreUnavailable)}


class VllmEngine(Engine):
    """A rollout engine (see engines.rollout.contract.RolloutEngine) on vLLM."""

    REMOTE = REMOTE

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
        self._spec = spec
        self._store = Store(spec.store_uri, spec.store_options)
        self._directory = models.materialize(spec.model, Path(spec.model_cache))
        self._tensors = models.tensor_shapes(self._directory)
        self._ends = models.end_token_ids(self._directory)
        self._held: Held | None = None
        self._digests: dict[int, str] = {}
        self._paused = False
        self._drawn = 0
        self._requests = 0
        # Shards in flight, each with the error that it must end with, if it must.
        self._shards: dict[asyncio.Task[list[Completion]], Exception | None] = {}
        self._process = VllmProcess(
            spec.name, lambda: vllm_terms.engine_arguments(spec, self._directory)
        )
        self._process.run(self._prepare())

    def generate(self, request: RolloutRequest) -> RolloutResult:
        """Sample a shard, write it, return its ref."""
        started = time.monotonic()
        prompts = read_prompts(self._store, request.prompts, self._spec.max_model_len)
        completions = self._process.run(self._sample_shard(prompts, request))
        return write_samples(
            self._store,
            request,
            prompts,
            completions,
            engine=self._spec.name,
            digests=self._digests,
            started=started,
        )

    def sync(self, weights: WeightsRef, mode: SyncMode = "idle") -> SyncReport:
        """Load a policy version from the store."""
        started = time.monotonic()
        check_manifest(self._store, weights, self._tensors)
        return self._process.run(self._sync(weights, mode, started))

    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """Log-probs, at temperature 1 and unfiltered, of each sequence's tokens past its prompt."""
        return self._process.run(self._score(token_ids, prompt_lengths))

    def pause(self) -> None:
        """Stop decoding; shards in flight keep their place. Waits for a running sync."""
        self._process.run(self._pause())

    def resume(self) -> None:
        """Go on decoding."""
        self._process.run(self._resume())

    def cancel(self) -> int:
        """End the shards in flight with RolloutCancelled; returns how many."""
        return self._process.run(
            self._end_shards(RolloutCancelled(f"rollout engine {self._spec.name}: cancelled"))
        )

    def status(self) -> RolloutStatus:
        """What the engine is doing; looks at this process only, so it costs microseconds."""
        held, process = self._held, self._process
        requests = process.requests.values()
        decoding = [r for r in requests if not r.is_prefilling]
        return RolloutStatus(
            name=self._spec.name,
            state=self._state(),
            cause=process.cause,
            version=held.version if held else None,
            digest=held.digest if held else "",
            running=len(decoding),
            waiting=len(requests) - len(decoding),
            tokens=self._drawn
            + sum(r.detokenizer.num_output_tokens() for r in decoding if r.detokenizer),
            pids=process.pids,
        )

    def close(self) -> None:
        """End vLLM and its processes; shards in flight end with RolloutCancelled."""
        if not self._process.closed:
            if not self._process.cause:
                self.cancel()
            self._process.close()

    def _state(self) -> EngineState:
        if self._process.cause or self._process.closed:
            return "dead" if self._process.cause else "closed"
        if self._paused:
            return "paused"
        return "ready" if self._held else "no weights"

    def _hold(self, held: Held | None) -> None:
        self._held = held
        self.version = held.version if held else None

    async def _prepare(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._syncing = asyncio.Lock()
        self._admitted = asyncio.Event()
        self._admitted.set()
        address = {"uri": self._store.uri, "options": self._store.options}
        await self._process.llm.init_weight_transfer_engine(
            WeightTransferInitRequest(init_info=address)
        )

    async def _sample_shard(
        self, prompts: PromptTokens, request: RolloutRequest
    ) -> list[Completion]:
        """All completions of a shard, row i of prompt i // n; may be ended by _end_shards."""
        task = asyncio.create_task(self._sample_all(prompts, request))
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

    async def _sample_all(self, prompts: PromptTokens, request: RolloutRequest) -> list[Completion]:
        # While a sync runs nothing is admitted, so that a request's salt is the version whose keys
        # and values it may share with others.
        await self._admitted.wait()
        if self._held is None:
            raise NoWeights(f"rollout engine {self._spec.name} holds no policy version: sync first")
        salt = f"v{self._held.version}"
        n = request.sampling.n
        rows = [
            asyncio.create_task(
                self._sample_row(tokens, salt, request, prompts.sample_id(row, k, n))
            )
            for row, tokens in enumerate(prompts.tokens)
            for k in range(n)
        ]
        try:
            return await asyncio.gather(*rows)
        finally:
            for task in rows:
                task.cancel()

    async def _sample_row(
        self, tokens: list[int], salt: str, request: RolloutRequest, sample_id: int
    ) -> Completion:
        sampling, seed = request.sampling, request.sampling.seed
        if seed is not None:
            seed = sample_seed(seed, request.step, sample_id)
        params = vllm_terms.sampling_params(sampling, self._ends, seed)
        prompt: TokensPrompt = {"prompt_token_ids": tokens, "cache_salt": salt}
        drawn = vllm_terms.completion(await self._answer(prompt, params))
        self._drawn += len(drawn.tokens)
        return drawn

    async def _answer(self, prompt: TokensPrompt, params: SamplingParams) -> RequestOutput:
        self._requests += 1
        name = f"{self._spec.name}-{self._requests}"
        async for output in self._process.llm.generate(prompt, params, name):
            if output.finished:
                return output
        raise AssertionError("vLLM ended a request without its last output")

    async def _score(self, token_ids: list[list[int]], starts: list[int]) -> list[list[float]]:
        await self._admitted.wait()
        params = vllm_terms.scoring_params()
        answers = await asyncio.gather(
            *(self._answer({"prompt_token_ids": tokens}, params) for tokens in token_ids)
        )
        return [
            vllm_terms.scores(answer, start) for answer, start in zip(answers, starts, strict=True)
        ]

    async def _pause(self) -> None:
        async with self._syncing:
            await self._process.llm.pause_generation(mode="keep", clear_cache=False)
            self._paused = True

    async def _resume(self) -> None:
        async with self._syncing:
            self._paused = False
            await self._process.llm.resume_generation()

    async def _end_shards(self, error: Exception) -> int:
        """End the shards in flight with `error`; returns how many."""
        for task in self._shards:
            self._shards[task] = error
            task.cancel()
        return len(self._shards)

    async def _sync(self, weights: WeightsRef, mode: SyncMode, started: float) -> SyncReport:
        async with self._syncing:
            if mode == "idle" and self._paused and self._shards:
                raise RuntimeError(
                    f"rollout engine {self._spec.name} is paused with shards in flight, which an "
                    "idle sync would wait for. Resume it, or sync with mode = keep."
                )
            how, drop_cache = _PAUSES[mode]
            self._admitted.clear()
            try:
                await self._process.llm.pause_generation(mode=how, clear_cache=drop_cache)
                loading = time.monotonic()
                report = await self._load(weights)
            except Exception as error:
                self._hold(None)
                await self._end_shards(error)
                raise
            finally:
                self._admitted.set()
                if not self._paused:
                    await self._process.llm.resume_generation()
        COUNTER.add(bytes_read=report["nbytes"])  # vLLM's own process has read them
        return SyncReport(
            version=weights.version,
            digest=report["digest"],
            tensors=report["tensors"],
            nbytes=report["nbytes"],
            seconds=time.monotonic() - started,
            load_seconds=time.monotonic() - loading,
        )

    async def _load(self, weights: WeightsRef) -> dict[str, Any]:
        """Have vLLM load `weights`; what its workers report counts, not that they were told."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._process.llm
        update = WeightTransferUpdateRequest(
            update_info={"weights": weights.model_dump(mode="json")}
        )
        try:
            await llm.start_weight_update()
            await llm.update_weights(update)
            await llm.finish_weight_update(weight_version=str(weights.version))
        except Exception as error:
            for report in await llm.collective_rpc("weights_report"):
                if "failure" in report:
                    kind = _FAILURES.get(report["failure"], RuntimeError)
                    raise kind(report["message"]) from error
            raise
        reports = await llm.collective_rpc("weights_report")
        version = await llm.get_weight_version()
        for report in reports:
            if (report["version"], report["digest"]) != (weights.version, weights.digest):
                raise WeightMismatch(
                    f"A vLLM worker loaded policy version {report['version']} with digest "
                    f"{report['digest']}, not {weights.version} with {weights.digest}."
                )
        if version != str(weights.version):
            raise WeightMismatch(f"vLLM reports policy version {version}, not {weights.version}.")
        self._digests[weights.version] = reports[0]["digest"]
        self._hold(Held(version=weights.version, digest=reports[0]["digest"]))
        return reports[0]
