"""What it costs to look back at a long run: time, requests and memory, whatever the number of steps.

    python -m benchmarks.store_scale [--steps 1000] [--samples 1000] [--shards 16] [--s3]

Writes a run by the product's own functions, without engines: prompts, samples, rewards and
advantages as batches with their markers, policy versions, snapshots, commits, retention after each
step. Then each question is asked by a process of its own: its seconds, the requests to the store
(operations, where it is a folder), the bytes read, and the peak of its resident memory, with how much
of that came after the imports. --s3: in a bucket of moto's server instead of a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.stores import place
from storage.audit.audit import audit
from storage.audit.lineage import of_prompt, of_sample, of_version, prompt_of
from storage.audit.samples import SampleOrigin
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import digest
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.prompts.cursor import Cursor, draw
from storage.runs import snapshots
from storage.runs.commit_log import Commit, Ledger, commit, head, read_commit
from storage.runs.curves import EVERY, History, read_history, shown, write_curves
from storage.runs.retention import clear, sweep
from storage.runs.run_store import RunStore
from storage.runs.seen_rows import seen_before
from storage.runs.weights import WeightsRef
from storage.runs.weights_writing import publish

RUN = "long"
GROUP = 8  # samples of a prompt
TOKENS = 8  # of a response
DATA_ROWS = 50_000
SNAPSHOT_EVERY = 10  # steps
STAGES = ("prompts", "advantage", "update", "weight_sync")  # that are one call
METRICS = 60  # of a step, about as many as a run has


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Of the run that is written."""

    steps: int
    samples: int  # of a step
    shards: int


class Rows:
    """The data set, of which only numbers are needed."""

    digest = "rows"

    def __len__(self) -> int:
        return DATA_ROWS


def write(run: RunStore, size: Size, first: int, last: int, keep_steps: int) -> None:
    """Commit the steps first to last, as a flow does, with what follows each commit."""
    if first == 1:
        run.write_run({"config": {}})
        before, weights = None, _publish(run, 0)
        history: History = []
    else:
        before = read_commit(run, first - 1)
        weights, history = before.version_out, read_history(run, first - 1)
    for step in range(first, last + 1):
        before = write_step(run, size, step, before, weights)
        weights = before.version_out
        history.append((step, shown(before.metrics)))
        if step % EVERY == 0:
            write_curves(run, step, history)
        retain(run, step, keep_steps)


def retain(run: RunStore, step: int, keep_steps: int) -> list[str]:
    """What follows a commit; versions at snapshots are tagged, as registered ones are."""
    tagged = range(SNAPSHOT_EVERY, step + 1, SNAPSHOT_EVERY)
    return sweep(run, keep_versions=3, keep_steps=keep_steps, keep_snapshots=2, tagged=tagged)


