"""PPO that goes on from an earlier run: with a new critic, with the old one, and with nothing new."""

from __future__ import annotations

import pytest

from storage.objects.store import Store
from storage.runs.origins import origin_of
from storage.runs.run_store import RunStore
from tests.faults.ledger import committed
from tests.flows.conftest import Launch

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_ppo_goes_on_and_is_skipped_with_nothing_new(launch: Launch) -> None:
    # A first epoch of all 64 rows, in steps of 4, would take long; 8 rows are seen in two steps.
    rows = ["data.source.size=8", "steps=2"]
    first = launch("tiny", *rows, "name=first", module="flows.ppo")
    code, out = first.end()
    assert code == 0, out
    name = first.files.run
    code, out = launch("tiny", *rows, f"continue_from={name}", module="flows.ppo").end()
    assert code == 0, out
    assert out == (
        "Nothing new to train on: all 8 rows of reasoning_gym/chain_sum were seen by "
        f"{name}@2 or the runs before it.\n"
    )
    store = Store(first.store_uri)
    values = []
    for state in ("weights", "trainer"):
        words = [f"name={state}", f"continue_state={state}", "continue_data=restart", "steps=1"]
        code, out = launch(
            "tiny", "data.source.size=8", *words, f"continue_from={name}", module="flows.ppo"
        ).end()
        assert code == 0, out
        (child,) = (one for one in store.children() if one.startswith(state))
        files = RunStore(store, child)
        assert str(origin_of(files)) == f"{name}@2"
        (commit,) = committed(files)
        assert commit.version_in.digest == committed(RunStore(store, name))[-1].version_out.digest
        values.append(commit.refs["batch"].fetch_numpy(store, "values")[0])
    assert (values[0] == 0).all()  # a new value head begins at 0
    assert (values[1] != 0).any()
