"""What is demanded of a replay: equal bits, or weights within a tolerance."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from pydantic import JsonValue

from engines.train.contract import MadeOn, TensorDifference, WeightsComparison
from tasks.commands.replay import ReplayDemand, demand_of, share_of_way

CPU = MadeOn(device="CPU (AVX2)", torch="2.13.0+cpu", fixed=True)
GPU = MadeOn(device="NVIDIA H100 80GB HBM3", torch="2.13.0+cu130", fixed=True)


def commit(was: MadeOn | None, **train: JsonValue) -> dict[str, JsonValue]:
    """What a commit says of an update by one rank of two threads."""
    made: dict[str, JsonValue] = {} if was is None else {"made_on": asdict(was)}
    return {**made, "train": {"kernels": True, **train}, "ranks": 1, "threads": 2}


@pytest.mark.parametrize("where", [CPU, GPU])
def test_equal_bits_are_demanded_where_the_order_of_sums_is_the_same(where: MadeOn) -> None:
    assert demand_of(commit(where), where, 1, 2) == ReplayDemand(
        bits=True, why=f"both were made on a {where.device} with a fixed order of sums"
    )


def test_an_update_on_a_gpu_from_before_the_kernels_is_another_sum() -> None:
    old = {**commit(GPU), "train": {"deterministic": True}}
    found = demand_of(old, GPU, 1, 2)
    assert not found.bits
    assert "by a Refrain without train.kernels" in found.why
    assert demand_of({**commit(CPU), "train": {}}, CPU, 1, 2).bits, "a CPU has no such kernels"
    assert demand_of(commit(GPU, kernels=False), GPU, 1, 2).bits


def test_of_a_commit_without_a_record_equal_bits_are_demanded() -> None:
    found = demand_of(commit(None), CPU, 4, 4)
    assert found == ReplayDemand(bits=True, why="the commit does not say on what it was made")


@pytest.mark.parametrize(
    ("was", "train", "now", "ranks", "why"),
    [
        (replace(GPU, fixed=False), {}, GPU, 1, "sums had no fixed order (train.deterministic"),
        (replace(CPU, fixed=False), {"compile": True}, CPU, 1, "layers were compiled"),
        (GPU, {}, replace(GPU, fixed=False), 1, "here (NVIDIA H100 80GB HBM3) sums have no fixed"),
        (GPU, {}, CPU, 1, "devices differ, NVIDIA H100 80GB HBM3 and CPU (AVX2)"),
        (
            replace(CPU, device="CPU (AVX512, GenuineIntel 6 143)"),
            {},
            replace(CPU, device="CPU (AVX512, AuthenticAMD 25 17)"),
            1,
            "devices differ, CPU (AVX512, GenuineIntel 6 143) and CPU (AVX512, AuthenticAMD 25 17)",
        ),
        (CPU, {}, replace(CPU, torch="2.14.0"), 1, "versions of torch differ, 2.13.0+cpu and 2.14"),
        (CPU, {}, CPU, 2, "numbers of ranks differ, 1 and 2"),
    ],
)
def test_a_tolerance_is_in_place_where_it_is_not(
    was: MadeOn, train: dict[str, JsonValue], now: MadeOn, ranks: int, why: str
) -> None:
    found = demand_of(commit(was, **train), now, ranks, 2)
    assert not found.bits
    assert why in found.why


def compared(*totals: float) -> WeightsComparison:
    """Tensors that differ by so much in all."""
    differing = tuple(
        TensorDifference(name=str(n), shape=(1,), elements=1, largest=total, total=total)
        for n, total in enumerate(totals)
    )
    return WeightsComparison(digest="", tensors=3, differing=differing)


@pytest.mark.parametrize(
    ("apart", "way", "share"),
    [((1.0,), (2.0, 8.0), 0.1), ((), (2.0,), 0.0), ((), (), 0.0), ((1.0,), (), math.inf)],
)
def test_the_share_of_the_way(
    apart: tuple[float, ...], way: tuple[float, ...], share: float
) -> None:
    assert share_of_way(compared(*apart), compared(*way)) == share


def test_what_is_not_a_number_is_within_no_tolerance() -> None:
    assert not share_of_way(compared(math.nan), compared(1.0)) <= 1e9
