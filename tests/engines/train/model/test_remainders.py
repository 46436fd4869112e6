"""Masters as a 16-bit remainder beside weights in bfloat16: the same bits after every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from configs.train import TrainConfig
from engines.train import optimizer_pieces
from engines.train.model import master_weights
from engines.train.model.master_weights import MasterWeights, joined, split
from engines.train.optimizer import Optimizer
from tests.engines.train.conftest import Make
from tests.engines.train.model.test_master_weights import ROUNDED, update

REMAINDERS = {**ROUNDED, "master_weights": "remainder"}
STEPS = 50


def of_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def apart(masters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rounded = torch.empty(masters.shape, dtype=torch.bfloat16)
    remainder = torch.empty(masters.shape, dtype=torch.int16)
    return rounded, remainder, split(masters, rounded, remainder)


@pytest.mark.parametrize("upper", [0, 1, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x0080, 0x2345])
@pytest.mark.parametrize("sign", [0, 1])
def test_every_lower_half_comes_back(upper: int, sign: int) -> None:
    """Ties to either side, small numbers, both zeros, and the largest, whose rounding is infinite."""
    bits = (torch.arange(1 << 16) | (upper << 16)) - (sign << 31)
    masters = of_bits(bits)
    rounded, remainder, ties = apart(masters)
    assert torch.equal(rounded, masters.to(torch.bfloat16))
    assert ties.tolist() == ([] if upper % 2 else [1 << 15])
    back = joined(rounded, remainder, ties)
    assert torch.equal(back.view(torch.int32), masters.view(torch.int32))


def test_a_number_beyond_16_bits_is_why_ties_are_kept() -> None:
    """Two masters of one weight and one remainder: without its place the upper one is lost."""
    masters = of_bits(torch.tensor([0x3F80_8000, 0x3F7F_8000]))
    rounded, remainder, ties = apart(masters)
    assert torch.equal(rounded[0], rounded[1]) and torch.equal(remainder[0], remainder[1])
    assert ties.tolist() == [0]
    assert not torch.equal(joined(rounded, remainder, None), masters)


class Model(nn.Module):
    """Matrices, a vector, and one with a piece that is cut short."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        shapes = {"a": (96, 64), "b": (64, 128), "c": (64,), "d": (5, 33, 3)}
        for name, shape in shapes.items():
            weights = torch.randn(shape, generator=draw).to(torch.bfloat16)
            self.register_parameter(name, nn.Parameter(weights.to(dtype)))


def plant_ties(model: Model, masters: MasterWeights) -> None:
    """Make every 50th master of the matrices a tie above an even weight."""
    for parameter in model.parameters():
        master = masters.to_set(parameter).view(-1)
        bits = master.view(torch.int32)[::50]
        bits.copy_((bits & ~0x1_FFFF) | master_weights.TIE)
    masters.round()


def optimizer(model: Model, remainders: bool, **given: object) -> Optimizer:
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0, **given}
    masters = MasterWeights(model.parameters(), "cpu", remainders)
    made = Optimizer(model, TrainConfig.model_validate(settings), None, masters)
    for parameter in model.parameters():
        masters.to_set(parameter).copy_(parameter.detach())
    masters.round()
    return made


@pytest.mark.parametrize("piece", [1024, 2**25])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "8bit"])
def test_masters_and_weights_are_those_of_float32_after_every_step(
    piece: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With decay and a bound on the gradient; ties are planted, as they are rare."""
    monkeypatch.setattr(optimizer_pieces, "PIECE", piece)
    models = [Model(torch.bfloat16) for _ in range(2)]
    made = [
        optimizer(model, remainders, optimizer_dtype=dtype)
        for model, remainders in zip(models, (False, True), strict=True)
    ]
    for model, one in zip(models, made, strict=True):
        plant_ties(model, one.masters)
    assert sum(
        len(ties) for one in made[1].masters._remainders.values() for ties in one.ties.values()
    )
    for step in range(STEPS):
        for model, one in zip(models, made, strict=True):
            draw = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad_dtype = torch.float32
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            torch.manual_seed(step)
            assert not one.step().skipped
        if step % 10 == 5:
            for model, one in zip(models, made, strict=True):
                plant_ties(model, one.masters)
        for whole, parts in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(whole, parts), step
            masters = (one.masters.of(each) for one, each in zip(made, (whole, parts), strict=True))
            first, second = (master.view(torch.int32) for master in masters)
            assert torch.equal(first, second), step
        for first, second in zip(*(one.moments().values() for one in made), strict=True):
            assert torch.equal(first, second)


@pytest.mark.slow
def test_fifty_updates_of_a_model_are_the_same_to_the_bit(tmp_path: Path, make: Make) -> None:
    whole = make(run="whole", weight_decay=0.1, **ROUNDED)
    parts = make(run="parts", weight_decay=0.1, **REMAINDERS)
    for step in range(1, STEPS + 1):
        assert update(whole, tmp_path, step) == update(parts, tmp_path, step)
    assert sum(one.nbytes for one in parts._masters.tensors) < 0.51 * sum(
        one.nbytes for one in whole._masters.tensors
    )


def test_it_goes_with_weights_in_bfloat16_alone() -> None:
    with pytest.raises(
        ValueError, match=r"Set train.weights_dtype = bfloat16 or train.master_weig"
    ):
        TrainConfig(master_weights="remainder")
