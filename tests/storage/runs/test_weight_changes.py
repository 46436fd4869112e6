"""Versions stored as the difference from another one: the same content, and what they need stays."""

import json

import pytest
import torch

from storage.objects.errors import ObjectDamaged, ObjectMissing
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.runs import weights_writing
from storage.runs.run_store import RunStore
from storage.runs.weights import BaseVersion, WeightsRef, open_manifest, stream
from storage.runs.weights_writing import base_for, copy_whole, outline_of, publish

FILES = {"config.json": b"{}"}


def tensors(version: int) -> dict[str, torch.Tensor]:
    """A weight of which little changes, one that stays, one that changes everywhere."""
    torch.manual_seed(0)
    found = {"moves": torch.randn(64, 64), "stays": torch.randn(32), "tied": torch.randn(8, 8)}
    found["moves"].view(-1)[:: 40 - version] += 0.5 * version
    torch.manual_seed(version)
    found["new"] = torch.randn(16, 16)
    found["count"] = torch.tensor(version)
    return found


def put(run: RunStore, version: int, base: WeightsRef | None = None) -> WeightsRef:
    named = None if base is None else BaseVersion(key=base.key, digest=base.digest)
    made = tensors(version).items()
    return publish(run.store, run.run, version, made, FILES, torch.bfloat16, base=named)


def test_the_content_is_that_of_a_whole_version(run: RunStore) -> None:
    base, whole = put(run, 0), put(run, 1)
    less = put(RunStore(run.store, "less"), 1, base)
    assert (less.digest, less.nbytes) == (whole.digest, whole.nbytes)
    entries = open_manifest(run.store, less).tensors
    assert {name: entry.form for name, entry in entries.items()} == {
        "moves": "changed", "stays": "same", "tied": "same", "new": "whole", "count": "whole",
    }  # fmt: skip
    for (name, one), (other_name, other) in zip(
        stream(run.store, whole), stream(run.store, less), strict=True
    ):
        assert name == other_name
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name
    assert less.base == BaseVersion(key=base.key, digest=base.digest)
    assert less.stored == sum(
        run.store.size(key) for key in run.store.list(less.key)
    ) - run.store.size(f"{less.key}/manifest.json")
    assert [name for name, _ in stream(run.store, less, {"tied", "count"})] == ["tied", "count"]


def test_only_the_difference_is_written(run: RunStore) -> None:
    base = put(run, 0)
    before = COUNTER.total().bytes_written
    ref = put(run, 1, base)
    manifest = run.store.size(f"{ref.key}/manifest.json")
    assert COUNTER.total().bytes_written - before == (ref.stored or 0) + manifest
    assert {key.rpartition(".")[2] for key in run.store.list(ref.key)} == {"delta", "json"}
    assert put(run, 1, base) == ref


def test_which_versions_are_whole(run: RunStore) -> None:
    outlines = {name: outline_of(tensor, torch.bfloat16) for name, tensor in tensors(0).items()}
    refs: dict[int, WeightsRef] = {}
    for version in range(8):
        base = base_for(run, version, outlines, 4)
        refs[version] = put(run, version, None if base is None else refs[int(base.key[-6:])])
    bases = {version: ref.base.key[-1] for version, ref in refs.items() if ref.base is not None}
    assert bases == {1: "0", 2: "0", 3: "0", 5: "4", 6: "4", 7: "4"}
    assert base_for(run, 8, outlines, 1) is None
    assert base_for(run, 20, outlines, 4) is None  # nothing is there before it
    tensor = {"x": torch.arange(100.0)}
    shape = {"x": outline_of(tensor["x"], None)}
    first = publish(run.store, "far", 0, tensor.items(), FILES)
    named = BaseVersion(key=first.key, digest=first.digest)
    publish(run.store, "far", 1, [("x", torch.randn(100))], FILES, base=named)
    assert base_for(RunStore(run.store, "far"), 2, shape, 4) is None  # nothing was gained
    other = {**outlines, "more": outlines["new"]}
    assert base_for(run, 7, other, 4) is None
    run.store.delete([f"{refs[4].key}/manifest.json"])
    assert base_for(run, 7, outlines, 4) is None


def test_a_whole_folder_can_be_made_of_a_difference(run: RunStore) -> None:
    base = put(run, 0)
    whole, less = put(RunStore(run.store, "whole"), 1), put(run, 1, base)
    made = copy_whole(run.store, less, run.store, "copied")
    assert (made.digest, made.base) == (whole.digest, None)
    names = {key.rpartition("/")[2] for key in run.store.list("copied")}
    assert {name for name in names if not name.startswith("model-")} == {
        "config.json", "manifest.json", "model.safetensors.index.json",
    }  # fmt: skip


def test_damage_names_the_tensor(run: RunStore) -> None:
    base = put(run, 0)
    ref = put(run, 1, base)
    entry = open_manifest(run.store, ref).tensors["moves"]
    before = open_manifest(run.store, base).tensors["moves"]
    for key, where in (
        (f"{ref.key}/{entry.file}", (entry.start + entry.stop) // 2),
        (f"{base.key}/{before.file}", before.start + 5),
    ):
        good = run.store.read(key)
        run.store.write(key, good[:where] + bytes([good[where] ^ 1]) + good[where + 1 :])
        with pytest.raises(ObjectDamaged, match=r"tensor 'moves' of object run/weights/v000001/ch"):
            list(stream(run.store, ref))
        run.store.write(key, good)
    assert len(list(stream(run.store, ref))) == 5
    run.store.delete([f"{base.key}/manifest.json"])
    with pytest.raises(ObjectMissing, match="v000000/manifest"):
        list(stream(run.store, ref))


def test_of_two_writers_the_first_stays(run: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    base = put(run, 0)
    ref = put(run, 1, base)
    kept = run.store.list(ref.key)
    monkeypatch.setattr(weights_writing, "find_manifest", lambda store, key: None)
    assert put(run, 1) == ref  # whole: it knew of no base
    assert run.store.list(ref.key) == kept


def test_transformers_does_not_take_it_for_weights(store: Store) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    files = {"config.json": config.to_json_string(use_diff=False).encode()}
    base = publish(store, "run", 0, model.state_dict().items(), files)
    named = BaseVersion(key=base.key, digest=base.digest)
    ref = publish(store, "run", 1, model.state_dict().items(), files, base=named)
    with pytest.raises((OSError, ValueError)):
        LlamaForCausalLM.from_pretrained(store.url(ref.key).removeprefix("file://"))
    assert json.loads(store.read(f"{ref.key}/manifest.json"))["body"]["base"]["key"] == base.key
