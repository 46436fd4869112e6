"""A store that is copied elsewhere is the same store: refs hold keys, not addresses."""

from storage.objects.store import Store
from storage.runs import commit_log as commits
from storage.runs.run_store import RunStore
from storage.runs.snapshots import snapshots
from tests.storage.runs.test_commit_log import record


def test_a_copied_run_has_the_same_history_and_data(run: RunStore, memory: Store) -> None:
    for step in (1, 2, 3):
        commits.commit(run, record(run, step, reward=step / 4))
    for key in run.store.list():
        memory.write(key, run.store.read(key))
    moved = RunStore(memory, run.run)
    assert commits.head(moved) == 3
    assert list(commits.history(moved)) == list(commits.history(run))
    for one in commits.history(moved):
        one.refs["batch"].verify(memory)
        assert one.refs["batch"].fetch_list(memory, "reward") == [one.step / 4, one.step]
    assert snapshots(moved) == snapshots(run)
    commits.commit(moved, record(moved, 4))
    assert (commits.head(moved), commits.head(run)) == (4, 3)
    here = run.store.uri.removeprefix("file://").encode()
    assert not [key for key in run.store.list() if here in run.store.read(key)]
