"""BatchRef's operations against a plain list of rows; its JSON; its size."""

import json
import pickle
import uuid

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from storage.batches.columns import COLUMNS, Declared
from storage.batches.refs import BatchRef
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store

Row = dict[str, object]
STORE = Store(f"memory://refs-{uuid.uuid4().hex[:8]}")

row = st.fixed_dictionaries(
    {
        "response_ids": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
        "reward": st.floats(-10, 10, width=32),
        "worker": st.text(max_size=3),
        "note": st.one_of(
            st.none(), st.booleans(), st.dictionaries(st.text(max_size=2), st.integers())
        ),
    }
)
batches = st.lists(row, min_size=1, max_size=5)


def written(rows: list[Row]) -> BatchRef:
    lengths = [len(r["response_ids"]) for r in rows]  # type: ignore[arg-type]
    ids = [token for r in rows for token in r["response_ids"]]  # type: ignore[attr-defined]
    columns = {
        "response_ids": Jagged(np.array(ids, np.int64), np.concatenate([[0], np.cumsum(lengths)])),
        "reward": np.array([r["reward"] for r in rows], np.float32),
        "worker": [r["worker"] for r in rows],
        "note": [{"value": r["note"]} for r in rows],
    }
    return write_batch(STORE, f"{uuid.uuid4().hex}.safetensors", columns)


def read(ref: BatchRef) -> list[Row]:
    columns = {name: ref.fetch_list(STORE, name) for name in ref.names}
    rows: list[Row] = []
    for number in range(len(ref)):
        found: Row = {name: values[number] for name, values in columns.items()}
        if "response_ids" in found:
            found["response_ids"] = found["response_ids"].tolist()  # type: ignore[attr-defined]
        if "note" in found:
            found["note"] = found["note"]["value"]  # type: ignore[index]
        rows.append(found)
    return rows


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_operations_like_a_list(data: st.DataObject) -> None:
    pool = [
        (written(rows), list(rows)) for rows in data.draw(st.lists(batches, min_size=1, max_size=3))
    ]
    for _ in range(data.draw(st.integers(0, 6))):
        ref, rows = data.draw(st.sampled_from(pool))
        match data.draw(
            st.sampled_from(["rows", "take", "concat", "with_columns", "chunk", "json"])
        ):
            case "rows":
                start, stop = data.draw(st.tuples(st.integers(-6, 6), st.integers(-6, 6)))
                result = ref.rows(start, stop), rows[slice(start, stop)]
            case "take":
                number = st.integers(0, max(len(rows) - 1, 0))
                index = data.draw(st.lists(number, max_size=8 if rows else 0))
                result = ref.take(index), [rows[n] for n in index]
            case "concat":
                others = data.draw(st.lists(st.sampled_from(pool), max_size=3))
                result = (
                    BatchRef.concat([ref, *(other for other, _ in others)]),
                    rows + [r for _, more in others for r in more],
                )
            case "with_columns":
                if not rows:
                    continue
                fresh = data.draw(st.lists(row, min_size=len(rows), max_size=len(rows)))
                added = written(fresh)[["reward", "note"]]
                result = (
                    ref.with_columns(added),
                    [
                        {**r, "reward": f["reward"], "note": f["note"]}
                        for r, f in zip(rows, fresh, strict=True)
                    ],
                )
            case "chunk":
                n = data.draw(st.integers(1, 4))
                parts = ref.chunk(n)
                assert [len(part) for part in parts] == [
                    len(rows) // n + (k < len(rows) % n) for k in range(n)
                ]
                assert read(BatchRef.concat(parts)) == rows
                continue
            case _:
                result = BatchRef.from_json(json.loads(json.dumps(ref.to_json()))), rows
        assert len(result[0]) == len(result[1])
        pool.append(result)
    for ref, rows in pool:
        assert read(ref) == rows
        assert read(pickle.loads(pickle.dumps(ref))) == rows
        lengths = ref.lengths(STORE, "response_ids").tolist()
        assert lengths == [len(r["response_ids"]) for r in rows]  # type: ignore[arg-type]


def some(rows: int = 4) -> BatchRef:
    return write_batch(
        STORE,
        f"{uuid.uuid4().hex}.safetensors",
        {
            "response_ids": [[n] * n for n in range(rows)],
            "reward": np.arange(rows, dtype=np.float32),
        },
    )


def test_selecting_and_dropping() -> None:
    ref = some()
    assert ref.names == ("response_ids", "reward")
    both = BatchRef.concat([ref[["response_ids"]], some().drop(["reward"]), ref.drop(["reward"])])
    both = BatchRef.from_json(both.rows(0, 9).to_json())
    assert [r["response_ids"] for r in read(both)] == [[], [1], [2, 2], [3, 3, 3]] * 2 + [[]]
    assert ref.drop(["reward"]).names == ("response_ids",)


