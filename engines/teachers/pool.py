"""A run's side of a teacher in vLLM: it takes the place of a gang's trainer.

There is an engine on each worker of the teacher's pool, and a shard goes to whichever is free.
"""

from __future__ import annotations

import threading

from pydantic import Field

from configs.base import Settings
from configs.model import Model
from engines.rollout.contract import RolloutSpec
from engines.teachers.contract import TeacherEngine
from engines.workers.cluster import Cluster
from engines.workers.engine import CallId, EngineSpec
from engines.workers.pool import EnginePool
from storage.batches.refs import BatchRef
from storage.runs.weights import WeightsRef

# Words beyond those asked for, among which may be some that the student does not know: rows with
# which a vocabulary is filled up.
SPARE_WORDS = 16


class VllmTeacherSpec(Settings):
    """From what a teacher in vLLM is built."""

    engine: RolloutSpec = Field(description="The engine that it runs in, under the teacher's name.")
    weights: WeightsRef | None = Field(
        None, description="The policy version that teaches; none: the model's own weights."
    )
    student: Model = Field(description="The model whose tokens it scores, which has the same ones.")
    run: str = Field(description="Name of the run, the first part of its keys in the store.")


class TeacherPool(EnginePool[TeacherEngine]):
    """The engines of one teacher. What they score does not depend on which of them does it."""

    def __init__(
        self,
        cluster: Cluster,
        pool: str,
        spec: VllmTeacherSpec,
        *,
        epoch: int,
        deadline: float,
        start_timeout: float,
        cancel: threading.Event | None = None,
    ) -> None:
        super().__init__(
            cluster,
            pool,
            f"teacher-{spec.engine.name}",
            EngineSpec.of("engines.teachers.vllm_teacher:VllmTeacher", spec, TeacherEngine),
            deadline=deadline,
            start_timeout=start_timeout,
            cancel=cancel,
        )
        self._run, self._epoch = spec.run, epoch
        self._digest: str | None = None if spec.weights is None else spec.weights.digest

    def at(self, version: int) -> None:
        """Build the engines; a teacher has version 0 alone."""
        assert version == 0, version
        self.start()

    def digest(self, version: int, dtype: str) -> str:
        """Digest of the weights held: the model's in rollout.dtype, or a version's."""
        assert version == 0, version
        if self._digest is None:
            self._digest = self.call(TeacherEngine.digest, self._call_id(f"digest-{dtype}"))
        return self._digest

    def teach(self, batch: BatchRef, out_key: str, top_k: int) -> BatchRef:
        """The scores of the responses [N, jagged], as new columns (VllmTeacher.teach)."""
        assert self._digest is not None, "its digest is part of what the columns are called"
        return self.call(
            TeacherEngine.teach,
            self._call_id(f"teach-{out_key}"),
            batch=batch,
            out_key=out_key,
            top_k=top_k,
            digest=self._digest,
        )

    def _call_id(self, call: str) -> CallId:
        return CallId(run=self._run, epoch=self._epoch, step=0, call=f"{self.role}-{call}")
