"""What elastic workers cannot train is refused in one sentence that says what to set."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from tasks.run.features import PreflightError
from tasks.run.opening import may_change
from tasks.run.preflight import check_lengths
from tests.tasks.memory.settings import plan

ELASTIC = "train.engine=elastic"


def settings(*words: str, model: type[GRPOConfig] = GRPOConfig) -> GRPOConfig:
    return load_recipe(model, "tiny", [ELASTIC, *words])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lora={}", "trains no adapters. Set train.engine = fsdp, or lora = null"),
        ("train.sequence_parallel=2", "Set train.sequence_parallel = 1"),
        ("train.replicas=2", "Set train.replicas = 1"),
        ("train.expert_parallel=2", "Set train.expert_parallel = 1"),
        ("train.reduce_gradients=optimizer_step", "Set train.reduce_gradients = micro_batch"),
        ("algorithm.loss.kind=clip_cov", "algorithm.loss.kind = clip_cov chooses tokens"),
        ("algorithm.entropy.top_share=0.5", "algorithm.entropy.top_share = 0.5 chooses tokens"),
        ("algorithm.kl.coefficient=0.1", "Set cluster.roles.ref to a pool of its own"),
        ("cluster.roles.aggregator=sum", "cluster.roles.aggregator = sum is no pool"),
    ],
)
def test_what_cannot_be_trained_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(word)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shared_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers that do not give their devices back"):
        settings("cluster.share_devices=true", "cluster.roles.rollout=train")


def test_a_reference_may_have_a_pool_of_its_own() -> None:
    found = settings(
        "algorithm.kl.coefficient=0.1",
        "cluster.roles.ref=ref",
        "cluster.pools.ref={workers: 1}",
        "cluster.roles.aggregator=sum",
        "cluster.pools.sum={workers: 1}",
    )
    assert found.used_pools == {"train", "rollout", "cpu", "ref", "sum"}
    assert "sum" not in load_recipe(GRPOConfig, "tiny", ["cluster.pools.sum={}"]).used_pools


def test_more_workers_than_rows_are_no_fault() -> None:
    words = ("prompts_per_step=2", "group_size=2", "cluster.pools.train.workers=8")
    assert settings(*words).cluster.pools["train"].workers == 8
    with pytest.raises(ConfigError, match="fewer rows than"):
        load_recipe(GRPOConfig, "tiny", list(words))


def test_a_unit_takes_the_longest_sample() -> None:
    with pytest.raises(PreflightError, match="Set train.unit_tokens to at least 143, and best"):
        check_lengths(settings("train.unit_tokens=100"))
    assert check_lengths(settings("train.unit_tokens=143"))


def test_only_the_lease_may_change_on_resuming() -> None:
    assert may_change("train.unit_lease")
    for name in ("engine", "unit_tokens", "gradient_dtype"):
        assert not may_change(f"train.{name}")


def test_the_memory_plan_counts_a_worker_without_and_the_aggregator_with_an_optimizer() -> None:
    lines = plan(settings("cluster.pools.train.workers=3"))
    worker, aggregator = lines[:2]
    assert worker.startswith("actor, each worker: holds weights")
    assert "optimizer" not in worker
    assert "gradients" in worker
    assert aggregator.startswith("aggregator, its rank: holds weights")
    assert "optimizer" in aggregator
    assert "sums" in aggregator