def test_the_example_of_the_docstring() -> None:
    ref = write_batch(
        STORE,
        "example.safetensors",
        {
            "response_ids": [[7, 8], [9], [4, 5, 6]],
            "reward": np.array([1.0, 0.0, 1.0], np.float32),
            "group_id": np.array([0, 0, 1]),
        },
    )
    assert repr(ref) == "BatchRef(3 rows: response_ids, reward, group_id)"
    first = ref[["response_ids", "reward"]].rows(0, 2)
    rewards, none = first.fetch_numpy(STORE, "reward")
    assert (rewards.tolist(), none) == ([1.0, 0.0], None)
    tokens, offsets = first.fetch_numpy(STORE, "response_ids")
    assert (tokens.tolist(), offsets.tolist()) == ([7, 8, 9], [0, 2, 3])


def test_user_mistakes_are_named() -> None:
    ref = some()
    with pytest.raises(ValueError, match="no column 'rewrad'; it has response_ids, reward"):
        ref[["rewrad"]]
    with pytest.raises(ValueError, match=r"ref\[\['reward'\]\]"):
        ref["reward"]  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="Row 4 is outside the batch's 4 rows"):
        ref.take([0, 4])
    with pytest.raises(ValueError, match="Row -1 is outside"):
        ref.take([-1])
    with pytest.raises(ValueError, match="flatnonzero"):
        ref.take(np.array([True, False, True, True]))
    with pytest.raises(ValueError, match="have 3 rows, the batch 4"):
        ref.with_columns(some(3))
    with pytest.raises(ValueError, match="do not both have column reward"):
        BatchRef.concat([ref, ref.drop(["reward"])])
    other = write_batch(STORE, "x", {"score": np.arange(4)})
    with pytest.raises(ValueError, match=r"'score' is .*I64.* in batch 1"):
        BatchRef.concat([write_batch(STORE, "y", {"score": np.zeros(4, np.float32)}), other])
    with pytest.raises(ValueError, match="at least one batch"):
        BatchRef.concat([])
    with pytest.raises(ValueError, match="dense: its rows have no lengths"):
        ref.lengths(STORE, "reward")
    with pytest.raises(ValueError, match="at least 1 batch, not 0"):
        ref.chunk(0)


def test_size_does_not_grow_with_the_rows() -> None:
    names = [f"column_{number}" for number in range(20)]
    columns = {name: np.zeros(100_000, np.float32) for name in names}
    ref = write_batch(STORE, "wide.safetensors", columns)
    assert len(pickle.dumps(ref)) < 3000
    assert len(pickle.dumps(ref.rows(17, 90_000))) < 3000
    kept = np.flatnonzero(np.arange(100_000) // 8 % 5 != 3)  # whole groups, as a filter leaves them
    assert len(pickle.dumps(ref.take(kept))) < 4000
    for part in ref.chunk(8):
        assert len(pickle.dumps(part)) < 3000
    shards = [
        write_batch(STORE, f"shard-{n}.safetensors", {m: np.zeros(64) for m in names})
        for n in range(64)
    ]
    assert len(pickle.dumps(BatchRef.concat(shards))) < 10_000


def test_a_shuffle_costs_two_bytes_a_row() -> None:
    ref = write_batch(STORE, "shuffled.safetensors", {"x": np.zeros(4096), "y": np.zeros(4096)})
    shuffled = ref.take(np.random.default_rng(0).permutation(4096))
    assert len(json.dumps(shuffled.to_json())) < 2.7 * 4096


def test_objects_are_those_of_the_rows() -> None:
    first, second = some(), some()
    both = BatchRef.concat([first, second])
    assert both.objects == first.objects | second.objects
    assert both.rows(0, 4).objects == first.objects
    assert both.take([6, 5]).objects == second.objects
    assert both.rows(2, 2).objects == frozenset()
    assert len(BatchRef.concat(both.chunk(3)).column("reward").sources) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(format="other/9"), "not of format refrain.batch/1"),
        (lambda v: v.pop("rows"), "no 'rows'"),
        (lambda v: v.update(rows=5), "a view of 4 rows does not fit 5"),
        (lambda v: v["views"][0].__setitem__(1, [0, 400]), "does not fit"),
        (lambda v: v["views"][0].__setitem__(0, [7]), "out of range"),
        (lambda v: v["columns"].update(reward=["dense", "F33", [], 0]), "'reward' is malformed"),
        (lambda v: v["columns"].update(reward="x"), "unpack"),
        (lambda v: v["columns"]["reward"].append(["renamed"]), "row runs are"),
        (lambda v: v["columns"]["reward"].extend([[0, 4], 0]), "too many values to unpack"),
        (lambda v: v["sources"].__setitem__(0, [1, 2, 3, 4]), "source 1 is malformed"),
    ],
)
def test_malformed_json_is_one_sentence(change, message: str) -> None:
    value = some().to_json()
    change(value)
    with pytest.raises(ValueError, match=message) as raised:
        BatchRef.from_json(value)
    assert str(raised.value).startswith("Malformed batch reference: ")
    assert "\n" not in str(raised.value)


