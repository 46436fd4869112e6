"""What a PPO run's settings add, and which flow an estimator belongs to."""

from pathlib import Path

import pytest

import configs.recipe
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.ppo import PPOConfig
from configs.recipe import load_recipe
from configs.resolving import Machine
from tests.configs import test_branches as branches
from tests.configs.flow_settings import any_flows_recipes
from tests.tasks.launch import test_deployment_file as files


@pytest.mark.parametrize("name", any_flows_recipes())
def test_every_recipe_is_one_of_ppo_too(name: str) -> None:
    assert load_recipe(PPOConfig, name).algorithm.advantage.kind == "gae"


def test_gae_stands_beside_other_choices() -> None:
    config = load_recipe(
        PPOConfig, "tiny", ["algorithm.kl.coefficient=0.1", "algorithm.loss.kind=gspo"]
    )
    assert config.algorithm.advantage.kind == "gae"
    config = load_recipe(
        PPOConfig, "tiny", ["algorithm.advantage.kind=gae", "algorithm.advantage.lam=0.9"]
    )
    assert config.algorithm.advantage.lam == 0.9
    assert PPOConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_critic_has_its_own_optimizer_and_the_policys_batching() -> None:
    config = load_recipe(
        PPOConfig, "tiny", ["critic.learning_rate=0.5", "critic.epochs=3", "train.mini_batches=2"]
    )
    critic, actor = config.train_of("critic"), config.train_of("actor")
    assert (critic.learning_rate, critic.epochs, critic.mini_batches) == (0.5, 3, 1)
    assert (actor.learning_rate, actor.epochs, actor.mini_batches) == (3e-3, 1, 2)
    assert critic.micro_batch_tokens == actor.micro_batch_tokens == 1024


def test_the_critic_lives_with_the_actor_unless_told() -> None:
    config = load_recipe(PPOConfig, "tiny")
    assert config.cluster.roles.pool_of("critic") == config.cluster.roles.actor
    assert config.trained_roles == ["actor", "critic"]
    assert config.engine_roles == ["rollout", "critic", "actor"]
    words = ["cluster.pools.critic.workers=1", "cluster.roles.critic=critic"]
    assert load_recipe(PPOConfig, "tiny", words).used_pools == {"train", "rollout", "cpu", "critic"}
    assert load_recipe(GRPOConfig, "tiny", words).used_pools == {"train", "rollout", "cpu"}


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        (GRPOConfig, ["algorithm.advantage.kind=gae"], "Run it with refrain ppo"),
        (PPOConfig, ["algorithm.advantage.kind=rloo"], "Run it with refrain grpo"),
        (PPOConfig, ["critic.mini_batches=3"], "Set critic.mini_batches to a divisor of 16"),
        (PPOConfig, ["train.engine=elastic"], "elastic trains no critic"),
        (PPOConfig, ["cluster.roles.critic=gpu"], "cluster.roles.critic = gpu is no pool"),
        (
            GRPOConfig,
            [
                "train.recompute_old_logprobs=false",
                "algorithm.advantage.kind=optimal_token_baseline",
            ],
            "Set train.recompute_old_logprobs = auto",
        ),
        (GRPOConfig, ["critic.epochs=2"], "critic: there is no such setting"),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    model: type[GRPOConfig], words: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match="^[^\\n]+$") as error:
        load_recipe(model, "tiny", words)
    assert said in str(error.value)


def test_a_part_of_its_estimator_can_be_set_alone() -> None:
    config = load_recipe(PPOConfig, "tiny", ["algorithm.advantage.lam=0.9"])
    assert config.algorithm.advantage.model_dump()["lam"] == 0.9


def test_a_policy_that_looks_at_images_is_refused() -> None:
    examples = Path(__file__).parents[2] / "examples"
    words = [
        f"episodes.environment.codec={examples}/seen_lake.py:Lake",
        f"data.source.path={examples}/seen_lake.py:rows",
        "algorithm.advantage={kind: gae}",
    ]
    with pytest.raises((ConfigError, ValueError), match="does not go with a critic"):
        load_recipe(PPOConfig, str(examples / "seen_lake.yaml"), words)


def test_it_multiplies_in_float32_where_a_cpu_is_slow_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(configs.recipe, "this_machine", lambda: Machine(multiplies_bfloat16=False))
    config = load_recipe(PPOConfig, "smollm2-arithmetic")
    assert (config.rollout.dtype, config.train.compute_dtype) == ("float32", "float32")
    assert config.train_of("critic").compute_dtype == "float32"


def test_other_flows_have_no_critic() -> None:
    forms = {model: model.model_json_schema() for model in (GRPOConfig, PPOConfig)}
    assert [model for model, form in forms.items() if "critic" in form["properties"]] == [PPOConfig]


def test_its_estimator_goes_with_branches_without_discount() -> None:
    agent, refused = branches.AGENT, branches.refused
    assert refused([agent], PPOConfig) == ""
    assert "lam = 0.9 goes" in refused([agent, "algorithm.advantage.lam=0.9"], PPOConfig)
    assert "gamma = 0.9 goes" in refused([agent, "algorithm.advantage.gamma=0.9"], PPOConfig)


def test_a_teams_deployment_names_its_flow(tmp_path: Path) -> None:
    found = files.team(tmp_path, files.TEAM.replace("flow: grpo", "flow: ppo"))
    assert files.entry(found, "sums")["entrypoint"] == "flows.ppo.ppo"
