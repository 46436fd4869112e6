"""What nobody has set is decided once, for a new run, and never for a stored one."""

from __future__ import annotations

import pytest

import configs.resolving
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, change
from configs.recipe import load_recipe, read_recipe
from configs.resolving import Machine, resolve, slow_formats
from engines.rollout.contract import engine_class
from tests.configs.flow_settings import any_flows_recipes

FAST, SLOW = Machine(multiplies_bfloat16=True), Machine(multiplies_bfloat16=False)
DEMO = "smollm2-arithmetic"
MANY = ("prompts_per_step=8", "rollout={engine: vllm}")
GPU = "cluster.pools.rollout.gpus=1"


def decided(*words: str, machine: Machine = SLOW, recipe: str = DEMO) -> list[str]:
    return [str(one) for one in resolve(read_recipe(GRPOConfig, recipe, words), machine).decisions]


def stored(config: GRPOConfig) -> GRPOConfig:
    """The settings as they are read from a run's record."""
    return GRPOConfig.model_validate(config.model_dump(mode="json"))


@pytest.mark.parametrize("name", any_flows_recipes())
def test_reading_is_the_same_on_every_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = read_recipe(GRPOConfig, name)
    for faster in (lambda: True, lambda: False):
        monkeypatch.setattr(configs.resolving, "cpu_multiplies_bfloat16", faster)
        assert read_recipe(GRPOConfig, name) == here


@pytest.mark.parametrize("name", any_flows_recipes())
@pytest.mark.parametrize("machine", [FAST, SLOW])
def test_nothing_of_stored_settings_is_decided_again(name: str, machine: Machine) -> None:
    begun = resolve(read_recipe(GRPOConfig, name, [GPU]), machine).settings
    for other in (FAST, SLOW):
        again = resolve(stored(begun), other)
        assert (again.settings, again.decisions) == (begun, ())


def test_a_line_says_what_was_decided_and_why() -> None:
    slow = "this CPU is slow in bfloat16"
    assert decided() == [
        f"rollout.dtype = float32: {slow}",
        f"train.compute_dtype = float32: {slow}",
    ]
    assert decided(machine=FAST) == []
    assert decided("rollout.dtype=bfloat16", "train.compute_dtype=bfloat16") == []
    on_gpu = decided("cluster.pools.rollout={gpus: 1}", *MANY, machine=FAST, recipe="tiny")
    assert on_gpu == [
        "rollout.enforce_eager = false: rollout workers have GPUs",
        "rollout.max_sequences = 512: rollout workers have GPUs",
        "cluster.pools.rollout.slots = 9: shards that an engine on GPUs decodes at once, and the next one",
    ]
    assert decided("rollout.over_sampling=1.5", "prompts_per_step=12", machine=FAST) == [
        "rollout.shards = 12: with rollout.over_sampling each group is a shard"
    ]


def test_vllm_beside_a_trainer_on_its_gpus_has_a_process_of_its_own() -> None:
    """Where steps overlap, and nobody has said otherwise."""
    gpu = "cluster.pools.train.gpus=1"
    overlap = ("max_staleness=1", "algorithm.correction=[{kind: truncate}]", "rollout.engine=vllm")
    together = ("cluster.roles.rollout=train", gpu, *overlap)
    said = "rollout.own_process = true: steps overlap, and a trainer has the same workers"

    def apart(*words: str) -> bool:
        read = resolve(read_recipe(GRPOConfig, "tiny", words), FAST)
        assert read.settings.rollout.own_process == (said in map(str, read.decisions))
        return read.settings.rollout.own_process

    assert apart(*together)
    assert not apart(*together, "rollout.own_process=false")
    assert not apart("cluster.roles.rollout=train", *overlap), "CPUs are what both would want"
    assert not apart("cluster.pools.rollout.gpus=1", gpu, *overlap), "workers of their own"
    assert not apart(*together, "max_staleness=0", "algorithm.correction=[]")
    assert not apart(*together, "rollout.engine=transformers")


def test_only_vllm_has_a_front_end() -> None:
    own = "rollout.own_process=true"
    path = engine_class(load_recipe(GRPOConfig, "tiny", [own, "rollout.engine=vllm"]).rollout)
    assert path == "engines.rollout.vllm_own_process:VllmInOwnProcess"
    with pytest.raises(ConfigError, match="Set rollout.own_process = false, or rollout.engine"):
        load_recipe(GRPOConfig, "tiny", [own])


def test_episodes_with_a_program_go_on_by_themselves() -> None:
    agent = ("episodes.environment={kind: agent, path: 'some.agents:ask'}",)
    said = "episodes.drive = apart: episodes.environment.kind = agent takes its time"
    assert decided(*agent, machine=FAST) == [said]
    assert decided(*agent, "episodes.drive=together", machine=FAST) == []
    game = "episodes.environment={kind: class, path: 'some.games:Game'}"
    assert decided(game, machine=FAST) == []


def test_how_episodes_are_driven_is_in_no_key() -> None:
    """Whole shards are found again, however they were played."""
    game = "episodes.environment={kind: class, path: 'some.games:Game'}"
    read = [
        read_recipe(GRPOConfig, DEMO, (game, *words)).episodes
        for words in ((), ("episodes.drive=apart", "episodes.fewest_at_once=4"))
    ]
    keys = [one.in_keys() for one in read if one is not None]
    assert keys[0] == keys[1]
    assert not {"drive", "deadline", "fewest_at_once"} & keys[0].keys()


def test_a_run_that_was_begun_elsewhere_is_told_what_is_slow_here() -> None:
    begun = stored(resolve(read_recipe(GRPOConfig, DEMO), FAST).settings)
    assert slow_formats(begun, FAST) == []
    rollout, train = slow_formats(begun, SLOW)
    assert rollout.startswith("rollout.dtype = bfloat16 is what the run has, and this CPU")
    assert train.startswith("train.compute_dtype = bfloat16")
    assert slow_formats(resolve(begun, SLOW).settings, SLOW) == [rollout, train], "it is kept"
    assert slow_formats(read_recipe(GRPOConfig, DEMO, ["rollout.dtype=float32"]), SLOW) == [train]


def test_words_that_change_a_stored_run_leave_open_what_they_take_away() -> None:
    begun = stored(
        resolve(
            read_recipe(GRPOConfig, "tiny", ["rollout={}", "prompts_per_step=8"]), FAST
        ).settings
    )
    assert (begun.rollout.dtype, begun.rollout.shards) == ("bfloat16", 8)
    words = ["prompts_per_step=4", "cluster.pools.rollout={gpus: 1}"]
    resolved = resolve(change(GRPOConfig, begun.model_dump(mode="json"), words), SLOW)
    assert [str(one).partition(":")[0] for one in resolved.decisions] == [
        "rollout.shards = 4",
        "cluster.pools.rollout.slots = 5",
    ]
    assert resolved.settings.rollout.dtype == "bfloat16"
