"""Runs whose roles have one pool's devices in turn: the same weights as without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.conftest import Launch

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = ("tiny", "steps=2", "cluster.roles.rollout=train", "algorithm.kl.coefficient=0.01")


def test_turns_change_no_weight(launch: Launch, tmp_path: Path) -> None:
    """Policy, reference and engines that sample on one worker."""
    found = {}
    for name, shared in (("apart", "false"), ("shared", "true")):
        store = f"file://{tmp_path}/{name}"
        run = launch(*WORDS, f"cluster.share_devices={shared}", f"store.uri={store}")
        run.store_uri = store
        code, out = run.end(300)
        assert code == 0, out
        found[name] = run.commits()
    digests = {n: [one.version_out.digest for one in made] for n, made in found.items()}
    assert digests["apart"] == digests["shared"]
    assert len(set(digests["shared"])) == 2
    assert not [name for name in found["apart"][1].metrics if "/sleep/" in name]
    second = found["shared"][1]
    assert not [attempt for attempt in second.attempts if attempt["error"]]
    moved = {
        role: [second.metrics[f"bytes/{what}/{role}"] for what in ("sleep", "wake")]
        for role in ("rollout", "ref", "actor")
    }
    for role, (slept, woke) in moved.items():
        assert slept == woke > 0, (role, slept, woke)
    assert moved["actor"][0] > 2.9 * moved["ref"][0]  # AdamW's moments too
    assert all(second.metrics[f"time/{what}/actor"] > 0 for what in ("sleep", "wake"))
