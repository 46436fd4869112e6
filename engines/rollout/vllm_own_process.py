"""vLLM for a worker that trains at the same time: its front end in a process of its own.

vLLM's model runs in processes of its own anyway. What feeds them and turns their words into
completions is Python, and so is what launches a trainer's kernels: in one process each waits for the
other's interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Metric

from engines.rollout.contract import (
    EngineDead,
    RolloutRequest,
    RolloutResult,
    RolloutSpec,
    RolloutStatus,
    Sampler,
    SyncMode,
    SyncReport,
)
from engines.weight_transfer.offer import TransferOffer
from engines.workers.engine import Moved
from engines.workers.own_process import OwnProcess
from storage.runs.weights import WeightsRef


class VllmInOwnProcess(Sampler):
    """VllmEngine (engines/rollout/vllm_engine.py), and its promises, in a process of its own."""

    def __init__(self, spec: RolloutSpec) -> None:
        """Start the process, and vLLM in it; raises as VllmEngine does."""
        self._name = spec.name
        self._process = OwnProcess(
            "refrain vLLM", "engines.rollout.vllm_engine:VllmEngine", spec, self._dead
        )

    @property
    def version(self) -> int | None:  # type: ignore[override]
        """Policy version held, as of the engine's last answer."""
        return self._process.version

    def generate(self, request: RolloutRequest) -> RolloutResult:
        return self._process.call(Sampler.generate, request=request)

    def sync(
        self, weights: WeightsRef, mode: SyncMode = "idle", offer: TransferOffer | None = None
    ) -> SyncReport:
        return self._process.call(Sampler.sync, weights=weights, mode=mode, offer=offer)

    def sync_and_score(
        self,
        weights: WeightsRef,
        mode: SyncMode,
        token_ids: list[list[int]],
        prompt_lengths: list[int],
        offer: TransferOffer | None = None,
    ) -> tuple[SyncReport, list[list[float]]]:
        return self._process.call(
            Sampler.sync_and_score,
            weights=weights,
            mode=mode,
            token_ids=token_ids,
            prompt_lengths=prompt_lengths,
            offer=offer,
        )

    def cut(self, out_keys: list[str]) -> None:
        self._process.call(Sampler.cut, out_keys=out_keys)

    def sleep(self, level: int) -> Moved:
        return self._process.call(Sampler.sleep, level=level)

    def wake(self) -> Moved:
        return self._process.call(Sampler.wake)

    def status(self) -> RolloutStatus:
        try:
            return self._process.call(Sampler.status)
        except EngineDead:
            return RolloutStatus(
                name=self._name,
                state="dead" if self._process.cause else "closed",
                cause=self._process.cause,
                version=None,
                digest="",
                running=0,
                waiting=0,
                tokens=0,
                pids=(),
            )

    def metrics(self) -> Sequence[Metric]:
        try:
            return self._process.call(Sampler.metrics)
        except EngineDead:
            return ()

    def close(self) -> None:
        self._process.close()

    def _dead(self, cause: str) -> EngineDead:
        return EngineDead(f"rollout engine {self._name} {cause}")
