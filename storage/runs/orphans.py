"""What writers that died left in a run's store: found, and removed when the run goes on.

Nothing here is wrong to leave, since readers trust markers and commits only. But a policy version or
a snapshot of a step that was never committed would be in the way of the step's next try, which may
sample otherwise; and what no commit names is only in the way of whoever pays for the store.

Of the committed steps only those are looked at in which something may lie: the run's index knows in
which an attempt failed, and which were under way when a flow died (run_index.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

from storage.objects.errors import ObjectMissing
from storage.runs import commit_log as commits
from storage.runs.run_index import make_index, read_index, unnamed_objects, write_index
from storage.runs.run_store import TRAINED_ROLES, RunStore
from storage.runs.snapshots import MARKER
from storage.runs.weights import MANIFEST, open_manifest_at


def clear(run: RunStore, head: int) -> list[str]:
    """Remove what is left of writers that died; returns the keys.

    `head`: the last committed step. Only under the run's lease, while none of its engines works.
    Finished shards of the step after it stay: the next try reuses them.
    """
    committed = run.store.exists(run.commit_key(head))
    index = (read_index(run, head) or make_index(run, head)) if committed else None
    removed = orphans(run, head, [] if index is None else index.suspects)
    run.store.delete(removed)
    if index is not None:  # the steps under way have what a dead flow began, and their next try not
        under_way = itertools.takewhile(
            lambda step: run.store.list(run.step_key(step)), itertools.count(head + 1)
        )
        index.suspects = list(under_way)
        write_index(run, index)
    for keys, marker in _uncommitted(run, head):
        first = [key for key in keys if key.endswith(marker)]
        run.store.delete(first)  # readers trust the marker
        run.store.delete([key for key in keys if key not in first])
        removed += keys
    asked = run.store.list(run.questions_key)  # of judges that died
    run.store.delete(asked)
    run.store.delete_unfinished(run.run)
    return removed + asked


def _uncommitted(run: RunStore, head: int) -> list[tuple[list[str], str]]:
    """The files of versions and snapshots beyond `head`, each with the name of its marker."""
    versions = [run.weights_key(version) for version in run.versions() if version > head]
    found = [(run.store.list(key), MANIFEST) for key in versions]
    for role in TRAINED_ROLES:
        trained = replace(run, role=role)
        states = [trained.state_key(step) for step in trained.state_steps() if step > head]
        found += [(run.store.list(key), MARKER) for key in states]
    return found


def orphans(run: RunStore, head: int, steps: Collection[int] | None = None) -> list[str]:
    """What dead attempts wrote beside the committed steps and versions: keys that nothing names.

    steps: those to look at, with the versions that they made; None for all that there are.
    """
    found = []
    for version in run.versions() if steps is None else steps:
        if version <= head:
            found += _beside_manifest(run, version)
    for step in run.steps() if steps is None else steps:
        if step <= head:
            found += unnamed_objects(run, commits.read_commit(run, step))
    return found


def _beside_manifest(run: RunStore, version: int) -> list[str]:
    key = run.weights_key(version)
    files = run.store.list(key)
    if not files:
        return []
    try:
        manifest = open_manifest_at(run.store, key)
    except ObjectMissing:
        return files
    return [
        file for file in files if file.removeprefix(f"{key}/") not in {*manifest.files, MANIFEST}
    ]
