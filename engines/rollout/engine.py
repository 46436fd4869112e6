"""The base of the rollout engines: what they promise, and what they have in common.

Reading prompts, writing samples, checking what was loaded and saying how the engine does is here;
how tokens are drawn and how weights get into the model is in vllm_engine.py and hf_engine.py.
tests/contract/rollout holds both to the same promises.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines.failures import WeightMismatch
from engines.models.tensor_files import CheckpointNames
from engines.rollout.contract import (
    EngineState,
    NoWeights,
    RolloutCancelled,
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    RolloutStatus,
    Sampler,
    SyncMode,
    SyncReport,
)
from engines.rollout.partial import PartialSamples, saving
from engines.rollout.samples import (
    Completion,
    PromptTokens,
    read_begun,
    read_prompts,
    write_samples,
)
from engines.rollout.thinking_budget import ThinkingBudget
from engines.rollout.weight_reader import HeldVersion, LoadReport, check_manifest, check_shapes
from engines.weight_transfer.offer import TransferOffer
from engines.workers.engine import Moved
from storage.objects.node_cache import open_node_cache
from storage.objects.store import Store
from storage.runs.run_store import finish_result
from storage.runs.weights import WeightsRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engines.models.routers import ChosenExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class Asleep:
    """How an engine went to sleep."""

    level: int  # 1: the weights are on the host, 2: they are gone
    held: HeldVersion | None  # the policy version that they were
    checksum: str  # of their bits, at level 1; empty: of none


class RolloutEngine(Sampler):
    """Samples completions under a policy version. Every method may be called from any thread.

    `version` is the policy version held, None before the first sync and after a failed one.

    After the engine's process has died each method raises EngineDead with the cause, within seconds,
    calls already waiting included. The engine must then be closed and built anew.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        shapes: Mapping[str, tuple[int, ...]],
        names: CheckpointNames,
        experts: ChosenExperts | None,
    ) -> None:
        """`shapes`: of the weights that the model needs, by name; each comes with every sync.

        names: what a version may call them instead. experts: of a model's routers, where shards may
        ask for them.
        """
        self._experts = experts
        self._spec = spec
        self._label = f"rollout engine {spec.name}"
        self._store = Store(spec.store_uri, spec.store_options)
        self._node_cache = open_node_cache(self._store, spec.node_cache_bytes)
        self._shapes = shapes
        self._names = names
        self._held: HeldVersion | None = None
        self._digests: dict[int, str] = {}  # of every version that was held
        self._paused = False
        self._asleep: Asleep | None = None
        self._moving = threading.Lock()  # held while the engine goes to sleep or wakes
        self._drawn = 0  # response tokens of completions that are done
        self._cut: set[str] = set()  # out_key of shards that end as they stand

    def generate(self, request: RolloutRequest) -> RolloutResult:
        self._check_awake()
        started = time.monotonic()
        prompts = read_prompts(
            self._store, request.prompts, self._spec.max_model_len, request.sampling.n
        )
        partial = PartialSamples(self._store, request.out_key)
        saved = None if request.save_every is None else partial.read()
        none = None
        if request.sampling.routed_experts:
            assert self._experts is not None, "it was built for such shards"
            none = self._experts.of_no_token
        begun = read_begun(
            self._store,
            saved or request.begun,
            len(prompts.samples),
            request.frozen,
            none,
            request.sampling.sampling_mask,
        )

        def write(completions: list[Completion], out_key: str) -> RolloutResult:
            return write_samples(
                self._store,
                dataclasses.replace(request, out_key=out_key),
                prompts,
                completions,
                engine=self._spec.name,
                digests=self._digests,
                started=started,
                held=self._holding().version,
                begun=sum(len(completion.tokens) for completion in begun),
            )

        bound = self._thinking_budget(request, prompts)

        def save() -> None:
            if (so_far := self._so_far(request.out_key)) is not None:
                stands = so_far if bound is None else bound.so_far(begun, so_far)
                ref = write(stands, partial.key).ref
                partial.write(ref, next(iter(ref[["response_ids"]].objects)))

        try:
            with saving(request.save_every, save):
                if bound is None:
                    completions = self._sample(prompts, request, begun)
                else:
                    completions = bound.sampled(begun, functools.partial(self._sample, prompts))
        finally:
            self._cut.discard(request.out_key)
        result = write(completions, request.out_key)
        stats = dataclasses.replace(result.stats, cache_use=self._cache_use())
        result = dataclasses.replace(result, stats=stats)
        if request.marked:
            stands = finish_result(self._store, request.out_key, result.record())
            result = RolloutResult.of_record(stands)
        if request.save_every is not None:
            partial.remove()
        return result

    def _thinking_budget(
        self, request: RolloutRequest, prompts: PromptTokens
    ) -> ThinkingBudget | None:
        """How thoughts are bounded; None where they are not."""
        if not request.sampling.thinking_budget:
            return None
        tokenizer = self._tokenizer
        return ThinkingBudget(
            request=request,
            prompts=prompts,
            max_model_len=self._spec.max_model_len,
            encode=functools.partial(tokenizer.encode, add_special_tokens=False),
            decode=lambda ids: str(tokenizer.decode(list(ids))),
        )

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from engines.models.checkpoints import load_tokenizer, materialize

        return load_tokenizer(materialize(self._spec.model, Path(self._spec.model_cache)))

    def sync(
        self, weights: WeightsRef, mode: SyncMode = "idle", offer: TransferOffer | None = None
    ) -> SyncReport:
        started, waited = time.monotonic(), 0.0
        if offer is None:
            waited = check_manifest(
                self._store, weights, self._shapes, self._names, self._node_cache
            )
        else:
            check_shapes(weights, offer.tensors, self._shapes, self._names)
        with self._moving:
            self._rouse()
        loaded = self._load(weights, mode, offer)
        return SyncReport(
            version=loaded.held.version,
            digest=loaded.held.digest,
            tensors=loaded.tensors,
            nbytes=loaded.nbytes,
            seconds=time.monotonic() - started,
            load_seconds=loaded.seconds,
            waited=waited + loaded.waited,
            transferred=loaded.transferred,
            missed=loaded.missed,
        )

    def sync_and_score(
        self,
        weights: WeightsRef,
        mode: SyncMode,
        token_ids: list[list[int]],
        prompt_lengths: list[int],
        offer: TransferOffer | None = None,
    ) -> tuple[SyncReport, list[list[float]]]:
        report = self.sync(weights, mode, offer)
        return report, self.score(token_ids, prompt_lengths) if token_ids else []

    @abstractmethod
    def score(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """Log-probs, at temperature 1 and unfiltered, of each sequence's tokens past its prompt."""

    @abstractmethod
    def pause(self) -> None:
        """Stop decoding; shards in flight keep their place. Waits for a running sync."""

    @abstractmethod
    def resume(self) -> None:
        """Go on decoding."""

    def cancel(self) -> int:
        """End the shards in flight with RolloutCancelled; returns how many."""
        return self._end_shards(RolloutCancelled(f"{self._label}: cancelled"))

    def cut(self, out_keys: list[str]) -> None:
        self._cut.update(out_keys)
        self._cut_shards()

    def sleep(self, level: int) -> Moved:
        with self._moving:
            if self._asleep is not None:
                return Moved()
            self.cancel()
            version = self._held
            checksum = self._checksum() if level == 1 and version is not None else ""
            self._let_go()
            self._asleep = Asleep(level=level, held=version, checksum=checksum)
            return self._put_away(level)

    def wake(self) -> Moved:
        with self._moving:
            asleep, moved = self._asleep, self._rouse()
            if asleep is not None and asleep.checksum and self._checksum() == asleep.checksum:
                assert asleep.held is not None
                self._held, self.version = asleep.held, asleep.held.version
            version = self._held
            return dataclasses.replace(moved, digest="" if version is None else version.digest)

    def status(self) -> RolloutStatus:
        version = self._held
        running, waiting, tokens = self._counts()
        return RolloutStatus(
            name=self._spec.name,
            state=self._state(),
            cause=self._cause,
            version=version.version if version else None,
            digest=version.digest if version else "",
            running=running,
            waiting=waiting,
            tokens=self._drawn + tokens,
            pids=self._pids,
        )

    @abstractmethod
    def close(self) -> None:
        """End the engine, its shards and every process that it started; may be called again."""

    # -- what an engine brings ---------------------------------------------------------------------

    @abstractmethod
    def _sample(
        self, prompts: PromptTokens, request: RolloutRequest, begun: list[Completion]
    ) -> list[Completion]:
        """All completions of a shard, row i of prompt i // n; `begun`: what each has already.

        Those of a shard in `_cut` come back as they are.
        """

    @abstractmethod
    def _cut_shards(self) -> None:
        """Have the shards in `_cut` end as they stand."""

    @abstractmethod
    def _so_far(self, out_key: str) -> list[Completion] | None:
        """All completions of a shard in flight as they stand; None where it is not in flight."""

    @abstractmethod
    def _load(self, weights: WeightsRef, mode: SyncMode, offer: TransferOffer | None) -> LoadReport:
        """Bring the weights into the model, and `_hold` them; from the store where `offer` fails."""

    @abstractmethod
    def _end_shards(self, error: Exception) -> int:
        """Have the shards in flight end with `error`; returns how many."""

    @abstractmethod
    def _counts(self) -> tuple[int, int, int]:
        """Sequences being decoded, sequences that wait, and tokens drawn of those not done."""

    @abstractmethod
    def _put_away(self, level: int) -> Moved:
        """Give the device's memory back, when no shard uses it."""

    @abstractmethod
    def _bring_back(self, level: int) -> Moved:
        """Take what `_put_away` gave back; after level 2 the weights are of no meaning."""

    @abstractmethod
    def _checksum(self) -> str:
        """Of the bits of all weights in the model."""

    def _cache_use(self) -> float | None:
        """Share of the cache of keys and values that sequences in flight have; None: not known."""
        return None

    @property
    def _cause(self) -> str:
        """Why the engine is dead; empty while it lives."""
        return ""

    @property
    def _pids(self) -> tuple[int, ...]:
        """Processes that the engine started."""
        return ()

    @property
    @abstractmethod
    def _closed(self) -> bool:
        """Whether `close` was called."""

    # -- the weights held --------------------------------------------------------------------------

    def _hold(self, weights: WeightsRef, *found: HeldVersion) -> HeldVersion:
        """Sample under `weights` from now on; WeightMismatch where what was loaded is not that."""
        expected = HeldVersion(version=weights.version, digest=weights.digest)
        for report in found:
            if report != expected:
                raise WeightMismatch(
                    f"{self._label} loaded policy version {report.version} with digest "
                    f"{report.digest}, not {expected.version} with {expected.digest}."
                )
        self._digests[expected.version] = expected.digest
        self._held, self.version = expected, expected.version
        return expected

    def _let_go(self) -> None:
        """Refuse to sample: the model's weights are no version, or not a whole one."""
        self._held = self.version = None

    def _holding(self) -> HeldVersion:
        """What the engine samples under; NoWeights."""
        if self._held is None:
            raise NoWeights(f"{self._label} holds no policy version: sync first")
        return self._held

    def _rouse(self) -> Moved:
        """Take the memory again, if it was put away; call it under `_moving`."""
        if self._asleep is None:
            return Moved()
        moved = self._bring_back(self._asleep.level)
        self._asleep = None
        return moved

    def _check_awake(self) -> None:
        if self._asleep is not None:
            raise NoWeights(f"{self._label} is asleep: sync first")

    def _refuse_endless_wait(self, mode: SyncMode, in_flight: bool) -> None:
        """RuntimeError for a sync that would wait for shards which are paused."""
        if mode == "idle" and self._paused and in_flight:
            raise RuntimeError(
                f"{self._label} is paused with shards in flight, which an idle sync would wait "
                "for. Resume it, or sync with mode = keep."
            )

    def _state(self) -> EngineState:
        if self._cause:
            return "dead"
        if self._closed:
            return "closed"
        if self._asleep is not None:
            return "asleep"
        if self._paused:
            return "paused"
        return "ready" if self._held else "no weights"
