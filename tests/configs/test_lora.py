"""The settings of an adapter, and what they change of a run's others."""

from __future__ import annotations

import pytest

from configs.grpo import GRPOConfig
from configs.lora import LoraConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe

KL = "algorithm.kl.coefficient=0.01"


def tiny(*words: str) -> GRPOConfig:
    return load_recipe(GRPOConfig, "tiny", words)


def test_it_is_off_and_an_empty_group_takes_the_defaults() -> None:
    assert tiny().lora is None
    lora = tiny("lora={}").lora
    assert lora is not None and (lora.rank, lora.scale) == (32, 1.0)
    chosen = tiny("lora.rank=8", "lora.target_modules=[q_proj, v_proj]").lora
    assert chosen is not None
    assert (chosen.scale, chosen.target_modules) == (4.0, ("q_proj", "v_proj"))


def test_experts_are_chosen_by_the_ends_of_their_weights_names() -> None:
    names = [f"model.layers.0.mlp.experts.{one}" for one in ("gate_up_proj", "down_proj")]
    for targets, adapted in [
        ((), [False, False]),
        ("all-experts", [True, True]),
        (("mlp.experts.down_proj",), [False, True]),
        (("own_proj",), [False, False]),
    ]:
        lora = LoraConfig(target_modules=("q_proj",), target_parameters=targets)
        assert [lora.adapts_experts(name) for name in names] == adapted
    assert lora.unfit(["q_proj"], names) == (
        "lora.target_parameters has own_proj, and no name of a weight of the decoder's experts ends "
        "so. Their weights are down_proj, gate_up_proj."
    )
    alone = LoraConfig(target_modules=(), target_parameters="all-experts")
    assert alone.unfit([], names) is None


def test_no_engine_holds_a_reference_beside_an_adapter() -> None:
    words = (KL, "cluster.roles.ref=reference", "cluster.pools.reference.workers=1")
    assert "reference" in tiny(*words).used_pools
    adapted = tiny(*words, "lora.rank=8")
    assert adapted.algorithm.needs_reference and "reference" not in adapted.used_pools


def test_an_adapter_is_no_difference() -> None:
    with pytest.raises(ConfigError, match=r"Set store\.whole_every = 1"):
        tiny("lora.rank=8", "store.whole_every=4")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lora.target_modules=[]", "lora.target_modules is empty.*Set lora.target_modules"),
        ("lora.target_modules=[q_proj, lm_head]", "has lm_head.*Leave it out"),
        ("lora.rank=0", "lora.rank"),
        (
            "lora.target_parameters=all-experts",
            "model.kind = random makes a model without any. Set lora.target_parameters",
        ),
        ("lora.dropout=0.1", "lora.dropout: there is no such setting"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny(word)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.engine=transformers"], "Set rollout.engine = vllm, or lora.serving = merged"),
        (["lora.rank=513"], "Set lora.rank to 512 or less"),
        (["cluster.share_devices=true"], "or cluster.share_devices = false"),
    ],
)
def test_beside_their_base_adapters_need_vllm_and_its_limits(words: list[str], said: str) -> None:
    beside = ["lora.serving=adapter", "rollout.engine=vllm"]
    assert tiny(*beside).lora is not None
    with pytest.raises(ConfigError, match=said):
        tiny(*beside, *words)
