"""What a distillation's settings add, and what of them is refused in a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.distillation import DistillAlgorithm, recorded_algorithm
from configs.distill import DistillConfig
from configs.grpo import GRPOConfig
from configs.help_topics import help_on
from configs.overrides import ConfigError, change
from configs.recipe import load_recipe, read_recipe
from configs.resolving import resolve
from configs.settings_help import fields
from configs.teachers import TeacherServiceConfig
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from tasks.run.opening import check_unchanged
from tests.configs.flow_settings import any_flows_recipes
from tests.configs.test_resolving import FAST, SLOW

TEACHER = ("teachers.tutor.model.kind=random", "teachers.tutor.model.seed=1")
IN_VLLM = "teachers.tutor.engine.kind=vllm"
SERVICE = "teachers.tutor.service=http://127.0.0.1:8200"
WORDS = "algorithm.distillation.loss.kind=forward_kl_topk"


def loaded(*words: str) -> DistillConfig:
    return load_recipe(DistillConfig, "tiny", words)


@pytest.mark.parametrize("name", any_flows_recipes())
def test_every_recipe_can_have_a_teacher(name: str) -> None:
    config = load_recipe(DistillConfig, name, TEACHER)
    assert config.engine_roles[0] == "rollout"
    assert "teacher" in config.frozen_roles
    assert DistillConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_teacher_has_a_pool_of_its_own_unless_told() -> None:
    config = loaded(*TEACHER, "cluster.pools.train.workers=2")
    assert config.cluster.roles.pool_of("teacher") == "teacher" in config.used_pools
    assert (config.cluster.pools["teacher"].workers, config.cluster.pools["train"].workers) == (
        1,
        2,
    )
    beside = loaded(*TEACHER, "cluster.roles.teacher=train")
    assert "teacher" not in beside.cluster.pools


def test_a_service_takes_no_workers_of_the_run() -> None:
    alone = loaded("teachers.tutor.service=http://127.0.0.1:8200/")
    assert alone.teachers["tutor"].service == "http://127.0.0.1:8200"
    assert "teacher" not in alone.engine_roles
    assert "teacher" not in alone.cluster.pools
    words = ["teachers.other.service=http://127.0.0.1:8200", "teacher_column=answer"]
    both = loaded(*TEACHER, *words)
    assert (both.own_teachers, list(both.services)) == (["tutor"], ["other"])
    assert "teacher" in both.used_pools


def test_a_teacher_in_vllm_starts_before_what_asks_how_much_memory_is_free() -> None:
    words = ("rollout.dtype=float32", "rollout.engine_args.max_num_batched_tokens=4096")
    engine = "teachers.tutor.engine={kind: vllm, kv_cache_gib: 0.5, tensor_parallel_size: 2}"
    config = loaded(*TEACHER, engine, "rollout.engine=vllm", *words)
    assert config.engine_roles == ["teacher", "rollout", "actor"]
    assert (config.frozen_roles, config.own_teachers) == ([], ["tutor"])
    assert config.sampling_roles == ["rollout"]
    found = config.vllm_teachers["tutor"].engine_of(config.rollout, 80)
    assert (found.engine, found.dtype, found.tensor_parallel_size) == ("vllm", "float32", 2)
    assert found.engine_args == {"max_num_batched_tokens": 4096, "max_logprobs": 80}
    assert loaded(*TEACHER).engine_roles == ["rollout", "teacher", "actor"]


def test_the_settings_of_a_service_have_a_meaning_and_no_password() -> None:
    found = {name: meaning for name, kind, _, meaning in fields(TeacherServiceConfig) if kind}
    assert [n for n, meaning in found.items() if not meaning and not n.endswith("kind")] == []
    config = change(
        TeacherServiceConfig, {}, ["model.kind=random", "cluster.pools.teacher.workers=2"]
    )
    assert config.cluster.pools[config.pool].workers == 2
    for words, said in (
        (
            ["model.kind=random", "other_stores=[s3://me:mine@host/b]"],
            "other_stores holds a password",
        ),
        ([], "and neither is set"),
        (["model.kind=random", "version=run@3"], "and both are set"),
    ):
        with pytest.raises(ConfigError, match=said):
            change(TeacherServiceConfig, {}, words)


def test_the_reverse_kl_takes_the_log_probs_before_the_update_and_words_do_not() -> None:
    assert loaded(*TEACHER).algorithm.needs_stored_logprobs
    by_words = loaded(*TEACHER, WORDS)
    assert not by_words.algorithm.needs_stored_logprobs
    assert by_words.algorithm.distillation.top_k == 64


def test_a_method_that_is_not_learned_from_needs_nothing() -> None:
    remax = (*TEACHER, "algorithm.advantage.kind=remax")
    assert not loaded(*remax).algorithm.needs_baselines
    assert loaded(*remax, "algorithm.distillation.task_weight=0.5").algorithm.needs_baselines


def test_an_algorithm_comes_back_from_a_commit_as_it_was() -> None:
    algorithm = loaded(*TEACHER, WORDS).algorithm
    again = recorded_algorithm(algorithm.model_dump(mode="json"))
    assert isinstance(again, DistillAlgorithm)
    assert again == algorithm
    assert type(recorded_algorithm(AlgorithmConfig().model_dump(mode="json"))) is AlgorithmConfig


def test_every_setting_has_a_meaning_and_other_flows_have_none_of_these() -> None:
    found = {name: meaning for name, kind, _, meaning in fields(DistillConfig) if kind}
    assert [n for n, meaning in found.items() if not meaning and not n.endswith("kind")] == []
    others = {name for name, *_ in fields(GRPOConfig)}
    assert {name for name in set(found) - others if "distill" not in name} == {
        name for name in found if name.startswith(("teacher", "off_policy"))
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "teachers: a value is needed"),
        (["teachers.a.version=x", "teachers.a.model.kind=random"], "one of teachers has a model and the version x"),
        (["teachers={'a b': {version: x}}"], "a teacher named 'a b'"),
        (["teachers.a={}"], "one of teachers has none of them"),
        ([*TEACHER, "teachers.tutor.service=http://h:1"], "one of teachers has a model and the service http://h:1"),
        (["teachers.a.service=h:8200"], "teachers.NAME.service = h:8200 is no address of a service"),
        ([*TEACHER, "teachers.tutor.digest=xxh3:0"], "teachers.NAME.digest is of a service's weights"),
        ([*TEACHER, "teachers.other.version=run@3"], "Set teacher_column to a column"),
        ([*TEACHER, "teacher_column=who"], "there is one, tutor. Set teacher_column = null"),
        (["teachers.a.version=models:/x"], "teachers.a.version = 'models:/x'"),
        ([*TEACHER, "rewards.functions=[]", "algorithm.distillation.task_weight=1"], "rewards.functions is empty"),
        ([*TEACHER, "train.recompute_old_logprobs=false"], "of a teacher as an advantage"),
        ([*TEACHER, IN_VLLM, "rollout.temperature=0.7"], "at temperature 1 alone, and rollout.temperature = 0.7"),
        ([*TEACHER, IN_VLLM, "cluster.share_devices=true", "cluster.roles.rollout=train"],
         "does not give its devices back. Set teachers.tutor.engine.kind = fsdp"),
        ([*TEACHER, IN_VLLM, "teachers.other.model.kind=random", "teacher_column=who"],
         "teachers.other.engine.kind = fsdp, but teachers.tutor on the same workers runs in vLLM"),
        (["teachers.a.service=http://h:1", "teachers.a.engine.kind=vllm"], "is a service, which computes by FSDP"),
        ([*TEACHER, "rewards.functions=[]", "evaluation.source.kind=reasoning_gym",
          "evaluation.source.task=chain_sum", "evaluation.source.seed=9"], "tested by the task's rewards"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="^[^\n]+$") as error:
        loaded(*words)
    assert said in str(error.value)


def test_the_flow_process_imports_no_engine_library() -> None:
    code = (
        "import flows.distill, sys; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'tensordict') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_that_learns_from_rewards_alone_must_have_some() -> None:
    with pytest.raises(ConfigError, match="rewards.functions is empty"):
        load_recipe(GRPOConfig, "tiny", ["rewards.functions=[]"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.distillation.loss.kind=reverse_kl"], "loss.kind = reverse_kl takes them"),
        (["algorithm.distillation.task_weight=0.5"], "task_weight = 0.5 takes them"),
        (
            ["rollout.over_sampling=1.5", "rollout.shards=4"],
            "rollout.over_sampling = 1.5 takes them",
        ),
        (["off_policy.student_data_fraction=1.5"], "less than or equal to 1"),
        (["algorithm.distillation.loss={kind: jsd_topk, beta: 1}"], "less than 1"),
    ],
)
def test_what_takes_all_samples_for_the_students_is_refused(words: list[str], said: str) -> None:
    given = (*TEACHER, WORDS, "off_policy.column=answer")
    assert loaded(*given).off_policy is not None
    with pytest.raises(ConfigError, match=said):
        loaded(*given, *words)


def test_teachers_of_a_student_whose_workers_come_and_go_have_their_own_pool() -> None:
    config = loaded(*TEACHER, "train.engine=elastic")
    assert config.cluster.roles.teacher in config.used_pools
    assert config.cluster.roles.teacher != config.cluster.roles.actor
    assert set(config.features) == {"elastic", "teachers"}


def test_how_a_teacher_is_asked_may_change_on_resuming(tmp_path: Path) -> None:
    flow, files = "flows.distill:distill", RunStore(Store(f"file://{tmp_path}"), "mine")
    config = loaded(SERVICE)
    files.write_run({"config": config.model_dump(mode="json"), "flow": flow})
    for word in ("teachers.tutor.key_variable=KEY", "teachers.tutor.patience=7"):
        check_unchanged(files, loaded(SERVICE, word), flow)
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.distillation\.coefficient\. .*may change: .*teachers\.\*\.service",
    ):
        check_unchanged(files, loaded(SERVICE, "algorithm.distillation.coefficient=0.5"), flow)


def test_teachers_have_a_pool_like_the_actors() -> None:
    read = read_recipe(DistillConfig, "tiny", [*TEACHER, "cluster.pools.train.threads=3"])
    assert read.cluster.roles.teacher is None
    resolved = resolve(read, SLOW)
    assert [str(one) for one in resolved.decisions] == [
        "cluster.pools.teacher = {threads: 3}: like the actor's, with one worker",
        "cluster.roles.teacher = teacher: teachers have a pool of their own",
    ]
    assert list(resolved.settings.cluster.pools) == ["teacher", *read.cluster.pools]


def test_a_rule_looks_at_settings_as_they_will_be() -> None:
    """The teacher's pool, which is to be made, is no pool that the actor shares."""
    with pytest.raises(ValueError, match=r"no two roles share a pool .*teacher on teacher"):
        read_recipe(DistillConfig, "tiny", [*TEACHER, "cluster.share_devices=true"])


def test_a_service_of_teachers_computes_in_float32_too() -> None:
    words = ["model.kind=random"]
    read = change(TeacherServiceConfig, {}, words)
    assert read.train.compute_dtype == "bfloat16"
    assert resolve(read, SLOW).settings.train.compute_dtype == "float32"
    assert resolve(read, FAST).settings == read
    on_gpus = change(TeacherServiceConfig, {}, [*words, "cluster.pools.teacher.gpus=1"])
    assert resolve(on_gpus, SLOW).decisions == ()


def test_help_on_all_has_what_a_teacher_may_have() -> None:
    lines = help_on(DistillConfig, "all").splitlines()
    assert any(line.startswith("  teachers.NAME.") for line in lines)
