"""Bytes and seconds of AdamW's step by where masters are and what moments are in, in one run.

    python -m benchmarks.optimizer [--layers 4] [--width 576] [--inner 1536] [--times 5]

The weights are those of so many layers like Llama's, on a GPU where there is one. Each way has them
in bfloat16 but the first, makes a step to begin with, and the ways take turns: so many steps of each.
A line of JSON for each way: bytes a parameter on the device and on the host (weights, masters and
moments; not gradients), and seconds a step, the median with the least and the most. On a CPU the two
are one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.train import TrainConfig
from engines.train.model.master_weights import MasterWeights
from engines.train.optimizer import Optimizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# But in the first weights are in bfloat16: those of a lone rank are, whatever weights_dtype says.
WAYS: dict[str, dict[str, object]] = {
    "float32": {},
    "masters on the device": {"optimizer_dtype": "float32"},
    "masters and moments on the host": {"weights_dtype": "bfloat16", "optimizer_device": "host"},
    "remainders": {"weights_dtype": "bfloat16", "master_weights": "remainder"},
    "bfloat16 moments": {"optimizer_dtype": "bfloat16"},
    "8-bit moments": {"optimizer_dtype": "8bit"},
    "remainders, 8-bit moments": {
        "weights_dtype": "bfloat16",
        "master_weights": "remainder",
        "optimizer_dtype": "8bit",
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A model with an optimizer."""

    model: nn.Module
    optimizer: Optimizer
    seconds: list[float]

    def step(self) -> None:
        """One step of gradients that are drawn outside its time."""
        draw = torch.Generator(DEVICE).manual_seed(len(self.seconds))
        for one in self.model.parameters():
            one.grad_dtype = torch.float32
            one.grad = torch.randn(one.shape, device=DEVICE, generator=draw)
        _wait()
        began = time.perf_counter()
        self.optimizer.step()
        _wait()
        self.seconds.append(time.perf_counter() - began)

    def nbytes(self, kind: str) -> int:
        """Of weights, masters and moments on a kind of device."""
        held = [*self.model.parameters(), *self.optimizer.moments().values()]
        held += self.optimizer.masters.tensors
        return sum(one.nbytes for one in held if one.device.type == kind)


def weights(layers: int, width: int, inner: int) -> Iterator[Tensor]:
    """Of layers like Llama's with a quarter of the heads for keys, drawn on the device."""
    torch.manual_seed(0)
    shapes = [(width, width)] * 2 + [(width // 4, width)] * 2
    shapes += [(inner, width)] * 2 + [(width, inner)]
    for _ in range(layers):
        yield from (torch.randn(shape, device=DEVICE) * 0.02 for shape in shapes)
        yield from (torch.ones(width, device=DEVICE) for _ in range(2))


def made(name: str, drawn: Iterator[Tensor]) -> Way:
    """A way with the weights drawn, after its first step."""
    settings = {"compute_dtype": "bfloat16", **WAYS[name]}
    config = TrainConfig.model_validate(settings)
    model = nn.Module()
    whole = name == "float32"
    where = "cpu" if config.weights_dtype == "bfloat16" else DEVICE.type
    held = list(drawn)
    for number, one in enumerate(held):
        own = nn.Parameter(one if whole else one.to(torch.bfloat16))
        model.register_parameter(f"weight_{number}", own)
    masters = MasterWeights(model.parameters(), where, config.master_weights == "remainder")
    with torch.no_grad():
        for parameter, one in zip(model.parameters(), held, strict=True):
            masters.to_set(parameter).copy_(one)
    masters.round()
    way = Way(model=model, optimizer=Optimizer(model, config, None, masters), seconds=[])
    way.step()
    way.seconds.clear()
    return way


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in {"layers": 4, "width": 576, "inner": 1536, "times": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    sizes = (given.layers, given.width, given.inner)
    ways = {name: made(name, weights(*sizes)) for name in WAYS}
    for _ in range(given.times):
        for way in ways.values():
            way.step()
    for name, way in ways.items():
        parameters = sum(one.numel() for one in way.model.parameters())
        found = {
            "way": name,
            "device": DEVICE.type,
            "parameters": parameters,
            "bytes_per_parameter": {
                kind: round(way.nbytes(kind) / parameters, 3)
                for kind in dict.fromkeys((DEVICE.type, "cpu"))
            },
            "seconds": round(statistics.median(way.seconds), 4),
            "least": round(min(way.seconds), 4),
            "most": round(max(way.seconds), 4),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
