"""The aggregator's memory and reads do not grow with the number of units."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines.algorithms.aggregation import MetricSums
from engines.elastic.gradients import Damaged, Summed, metric_sums, unit_metrics, write_gradient
from engines.train.contract import MadeOn
from engines.train.updater import Tally
from storage.objects.store import Store
from storage.runs.gradients import Gradient, GradientsOf, UnitMetrics, open_folder
from storage.runs.run_store import RunStore

OF = GradientsOf(run="run", step=1, optimizer_step=0, weights="xxh3:1", inputs="2")
FOLDER = "run/gradients/000001/000001.0-3"
SHAPES = {"small": (64,), "large": (256, 128), "other": (100, 64)}
MADE = MadeOn(device="CPU", torch="2", fixed=True)
NOTHING = UnitMetrics(
    means={}, sums={}, maxima={}, finite=True, tokens=1, whole=1, responses=1, flops=1.0
)


class Tracked(TorchDispatchMode):
    """Bytes of the tensors that live, and the most there have been."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(one, torch.Tensor):
                self._track(one)
        return found

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


def gradients(files: RunStore, units: int, **skipped: int) -> list[Gradient]:
    """Random gradients; `skipped`: by parameter, the unit that has none."""
    open_folder(files.store, FOLDER, OF)
    found = []
    for unit in range(units):
        torch.manual_seed(unit)
        tensors = {n: torch.randn(s) for n, s in SHAPES.items() if skipped.get(n) != unit}
        one, equal = write_gradient(
            files, FOLDER, OF, unit, "rows", tensors, torch.float32, MADE, NOTHING
        )
        assert equal
        found.append(one)
    return found


def files_of(folder: Path) -> RunStore:
    return RunStore(Store(str(folder)), "run")


def test_memory_is_flat_from_4_to_64_units(tmp_path: Path) -> None:
    peaks = {}
    for units in (4, 64):
        files = files_of(tmp_path / str(units))
        made = gradients(files, units)
        with Tracked() as tracked, Summed(files, FOLDER, made, torch.device("cpu")) as summed:
            for name in SHAPES:
                total = summed.first(name)
                del total
            for name in SHAPES:
                total = summed.again(name)
                del total
        peaks[units] = tracked.peak
        assert summed.nbytes == units * sum(4 * torch.Size(s).numel() for s in SHAPES.values())
    largest = 4 * 256 * 128
    assert largest <= peaks[4] <= 3 * largest
    assert abs(peaks[64] / peaks[4] - 1) < 0.05


def test_sums_are_in_the_order_of_the_units_and_come_twice(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    made = gradients(files, 5, small=0, other=4)
    with Summed(files, FOLDER, made, torch.device("cpu")) as summed:
        first = {name: summed.first(name) for name in SHAPES}
        again = {name: summed.again(name) for name in reversed(SHAPES)}
        assert summed.first("nowhere") is None
    wanted: dict[str, torch.Tensor] = {}
    for unit in range(5):
        torch.manual_seed(unit)
        for name, shape in SHAPES.items():
            if (name, unit) in (("small", 0), ("other", 4)):
                continue
            part = torch.randn(shape)
            wanted[name] = wanted[name] + part if name in wanted else part
    for name, total in wanted.items():
        assert torch.equal(first[name], total)
        assert torch.equal(again[name], total)


def test_damage_names_the_unit(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    made = gradients(files, 3)
    (tmp_path / FOLDER / made[1].file).unlink()
    with (
        Summed(files, FOLDER, made, torch.device("cpu")) as summed,
        pytest.raises(Damaged, match="does not exist") as caught,
    ):
        summed.first("small")
    assert caught.value.unit == 1


def test_metrics_of_a_unit_come_back_to_the_bit() -> None:
    sums = MetricSums(
        means={"kl": torch.tensor([0.1, 3.0])},
        sums={"loss": torch.tensor(float("nan"))},
        maxima={"ratio": torch.tensor(float("-inf"))},
    )
    tally = Tally(sums=sums, tokens=7, whole=9, responses=3, flops=1e12)
    told = UnitMetrics.model_validate_json(unit_metrics(tally, True).model_dump_json())
    back = metric_sums(told)
    assert torch.equal(back.means["kl"], sums.means["kl"])
    assert back.sums["loss"].isnan()
    assert back.maxima["ratio"] == float("-inf")
    assert (told.tokens, told.whole, told.responses, told.flops) == (7, 9, 3, 1e12)


@pytest.mark.parametrize("shape", [(1,), (64, 1), (8, 8)])
def test_a_gradient_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Torch would add [1] to each element of [64], and make [64, 64] of [64, 1]."""
    files = files_of(tmp_path)
    made = gradients(files, 2)
    odd, _ = write_gradient(
        files, FOLDER, OF, 2, "rows", {"small": torch.ones(shape)}, torch.float32, MADE, NOTHING
    )
    for order in ([*made, odd], [odd, *made]):
        with (
            Summed(files, FOLDER, order, torch.device("cpu"), SHAPES) as summed,
            pytest.raises(Damaged, match="has the shape") as caught,
        ):
            summed.first("small")
        assert caught.value.unit == 2


@pytest.mark.parametrize("text", ["", "one", "0x1p99999", "9" * 5000])
def test_a_metric_that_is_no_number_is_refused(text: str) -> None:
    known = NOTHING.model_dump()
    with pytest.raises(ValueError, match="is no number of a metric"):
        UnitMetrics.model_validate({**known, "sums": {"a": text}})
    with pytest.raises(ValueError, match="is no number of a metric"):
        UnitMetrics.model_validate({**known, "means": {"a": ("0x1p0", text)}})
