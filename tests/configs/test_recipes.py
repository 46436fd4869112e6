"""Recipes load, and a wrong setting is answered by one sentence that says what to do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, read_yaml
from configs.recipe import FOLDER, load_recipe, recipe_names
from configs.settings_help import fields
from tests.configs.flow_settings import any_flows_recipes, of_flows

OVERLAP = ("max_staleness=2", "algorithm.correction=[{kind: truncate}]")
INTERPOLATED = (*OVERLAP, "algorithm.proximal=loglinear", "train.mini_batches=2")


@pytest.mark.parametrize("name", any_flows_recipes())
def test_every_recipe_loads(name: str) -> None:
    config = load_recipe(GRPOConfig, name)
    assert config.name == name
    assert GRPOConfig.model_validate_json(config.model_dump_json()) == config


def test_the_named_recipes_are_there() -> None:
    assert {"smollm2-arithmetic", "tiny", "gsm8k-qwen2.5", "gsm8k-multinode"} <= set(recipe_names())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.temprature=1"], "rollout.temprature: there is no such setting. Did you mean rollout.temperature?"),
        (["steps=many"], "steps = 'many'"),
        (["train.mini_batches=3"], "Set train.mini_batches to a divisor of 16"),
        (
            ["rollout.engine_args={max_num_seqs: 4}"],
            "rollout.engine_args.max_num_seqs is set by Refrain itself. Set rollout.max_sequences instead.",
        ),
        (["rollout.engine_args={load_format: auto}"], "is set by Refrain itself. Remove it."),
        (["train.sequence_parallel=2"], "Set train.sequence_parallel to a divisor of 1"),
        (["rollout.shards=5"], "Set rollout.shards to at most 4"),
        (["rollout.engine=vlm"], "rollout.engine = 'vlm': input should be 'vllm' or 'transformers'"),
        (["data.source.kind=foo"], "data.source.kind = foo: it must be file, hub, reasoning_gym, function, coding or tasks"),
        (["model.path=x", "model.kind=random"], "model.path: model.kind = random has no such setting. Set model.kind to pretrained"),
        (["model.kind=pretrained"], "model.path: a value is needed"),
        (["cluster.roles.actor=gpu"], "cluster.roles.actor = gpu is no pool"),
        (["cluster.address=tcp://h:1"], "contradict each other"),
        (["data.system_prompt=Hi"], "Set data.template = chat"),
        (["rewards.functions.7.weight=1"], "no position in a list of 1"),
        (["store.uri=memory://x"], "lives in one process"),
        (["rewards.functions=[{kind: reasoning_gym}]", "data.source={kind: file, path: a.jsonl}"],
         "scores only reasoning-gym problems"),
        ([*INTERPOLATED, "max_staleness=0"], "Set max_staleness higher, algorithm.proximal = recompute"),
        ([*INTERPOLATED, "train.mini_batches=1"], "the update's first pass has the exact log-probs"),
        ([*INTERPOLATED, "train.recompute_old_logprobs=true"], "Set train.recompute_old_logprobs = auto"),
        (["episodes.environment={kind: class, path: 'x.py:y'}", "episodes.environment.python=/x"],
         "episodes.environment.python: there is no such setting. Did you mean episodes.python?"),
        (["train.steps=1"], "Did you mean steps?"),
        (["cluster.pools.rollout.gpuss=1"], "Did you mean cluster.pools.rollout.gpus?"),
        (["episodes.environment.path=x.py:y"],
         "episodes.environment.kind: a value is needed. Set episodes.environment.kind to class, tools, "),
        (["rewards.functions.0.extract=whole"],
         "Set rewards.functions.0.kind to reasoning_gym or unit_tests, or remove it."),
        (["model.layers=3", "model.path=x"], "model.layers: model.kind = pretrained has no such setting"),
        (["algorithm.correction.0.kind=trancate"], "Did you mean truncate?"),
        (["evaluation.before=true"], "evaluation.suites is empty, and it needs 1 or more. Set evaluation.suites."),
        (["prompts_per_step=6", "rollout.shards=8"], "Set rollout.shards to at most 6"),
        (["rewards.functions[].weight=2"], "Write rewards.functions.0.weight=… for the first."),
        (["train.router_aux_loss_coef=0.1"], "makes a model without any. Set train.router_aux_loss_coef = 0"),
        (["train.router_dtype=float32"], "makes a model without any. Set train.router_dtype = compute"),
        (["model={path: x}", "train.router_aux_loss_coef=0.1", "train.compile=true"],
         "Set train.sequence_parallel = 1 and train.compile = false"),
        (["model={path: x}", "train.router_bias_update_rate=0.001", "lora.rank=4"], "Set lora = null"),
        (["train.router_replay=true"], "makes a model without any. Set train.router_replay = false"),
        (["model={path: x}", "train.router_replay=true", "train.engine=elastic"],
         "elastic workers do not replay routing. Set train.engine = fsdp"),
        (["train.expert_parallel=2"], "makes a model without any. Set train.expert_parallel = 1"),
        (["model={path: x}", "train.expert_parallel=2", "lora.rank=4"],
         "Set lora = null and train.compile = false, or train.expert_parallel = 1"),
        (["model={path: x}", "train.expert_parallel=2", "train.compile=true"],
         "Set lora = null and train.compile = false, or train.expert_parallel = 1"),
        (["nonsense"], "nonsense is no setting"),
        (["steps.deep=1"], "steps is a single value, not a group"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="^[^\n]+$") as error:
        load_recipe(GRPOConfig, "tiny", words)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        (["prompts_per_step=6"], "rollout.shards", 2),  # as the recipe says
        (["prompts_per_step=1"], "rollout.shards", 1),
        (["rollout={engine: transformers}", "prompts_per_step=6"], "rollout.shards", 6),
        (["rollout={engine: transformers}", "prompts_per_step=9"], "rollout.shards", 8),
        (["rollout.over_sampling=1.5"], "rollout.shards", 4),
        (["rewards.functions=[{kind: unit_tests, sandbox: {timeout: 2}}]"], "rewards.functions.0.test_timeout", 2.0),
        (["rewards.functions=[{kind: unit_tests, sandbox: {timeout: '2'}}]"], "rewards.functions.0.test_timeout", 2.0),
        (["rewards.functions=[{kind: unit_tests}]"], "rewards.functions.0.test_timeout", 5.0),
        (["model.path=org/name"], "model.kind", "pretrained"),
        (["model.revision=main", "model.path=org/name"], "model.revision", "main"),
        (["model={path: org/name}"], "model.kind", "pretrained"),
        (["evaluation.suites=[gsm8k]", "evaluation.suites.gsm8k.rewards.functions.0.kind=math"],
         "evaluation.suites.gsm8k.rewards.functions.0.kind", "math"),
        (["rewards.functions.1.kind=math"], "rewards.functions.1.kind", "math"),
        (["guards.0.metric=reward/mean", "guards.0.name=low", "guards.0.below=0"], "guards.0.below", 0.0),
        (["rollout.stop.0=x", "rollout.stop.1=y"], "rollout.stop", ("x", "y")),
        (["algorithm.loss.clip_high=0.3"], "algorithm.loss.clip_high", 0.3),
        (["algorithm.advantage.normalize=batch"], "algorithm.advantage.normalize", "batch"),
        (["algorithm={loss: {clip_high: 0.3}}"], "algorithm.loss.kind", "clipped"),
    ],
)  # fmt: skip
def test_what_is_not_set_follows_from_what_is(
    words: list[str], setting: str, value: object
) -> None:
    here: object = load_recipe(GRPOConfig, "tiny", words)
    for part in setting.split("."):
        if isinstance(here, dict):
            here = here[part]
        else:
            here = here[int(part)] if part.isdigit() else vars(here)[part]
    assert here == value


def test_help_names_types_as_people_write_them() -> None:
    for name, kind, default, _ in fields(GRPOConfig):
        for ours in (
            "FieldInfo",
            "Annotated",
            "Optional",
            "Union",
            "<class",
            "object at",
            "Pydantic",
        ):
            assert ours not in kind and ours not in default, (name, kind, default)


def test_an_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="tiny"):
        load_recipe(GRPOConfig, "no-such-recipe")


def test_a_new_kind_drops_the_old_kinds_settings() -> None:
    config = load_recipe(GRPOConfig, "tiny", ["model.path=org/name", "model.kind=pretrained"])
    assert config.model.model_dump() == {"kind": "pretrained", "path": "org/name", "revision": None}


def test_values_are_read_as_people_mean_them() -> None:
    config = load_recipe(
        GRPOConfig,
        "tiny",
        ["train.learning_rate=1e-6", "rollout.stop=[a, b]", "rollout.seed=null", "steps=7"],
    )
    assert config.train.learning_rate == 1e-6
    assert config.rollout.stop == ("a", "b")
    assert config.rollout.seed is None
    assert config.steps == 7


def test_one_worker_count_changes_and_the_other_pools_stay() -> None:
    config = load_recipe(GRPOConfig, "smollm2-arithmetic", ["cluster.pools.rollout.workers=2"])
    assert config.cluster.pools["rollout"].workers == 2
    assert set(config.cluster.pools) == {"train", "rollout", "cpu"}


@pytest.mark.parametrize("kind_of_run", of_flows().values())
def test_every_setting_has_a_meaning(kind_of_run: type[GRPOConfig]) -> None:
    silent = [
        name
        for name, kind, _, meaning in fields(kind_of_run)
        if not meaning and not name.endswith("kind") and kind
    ]
    assert silent == []


@pytest.mark.parametrize("module", ["configs.grpo", "flows.grpo", "flows.ppo", "flows.dapo"])
def test_the_flow_process_imports_no_engine_library(module: str) -> None:
    code = (
        f"import {module}, sys; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'tensordict') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_without_episodes_imports_none_of_them() -> None:
    modules = "flows.grpo, tasks.run.preflight, tasks.run.preflight_data, tasks.evaluation.evaluate"
    code = (
        f"import {modules}, engines.data.data_engine, sys; print([m for m in sys.modules if "
        "m.startswith(('engines.episodes', 'engines.environments', 'tasks.episodes'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["store.options.secret=hunter2"], "store.options.secret looks like a credential"),
        (["store.options.client_kwargs={aws_secret_access_key: hunter2}"], "aws_secret_access_key"),
        (["store.uri=s3://me:hunter2@host/x"], "store.uri holds a password"),
        (["tracking.uri=postgresql://me:hunter2@host/x"], "tracking.uri holds a password"),
        (["cluster.pools.cpu.env={AWS_SESSION_TOKEN: hunter2}"], "AWS_SESSION_TOKEN looks like"),
        (["store.uri=s3://b/x", "store.whole_every=4"], "Set store.node_cache_gib"),
        (["cluster.kind=slurm"], "cluster.kind = slurm needs cluster.host"),
        (["cluster.kind=ssh", "cluster.host=lo"], "Set cluster.ssh.hosts"),
        (["cluster.kind=slurm", "cluster.host=lo", "cluster.pools.train.workers=4", "cluster.slurm.pools.train.workers_per_job=3"],
         "workers_per_job = 3 does not divide cluster.pools.train.workers. Set it to a divisor of 4"),
        (["cluster.kind=kubernetes"], "Set cluster.kubernetes.image"),
        (["cluster.kind=slurm", "cluster.host=lo"], "file system that all nodes share"),
        (["cluster.kind=address", "cluster.address=tls://h:1"], "Use tls://HOST:PORT together with"),
    ],
)  # fmt: skip
def test_what_is_half_said_or_a_credential_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="^[^\n]+$") as error:
        load_recipe(GRPOConfig, "tiny", words)
    assert said in str(error.value)
    assert "hunter2" not in str(error.value)


def test_a_kind_of_cluster_keeps_the_pools_and_has_tls_where_others_listen() -> None:
    words = ["cluster.kind=slurm", "cluster.host=ib0", "store.uri=s3://bucket/x"]
    made = load_recipe(GRPOConfig, "tiny", words).cluster
    assert made.pools["rollout"].slots == 3
    assert made.encryption.kind == "temporary"
    assert load_recipe(GRPOConfig, "tiny").cluster.encryption.kind == "off"
    assert load_recipe(GRPOConfig, "gsm8k-multinode", words).cluster.address is None
    allowed = ["cluster.pools.cpu.env={TOKENIZERS_PARALLELISM: 'false'}"]
    assert load_recipe(GRPOConfig, "tiny", allowed).cluster.pools["cpu"].env


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 1\nseed: 2\nsteps: 3\n", "the key steps stands twice in one group, in line 1 and in line 3"),
        ("train:\n  epochs: 1\n# a comment\n  epochs: 2\n", "the key epochs .* in line 2 and in line 4"),
        ("train: {epochs: 1}\ntrain: {mini_batches: 2}\n", "the key train .* in line 1 and in line 2"),
        ("rewards:\n  functions:\n  - kind: math\n    weight: 1\n    weight: 2\n", "the key weight .* 4 and in line 5"),
        ('{"steps": 1, "steps": 2}', "the key steps .* in line 1 and in line 1"),
        ("data: {1: a, 0x1: b}", "the key 0x1 "),
    ],
)  # fmt: skip
def test_a_key_that_stands_twice_is_named_with_its_lines(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: {said}") as caught:
        load_recipe(GRPOConfig, str(path))
    assert str(caught.value).endswith("Remove one.")


def test_a_key_that_stands_twice_in_a_word_is_named() -> None:
    with pytest.raises(ConfigError, match=r"train=.*: the key epochs stands twice"):
        load_recipe(GRPOConfig, "tiny", ["train={epochs: 1, epochs: 2}"])


def test_a_merged_group_may_be_changed(tmp_path: Path) -> None:
    """The same key in different groups, and beside a merge, is no key that stands twice."""
    path = tmp_path / "merged.yaml"
    path.write_text((FOLDER / "tiny.yaml").read_text().replace("train:\n", "train: &train\n", 1))
    with path.open("a") as recipe:
        recipe.write("critic_train:\n  <<: *train\n  epochs: 3\n  gradient_clip: 0.5\n")
    read = read_yaml(path.read_text())
    assert read["critic_train"] == read["train"] | {"epochs": 3, "gradient_clip": 0.5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 2\ntrain:\n\tlearning_rate: 1e-4\n", "in line 3, column 1 is a tab. Indent with spaces"),
        ("steps: 2\ndata: [1, 2\ntrain: 3\n", "in line 3, column"),
        ("steps: 2\nname: 'a\n", "in line 3, column"),
        ("steps: 2\n  name: a\n", "in line 2, column"),
    ],
)  # fmt: skip
def test_broken_yaml_is_named_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not valid YAML") as caught:
        load_recipe(GRPOConfig, str(path))
    assert said in str(caught.value)
