"""A run whose weights are in bfloat16 with float32 masters, killed, and gone on with as float32 ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.planted import Faults
from tests.faults.test_matrix import FLOW
from tests.flows.conftest import Launch
from tests.flows.test_lora import command, digests, ended, named

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.slow]

MULTIPLIED = ("train.compute_dtype=bfloat16", "rollout.dtype=bfloat16")
WORDS = ("tiny", *MULTIPLIED, "rollout.probe_tolerance=0.2", "steps=4", "store.snapshot_every=2")
ROUNDED = "train.weights_dtype=bfloat16"
REMAINDERS = ("train.master_weights=remainder",)


@pytest.mark.parametrize(
    ("began_with", "on_with"),
    [
        ((), ()),
        ((), ("train.weights_dtype=float32",)),
        (REMAINDERS, REMAINDERS),
        (REMAINDERS, ("train.weights_dtype=float32", "train.master_weights=float32")),
        ((), REMAINDERS),
    ],
)
def test_a_killed_run_ends_with_the_weights_of_a_float32_one(
    launch: Launch, tmp_path: Path, began_with: tuple[str, ...], on_with: tuple[str, ...]
) -> None:
    whole = ended(launch(*WORDS, "cluster.pools.train.workers=2", "name=whole"))
    kill = replace(FLOW["update"], id="update-3", nth=3)
    faults = Faults(tmp_path.parent / f"{tmp_path.name}-faults", [kill])
    words = (*WORDS, "cluster.pools.train.workers=2", ROUNDED, *began_with, "name=broken")
    code, out = launch(*words, environment=faults.environment).end()
    assert code == -9, out
    assert faults.missed == []
    broken = named(whole, "broken")
    code, out = launch("--resume", broken.run, *on_with).end()
    assert code == 0, out
    assert digests(broken) == digests(named(whole, "whole"))
    assert command(whole, "audit", broken.run, "--strict")["good"]
    assert command(whole, "replay", broken.run, "2")["equal"]
