"""A small run in a store, made without engines: what a flow leaves behind, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch

from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects import documents
from storage.objects.documents import digest
from storage.runs.commit_log import Commit, Ledger, commit
from storage.runs.run_store import ORIGIN_FIELD, Origin, RunStore
from storage.runs.snapshots import INDEX, STATE_FORMAT, mark
from storage.runs.weights import WeightsRef
from storage.runs.weights_writing import publish

PROMPTS, GROUP = 2, 3
CODE = {"name": "length", "settings": {"kind": "function", "path": "mine:length", "weight": 1.0}}


def begin(run: RunStore, origin: Origin | None = None) -> None:
    record: dict[str, object] = {"config": {}}
    if origin is not None:
        record[ORIGIN_FIELD] = origin.model_dump(mode="json")
    run.write_run(record)


def publish_version(run: RunStore, version: int) -> WeightsRef:
    tensors = [("w", torch.full((4,), float(version))), ("b", torch.zeros(2))]
    return publish(run.store, run.run, version, tensors, {"config.json": b"{}"})


def take(
    run: RunStore,
    step: int,
    before: Commit | None = None,
    *,
    sampled_with: WeightsRef | None = None,
    dropped: Mapping[str, list[int]] | None = None,
    filtered: bool = False,
    **changes: object,
) -> Commit:
    """A committed step of two prompts with three samples each; `changes` to its record."""
    dropped = dict(dropped or {})
    weights = sampled_with or (publish_version(run, 0) if before is None else before.version_out)
    prompts, samples = _samples(run, step, weights)
    batch = samples.rows(0, GROUP) if filtered else samples
    key = run.stage_key(step, "advantage", 1, "k")
    advantages = [np.full(2, row, np.float32) for row in range(len(batch))]
    batch = batch.with_columns(write_batch(run.store, key, {"advantages": advantages}))
    drawn = PROMPTS + sum(map(len, dropped.values()))
    earlier = before.ledger if before else Ledger()
    lost = Counter(earlier.dropped)
    lost.update({reason: len(rows) for reason, rows in dropped.items()})
    ledger = Ledger(
        drawn=earlier.drawn + drawn,
        trained=earlier.trained + PROMPTS - filtered,
        filtered=earlier.filtered + int(filtered),
        dropped=dict(lost),
    )
    position = int(str(before.cursor["position"])) if before else 0
    fields: dict[str, object] = {
        "step": step,
        "parent": step - 1,
        "refs": {"prompts": prompts, "samples": samples, "batch": batch},
        "version_in": weights,
        "version_out": publish_version(run, step),
        "cursor": {"epoch": 0, "size": 100, "position": position + drawn},
        "ledger": ledger,
        "first_group": (step - 1) * PROMPTS,
        "group_size": GROUP,
        "dropped_rows": dropped,
        "reward_code": {"c0de": [CODE]},
    }
    return commit(run, Commit.model_validate(fields | changes))


def _samples(run: RunStore, step: int, weights: WeightsRef) -> tuple[BatchRef, BatchRef]:
    groups = np.arange((step - 1) * PROMPTS, step * PROMPTS, dtype=np.int64)
    prompts = write_batch(
        run.store,
        run.stage_key(step, "prompts", 1, "k"),
        {
            "prompt_ids": [np.arange(3)] * PROMPTS,
            "group_id": groups,
            "prompt_row": groups + 40,
            "row": [{"question": f"row {group + 40}?"} for group in groups.tolist()],
        },
    )
    rows = PROMPTS * GROUP
    key = run.stage_key(step, "rollout", 1, "k")
    drawn = write_batch(
        run.store,
        key,
        {
            "response_ids": [np.arange(2)] * rows,
            "weight_spans": [np.array([weights.version, 0, 2])] * rows,
            "sample_id": np.arange((step - 1) * rows, step * rows, dtype=np.int64),
            "status": np.zeros(rows, np.int64),
            "finish_reason": ["stop"] * rows,
            "weights_digest": [weights.digest] * rows,
            "worker": ["rollout-1"] * rows,
            "attempt": np.full(rows, 1 + step % 2, np.int64),
            "reward": np.arange(rows, dtype=np.float32) / 4,
            "reward_code": ["c0de"] * rows,
        },
    )
    run.finish(key, {"ref": drawn.to_json()})
    of_prompt = prompts[["prompt_ids", "group_id", "prompt_row"]]
    return prompts, of_prompt.take(np.repeat(np.arange(PROMPTS), GROUP)).with_columns(drawn)


def snapshot(run: RunStore, step: int) -> None:
    state, folder = b"state of the trainer", run.state_key(step)
    run.store.write(f"{folder}/rank.safetensors", state)
    piece = {"file": "rank.safetensors", "bytes": [0, len(state)], "digest": digest(state)}
    piece |= {"offsets": [0], "shape": [len(state)], "dtype": "U8"}
    tensor = {"shape": [len(state)], "chunks": [piece]}
    body = {"facts": {"step": step}, "tensors": {"model.w": tensor}}
    index = documents.encode(STATE_FORMAT, body)
    run.store.write(f"{folder}/{INDEX}", index)
    mark(run, step)


def make(run: RunStore, steps: int = 4, snapshots: tuple[int, ...] = (2,)) -> list[Commit]:
    """A run of some steps; the third has a dropped row and a filtered group."""
    begin(run)
    commits: list[Commit] = []
    for step in range(1, steps + 1):
        odd = {"dropped": {"prompt too long": [99]}, "filtered": True} if step == 3 else {}
        commits.append(take(run, step, commits[-1] if commits else None, **odd))
        if step in snapshots:
            snapshot(run, step)
    return commits
