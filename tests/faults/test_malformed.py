"""Objects that are not what was written: each gives one sentence, and reading changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.audit.audit import Read, check_snapshot
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.documents import canonical, digest
from storage.objects.errors import StoreError
from storage.objects.store import Store
from storage.runs import snapshots
from storage.runs.commit_log import FORMAT, Commit, Ledger, commit, head, history, read_commit
from storage.runs.run_store import RunStore
from storage.runs.weights import stream
from storage.runs.weights_writing import publish

STEPS = 3


def made_run(folder: Path) -> RunStore:
    """A run of three steps as the tasks leave it, without engines."""
    from engines.train.snapshots import save_snapshot

    run = RunStore(Store(f"file://{folder}/store"), "run")
    run.write_run({"config": {"steps": STEPS}})
    versions = [
        publish(
            run.store, run.run, number, [("w", torch.arange(64.0) + number)], {"config.json": b"{}"}
        )
        for number in range(STEPS + 1)
    ]
    for step in range(1, STEPS + 1):
        ref = batch(run, step)
        run.finish(run.stage_key(step, "rollout", 1, "k"), {"ref": ref.to_json()})
        if step == 2:
            save_snapshot(run, step, {"w": torch.arange(64.0)}, {"step": step}, group())
        commit(
            run,
            Commit(
                step=step,
                parent=step - 1,
                refs={"batch": ref},
                version_in=versions[step - 1],
                version_out=versions[step],
                ledger=Ledger(drawn=8 * step, trained=8 * step),
            ),
        )
    return run


def batch(run: RunStore, step: int) -> BatchRef:
    offsets = np.arange(9) * 4
    data = {
        "response_ids": Jagged(np.arange(32) + step, offsets),
        "reward": np.arange(8, dtype=np.float32),
        "row": [{"question": f"{step}"}] * 8,
    }
    return write_batch(run.store, run.stage_key(step, "rollout", 1, "k"), data)


def group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def read_all(run: RunStore) -> None:
    """Read everything that a resume, a replay or an audit reads."""
    from engines.train.snapshots import load_snapshot

    run.read_run()
    head(run)
    for record in history(run):
        for ref in record.refs.values():
            ref.verify(run.store)
            for name in ref.names:
                ref.fetch_numpy(run.store, name) if name != "row" else ref.fetch_list(
                    run.store, name
                )
        run.finished(run.stage_key(record.step, "rollout", 1, "k"))
        for _ in stream(run.store, record.version_out):
            pass
    for step in snapshots.snapshots(run):
        check_snapshot(run, run.state_key(step), Read())
        load_snapshot(run, step, {"w": torch.zeros(64)}, group())


def contents(run: RunStore) -> dict[str, bytes]:
    return {key: run.store.read(key) for key in run.store.list()}


def path_of(run: RunStore, key: str) -> Path:
    return Path(run.store.uri.removeprefix("file://")) / key


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    run = made_run(tmp_path_factory.mktemp("run"))
    read_all(run)
    return run


@pytest.fixture
def run(whole: RunStore, tmp_path: Path) -> RunStore:
    """A copy of the run to be damaged."""
    copy = Store(f"file://{tmp_path}/store")
    for key, data in contents(whole).items():
        copy.write(key, data)
    return RunStore(copy, "run")


KEYS = (
    "run/run.json",
    "run/HEAD",
    "run/steps/000002/commit.json",
    "run/steps/000003/commit.json",
    "run/steps/000002/rollout/1-k.safetensors",
    "run/steps/000002/rollout/1-k.json",
    "run/weights/v000002/manifest.json",
    "run/state/000002/index.json",
    "run/state/000002/marker.json",
    "run/state/000002/rank-00000.safetensors",
)


def damaged(run: RunStore, key: str, change: Callable[[bytes], bytes]) -> str:
    """The sentence that reading gives after an object was changed; nothing else may change."""
    path = path_of(run, key)
    path.write_bytes(change(path.read_bytes()))
    before = contents(run)
    with pytest.raises(StoreError) as caught:
        read_all(run)
    assert contents(run) == before
    text = str(caught.value)
    assert "\n" not in text, text
    return text


def weights_file(run: RunStore) -> str:
    (found,) = [
        key for key in run.store.list("run/weights/v000002") if key.endswith(".safetensors")
    ]
    return found


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("key", [*KEYS, "weights"])
def test_truncated(run: RunStore, key: str, share: float) -> None:
    key = weights_file(run) if key == "weights" else key
    text = damaged(run, key, lambda data: data[: int(len(data) * share)])
    assert key in text or "run/steps/000002" in text


@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.97])
@pytest.mark.parametrize("key", [*KEYS, "weights"])
def test_a_bit_flipped(run: RunStore, key: str, where: float) -> None:
    """The safetensors header of weights and snapshots is for other programs: not read, not tried."""
    key = weights_file(run) if key == "weights" else key
    if key.endswith("00000.safetensors") or key == weights_file(run):
        where = 0.6 + where / 3

    def flip(data: bytes) -> bytes:
        place = int(len(data) * where)
        while data[place : place + 1].isspace() and key.endswith((".json", "HEAD")):
            place += 1  # white space means nothing
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    text = damaged(run, key, flip)
    assert "damaged" in text or "altered" in text or "is no" in text or "document" in text, text


@pytest.mark.parametrize(
    "key", [key for key in KEYS if "run.json" not in key and "HEAD" not in key]
)
def test_missing(run: RunStore, key: str) -> None:
    optional = key.endswith(("1-k.json", "marker.json"))  # marks what is then not finished
    path_of(run, key).unlink()
    before = contents(run)
    if optional:
        read_all(run)
    else:
        with pytest.raises(StoreError, match=r"does not exist|is damaged|no valid") as caught:
            read_all(run)
        assert "\n" not in str(caught.value)
    assert contents(run) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("run/steps/000002/rollout/1-k.safetensors", "run/steps/000003/rollout/1-k.safetensors"),
        ("run/steps/000002/commit.json", "run/steps/000003/commit.json"),
        ("run/weights/v000002/manifest.json", "run/weights/v000003/manifest.json"),
        ("run/steps/000002/rollout/1-k.json", "run/steps/000002/rollout/1-k.safetensors"),
    ],
)
def test_swapped(run: RunStore, one: str, other: str) -> None:
    first = path_of(run, one).read_bytes()
    path_of(run, one).write_bytes(path_of(run, other).read_bytes())
    damaged(run, other, lambda _: first)


@pytest.mark.parametrize("key", [key for key in KEYS if key.endswith((".json", "HEAD"))])
def test_another_format(run: RunStore, key: str) -> None:
    def older(data: bytes) -> bytes:
        document = json.loads(data)
        document["format"] = document["format"].partition("/")[0] + "/0"
        return json.dumps(document).encode()

    text = damaged(run, key, older)
    assert (
        ("/0" in text and ("/1" in text or "/2" in text)) or "altered" in text or "damaged" in text
    )


@pytest.mark.parametrize("other", [0, 2])
def test_batches_of_another_format(run: RunStore, other: int, monkeypatch) -> None:
    monkeypatch.setattr("storage.batches.format.VERSION", other)
    ref = write_batch(run.store, "run/other.safetensors", {"reward": np.arange(8, dtype="f4")})
    monkeypatch.undo()
    with pytest.raises(StoreError, match=f"it has format version {other}; this one reads 1"):
        ref.fetch_numpy(run.store, "reward")


def rewritten(run: RunStore, step: int, change: Callable[[dict], None]) -> None:
    """Rewrite a commit as another version of the program might have written it."""
    path = path_of(run, run.commit_key(step))
    body = json.loads(path.read_bytes())["body"]
    change(body)
    document = {"format": FORMAT, "digest": digest(canonical(body)), "body": body}
    path.write_bytes(json.dumps(document).encode())


def test_a_commit_with_fields_of_a_later_version(run: RunStore, caplog) -> None:
    rewritten(run, 3, lambda body: body.update(weather="fine", mood={"a": 1}))
    assert read_commit(run, 3).step == 3
    assert "mood, weather" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("version_in"),
        lambda body: body.update(step="three"),
        lambda body: body.update(refs={"batch": {"format": "refrain.ref/0"}}),
        lambda body: body.update(refs=[]),
        lambda body: body["ledger"].update(drawn=99),
        lambda body: body.update(parent=0),
        lambda body: body.update(metrics={"a": "b"}),
        lambda body: body.update(step=2, parent=1),
    ],
)
def test_a_commit_that_makes_no_sense(run: RunStore, change: Callable[[dict], None]) -> None:
    rewritten(run, 3, change)
    before = contents(run)
    with pytest.raises(StoreError, match="Object run/steps/000003/commit.json") as caught:
        read_commit(run, 3)
    assert "\n" not in str(caught.value)
    assert contents(run) == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=200)
def test_no_json_but_a_ref_is_a_ref(value: object) -> None:
    with pytest.raises(ValueError, match="Malformed batch reference") as caught:
        BatchRef.from_json(value)
    assert "\n" not in str(caught.value)


@given(st.data())
@settings(max_examples=300)
def test_a_ref_with_a_part_replaced(whole: RunStore, data: st.DataObject) -> None:
    """It is refused, or it is a ref whose reading is checked against the store as any other."""
    value = read_commit(whole, 3).refs["batch"].to_json()
    holder: object = value
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            holder[key] = data.draw(JSON)
            break
        holder = inner
    try:
        found = BatchRef.from_json(value)
    except ValueError as error:
        assert "Malformed batch reference" in str(error)
        assert "\n" not in str(error)
        return
    try:
        found.verify(whole.store)
    except (StoreError, ValueError) as error:
        assert "\n" not in str(error)


@given(st.lists(st.integers(0, 7), max_size=40), st.integers(1, 5))
@settings(max_examples=100)
def test_what_is_picked_comes_back(whole: RunStore, rows: list[int], parts: int) -> None:
    ref = read_commit(whole, 3).refs["batch"].take(rows)
    again = BatchRef.from_json(json.loads(json.dumps(ref.to_json())))
    assert again == ref
    if rows:
        values, _ = again.fetch_numpy(whole.store, "reward")
        assert values.tolist() == rows
        joined = BatchRef.concat(again.chunk(parts))
        assert joined.fetch_numpy(whole.store, "reward")[0].tolist() == rows
