"""The policy that is trained: a gang of FSDP ranks, brought to any committed version by replay.

The weights of version v are those after v updates. A fresh gang holds version 0, the model's own
weights. Any other version is reached from the nearest snapshot below it by applying the stored
batches of the committed steps again, never by sampling again. That is how a gang which lost a rank,
or a resumed run, gets its weights back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engines.gang import Gang
from engines.lease import Lease
from storage.commits import read_commit
from storage.refs import BatchRef
from storage.runs import RunStore
from storage.snapshots import snapshots
from storage.weights import WeightsRef

if TYPE_CHECKING:
    from engines.fsdp import UpdateResult


class Trainer:
    """Drives the actor's gang. Calls are serialised: a gang does one thing at a time."""

    def __init__(
        self,
        gang: Gang,
        files: RunStore,
        *,
        epoch: int,
        update_arguments: dict[str, Any],
        on_replay: Callable[[int, int], None] = lambda step, last: None,
    ) -> None:
        self._gang = gang
        self._files = files
        self._epoch = epoch
        self._update_arguments = update_arguments
        self._on_replay = on_replay
        self._version: int | None = None
        self._lock = threading.RLock()

    def at(self, version: int) -> None:
        """Bring the gang to a version: form it if need be, load the nearest snapshot, replay."""
        with self._lock:
            if self._version is None or not self._gang.formed:
                self._gang.form()
                self._version = 0
            if self._version == version:
                return
            base = max((s for s in snapshots(self._files) if s <= version), default=0)
            if self._version > version or base > self._version:
                if base == 0:
                    self._gang.form()
                else:
                    self._call("load_state", base, step=base)
                self._version = base
            for step in range(self._version + 1, version + 1):
                self._on_replay(step, version)
                commit = read_commit(self._files, step)
                self._update(step, commit.refs["batch"])

    def update(self, step: int, batch: BatchRef) -> UpdateResult:
        """Apply step's update to version step - 1; the gang then holds version step."""
        with self._lock:
            self.at(step - 1)
            return self._update(step, batch)

    def logprobs(self, step: int, batch: BatchRef, column: str, out_key: str) -> BatchRef:
        """Log-probs [N, jagged] of the responses under version step - 1, as a new column."""
        with self._lock:
            self.at(step - 1)
            return self._call(
                f"logprobs-{column}", step, method="logprobs", batch=batch, column=column, out_key=out_key
            )

    def export(self, version: int, dtype: str) -> WeightsRef:
        """Publish the weights of a version to the store."""
        with self._lock:
            self.at(version)
            return self._call("export_weights", version, version=version, dtype=dtype)

    def score(self, version: int, tokens: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """Log-probs of the response tokens of a few sequences under a version."""
        with self._lock:
            self.at(version)
            return self._call(
                f"score-{version}", version, method="score", token_ids=tokens, prompt_lengths=prompt_lengths
            )

    def snapshot(self, version: int) -> None:
        """Write the whole trainer state of a version: weights, optimizer, schedule, RNG."""
        with self._lock:
            self.at(version)
            self._call("save_state", version, step=version)

    def _update(self, step: int, batch: BatchRef) -> UpdateResult:
        # A gang that breaks in here is formed anew from a snapshot: no half-applied update stays.
        self._version = None
        result = self._call("update", step, batch=batch, step=step, **self._update_arguments)
        self._version = step
        return result

    def _call(self, call: str, step: int, *, method: str | None = None, **arguments: Any) -> Any:
        lease = Lease(run=self._files.run, epoch=self._epoch, step=step, call=call)
        return self._gang.call(method or call, lease, **arguments)
