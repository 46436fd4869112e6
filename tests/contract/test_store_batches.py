"""Batches and policy versions, written to and read from every kind of store."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensordict import NonTensorStack, TensorDict

from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.errors import ObjectMissing, StoreError
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.weights import stream
from storage.runs.weights_writing import publish


def batch(rows: int = 6) -> TensorDict:
    offsets = torch.arange(rows).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), offsets])
    tokens = int(offsets[-1])
    return TensorDict(
        {
            "response_ids": torch.nested.nested_tensor_from_jagged(torch.arange(tokens), offsets),
            "rollout_logprobs": torch.nested.nested_tensor_from_jagged(
                -torch.arange(tokens) / 10, offsets
            ),
            "reward": torch.arange(rows) / 2,
            "finish_reason": NonTensorStack(*[f"stop {row} é" for row in range(rows)]),
        },
        batch_size=[rows],
    )


def test_a_batch_comes_back(store: Store) -> None:
    ref = write_batch(store, "run/a.safetensors", batch())
    ref = BatchRef.from_json(json.loads(json.dumps(ref.to_json())))
    found = ref.fetch(store)
    wanted = batch()
    assert found.batch_size == wanted.batch_size
    assert torch.equal(found["reward"], wanted["reward"])
    assert list(found["finish_reason"]) == list(wanted["finish_reason"])
    for name in ("response_ids", "rollout_logprobs"):
        for got, expected in zip(found[name].unbind(), wanted[name].unbind(), strict=True):
            assert torch.equal(got, expected)
    product = found["response_ids"] * found["rollout_logprobs"]  # they share their offsets
    assert product.values().shape == (15,)


def test_rows_in_any_order(store: Store) -> None:
    ref = write_batch(store, "run/a.safetensors", batch())
    other = write_batch(store, "run/b.safetensors", {"row": [{"n": n} for n in range(6)]})
    both = BatchRef.concat([ref.with_columns(other)] * 2)
    found = both.take([11, 2, 2, 5]).fetch(store)
    assert found["reward"].tolist() == [2.5, 1.0, 1.0, 2.5]
    assert [row["n"] for row in found["row"]] == [5, 2, 2, 5]
    assert [row.tolist() for row in found["response_ids"].unbind()] == [
        [10, 11, 12, 13, 14],
        [1, 2],
        [1, 2],
        [10, 11, 12, 13, 14],
    ]


def test_objects_never_change(store: Store) -> None:
    first = write_batch(store, "run/a.safetensors", batch(4))
    again = write_batch(store, "run/a.safetensors", batch(4))
    other = write_batch(store, "run/a.safetensors", batch(5))
    assert first.objects == again.objects == {"run/a.safetensors"}
    assert other.objects != first.objects
    assert first.fetch(store)["reward"].shape == (4,)
    assert other.fetch(store)["reward"].shape == (5,)


def test_a_missing_object_is_named(store: Store) -> None:
    ref = write_batch(store, "run/gone.safetensors", batch(3))
    store.delete(["run/gone.safetensors"])
    with pytest.raises(ObjectMissing, match=r"run/gone\.safetensors"):
        ref.fetch(store)


def test_stage_results_are_reused(store: Store) -> None:
    run = RunStore(store, "run")
    key = run.stage_key(3, "rollout", 0, "abc")
    assert run.finished(key) is None
    ref = write_batch(store, key, batch(3))
    assert run.finish(key, {"ref": ref.to_json()}) == {"ref": ref.to_json()}
    assert run.finish(key, {"ref": "of a late attempt"}) == {"ref": ref.to_json()}
    assert run.finished(key) == {"ref": ref.to_json()}


def test_weights_come_back(store: Store, tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(7, 5),
        "b.bias": torch.randn(3).bfloat16(),
        "c.count": torch.tensor(5),
        "d.none": torch.empty(0, 4),
    }
    files = {"config.json": b"{}"}
    ref = publish(store, "run", 0, iter(tensors.items()), files, shard_bytes=100)
    found = dict(stream(store, ref))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    for key in store.list(ref.key):
        (tmp_path / Path(key).name).write_bytes(store.read(key))
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 2
    loaded = {name: t for shard in shards for name, t in load_file(shard).items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_weights_are_published_once(store: Store) -> None:
    tensors = {"w": torch.ones(4)}
    ref = publish(store, "run", 1, tensors.items(), {})
    assert publish(store, "run", 1, tensors.items(), {}) == ref
    with pytest.raises(StoreError, match="already published"):
        publish(store, "run", 1, {"w": torch.zeros(4)}.items(), {})
    assert torch.equal(dict(stream(store, ref))["w"], tensors["w"])
