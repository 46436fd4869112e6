"""What is trained (policy or critic): a gang of FSDP ranks, brought to any version by replay.

What is frozen (the reference, teachers) is one too, and has version 0 alone.

The weights of version v are those after v updates. A fresh gang holds the model's own weights, which
are version 0 unless the run began at a step of another one. Any other version is reached from the
nearest snapshot below it, the parent's where the run began, by applying the stored batches of the
steps since again, never by sampling again. That is how a gang which lost a rank, or a resumed run,
gets its weights back. The step under way is not committed yet: its batch is remembered here, and a
snapshot of it is not built upon, for it may be of an attempt that another flow made.
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.distillation import recorded_algorithm
from engines.model_tokens import ModelTokens
from engines.train.batching.mfu import CostModel
from engines.workers.gang import Gang
from engines.workers.messages import CallId
from storage.batches.refs import BatchRef
from storage.runs.commit_log import head, read_commit
from storage.runs.origins import origin_of, start_of
from storage.runs.run_store import RunStore
from storage.runs.snapshots import Base, base_of
from storage.runs.weights import WeightsRef

if TYPE_CHECKING:
    from engines.train.spec import UpdateResult, WeightsComparison

UNTRAINED = -1  # the version held where the model's own weights are no version of the run


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateInputs:
    """What the update of a step is made of."""

    batch: BatchRef  # with advantages
    algorithm: AlgorithmConfig


class Trainer:
    """Drives a gang. Its calls are serialised: a gang does one thing at a time."""

    def __init__(
        self,
        gang: Gang,
        files: RunStore,
        *,
        epoch: int,
        temperature: float,
        max_new_tokens: int,
        cancel: threading.Event | None = None,
        on_replay: Callable[[int, int], None] = lambda step, last: None,
        caller: str | None = None,
    ) -> None:
        """`on_replay(step, last)` is told of each step whose update is applied again.

        `caller`: in whose name calls are made, if not the run's: of another run that reads it.
        """
        self._gang = gang
        self._spec = gang.spec
        self._files = files
        self._epoch = epoch
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._cancel = cancel
        self._on_replay = on_replay
        self._base = 0
        self._caller = caller or files.run
        self._version: int | None = None  # of the weights that the gang holds; None: not known
        # By step, of the steps that were not committed when they were updated.
        self._uncommitted: dict[int, UpdateInputs] = {}
        self._loads = 0  # of older states; tells calls that are repeated on purpose from retries
        self._cost: CostModel | None = None
        self._lock = threading.RLock()

    def at(self, version: int) -> None:
        """Bring the gang to a version: form it if need be, load the nearest snapshot, replay.

        Raises GangFailed where a rank dies or hangs, ObjectMissing or ObjectDamaged by the store.
        """
        with self._lock:
            if self._version is None or not self._gang.formed:
                self._form()
            if self._version == version:
                return
            committed = head(self._files) or start_of(self._files)
            base = base_of(self._files, min(version, committed))
            nearest = 0 if base is None else base.version
            if self._held > version or self._held < nearest:
                self._go_to(base)
            for step in range(self._held + 1, version + 1):
                self._on_replay(step, version)
                again = self._stored(step) if step <= committed else self._uncommitted[step]
                self._update(step, again.batch, again.algorithm)

    def update(
        self,
        step: int,
        batch: BatchRef,
        algorithm: AlgorithmConfig,
        plan: BatchRef | None = None,
    ) -> UpdateResult:
        """Apply step's update to version step - 1; the gang then holds version step.

        plan: the micro-batches, where they were made before; a replay makes the same ones itself.
        """
        with self._lock:
            self.at(step - 1)
            self._uncommitted[step] = UpdateInputs(batch=batch, algorithm=algorithm)
            return self._update(step, batch, algorithm, plan)

    def cost(self, version: int) -> CostModel:
        """What plans of micro-batches are balanced by; asked of the gang, at a version, once."""
        with self._lock:
            if self._cost is None:
                self.at(version)
                self._cost = self._call("cost", version, {})
            return self._cost

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._gang.world

    @property
    def base(self) -> int:
        """Version of the stored state that the weights held were last rebuilt from."""
        return self._base

    def committed(self, step: int) -> None:
        """A step has been committed: its batch is found in the store from now on."""
        with self._lock:
            self._uncommitted = {
                later: update for later, update in self._uncommitted.items() if later > step
            }

    def logprobs(
        self, version: int, batch: BatchRef, column: str, out_key: str, squared: bool = False
    ) -> BatchRef:
        """Log-probs of the responses [N, jagged] under a version, as a new column.

        `squared`: sum_pi_squared is a second one.
        """
        arguments = {
            "batch": batch,
            "column": column,
            "out_key": out_key,
            "temperature": self._temperature,
            "squared": squared,
        }
        with self._lock:
            self.at(version)
            return self._call("logprobs", version, arguments, name=f"{column}-{out_key}").batch

    def teach(self, batch: BatchRef, out_key: str, top_k: int) -> BatchRef:
        """A teacher's scores of the responses [N, jagged], as new columns (FSDPEngine.teach)."""
        arguments = {
            "batch": batch,
            "out_key": out_key,
            "temperature": self._temperature,
            "top_k": top_k,
        }
        with self._lock:
            self.at(0)
            return self._call("teach", 0, arguments, name=f"teach-{out_key}").batch

    def tokens(self, version: int) -> ModelTokens | None:
        """The model's tokens; None where its files do not have them."""
        with self._lock:
            self.at(version)
            return self._call("tokens", version, {})

    def values(self, version: int, batch: BatchRef, out_key: str) -> BatchRef:
        """A critic's values of the responses [N, jagged] under a version, as a new column."""
        arguments = {"batch": batch, "out_key": out_key}
        with self._lock:
            self.at(version)
            return self._call("values", version, arguments, name=f"values-{out_key}").batch

    def export(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        """Publish the weights of a version; `whole`: not as a difference.

        The store has them once `settle`, with the same arguments, has returned; until then only
        engines on the trainer's machine can read them, where it keeps versions.
        """
        return self._publish("export_weights", version, dtype, whole)

    def settle(self, version: int, dtype: str, whole: bool = False) -> WeightsRef:
        """Return once the store has a version. A gang that was lost meanwhile publishes it again."""
        return self._publish("settle_weights", version, dtype, whole)

    def _publish(self, method: str, version: int, dtype: str, whole: bool) -> WeightsRef:
        arguments = {"version": version, "dtype": dtype, "whole": whole}
        with self._lock:
            self.at(version)
            return self._call(method, version, arguments)

    def score(
        self, version: int, tokens: list[list[int]], prompt_lengths: list[int]
    ) -> list[list[float]]:
        """Log-probs of the response tokens of a few sequences under a version."""
        arguments = {"token_ids": tokens, "prompt_lengths": prompt_lengths}
        with self._lock:
            self.at(version)
            return self._call("score", version, arguments)

    def mismatch(self, version: int) -> str | None:
        """How log-probs under a version differ from transformers' own, as a clause; None: not."""
        with self._lock:
            self.at(version)
            return self._call("mismatch", version, {})

    def snapshot(self, version: int, run: str | None = None, step: int | None = None) -> None:
        """Store the whole trainer state of a version: weights, optimizer, schedule, RNG.

        `run`, `step`: of which it is to be the snapshot, if not of this run's step `version`.
        """
        with self._lock:
            self.at(version)
            where = {"run": run, "step": version if step is None else step}
            self._call("save_state", version, where)

    def compare(self, version: int, weights: WeightsRef, dtype: str) -> WeightsComparison:
        """The weights of a version, as the gang has them, beside published ones."""
        with self._lock:
            self.at(version)
            return self._call("compare", version, {"weights": weights, "dtype": dtype})

    def digest(self, version: int, dtype: str) -> str:
        """The digest that publishing a version in a number format would give it."""
        with self._lock:
            self.at(version)
            return self._call("digest", version, {"dtype": dtype})

    def _stored(self, step: int) -> UpdateInputs:
        """A committed step's update."""
        done = read_commit(self._files, step)
        return UpdateInputs(batch=done.refs["batch"], algorithm=recorded_algorithm(done.algorithm))

    @property
    def _held(self) -> int:
        assert self._version is not None
        return self._version

    def _go_to(self, base: Base | None) -> None:
        """Bring the gang to a stored state, or to the beginning.

        Updates that follow are made again, not looked up.
        """
        self._loads += 1
        if base is None:
            self._form()
            self._base = 0
            return
        if base.weights is not None:
            if self._held != UNTRAINED:
                self._form()  # with a fresh optimizer
            self._version = None
            arguments = {"weights": base.weights, "version": base.version}
            self._call("load_weights", base.version, arguments)
        else:
            self._version = None
            where = {"run": base.run, "step": base.step, "version": base.version}
            self._call("load_state", base.version, where)
        self._version = self._base = base.version

    def _form(self) -> None:
        """Form the gang with the model's own weights, also on workers that hold trained ones."""
        self._version = None
        digest = f"{self._spec.digest}-{uuid.uuid4().hex[:8]}"
        self._gang.spec = dataclasses.replace(self._spec, digest=digest)
        self._gang.form(self._cancel)
        origin, role = origin_of(self._files), self._files.role
        # A run that goes on with a policy's weights alone begins with a new critic.
        new_critic = role == "critic" and origin is not None and not origin.trainer_state
        first = role in ("ref", "teacher") or origin is None or new_critic
        self._version = 0 if first else UNTRAINED

    def _update(
        self,
        step: int,
        batch: BatchRef,
        algorithm: AlgorithmConfig,
        plan: BatchRef | None = None,
    ) -> UpdateResult:
        # Whatever breaks in here, the gang is formed anew: no half-applied update stays.
        self._version = None
        arguments = {
            "batch": batch,
            "algorithm": algorithm,
            "temperature": self._temperature,
            "max_new_tokens": self._max_new_tokens,
            "step": step,
            "plan": plan,
        }
        result = self._call("update", step, arguments)
        self._version = step
        return result

    def _call(self, method: str, step: int, arguments: Mapping[str, Any], name: str = "") -> Any:
        call_id = CallId(
            run=self._caller,
            epoch=self._epoch,
            step=step,
            call=f"{name or method}@{self._gang.generation}.{self._loads}",
        )
        return self._gang.call(method, call_id, arguments, cancel=self._cancel)
