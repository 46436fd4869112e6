"""What writers that died left in a run's store: found, and removed when the run goes on.

Nothing here is wrong to leave, since readers trust markers and commits only. But a policy version or
a snapshot of a step that was never committed would be in the way of the step's next try, which may
sample otherwise; and what no commit names is only in the way of whoever pays for the store.
"""

from __future__ import annotations

import re

from storage.objects.errors import ObjectMissing
from storage.runs import commit_log as commits
from storage.runs.run_store import DATA_SUFFIX, RunStore
from storage.runs.snapshots import MARKER
from storage.runs.weights import MANIFEST, open_manifest_at

VERSION_FOLDER = re.compile(r"v(\d+)")


def clear(run: RunStore, head: int) -> list[str]:
    """Remove what is left of writers that died; returns the keys.

    `head`: the last committed step. Only under the run's lease, while none of its engines works.
    Finished shards of the step after it stay: the next try reuses them.
    """
    removed = []
    for keys, marker in [*_uncommitted(run, head), *((keys, "") for keys in _unnamed(run, head))]:
        first = [key for key in keys if marker and key.endswith(marker)]
        run.store.delete(first)  # readers trust the marker
        run.store.delete([key for key in keys if key not in first])
        removed += keys
    run.store.delete_unfinished(run.run)
    return removed


def orphans(run: RunStore, head: int) -> list[str]:
    """Keys of the committed steps and versions that nothing names."""
    return [key for keys in _unnamed(run, head) for key in keys]


def _uncommitted(run: RunStore, head: int) -> list[tuple[list[str], str]]:
    """The files of versions and snapshots beyond `head`, each with the name of its marker."""
    found = []
    for name in run.store.children(f"{run.run}/weights"):
        match = VERSION_FOLDER.fullmatch(name)
        if match and int(match[1]) > head:
            found.append((run.store.list(run.weights_key(int(match[1]))), MANIFEST))
    for name in run.store.children(f"{run.run}/state"):
        if name.isdigit() and int(name) > head:
            found.append((run.store.list(run.state_key(int(name))), MARKER))
    return found


def _unnamed(run: RunStore, head: int) -> list[list[str]]:
    """What dead attempts wrote beside what counts, folder by folder."""
    found = []
    for name in run.store.children(f"{run.run}/weights"):
        match = VERSION_FOLDER.fullmatch(name)
        if match and int(match[1]) <= head:
            found.append(_beside_manifest(run, int(match[1])))
    for name in run.store.children(f"{run.run}/steps"):
        if name.isdigit() and int(name) <= head:
            named = commits.read_commit(run, int(name)).objects
            keys = run.store.list(run.step_key(int(name)))
            found.append([key for key in keys if key.endswith(DATA_SUFFIX) and key not in named])
    return [keys for keys in found if keys]


def _beside_manifest(run: RunStore, version: int) -> list[str]:
    key = run.weights_key(version)
    files = run.store.list(key)
    try:
        manifest = open_manifest_at(run.store, key)
    except ObjectMissing:
        return files
    return [
        file for file in files if file.removeprefix(f"{key}/") not in {*manifest.files, MANIFEST}
    ]
