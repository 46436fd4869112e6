"""The same on GPUs: CUDA IPC between two processes on one, NCCL between two."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines.rollout.transferred_weights import TransferredWeights
from engines.train.publication import outlines_of
from engines.train.transfer import WeightSending
from engines.weight_transfer.offer import Transfer
from engines.weight_transfer.receiver import Receiver
from storage.runs.weights import tensor_digest, weights_digest
from tests.engines.weight_transfer.test_transfer import tensors

PIECE = 2**20


def receive(offers: Any, results: Any, index: int) -> None:
    torch.cuda.set_device(index)
    receiver = Receiver(torch.device("cuda", index))
    while (offer := offers.get()) is not None:
        transferred = TransferredWeights(receiver, offer)
        devices = {tensor.device.index for _, tensor in transferred}
        results.put((transferred.held().digest, devices))


def check(way: Transfer, index: int) -> None:
    """Three versions to a process on GPU `index`; hashed there, they are what GPU 0 has."""
    spawned = multiprocessing.get_context("spawn")
    offers, results = spawned.Queue(), spawned.Queue()
    process = spawned.Process(target=receive, args=(offers, results, index), daemon=True)
    process.start()
    device = torch.device("cuda", 0)
    sending = WeightSending(dist.ProcessGroup(dist.HashStore(), 0, 1), device, "127.0.0.1")
    try:
        for version in range(3):
            state = {name: tensor.to(device) for name, tensor in tensors(version).items()}
            state["large"] = torch.randn(3 * PIECE, device=device)
            outlines = outlines_of(state, torch.bfloat16, ())
            offer = sending.offer(way, version, outlines, 1, 120.0, piece=PIECE)
            offers.put(offer)
            with ThreadPoolExecutor(1) as beside:
                report = beside.submit(sending.send, version, state).result()
            digest, devices = results.get(timeout=120)
            assert report.served == 1, report
            assert devices == {index}
            assert digest == weights_digest(
                (
                    name,
                    outlines[name].dtype,
                    outlines[name].shape,
                    tensor_digest(tensor.bfloat16() if tensor.is_floating_point() else tensor),
                )
                for name, tensor in state.items()
            )
    finally:
        sending.close()
        process.kill()
        process.join()


@pytest.mark.gpu(1)
def test_cuda_ipc() -> None:
    check("ipc", 0)


@pytest.mark.gpu(2)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
def test_nccl() -> None:
    check("nccl", 1)
