"""AdamW piece by piece, with its state brought to the device and taken back: the same to the bit."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.train import TrainConfig
from engines.train import optimizer, optimizer_pieces
from engines.train.model.fsdp import own_part, shard
from engines.train.model.master_weights import MasterWeights
from engines.train.model.rendezvous import meet
from engines.train.optimizer import MOMENTS, FetchingAdamW, make_adamw
from engines.workers import device_memory
from engines.workers.device_memory import pin

SHAPES = [(300, 70), (7,), (1,), (0, 5), (2048,), (33, 3, 5)]
STEPS = 4


@pytest.fixture(params=[64, 1024, 2**25])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(optimizer_pieces, "PIECE", request.param)
    return int(request.param)


def away(kept: Tensor, own: Tensor) -> bool:
    """All of it, as where the host has it and the weights are on a GPU."""
    return True


def drawn(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def steps(made: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Some steps, in one of which a parameter has no gradient."""
    draw = torch.Generator().manual_seed(4)
    for number in range(STEPS):
        for place, one in enumerate(parameters):
            one.grad_dtype = torch.float32
            one.grad = torch.randn(one.shape, generator=draw)
            if (number, place) == (2, 0):
                one.grad = None
        for group in made.param_groups:
            group["lr"] = 1e-3 / (number + 1)
        made.step()


