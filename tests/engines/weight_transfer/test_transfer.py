"""A trainer's tensors get to receivers as they are, by either way, whoever fails in between."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.train.publication import outlines_of
from engines.train.transfer import WeightSending
from engines.weight_transfer import receiver, shared_buffers
from engines.weight_transfer.offer import Transfer, TransferFailed, TransferOffer, TransferReport
from engines.weight_transfer.receiver import Receiver
from storage.runs.weights import tensor_digest

CPU = torch.device("cpu")
PIECE = 1000  # bytes, so that tensors span pieces and pieces have several
WAYS: tuple[Transfer, ...] = ("ipc", "nccl")
TIMEOUT = 10.0  # seconds; a transfer of these takes a fraction of one
START = 300.0  # seconds in which a process is there, on a busy machine
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.engines.train.rank_image"])


def tensors(version: int = 0) -> dict[str, Tensor]:
    """Of several formats and shapes, one without elements; masters that are cast to bfloat16."""
    torch.manual_seed(version)
    return {
        "embed": torch.randn(40, 33),
        "scale": torch.randn(()),
        "nothing": torch.empty(0, 7),
        "count": torch.arange(version, version + 5),
        "head": torch.randn(1700).t(),
        "bias": torch.randn(3, requires_grad=True),
    }


class World:
    """A trainer of one rank in this process."""

    def __init__(self) -> None:
        self.group = dist.ProcessGroup(dist.HashStore(), 0, 1)
        self.sending = WeightSending(self.group, CPU, "127.0.0.1")
        self.threads = ThreadPoolExecutor(8)

    def begin(
        self,
        way: Transfer,
        receivers: int = 1,
        version: int = 0,
        timeout: float = TIMEOUT,
        piece: int = PIECE,
    ) -> tuple[TransferOffer, Callable[[], TransferReport]]:
        """What is offered, and what waits for the report."""
        state = tensors(version)
        outlines = outlines_of(state, torch.bfloat16, ())
        offer = self.sending.offer(way, version, outlines, receivers, timeout, piece=piece)
        return offer, self.threads.submit(self.sending.send, version, state).result


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.sending.close()
    made.threads.shutdown()


def digests(pairs: Any) -> list[tuple[str, str, str]]:
    return [(name, str(tensor.dtype), tensor_digest(tensor)) for name, tensor in pairs]


def expected(version: int = 0) -> list[tuple[str, str, str]]:
    """What is to arrive, in this order."""
    return digests(
        (name, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
        for name, tensor in tensors(version).items()
    )


# One that hangs is waited for.
KILLED_OR_STOPPED = [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]


@pytest.mark.parametrize("way", WAYS)
def test_bytes_and_order(world: World, way: Transfer) -> None:
    offer, report = world.begin(way)
    arrived = list(Receiver(CPU).tensors(offer))
    assert digests(arrived) == expected()
    assert all(not tensor.requires_grad for _, tensor in arrived)
    assert (report().served, report().why) == (1, "")


def child(offers: Any, results: Any) -> None:
    """A receiver in a process of its own, for one offer after the other."""
    torch.set_num_threads(1)
    own = Receiver(CPU)
    results.put("ready")
    while (offer := offers.get()) is not None:
        try:
            results.put(digests(own.tensors(offer)))
        except TransferFailed as error:
            results.put(str(error))


class Child:
    """The same, seen from here."""

    def __init__(self) -> None:
        self.offers, self.results = processes.Queue(), processes.Queue()
        self.process = processes.Process(
            target=child, args=(self.offers, self.results), daemon=True
        )
        self.process.start()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made = [Child() for _ in range(2)]
    assert [each.results.get(timeout=START) for each in made] == 2 * ["ready"]
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("way", WAYS)
def test_several_versions_reach_other_processes(
    world: World, children: list[Child], way: Transfer
) -> None:
    groups = []
    for version in range(3):
        offer, report = world.begin(way, 2, version)
        for each in children:
            each.offers.put(offer)
        assert [each.results.get(timeout=START) for each in children] == 2 * [expected(version)]
        assert report().served == 2
        groups.append(world.sending._groups.group)
    assert (groups[0] is not None) == (way == "nccl")
    assert groups[0] is groups[1] is groups[2], "the group stays from version to version"


class Caught:
    """A receiver in a thread that takes one tensor, and then does as it is told."""

    def __init__(self, world: World, offer: TransferOffer) -> None:
        self.first, self.on = threading.Event(), threading.Event()
        self.result = world.threads.submit(self._run, offer).result

    def _run(self, offer: TransferOffer) -> list[tuple[str, str, str]]:
        def slowly() -> Iterator[tuple[str, Tensor]]:
            for pair in Receiver(CPU).tensors(offer):
                self.first.set()
                self.on.wait()
                yield pair

        return digests(slowly())


@pytest.mark.parametrize("action", KILLED_OR_STOPPED)
@pytest.mark.parametrize("way", WAYS)
def test_a_receiver_that_dies_or_hangs_in_the_middle(
    world: World, children: list[Child], way: Transfer, action: signal.Signals
) -> None:
    began = time.monotonic()
    offer, report = world.begin(way, 2)
    victim = children[0].process
    children[0].offers.put(offer)
    other = Caught(world, offer)
    assert other.first.wait(30)
    assert victim.pid is not None
    os.kill(victim.pid, action)
    other.on.set()
    if way == "ipc" and action == signal.SIGKILL:  # whoever is left gets it
        assert other.result() == expected()
    else:  # it is waited for until the time is over, for all
        try:
            assert other.result() == expected()
        except TransferFailed:
            assert report().served == 0
    if report().served < 2:
        assert report().why
    assert time.monotonic() - began < 4 * TIMEOUT + 30
    again, after = world.begin(way, 1, 1)
    assert digests(Receiver(CPU).tensors(again)) == expected(1), "the next one works"
    assert after().served == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_receiver_that_never_comes(world: World, way: Transfer) -> None:
    """Who is there gets the version without it, as soon as the time is over."""
    began = time.monotonic()
    offer, report = world.begin(way, 2, timeout=1.0)
    assert digests(Receiver(CPU).tensors(offer)) == expected()
    assert time.monotonic() - began > 0.9
    assert report().served == 1
    assert report().why == "1 of 2 did not come in time"


@pytest.mark.parametrize("way", WAYS)
def test_one_that_comes_late_is_told_at_once(world: World, way: Transfer) -> None:
    offer, report = world.begin(way)
    list(Receiver(CPU).tensors(offer))
    report()
    began = time.monotonic()
    with pytest.raises(TransferFailed, match="is not reached"):
        list(Receiver(CPU).tensors(offer))
    assert time.monotonic() - began < 1


def test_another_machine_is_refused_what_is_shared(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, report = world.begin("ipc")
    monkeypatch.setattr("engines.weight_transfer.receiver.place_of", lambda device: "elsewhere")
    with pytest.raises(TransferFailed, match="another device or machine than the trainer"):
        list(Receiver(CPU).tensors(offer))
    assert report().why.endswith("it is on another device or machine than the trainer")


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02{}", b"\x00\x00\x00\x04null"]
)
def test_strangers_get_nothing_and_hold_nobody_up(world: World, said: bytes) -> None:
    offer, report = world.begin("ipc")
    with socket.create_connection((offer.host, offer.port)) as stranger:
        stranger.sendall(said)
        wrong = offer.model_copy(update={"token": "0" * 32})
        with pytest.raises(TransferFailed, match="gone"):
            list(Receiver(CPU).tensors(wrong))
        assert digests(Receiver(CPU).tensors(offer)) == expected()
    assert report().served == 1


def trainer(way: Transfer, offers: Any, action: signal.Signals) -> None:
    """A trainer that is killed, or stops, when it has sent a few pieces."""
    made = World()
    state = tensors()
    outlines = outlines_of(state, torch.bfloat16, ())
    offers.put(made.sending.offer(way, 0, outlines, 1, TIMEOUT, piece=PIECE))
    over = made.sending._over
    numbers = itertools.count()

    def sent(*arguments: Any) -> bool:
        if next(numbers) == 5:  # of seven
            os.kill(os.getpid(), action)
        return over(*arguments)

    made.sending._over = sent  # type: ignore[method-assign]
    made.sending.send(0, state)


@pytest.mark.parametrize("action", KILLED_OR_STOPPED)
@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_that_dies_or_hangs_in_the_middle(way: Transfer, action: signal.Signals) -> None:
    offers = processes.Queue()
    process = processes.Process(target=trainer, args=(way, offers, action), daemon=True)
    process.start()
    try:
        offer = offers.get(timeout=START)
        began, arrived = time.monotonic(), 0
        with pytest.raises(TransferFailed):
            for _ in Receiver(CPU).tensors(offer):
                arrived += 1
        assert arrived > 0, "it was in the middle"
        # A connection that ends is seen at once, silence after the time-out and its margin.
        limit = 5.0 if action == signal.SIGKILL else 1.5 * TIMEOUT + 5
        assert time.monotonic() - began < limit
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("way", WAYS)
def test_buffers_stay_until_a_slow_receiver_has_opened_them(
    world: World, monkeypatch: pytest.MonkeyPatch, way: Transfer
) -> None:
    """Of a version in one piece, which is sent long before."""
    opened = receiver.open_shared

    def slowly(handle: Any, device: torch.device) -> Any:
        time.sleep(0.5)
        return opened(handle, device)

    monkeypatch.setattr(receiver, "open_shared", slowly)
    offer, report = world.begin(way, piece=10 * PIECE)
    assert digests(Receiver(CPU).tensors(offer)) == expected()
    assert report().served == 1


def test_what_a_receiver_missed_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(handle: Any, device: torch.device) -> Any:
        raise TransferFailed("buffers are closed")

    monkeypatch.setattr(receiver, "open_shared", closed)
    offer, report = world.begin("ipc")
    with pytest.raises(TransferFailed, match="buffers are closed"):
        list(Receiver(CPU).tensors(offer))
    assert report().why.endswith("buffers are closed")


def test_nothing_stays_open_or_behind(world: World) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        offer, report = world.begin("ipc")
        list(Receiver(CPU).tensors(offer))
        report()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert not shared_buffers._of_this_process


def test_an_offer_is_withdrawn_by_the_next(world: World) -> None:
    state = tensors()
    outlines = outlines_of(state, torch.bfloat16, ())
    first = world.sending.offer("ipc", 0, outlines, 1, TIMEOUT)
    world.sending.offer("ipc", 0, outlines, 1, TIMEOUT)
    with pytest.raises(TransferFailed, match="is not reached"):
        list(Receiver(CPU).tensors(first))


def test_ranks_that_were_lost_since_have_nothing_to_send(world: World) -> None:
    report = world.sending.send(3, tensors(3))
    assert (report.served, report.why) == (0, "the offer was lost")
