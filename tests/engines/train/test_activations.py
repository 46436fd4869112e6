"""Activations that go to other memory and come back: seen on a CPU, to another place of its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs.algorithm.algorithm import AlgorithmConfig
from configs.train import TrainConfig
from engines.train import activations, updater
from engines.train.activations import kept_on_host, pinned
from engines.train.contract import UpdateRequest
from engines.train.memory_plan import activation_bytes, largest_batch
from tests.engines.train.conftest import Make
from tests.engines.train.test_memory_plan import (
    GROUP,
    PROMPT,
    RESPONSE,
    ROWS,
    longest_rows,
    shape_of,
)
from tests.engines.train.train_ranks import TEMPERATURE, samples, stored, update_of

# Of rotary cosines and sines [1, 1, T, HEAD], which a layer that is computed anew is called with again.
HEAD = 32


class Elsewhere:
    """Another place in a CPU's memory. What went there is spoilt once the forward pass is over.

    Not what checkpointed layers are called with besides their input, whose places in the batch are
    whole numbers: that is kept where it is.
    """

    def __init__(self) -> None:
        self.moved: list[int] = []  # bytes, by forward pass
        self._originals: list[Tensor] = []

    def room(self, tensor: Tensor) -> Tensor:
        self._originals.append(tensor.detach())
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    @contextlib.contextmanager
    def kept(self, wanted: bool) -> Iterator[None]:
        with kept_on_host(wanted, self.room):
            yield
        self.moved.append(sum(one.nbytes for one in self._originals))
        for one in self._originals:
            rotary = one.shape[-1] == HEAD and one.shape[:-2].numel() == 1
            if one.is_floating_point() and not rotary:
                one.fill_(float("nan"))
        self._originals.clear()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    made = Elsewhere()
    monkeypatch.setattr(updater, "kept_on_host", made.kept)
    monkeypatch.setattr(activations, "SMALL", 1024)
    return made


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_checkpointing": 0.5}, {"gradient_checkpointing": 1.0}]
)
def test_what_goes_comes_back_the_same_and_is_as_much_as_planned(
    make: Make, tmp_path: Path, elsewhere: Elsewhere, settings: dict[str, Any]
) -> None:
    batch = longest_rows(tmp_path)

    def updated(offload: bool) -> str:
        engine = make(activation_offload=offload, **settings)
        for step in (1, 2):
            engine.update(
                UpdateRequest(
                    step=step,
                    batch=batch,
                    algorithm=AlgorithmConfig(),
                    temperature=TEMPERATURE,
                    max_new_tokens=RESPONSE,
                )
            )
        return engine.digest()

    plain = updated(offload=False)
    assert not any(elsewhere.moved)
    elsewhere.moved.clear()
    assert updated(offload=True) == plain
    train = TrainConfig(compute_dtype="float32", micro_batch_tokens=4096, **settings)
    largest = largest_batch(4096, PROMPT, RESPONSE, ROWS, GROUP, 1)
    planned = activation_bytes(shape_of(), train, largest, 4, on_gpu=False)
    assert elsewhere.moved == [pytest.approx(planned, rel=0.05)] * 2


def test_what_several_operations_keep_goes_once_and_what_has_changed_again(
    elsewhere: Elsewhere,
) -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    x = torch.rand(64, 64, requires_grad=True)
    with elsewhere.kept(wanted=True):
        y = x.exp()  # keeps its output
        loss = (y * y).sum() + (y @ weight).sum()  # y twice more; weights stay
    assert elsewhere.moved == [y.nbytes]
    assert y.isnan().all()
    loss.backward()
    assert x.grad is not None and x.grad.isfinite().all()

    kept: list[Tensor] = []

    def room(tensor: Tensor) -> Tensor:
        kept.append(torch.empty_like(tensor))
        return kept[-1]

    z = torch.rand(64, 64)
    with kept_on_host(True, room):
        first = x * z
        with torch.no_grad():
            z.add_(1.0)
        second = x * z
        (first + second).sum()
    assert len({float(one.sum()) for one in kept}) == len(kept) == 2  # z, and z changed


def test_on_a_cpu_nothing_has_to_go() -> None:
    assert pinned(torch.zeros(4)) is None


@pytest.mark.parametrize("recompute", ["all", "selective"])
def test_what_is_computed_again_changes_no_bit(tmp_path: Path, make: Make, recompute: str) -> None:
    plain = make(run="plain", micro_batch_tokens=64)
    again = make(
        run="again", micro_batch_tokens=64, gradient_checkpointing=True, recompute=recompute
    )
    batch = stored(tmp_path, samples(1), "batch")
    for engine in (plain, again):
        engine.update(update_of(batch, AlgorithmConfig(), 1))
    assert plain.digest() == again.digest()


def test_products_are_not_made_again(make: Make, tmp_path: Path) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), named: Any = None
        ) -> Any:
            self.products += function.name().partition(".")[0] in activations.PRODUCTS
            return function(*args, **(named or {}))

    numbers = {}
    for name, settings in {
        "none": {},
        "selective": {"gradient_checkpointing": True, "recompute": "selective"},
        "all": {"gradient_checkpointing": True},
    }.items():
        engine = make(run=name, micro_batch_tokens=64, **settings)
        batch = stored(tmp_path, samples(1), f"batch-{name}")
        with Count() as count:
            engine.update(update_of(batch, AlgorithmConfig(), 1))
        numbers[name] = count.products
    assert numbers["none"] == numbers["selective"] < numbers["all"]