def held(made: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    for one in parameters:
        yield one.detach()
        yield from (made.state[one][name] for name in (*MOMENTS, "step"))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_step_by_pieces_is_torchs_own(
    piece: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if elsewhere:
        monkeypatch.setattr(FetchingAdamW, "_is_away", staticmethod(away))
    plain, pieces, config = drawn(), drawn(), TrainConfig(weight_decay=0.1)
    one = make_adamw(plain, config, MasterWeights())
    assert type(one) is torch.optim.AdamW
    other = make_adamw(
        pieces, config.model_copy(update={"optimizer_device": "host"}), MasterWeights()
    )
    steps(one, plain)
    steps(other, pieces)
    for mine, torchs in zip(held(other, pieces), held(one, plain), strict=True):
        assert torch.equal(mine, torchs)


def test_masters_are_what_a_step_changes(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FetchingAdamW, "_is_away", staticmethod(away))
    plain, rounded, config = drawn(), drawn(torch.bfloat16), TrainConfig()
    masters = MasterWeights(rounded)
    for master, weights in zip(masters.tensors, plain, strict=True):
        master.copy_(weights.detach())
    one, other = make_adamw(plain, config, MasterWeights()), make_adamw(rounded, config, masters)
    steps(one, plain)
    steps(other, rounded)
    for master, weights, device in zip(masters.tensors, plain, rounded, strict=True):
        assert torch.equal(master, weights)
        assert torch.equal(device, weights.to(torch.bfloat16))


def test_moments_in_bfloat16_are_the_same_wherever_they_lie(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(optimizer_dtype="bfloat16")
    here, there = drawn(), drawn()
    one = make_adamw(here, config, MasterWeights())
    torch.manual_seed(5)
    steps(one, here)
    monkeypatch.setattr(FetchingAdamW, "_is_away", staticmethod(away))
    other = make_adamw(there, config, MasterWeights())
    torch.manual_seed(5)
    steps(other, there)
    for mine, its in zip(held(other, there), held(one, here), strict=True):
        assert torch.equal(mine, its)


def test_a_piece_waits_for_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes into a place of the device has its turn, and what was there has gone."""
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(optimizer_pieces, "PIECE", 1024)
    monkeypatch.setattr(FetchingAdamW, "_is_away", staticmethod(away))
    for name in ("fetching", "using", "writing"):

        @contextmanager
        def turn(lanes: object, slot: object, name: str = name) -> Iterator[None]:
            seen.append((name, id(slot)))
            yield

        monkeypatch.setattr(optimizer._Lanes, name, turn)
    parameters = [nn.Parameter(torch.ones(5 * 1024 + 1))]
    made = make_adamw(parameters, TrainConfig(optimizer_device="host"), MasterWeights())
    parameters[0].grad = torch.ones(5 * 1024 + 1)
    made.step()
    assert [name for name, _ in seen] == ["fetching", "using", "writing"] * 6
    places = [place for _, place in seen[::3]]
    assert len(set(places)) == optimizer.SLOTS
    assert places[: optimizer.SLOTS] == places[optimizer.SLOTS :]
    assert made.state[parameters[0]]["step"] == 1


def test_pinned_tensors_stay_and_begin_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "BLOCK", 3 * 4096)
    tensors = [torch.full(shape, 7.0) for shape in ((1024,), (1500,), (0, 3), (), (9000,))]
    tensors.append(torch.ones(5, 5, dtype=torch.bfloat16))
    names = [id(tensor.untyped_storage()) for tensor in tensors]
    registered: dict[int, int] = {}

    def register(address: int, nbytes: int) -> device_memory.Unregister:
        registered[address] = nbytes
        return lambda: registered.pop(address)

    pin(tensors, register)
    assert names != [id(tensor.untyped_storage()) for tensor in tensors]
    # 1 and 2 pages; a page of one number; nine pages of a tensor that is larger; one page.
    assert sorted(registered.values()) == [1 * 4096, 1 * 4096, 3 * 4096, 9 * 4096]
    for number, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert number == 2 or not tensor.any()
        tensor.fill_(number)
    assert [float(t.max()) for t in tensors if t.numel()] == [0, 1, 3, 4, 5]
    assert tensors[3].shape == ()
    for at in registered:
        assert at % 4096 == 0
    last = tensors[4][8000:]
    del tensor, tensors
    gc.collect()
    assert list(registered.values()) == [9 * 4096], "a view keeps its block"
    assert last.sum() == 4000
    del last
    gc.collect()
    assert not registered


def test_this_ranks_part_of_a_sharded_tensor_is_pinned() -> None:
    meeting = meet(0, 1, "127.0.0.1", 0, torch.device("cpu"), 60.0, 120.0)
    with torch.device("meta"):
        module = nn.Sequential(nn.ModuleList([nn.Linear(8, 8)]))
    shard(module, meeting.group, torch.device("cpu"), torch.float32)
    moments = [torch.empty_like(one) for one in module.parameters()]
    registered: list[tuple[int, int]] = []

    def register(address: int, nbytes: int) -> device_memory.Unregister:
        registered.append((address, nbytes))
        return registered.clear

    pin(moments, register)
    assert registered
    for moment in moments:
        assert isinstance(moment, DTensor)
        own = own_part(moment)[0]
        assert any(at <= own.data_ptr() < at + nbytes for at, nbytes in registered)
        moment.copy_(torch.full_like(moment, 3.0))
        assert own.eq(3.0).all()


def test_memory_that_is_not_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def register(address: int, nbytes: int) -> device_memory.Unregister:
        raise RuntimeError("no more locked memory")

    tensor = torch.ones(10)
    with caplog.at_level(logging.WARNING):
        pin([tensor], register)
    assert "no more locked memory" in caplog.text
    assert torch.equal(tensor, torch.zeros(10))


class FakeEvent:
    """Of a stream, after so many of its entries."""

    def __init__(self, stream: FakeStream) -> None:
        self.before = {*stream.done}


class FakeStream:
    """Which pieces of work came before what it does: in it, or in streams that it has waited for."""

    now: list[FakeStream]

    def __init__(self, device: object = None) -> None:
        self.done: set[tuple[str, int]] = set()

    def wait_event(self, event: FakeEvent) -> None:
        self.done |= event.before

    def wait_stream(self, other: FakeStream) -> None:
        self.done |= other.done

    def record_event(self) -> FakeEvent:
        return FakeEvent(self)

    def synchronize(self) -> None:
        return None

    def __enter__(self) -> None:
        self.now.append(self)

    def __exit__(self, *error: object) -> None:
        self.now.pop()


def test_streams_wait_for_each_other_where_they_share_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = FakeStream()
    monkeypatch.setattr(FakeStream, "now", [here], raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    streams = optimizer._Streams(torch.device("cuda"))
    slots = [optimizer._Slot([], away) for _ in range(optimizer.SLOTS)]
    for number in range(4 * optimizer.SLOTS):
        slot = slots[number % optimizer.SLOTS]
        earlier = number - optimizer.SLOTS
        with streams.fetching(slot):
            now = FakeStream.now[-1]
            assert earlier < 0 or ("written", earlier) in now.done, "what was here has gone"
            assert ("used", number - 1) not in now.done, "it does not wait for the one before"
            now.done.add(("fetched", number))
        with streams.using(slot):
            now = FakeStream.now[-1]
            assert now is here
            assert ("fetched", number) in now.done
            now.done.add(("used", number))
        with streams.writing(slot):
            now = FakeStream.now[-1]
            assert ("used", number) in now.done
            assert now is not here
            now.done.add(("written", number))
    streams.end()