def write_step(
    run: RunStore, size: Size, step: int, before: Commit | None, weights: WeightsRef
) -> Commit:
    """A committed step of so many samples in so many shards."""
    groups = size.samples // GROUP
    cursor = Cursor(
        epoch=0, position=0, seed=1, order="shuffled", size=DATA_ROWS, digest=Rows.digest
    )
    if before is not None:
        cursor = Cursor.from_json(before.cursor)
    rows, cursor = draw(Rows(), cursor, groups)
    first = (step - 1) * groups
    prompts = _stored(run, step, "prompts", 1, {
        "prompt_ids": [np.arange(8)] * groups,
        "group_id": np.arange(first, first + groups),
        "prompt_row": np.array(rows),
        "row": [{"question": f"What is {row} + 1?", "answer": str(row + 1)} for row in rows],
    })  # fmt: skip
    shards = np.array_split(np.arange(groups), size.shards)
    samples = BatchRef.concat(
        [_shard(run, step, n, prompts, part, weights) for n, part in enumerate(shards, 1)]
    )
    advantages = [np.full(TOKENS, 0.5, np.float32)] * size.samples
    batch = samples.with_columns(_stored(run, step, "advantage", 1, {"advantages": advantages}))
    if step % SNAPSHOT_EVERY == 0:
        run.store.write(f"{run.state_key(step)}/0.distcp", b"state")
        snapshots.mark(run, step)
    ledger = before.ledger if before else Ledger()
    record = Commit(
        step=step,
        parent=step - 1,
        refs={"prompts": prompts, "samples": samples, "batch": batch},
        version_in=weights,
        version_out=_publish(run, step),
        cursor=dict(cursor.to_json()),
        ledger=Ledger(drawn=ledger.drawn + groups, trained=ledger.trained + groups),
        first_group=first,
        group_size=GROUP,
        reward_code={"c0de": [{"name": "exact", "settings": {"kind": "math"}}]},
        metrics={
            "reward/mean": 0.5,
            **{f"time/{stage}": 1.0 for stage in STAGES},
            **{f"train/metric_{number}": number / 7 for number in range(METRICS)},
        },
        attempts=[
            *(_attempt(stage, None) for stage in STAGES),
            *(_attempt(stage, n) for stage in ("rollout", "reward") for n in range(size.shards)),
        ],
    )
    return commit(run, record)


def _attempt(stage: str, shard: int | None) -> dict[str, str | int | float | None]:
    return {
        "stage": stage, "shard": shard, "number": 1, "worker": f"{stage}-{shard}",
        "started": 1.8e9, "seconds": 1.25, "error": "",
    }  # fmt: skip


def _shard(
    run: RunStore, step: int, number: int, prompts: BatchRef, part: np.ndarray, weights: WeightsRef
) -> BatchRef:
    count = len(part) * GROUP
    first = ((step - 1) * len(prompts) + int(part[0])) * GROUP
    drawn = _stored(run, step, "rollout", number, {
        "response_ids": [np.arange(TOKENS)] * count,
        "rollout_logprobs": [np.full(TOKENS, -0.5, np.float32)] * count,
        "weight_spans": [np.array([weights.version, 0, TOKENS])] * count,
        "sample_id": np.arange(first, first + count),
        "finish_reason": ["stop"] * count,
        "weights_digest": [weights.digest] * count,
        "worker": [f"rollout-{number}"] * count,
        "attempt": np.ones(count, np.int64),
    })  # fmt: skip
    scored = _stored(run, step, "reward", number, {
        "reward": np.arange(count, dtype=np.float32) / count,
        "status": np.zeros(count, np.int64),
        "reward_code": ["c0de"] * count,
    })  # fmt: skip
    of_prompt = prompts[["prompt_ids", "group_id", "prompt_row"]].take(np.repeat(part, GROUP))
    return of_prompt.with_columns(drawn).with_columns(scored)


def _stored(
    run: RunStore, step: int, stage: str, shard: int, columns: dict[str, object]
) -> BatchRef:
    """A stage's result, with its marker."""
    key = run.stage_key(step, stage, shard, digest(f"{step}/{stage}".encode())[-16:])
    ref = write_batch(run.store, key, columns)
    run.finish(key, {"ref": ref.to_json()})
    return ref


def _publish(run: RunStore, version: int) -> WeightsRef:
    import torch  # not where nothing is written: it takes most of a process's memory

    tensors = [("w", torch.full((4,), float(version)))]
    return publish(run.store, run.run, version, tensors, {"config.json": b"{}"})


def resume(run: RunStore) -> str:
    """What a resumed flow reads of its past before it starts engines, and MLflow's page after."""
    last = read_commit(run, head(run) or 0)
    seen_before(run)
    clear(run, last.step)
    snapshots.base_of(run, last.step)
    return f"{len(read_history(run, last.step))} steps' curves"


