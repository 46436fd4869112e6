"""Bytes from and to a device by several lanes: the same as one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engines.workers import device_memory
from engines.workers.device_memory import Lane, fill, on_lanes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As for a GPU, with plain memory and small pieces."""
    monkeypatch.setattr(device_memory, "PIECE", 64)
    monkeypatch.setattr(device_memory, "by_lanes", lambda device: True)
    device_memory._lanes.cache_clear()
    yield
    device_memory._lanes.cache_clear()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (32,), (33,), (5, 40), (257, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_that_come_out_are_the_tensors(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape)
    out = b"".join(bytes(piece) for piece in Lane(CPU).out(tensor, dtype))
    assert out == tensor.to(dtype).reshape(-1).view(torch.uint8).numpy().tobytes()


def test_columns_come_out_in_order() -> None:
    tensor = torch.arange(600).view(20, 30).t()
    out = b"".join(bytes(piece) for piece in Lane(CPU).out(tensor, torch.int64))
    assert out == tensor.contiguous().numpy().tobytes()


def test_tensors_are_filled_as_one_after_the_other() -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 4), (1,), (16,), (17,), (300, 7)]
    sources = [torch.randn(shape) for shape in shapes]
    targets = [torch.zeros(shape) for shape in shapes]
    other = torch.zeros(300, 7, dtype=torch.bfloat16)  # of another format
    turned = torch.zeros(7, 300).t()
    shared = torch.zeros(100)  # has two names: the later one counts
    pairs = [*zip(targets, sources, strict=True), (other, sources[-1]), (turned, sources[-1])]
    pairs += [(shared, torch.ones(100)), (shared.view(100), torch.full((100,), 2.0))]
    fill(CPU, iter(pairs))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
    assert torch.equal(other, sources[-1].to(torch.bfloat16))
    assert torch.equal(turned, sources[-1])
    assert shared.eq(2).all()


def test_results_are_in_order_and_the_first_error_is_raised() -> None:
    def gives(number: int) -> Callable[[Lane], int]:
        return lambda lane: number

    def fails(lane: Lane) -> int:
        raise OSError("no space left")

    assert on_lanes(CPU, map(gives, range(50))) == list(range(50))
    with pytest.raises(OSError, match="no space left"):
        on_lanes(CPU, [gives(0), fails, *map(gives, range(50))])
    assert on_lanes(CPU, map(gives, range(50))) == list(range(50)), "every lane was given back"


def test_a_source_that_is_damaged_ends_the_filling() -> None:
    def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.zeros(3), torch.ones(3)
        raise ValueError("its digest does not match")

    with pytest.raises(ValueError, match="its digest"):
        fill(CPU, pairs())
