"""The samples of a step that is not committed: of one under way, or one that failed."""

from __future__ import annotations

from collections import defaultdict

from storage.batches.reading import columns_of
from storage.batches.ref_columns import ColumnRef, Source
from storage.batches.refs import BatchRef
from storage.batches.rows import RowIndex
from storage.objects import documents
from storage.objects.documents import digest
from storage.objects.store import Store
from storage.runs.run_store import DATA_SUFFIX, STAGE_FORMAT, RunStore

SAMPLED = ("episodes", "tree", "rollout")  # stages whose results are samples, the whole ones first
SCORED = "reward"


def samples_under_way(run: RunStore, step: int) -> BatchRef | None:
    """What a step has sampled so far, with its scores where all of it is scored; None: nothing.

    Without the column `reward` nothing is scored, or it is not known which scores are whose: with
    rollout.over_sampling, and where a shard was made more than once.
    """
    for stage in SAMPLED:
        shards = _by_number(run, step, stage, ".json")
        if shards:
            refs = [_marked(run.store, keys[-1]) for _, keys in sorted(shards.items())]
            return _with_scores(run, step, BatchRef.concat(refs))
    return None


def _with_scores(run: RunStore, step: int, samples: BatchRef) -> BatchRef:
    calls = _by_number(run, step, SCORED, DATA_SUFFIX)
    if not calls or _over_samples(run) or any(len(keys) > 1 for keys in calls.values()):
        return samples
    scores = BatchRef.concat(
        [stored_batch(run.store, keys[0]) for _, keys in sorted(calls.items())]
    )
    if len(scores) != len(samples):
        return samples
    return samples.drop([n for n in samples.names if n in scores.names]).with_columns(scores)


def _over_samples(run: RunStore) -> bool:
    """Whether shards are scored in the order in which they end, which is not known afterwards."""
    match run.read_run():
        case {"config": {"rollout": {"over_sampling": float() | int() as factor}}}:
            return factor > 1
    return False


def _by_number(run: RunStore, step: int, stage: str, suffix: str) -> dict[int, list[str]]:
    """Objects of a stage by the number of their shard or call, in the order of their names."""
    keys: dict[int, list[str]] = defaultdict(list)
    for key in sorted(run.store.list(f"{run.step_key(step)}/{stage}")):
        number, dash, _ = key.rpartition("/")[2].partition("-")
        if key.endswith(suffix) and dash and number.isdecimal():
            keys[int(number)].append(key)
    return keys


def _marked(store: Store, key: str) -> BatchRef:
    """The batch of a stage result that is marked as finished."""
    return BatchRef.from_json(documents.read(store, key, STAGE_FORMAT)["ref"])


def stored_batch(store: Store, key: str) -> BatchRef:
    """A batch by its object alone, which has to be as it was written: nothing vouches for it."""
    (size,) = store.read_ranges([(key, 0, 8)])
    header = 8 + int.from_bytes(size, "little")
    (data,) = store.read_ranges([(key, 0, store.size(key))])
    columns = columns_of(key, data)
    first = min((column.start for column in columns.values()), default=header)
    head = data[:first]
    rows = len(next(iter(columns.values())).sums)
    source = Source(key=key, rows=rows, head=first, digest=digest(head))
    return BatchRef(
        rows,
        {
            name: ColumnRef(
                kind=column.kind,
                dtype=column.dtype,
                shape=column.shape,
                sources=(source,),
                index=RowIndex(range(rows)),
            )
            for name, column in columns.items()
        },
    )