def test_as_a_field_of_a_model() -> None:
    class Carrier(BaseModel):
        ref: BatchRef

    carrier = Carrier(ref=some())
    again = Carrier.model_validate_json(carrier.model_dump_json())
    assert read(again.ref) == read(carrier.ref)
    with pytest.raises(ValueError, match="Malformed batch reference"):
        Carrier.model_validate({"ref": {"format": "x"}})


def test_token_ids_of_older_stores_are_read_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("memory://older")
    rows = {"response_ids": [[5, 6], [], [70_000]], "reward": np.zeros(3, np.float32)}
    with monkeypatch.context() as patch:  # as version 0.1 declared it
        patch.setitem(COLUMNS, "response_ids", Declared("jagged", "I64", "tokens"))
        old = write_batch(store, "old.safetensors", rows)
    new = write_batch(store, "new.safetensors", {**rows, "response_ids": [[1], [2, 3], [4]]})
    assert old.column("response_ids").dtype == "I64"
    assert new.column("response_ids").dtype == "I32"
    assert [row.tolist() for row in old.fetch_list(store, "response_ids")] == [[5, 6], [], [70_000]]

    joined = BatchRef.from_json(BatchRef.concat([new, old]).to_json())
    assert joined.column("response_ids").dtype == "I32"
    assert joined.lengths(store, "response_ids").tolist() == [1, 2, 1, 2, 0, 1]
    picked = joined.take([5, 1, 3])  # rows of both, not in their order
    assert [row.tolist() for row in picked.fetch_list(store, "response_ids")] == [
        [70_000], [2, 3], [5, 6],
    ]  # fmt: skip
    joined.verify(store)
    assert BatchRef.concat([old, old]).to_json()["columns"]["response_ids"][1] == "I64"  # type: ignore[index]


def test_token_ids_that_do_not_fit_are_refused() -> None:
    store = Store("memory://narrow")
    for ids in (np.array([1, 2**31]), [[1, 2**31]]):
        column = Jagged(ids, np.array([0, 2])) if isinstance(ids, np.ndarray) else ids
        with pytest.raises(ValueError, match="'response_ids'"):
            write_batch(store, "x.safetensors", {"response_ids": column})


def test_samples_of_one_prompt_and_player_have_one_number() -> None:
    groups = {"group_id": np.array([4, 4, 4, 5, 5])}
    plain = write_batch(STORE, f"{uuid.uuid4().hex}.safetensors", groups)
    assert plain.own_groups(STORE).tolist() == [4, 4, 4, 5, 5]
    seats = {**groups, "player": np.array([0, 1, 2, 0, 0])}
    found = write_batch(STORE, f"{uuid.uuid4().hex}.safetensors", seats).own_groups(STORE)
    assert found.tolist() == [12, 13, 14, 15, 15], "in the order of prompts and players"


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rows_grouped_by_reference_are_jagged(data: st.DataObject) -> None:
    """Each row is made of dense rows of two objects, whatever is picked, joined and sent on."""
    pictures = np.arange(5 * 6, dtype=np.uint8).reshape(5, 2, 3)
    parts = [
        write_batch(STORE, f"{uuid.uuid4().hex}.safetensors", {"frame": some})
        for some in (pictures[:2], pictures[2:])
    ]
    every = BatchRef.concat(parts)
    wanted = data.draw(st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5))
    ref = every.grouped(wanted)
    if data.draw(st.booleans()):
        more = data.draw(st.lists(st.lists(st.integers(0, 4), max_size=2), min_size=1, max_size=3))
        ref, wanted = BatchRef.concat([ref, every.grouped(more)]), wanted + more
    picked = data.draw(st.lists(st.integers(0, len(wanted) - 1), max_size=6))
    ref, wanted = ref.take(picked), [wanted[number] for number in picked]
    ref = BatchRef.from_json(json.loads(json.dumps(ref.to_json())))
    assert ref.lengths(STORE, "frame").tolist() == [len(one) for one in wanted]
    for found, rows in zip(ref.fetch_list(STORE, "frame"), wanted, strict=True):
        np.testing.assert_array_equal(found, pictures[rows])  # type: ignore[arg-type]
    assert ref.objects <= every.objects
    if wanted:
        nested = ref.fetch(STORE, ["frame"])["frame"]
        assert nested.values().shape == (sum(map(len, wanted)), 2, 3)


def test_what_is_grouped_must_be_dense_and_joins_its_like_alone() -> None:
    ref = write_batch(STORE, f"{uuid.uuid4().hex}.safetensors", {"frame": [[1], [2, 3]]})
    with pytest.raises(ValueError, match="Column 'frame' is jagged; rows of dense ones"):
        ref.grouped([[0, 1]])
    dense = write_batch(STORE, f"{uuid.uuid4().hex}.safetensors", {"frame": np.array([1, 2])})
    with pytest.raises(ValueError, match="made of dense rows in some batches"):
        BatchRef.concat([ref, dense.grouped([[0, 1]])])
    broken = dense.grouped([[0, 1]]).to_json()
    broken["rows"] = 2
    with pytest.raises(ValueError, match="does not fit 2"):
        BatchRef.from_json(broken)
