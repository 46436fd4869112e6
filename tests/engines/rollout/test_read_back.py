"""Tensors of a load are read back from what a model computes with, whatever its layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engines.failures import WeightMismatch
from engines.rollout import read_back
from engines.rollout.read_back import LoadCheck, ReadBack


class Product:
    """As a method of vLLM's: it multiplies by whatever a layer has."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        found: Tensor = layer.cpu_linear(x) if hasattr(layer, "cpu_linear") else x @ layer.weight.T
        return found


class Linear(nn.Module):
    """Fused q_proj and k_proj; packed: its numbers are nowhere but in a product."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.input_size = 48
        self.quant_method = Product()
        self.packed = packed
        self.weight = nn.Parameter(torch.rand(0 if packed else 80, 48))
        self.put(torch.rand(80, 48))

    def put(self, weight: Tensor) -> None:
        if self.packed:
            self.cpu_linear = lambda x: x @ weight.T
        else:
            self.weight.data = weight.clone()


class Layer(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.qkv_proj = Linear(packed)
        self.sinks = nn.Parameter(torch.rand(8))
        self.norm = nn.Parameter(torch.rand(48))


class Model(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.rand(32, 48))
        self.layers = nn.ModuleList(Layer(packed) for _ in range(3))

    def take(self, name: str, tensor: Tensor) -> None:
        if name == "embed.weight":
            self.embed.data = tensor.clone()
            return
        layer = self.layers[int(name.split(".")[1])]
        assert isinstance(layer, Layer)
        if "sinks" in name or "norm" in name:
            getattr(layer, name.split(".")[2]).data = tensor.clone()
            return
        held = layer.qkv_proj.quant_method.apply(layer.qkv_proj, torch.eye(48)).T.clone()
        held[(slice(0, 64) if "q_proj" in name else slice(64, 80))] = tensor
        layer.qkv_proj.put(held)


def version(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    found = {"embed.weight": torch.randn(32, 48)}
    for layer in range(3):
        found |= {
            f"layers.{layer}.q_proj.weight": torch.randn(64, 48),
            f"layers.{layer}.k_proj.weight": torch.randn(16, 48),
            f"layers.{layer}.sinks": torch.randn(8),
            f"layers.{layer}.norm.weight": torch.ones(48),
        }
    return found


def load(
    model: Model, check: LoadCheck, seed: int, takes: Callable[[str], bool] = lambda name: True
) -> ReadBack:
    check.begin()
    for name, tensor in check.watch(version(seed).items()):
        if takes(name):
            model.take(name, tensor)
    return check.end()


@pytest.mark.parametrize("packed", [False, True])
def test_each_kind_is_found_in_whatever_layout(packed: bool) -> None:
    model = Model(packed)
    check = LoadCheck(model)

    for seed in range(4):
        seen = load(model, check, seed)

        kinds = ("layers.#.k_proj.weight", "layers.#.q_proj.weight", "layers.#.sinks")
        assert seen.found == ("embed.weight", *kinds)
        assert seen.unseen == ("layers.#.norm.weight",)  # ones, which are anywhere


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kept", ["sinks", "k_proj", "q_proj", "embed"])
def test_what_keeps_its_old_numbers_is_named(kept: str, packed: bool) -> None:
    model = Model(packed)
    check = LoadCheck(model)
    load(model, check, 0)

    with pytest.raises(WeightMismatch, match=kept):
        load(model, check, 1, lambda name: kept not in name)


def test_at_the_first_load_numbers_that_were_drawn_are_no_version() -> None:
    model = Model(packed=False)

    with pytest.raises(WeightMismatch, match=r"layers\.0\.sinks"):
        load(model, LoadCheck(model), 0, lambda name: "sinks" not in name)


def test_a_layer_that_the_model_has_not_is_not_looked_for() -> None:
    """A version has layers for multi-token prediction, which vLLM passes over."""
    model = Model(packed=False)
    check = LoadCheck(model)
    for seed in range(8):
        besides = {"layers.3.q_proj.weight": torch.randn(64, 48), "layers.3.sinks": torch.randn(8)}
        check.begin()
        for name, tensor in check.watch((version(seed) | besides).items(), besides):
            if name not in besides:
                model.take(name, tensor)
        assert "layers.#.q_proj.weight" in check.end().found


def test_one_layer_is_not_found_in_another() -> None:
    model = Model(packed=False)
    check = LoadCheck(model)
    load(model, check, 0)
    check.begin()
    values = version(1)
    for name, _ in check.watch(values.items()):
        other = name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1.")
        model.take(name, values[other])
    chosen = {each.name.split(".")[1] for each in check._chosen.values() if "proj" in each.name}
    assert chosen & {"0", "1"}

    with pytest.raises(WeightMismatch):
        check.end()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("by", ["rows", "columns"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_has_its_share_only(rank: int, by: str, packed: bool) -> None:
    """Of layers that are split by rows or by columns over two ranks."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_size = 48
            if by == "columns":
                self.input_size_per_partition = 24
            self.quant_method = Product()
            self.weight = nn.Parameter(torch.rand(32, 48) if by == "rows" else torch.rand(64, 24))

    whole = {"o_proj.weight": torch.randn(64, 48)}
    part = Part()
    check = LoadCheck(part, ranks=2)
    check.begin()
    for tensor in dict(check.watch(whole.items())).values():
        share = tensor.chunk(2, dim=0 if by == "rows" else 1)[rank].clone()
        if packed:
            part.weight.data = torch.rand(0, 48)
            part.cpu_linear = lambda x: x @ share.T  # noqa: B023
        else:
            part.weight.data = share

    assert check.end().found == ("o_proj.weight",)


def test_a_piece_is_found_where_blocks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_back, "_BLOCK", 10)
    values = torch.arange(37.0)

    assert all(read_back._within(values[at : at + 6], values) for at in range(32))
    assert not read_back._within(torch.tensor([8.0, 9.0, 11.0]), values)
    assert not read_back._within(torch.arange(38.0), values)
