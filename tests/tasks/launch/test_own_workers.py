"""`refrain worker`: what cannot be is said before anything starts, or a unit is printed."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig, check_new_run
from configs.recipe import load_recipe
from flows import worker

PLACE = ["tiny", "cluster.kind=address", "store.uri=file:///shared"]
ADDRESS = "cluster.address=tcp://10.0.0.1:8786"
HEADER = "rollout.engine_args={default_headers: {Cookie: a}}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout", "tiny"], "set cluster.kind=address and cluster.address=tcp://HOST:PORT"),
        (["rolout", *PLACE, ADDRESS], "rolout is no pool"),
        (["rollout", *PLACE, ADDRESS, "--workers=0"], "--workers = 0"),
        (["rollout", *PLACE, ADDRESS, "--name=a/b"], "--name = a/b is no name of workers"),
        (["rollout", *PLACE, ADDRESS, "cluster.pools.rollout.gpus=99"], "need 99 GPUs"),
        (["rollout", *PLACE, ADDRESS, HEADER], "default_headers.Cookie is a header"),
        (["rollout", *PLACE, "cluster.address=tcp://10.0.0.1"], "is no address of a scheduler"),
        (["rollout", *PLACE, "cluster.address=tcp://10.0.0.1:0"], "is no address of a scheduler"),
        (["rollout", *PLACE, "cluster.address=http://h:1"], "is no address of a scheduler"),
        (["rollout", *PLACE, "cluster.address=tcp://0.0.0.0:1"], "is where a scheduler listens"),
    ],
)
@pytest.mark.parametrize("unit", [["--systemd"], []])
def test_what_cannot_be_is_said_first(
    words: list[str], said: str, unit: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert worker.main([*words, *unit]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_unit_is_printed_for_workers_that_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert worker.main(["rollout", *PLACE, ADDRESS, "--systemd"]) == 0
    assert f"flows worker rollout tiny cluster.kind=address store.uri=file:///shared {ADDRESS}" in (
        capsys.readouterr().out
    )


def test_a_run_joins_no_scheduler_at_such_an_address() -> None:
    recipe, *words = [*PLACE, "cluster.address=tcp://[::]:8786"]
    with pytest.raises(ValueError, match=r"cluster\.address = tcp://\[::\]:8786 is where"):
        check_new_run(load_recipe(GRPOConfig, recipe, words))