def ask_sample(run: RunStore) -> str:
    """A sample of the first tenth of the run, and its prompt."""
    last = read_commit(run, head(run) or 0)
    samples = len(last.refs["samples"])
    found, _ = of_sample(run, samples * (last.step // 10) + 11)
    assert isinstance(found, SampleOrigin)
    return f"step {found.step}, {prompt_of(run, found)}"


def ask_prompt(run: RunStore) -> str:
    """A row that was drawn in the first step."""
    row = int(read_commit(run, 1).refs["prompts"].fetch_numpy(run.store, "prompt_row")[0][0])
    found = of_prompt(run, row)
    return f"{len(found.samples)} samples of {len({one.group for one in found.samples})} draws"


def ask_version(run: RunStore) -> str:
    """What made the last version."""
    found = of_version(run, head(run) or 0)
    return f"{len(found.steps)} of {found.updates} updates"


def ask_audit(run: RunStore) -> str:
    """The whole run."""
    found = audit(run)
    assert found.good and not found.orphans, found.problems[:3]
    return f"{len(found.steps)} steps, {found.read.objects} objects, all good"


def ask_retention(run: RunStore) -> str:
    """The sweep after the last step, with which the oldest one's batches go."""
    step = head(run) or 0
    removed = retain(run, step, step - 1)
    return f"{len(removed)} objects removed"


QUESTIONS: dict[str, Callable[[RunStore], str]] = {
    "lineage --version": ask_version,
    "lineage --sample": ask_sample,
    "lineage --prompt": ask_prompt,
    "audit": ask_audit,
    "resume": resume,
    "retention": ask_retention,
}


def answer(run: RunStore, question: str) -> None:
    """Ask in this process; prints what it cost as JSON."""
    imported = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    used, start = COUNTER.total(), time.perf_counter()
    said = QUESTIONS[question](run)
    seconds, used = time.perf_counter() - start, COUNTER.total() - used
    peak = resident("VmHWM")
    cost = {
        "seconds": seconds, "requests": used.requests, "bytes": used.bytes_read,
        "peak": peak, "own": peak - imported, "said": said,
    }  # fmt: skip
    print(json.dumps(cost))


def resident(field: str) -> float:
    """Memory of this process by its status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1000, help="of a step")
    parser.add_argument("--shards", type=int, default=16, help="of a step")
    parser.add_argument("--s3", action="store_true", help="on moto's server")
    parser.add_argument("--ask", choices=QUESTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = Size(steps=options.steps, samples=options.samples, shards=options.shards)
    if options.ask:
        answer(RunStore(Store(options.store, options.options), RUN), options.ask)
        return
    with place(options.s3) as (uri, store_options):
        run = RunStore(Store(uri, store_options), RUN)
        start = time.perf_counter()
        write(run, size, 1, size.steps, keep_steps=size.steps)
        written = time.perf_counter() - start
        last = read_commit(run, size.steps)
        lists = 0 if last.lists is None else last.lists.nbytes
        print(
            f"{size.steps} steps of {size.samples} samples in {size.shards} shards: written in "
            f"{written:.0f} s, {len(run.store.list(RUN))} objects; a commit.json has "
            f"{run.store.size(run.commit_key(size.steps)) / 1024:.1f} KiB, its lists "
            f"{lists / 1024:.1f} KiB"
        )
        print(f"{'':20}{'s':>8}{'requests':>10}{'MiB read':>10}{'peak MiB':>10}{'its own':>9}")
        for question in QUESTIONS:
            words = ["--ask", question, "--store", uri, "--options", json.dumps(store_options)]
            if question == "retention":  # the oldest step goes when one more is committed
                write_step(run, size, size.steps + 1, last, last.version_out)
            command = [sys.executable, "-m", "benchmarks.store_scale", *words]
            cost = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            print(
                f"{question:20}{cost['seconds']:8.2f}{cost['requests']:10}"
                f"{cost['bytes'] / 2**20:10.1f}{cost['peak']:10.0f}{cost['own']:9.0f}"
                f"   {cost['said']}"
            )


if __name__ == "__main__":
    main()
