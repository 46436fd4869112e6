"""Ranks publish, digest and compare whole tensors together, over Gloo."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.train import publication
from engines.train.model.fsdp import on_first, own_part, shard, together
from engines.train.model.rendezvous import meet
from engines.train.publication import (
    agree_together,
    compare_together,
    digest_together,
    publish_together,
)
from engines.workers import device_memory
from storage.objects.errors import StoreError
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, open_manifest, stream
from storage.runs.weights_writing import publish, write_shard
from tests.engines.train.train_ranks import Ranks

SHARD_BYTES = 1000


class Small(nn.Module):
    """Rows that four ranks cannot share evenly, and what is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(nn.Linear(8, rows) for rows in (8, 5, 1))
        self.norm = nn.LayerNorm(3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def whole(version: int) -> dict[str, Tensor]:
    """The values of a version, in the order in which they are published."""
    torch.manual_seed(version)
    state = Small().state_dict()
    return {n: torch.randn(t.shape) if t.is_floating_point() else t + 7 for n, t in state.items()}


def sharded(group: dist.ProcessGroup, version: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        module = Small()
    shard(module, group, torch.device("cpu"), torch.float32)
    for name, value in whole(version).items():
        own, first = own_part(module.state_dict()[name])
        own.copy_(value.reshape(-1)[first : first + own.numel()].view(own.shape))
    return dict(module.state_dict())


def attempt(work: object) -> str:
    try:
        work()  # type: ignore[operator]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def scenario(rank: int, world: int, ports: list[int], folder: Path) -> dict[str, object]:
    """All that is done with groups of 1, 2 and 4 of the ranks."""
    meeting = meet(rank, world, "127.0.0.1", ports[0], torch.device("cpu"), 60.0, 120.0)
    groups = {4: meeting.group, 2: dist.new_group([0, 1]), 1: dist.new_group([0])}
    store = Store(str(folder / "store"))
    seen: dict[str, object] = {}

    def put(
        run: str, version: int, state: dict[str, Tensor], group: dist.ProcessGroup, every: int = 1
    ) -> WeightsRef:
        bfloat16, files = torch.bfloat16, {"config.json": b"{}"}
        return publish_together(
            store, run, version, state, files, bfloat16, group, every, shard_bytes=SHARD_BYTES
        ).settle()

    for size, group in groups.items():
        if rank >= size:
            continue
        state = sharded(group, 1)
        ref = put(f"of-{size}", 1, state, group)
        assert put(f"of-{size}", 1, state, group) == ref
        seen[f"ref {size}"] = ref
        seen[f"digest {size}"] = digest_together(state, torch.bfloat16, group)
        seen[f"equal {size}"] = compare_together(store, ref, state, torch.bfloat16, group)
        other = sharded(group, 1)
        own, _ = own_part(other["layers.1.weight"])
        own += 1
        seen[f"differs {size}"] = compare_together(store, ref, other, torch.bfloat16, group)
        seen[f"refused {size}"] = attempt(lambda: put(f"of-{size}", 1, other, group))  # noqa: B023
        seen[f"less {size}"] = put(f"of-{size}", 2, other, group, every=3)
        assert put(f"of-{size}", 2, other, group, every=3) == seen[f"less {size}"]
        # Of the published version one tensor is otherwise, one within its rounding, others the same.
        near, _ = own_part(other["layers.0.weight"])
        near *= 1 + 2**-16
        held = {name: each for name, each in other.items() if name != "norm.bias"}
        seen[f"agreed {size}"] = agree_together(store, ref, held, group)
        seen[f"taken {size}"] = own_part(other["layers.1.weight"])[0].clone()
        seen[f"kept {size}"] = near.clone(), own_part(state["layers.0.weight"])[0].clone()
        seen[f"rank's {size}"] = own_part(state["layers.1.weight"])[0].clone()
    state = sharded(meeting.group, 2)
    if rank == 2:  # its disk is full, once
        publication.write_shard = full  # type: ignore[assignment]
    seen["full"] = attempt(lambda: put("full", 2, state, meeting.group))
    publication.write_shard = write_shard
    dist.barrier(meeting.group)  # all have given up
    seen["left"] = len(store.list("full"))
    dist.barrier(meeting.group)
    seen["again"] = put("full", 2, state, meeting.group)
    return seen


def full(store: Store, *rest: object) -> None:
    """A disk that is full once another rank has written something."""
    until = time.monotonic() + 20.0
    while not store.list("full") and time.monotonic() < until:
        time.sleep(0.01)
    raise StoreError("No space left on device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("publication")


@pytest.fixture(scope="module")
def seen(folder: Path) -> Iterator[list[dict[str, object]]]:
    ranks = Ranks(4)
    yield ranks.run(scenario, folder)
    ranks.close()


def test_one_digest_for_any_number_of_ranks(seen: list[dict[str, object]], folder: Path) -> None:
    store = Store(str(folder / "store"))
    alone = publish(store, "alone", 1, whole(1).items(), {}, torch.bfloat16)
    for size in (1, 2, 4):
        for rank in seen[:size]:
            ref = rank[f"ref {size}"]
            assert isinstance(ref, WeightsRef)
            assert (ref.digest, ref.nbytes) == (alone.digest, alone.nbytes)
            assert rank[f"digest {size}"] == alone.digest
        manifest = open_manifest(store, ref)
        assert list(manifest.tensors) == list(whole(1))
        for name, tensor in stream(store, ref):
            assert torch.equal(tensor, whole(1)[name].to(tensor.dtype)), name


def test_a_difference_has_the_digest_of_the_whole(
    seen: list[dict[str, object]], folder: Path
) -> None:
    store = Store(str(folder / "store"))
    values = whole(1)
    values["layers.1.weight"] += 1
    alone = publish(store, "alone", 2, values.items(), {}, torch.bfloat16)
    for size in (1, 2, 4):
        ref = seen[0][f"less {size}"]
        assert isinstance(ref, WeightsRef)
        assert ref.base is not None
        assert (ref.base.key, ref.digest) == (f"of-{size}/weights/v000001", alone.digest)
        forms = {name: entry.form for name, entry in open_manifest(store, ref).tensors.items()}
        assert {name for name, form in forms.items() if form != "same"} == {"layers.1.weight"}
        for name, tensor in stream(store, ref):
            assert torch.equal(tensor, values[name].to(tensor.dtype)), name


def test_every_rank_wrote_some_of_it(seen: list[dict[str, object]], folder: Path) -> None:
    store = Store(str(folder / "store"))
    for size in (1, 2, 4):
        shards = [
            key for key in store.list(f"of-{size}/weights/v000001") if key.endswith(".safetensors")
        ]
        total = sum(t.numel() * 2 for t in whole(1).values())
        assert len(shards) >= size
        assert all(store.size(key) < total / size + 1000 for key in shards)


def test_what_differs_is_found_by_the_rank_that_has_it(seen: list[dict[str, object]]) -> None:
    for size in (1, 2, 4):
        for rank in seen[:size]:
            equal, differs = rank[f"equal {size}"], rank[f"differs {size}"]
            assert equal.differing == ()  # type: ignore[attr-defined]
            assert equal.digest == rank[f"digest {size}"]  # type: ignore[attr-defined]
            (one,) = differs.differing  # type: ignore[attr-defined]
            assert (one.name, one.elements) == ("layers.1.weight", 40)
            assert "already published" in str(rank[f"refused {size}"])


def test_ranks_take_a_version_where_they_hold_another(seen: list[dict[str, object]]) -> None:
    """In bfloat16 as published; what rounds to the same keeps its float32."""
    for size in (1, 2, 4):
        for rank in seen[:size]:
            assert 1 <= rank[f"agreed {size}"] <= 2  # type: ignore[operator]
            taken, own = rank[f"taken {size}"], rank[f"rank's {size}"]
            assert isinstance(taken, Tensor) and isinstance(own, Tensor)
            assert torch.equal(taken, own.bfloat16().float())
            kept, before = rank[f"kept {size}"]  # type: ignore[misc]
            same = kept.bfloat16() == before.bfloat16()
            assert torch.equal(kept[~same], kept[~same].bfloat16().float())
            assert torch.equal(kept[same], (before * (1 + 2**-16))[same])
            assert same.float().mean() > 0.9 or not same.numel()


def test_an_error_of_one_rank_is_every_ranks(seen: list[dict[str, object]], folder: Path) -> None:
    assert {rank["full"] for rank in seen} == {"StoreError: No space left on device"}
    assert all(rank["left"] for rank in seen)  # what the others had written
    store = Store(str(folder / "store"))
    ref = seen[0]["again"]
    assert isinstance(ref, WeightsRef)
    named = {*open_manifest(store, ref).files, "manifest.json"}
    assert {key.rpartition("/")[2] for key in store.list("full")} == named


def test_a_lone_rank_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process group's threads would get threads of their own for it, beside the update's."""

    monkeypatch.setattr(dist, "all_gather_object", None)
    group = cast("dist.ProcessGroup", Lone())
    assert together(group, lambda: "part") == ["part"]
    assert on_first(group, lambda: "whole") == "whole"
    with pytest.raises(StoreError, match="full"):
        together(group, lambda: _raise(StoreError("full")))


def _raise(error: Exception) -> None:
    raise error


@pytest.fixture
def lanes_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lone rank publishes as on a GPU, by plain memory and in small pieces."""
    for module in (device_memory, publication):
        monkeypatch.setattr(module, "by_lanes", lambda device: True)
    monkeypatch.setattr(device_memory, "PIECE", 64)
    device_memory._lanes.cache_clear()
    yield
    device_memory._lanes.cache_clear()


def _files(store: Store, key: str) -> list[bytes]:
    """The bytes of a version's files, by their number."""
    return [store.read(one) for one in store.list(key) if not one.endswith(".json")]


def test_a_lone_rank_of_a_gpu_publishes_the_same_bytes(
    folder: Path, lanes_of_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, group = Store(str(folder / "lanes")), cast("dist.ProcessGroup", Lone())
    monkeypatch.setattr(publication, "new_token", lambda: "token")
    put = partial(publish_together, store, group=group, dtype=torch.bfloat16, files={})

    def both(version: int, every: int) -> tuple[WeightsRef, WeightsRef]:
        values = whole(1)
        values["layers.1.weight"] += version - 1
        by_lanes = put("lanes", version, values, every=every, shard_bytes=300).settle()
        with monkeypatch.context() as patch:
            patch.setattr(publication, "by_lanes", lambda device: False)
            alone = put("alone", version, values, every=every, shard_bytes=300).settle()
        return by_lanes, alone

    for version, every in ((1, 1), (2, 5)):
        by_lanes, alone = both(version, every)
        assert by_lanes.digest == alone.digest
        files = _files(store, by_lanes.key)
        assert len(files) > 1
        assert files == _files(store, alone.key)
        one, other = open_manifest(store, by_lanes), open_manifest(store, alone)
        assert (one.tensors, one.files) == (other.tensors, other.files)
        assert list(one.tensors) == list(other.tensors)
        assert (one.base is None) == (every == 1)


def test_a_lane_that_fails_leaves_no_version(
    folder: Path, lanes_of_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, group = Store(str(folder / "failing")), cast("dist.ProcessGroup", Lone())
    begun = []

    def failing(*arguments: Any, **settings: Any) -> Any:
        begun.append(arguments)
        if len(begun) == 2:
            raise StoreError("No space left on device")
        return write_shard(*arguments, **settings)

    def put() -> WeightsRef:
        return publish_together(
            store, "failing", 1, whole(1), {}, torch.bfloat16, group, shard_bytes=300
        ).settle()

    with monkeypatch.context() as patch:
        patch.setattr(publication, "write_shard", failing)
        with pytest.raises(StoreError, match="No space"):
            put()
    assert not any(key.endswith("manifest.json") for key in store.list("failing"))
    ref = put()
    named = {*open_manifest(store, ref).files, "manifest.json"}
    assert {key.rpartition("/")[2] for key in store.list("failing")} == named


class Lone:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0
