"""Policy versions: published once, streamed back checked, loadable by other software."""

import json
from pathlib import Path

import pytest
import torch

from storage.objects import documents
from storage.objects.errors import ObjectDamaged, ObjectMissing, StoreError
from storage.objects.store import Store
from storage.objects.usage import COUNTER
from storage.runs import weights, weights_writing
from storage.runs.weights import (
    FORMAT,
    MANIFEST,
    BaseVersion,
    WeightsRef,
    open_chain,
    open_manifest_at,
    stream,
    tensor_digest,
    weights_digest,
)
from storage.runs.weights_writing import publish

TENSORS = {f"layer.{n}.weight": torch.randn(8, 16) + n for n in range(6)}


def files_of(store: Store, ref: WeightsRef) -> Path:
    return Path(store.url(ref.key).removeprefix("file://"))


def test_cast_while_written(store: Store) -> None:
    tensors = {**TENSORS, "steps": torch.arange(3)}
    ref = publish(store, "run", 0, tensors.items(), {}, dtype=torch.bfloat16)
    found = dict(stream(store, ref))
    assert found["steps"].dtype == torch.int64
    assert torch.equal(found["layer.3.weight"], TENSORS["layer.3.weight"].bfloat16())
    assert ref.nbytes == 6 * 8 * 16 * 2 + 3 * 8


def test_the_digest_can_be_made_from_what_was_loaded(store: Store) -> None:
    ref = publish(store, "run", 0, TENSORS.items(), {}, shard_bytes=1000)
    loaded = reversed(list(stream(store, ref)))
    entries = [(name, "F32", tuple(t.shape), tensor_digest(t)) for name, t in loaded]
    assert weights_digest(entries) == ref.digest
    assert publish(store, "other", 5, TENSORS.items(), {}).digest == ref.digest


def test_some_of_the_tensors_are_read_alone(store: Store) -> None:
    ref = publish(store, "run", 0, TENSORS.items(), {}, shard_bytes=1000)
    before = COUNTER.total().bytes_read
    some = list(stream(store, ref, {"layer.4.weight", "layer.1.weight"}))
    read = COUNTER.total().bytes_read - before
    assert [name for name, _ in some] == ["layer.1.weight", "layer.4.weight"]
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in some)
    assert read == store.size(f"{ref.key}/manifest.json") + 2 * 8 * 16 * 4


def test_tensors_are_held_one_shard_at_a_time(store: Store) -> None:
    alive: list[str] = []

    def gathered():
        for name in TENSORS:
            alive.append(name)
            shards = len(store.list("run")) if store.children() else 0
            assert len(alive) <= 2 * shards + 3
            yield name, TENSORS[name].clone()

    publish(store, "run", 0, gathered(), {}, shard_bytes=2 * 8 * 16 * 4)
    assert len(store.list("run")) == 3 + 2


def test_a_crashed_publisher_is_no_version(store: Store) -> None:
    def failing():
        yield from list(TENSORS.items())[:4]
        raise RuntimeError("rank lost")

    with pytest.raises(RuntimeError, match="rank lost"):
        publish(store, "run", 3, failing(), {}, shard_bytes=1000)
    ref = WeightsRef(version=3, key="run/weights/v000003", digest="xxh3:0", nbytes=0)
    with pytest.raises(ObjectMissing, match=r"manifest\.json"):
        list(stream(store, ref))
    ref = publish(store, "run", 3, TENSORS.items(), {})
    assert len(dict(stream(store, ref))) == 6
    assert len(store.list(ref.key)) == 3  # what the first one left is gone


def test_of_two_publishers_the_first_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = publish(store, "run", 1, TENSORS.items(), {})
    # The second one looked for a manifest before there was one.
    monkeypatch.setattr(weights_writing, "find_manifest", lambda store, key: None)
    others = {name: -tensor for name, tensor in TENSORS.items()}
    with pytest.raises(StoreError, match="already published"):
        publish(store, "run", 1, others.items(), {})
    assert publish(store, "run", 1, TENSORS.items(), {}) == ref
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in stream(store, ref))
    shards = {path.name for path in files_of(store, ref).glob("*.safetensors")}
    index = json.loads((files_of(store, ref) / "model.safetensors.index.json").read_text())
    assert shards == set(index["weight_map"].values())


def test_damage_names_the_tensor(store: Store) -> None:
    ref = publish(store, "run", 0, TENSORS.items(), {}, shard_bytes=1500)
    entry = weights.open_manifest(store, ref).tensors["layer.3.weight"]
    path = files_of(store, ref) / entry.file
    good = path.read_bytes()
    path.write_bytes(good[: entry.start] + bytes([good[entry.start] ^ 1]) + good[entry.start + 1 :])
    with pytest.raises(
        ObjectDamaged, match=r"tensor 'layer\.3\.weight' of object run/weights/v000000/model"
    ):
        list(stream(store, ref))
    path.write_bytes(good[: entry.start + 3])
    with pytest.raises(ObjectDamaged, match=r"tensor 'layer\.3\.weight'.* ends within it"):
        list(stream(store, ref))
    path.unlink()
    with pytest.raises(ObjectMissing, match=entry.file):
        list(stream(store, ref))


def test_a_swapped_version_is_noticed(store: Store) -> None:
    first = publish(store, "run", 0, TENSORS.items(), {})
    second = publish(store, "run", 1, {"x": torch.ones(2)}.items(), {})
    wrong = first.model_copy(update={"key": second.key})
    with pytest.raises(ObjectDamaged, match="not the version that the reference names"):
        list(stream(store, wrong))


def test_a_tensor_published_twice_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="'a' is published twice"):
        publish(store, "run", 0, [("a", torch.ones(1)), ("a", torch.ones(1))], {})


def test_transformers_loads_the_folder(store: Store) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    files = {"config.json": config.to_json_string(use_diff=False).encode()}
    ref = publish(store, "run", 0, model.state_dict().items(), files, shard_bytes=20_000)
    loaded = LlamaForCausalLM.from_pretrained(files_of(store, ref))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_version_of_before_is_read(store: Store) -> None:
    ref = publish(store, "run", 0, TENSORS.items(), {})
    key = f"{ref.key}/{MANIFEST}"
    body = documents.read(store, key, FORMAT)
    assert body.pop("base") is None
    store.write(key, documents.encode("refrain.weights/1", body))
    found = dict(stream(store, WeightsRef.model_validate(ref.model_dump(exclude={"base"}))))
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert open_manifest_at(store, ref.key).base is None


def test_a_version_needs_its_base(store: Store) -> None:
    base = publish(store, "run", 0, TENSORS.items(), {})
    ref = publish(store, "run", 1, [("a", torch.ones(2))], {})
    said = {"base": BaseVersion(key=base.key, digest=base.digest).model_dump()}
    body = documents.read(store, f"{ref.key}/{MANIFEST}", FORMAT) | said
    store.write(f"{ref.key}/{MANIFEST}", documents.encode(FORMAT, body))
    assert [key for key, _ in open_chain(store, ref)] == [ref.key, base.key]
    store.delete([f"{base.key}/{MANIFEST}"])
    with pytest.raises(ObjectMissing, match="v000000/manifest"):
        open_chain(store, ref)


def test_readers_that_check_a_version_together(store: Store) -> None:
    """Each tensor is checked by one of them; a damaged one is found by that one."""
    tensors = {name: torch.randn(64, 32) for name in "abcde"}
    ref = publish(store, "run", 1, tensors.items(), {})
    entry = weights.open_manifest(store, ref).tensors["d"]
    key = f"{ref.key}/{entry.file}"
    data = bytearray(store.read(key))
    data[entry.start] ^= 1
    store.write(key, bytes(data))
    failed = []
    for number in range(3):
        try:
            list(stream(store, ref, share=(number, 3)))
        except ObjectDamaged as error:
            assert "'d'" in str(error)
            failed.append(number)
    assert failed == [0]  # a b c d e: reader 0 has a and d
    with pytest.raises(ObjectDamaged):
        list(stream(store, ref))
