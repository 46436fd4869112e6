"""The checks of teachers before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.families import make
from configs.distill import DistillConfig
from configs.model import RandomModel
from configs.recipe import load_recipe
from engines.models.checkpoints import materialize
from tasks.run.features import PreflightError
from tasks.run.preflight import check
from tasks.run.run import _shards_of
from tasks.teachers.checks import check_teachers
from tests.tasks.memory.settings import GPU, plan
from tests.tasks.memory.settings import words as policy_words

Check = Callable[..., str]
GIVEN = (
    "teachers.t.model={kind: random}",
    "algorithm.distillation.loss={kind: jsd_topk, top_k: 8}",
)


@pytest.fixture
def checked(tmp_path: Path) -> Check:
    """Checks the teachers of the recipe `tiny` with these words."""

    def check(*words: str) -> str:
        config = load_recipe(DistillConfig, "tiny", [f"store.uri=file://{tmp_path}/store", *words])
        (found,) = check_teachers(config)
        return found.found

    return check


def test_a_checkpoint_with_the_students_tokens_is_found_good(
    checked: Check, tmp_path: Path
) -> None:
    folder = materialize(RandomModel(), tmp_path / "models")
    model = (f"model={{kind: pretrained, path: '{folder}'}}", f"teachers.t.model.path={folder}")
    assert "t: the student's tokenizer, " in checked("teachers.t.model.kind=pretrained", *model)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["teachers.t.model={kind: random, max_positions: 64}"], "= 144 tokens, and the teacher t reads 64"),
        (["teachers.t.model={kind: random, max_positions: 144}", "teachers.t.engine.kind=vllm"],
         "the teacher t reads 144, with one more that vLLM draws"),
        (["teachers.t.model={kind: random}", "algorithm.distillation.loss={kind: reverse_kl_topk, top_k: 101}"],
         "top_k = 101, and the teacher t has 101 words"),
        (["teachers.t.model={kind: pretrained, path: ./none}"], "teachers.t.model.path = ./none: no such file"),
        (["teachers.t.version=gone@3"], "teachers.t.version = gone@3: Run gone has no committed step"),
        (["teachers.a.model={kind: random}", "teachers.b.model={kind: random}", "teacher_column=answer"],
         "Row 0 of reasoning_gym/chain_sum has answer = "),
        (["teachers.a.model={kind: random}", "teachers.b.model={kind: random}", "teacher_column=who"], "who"),
        ([*GIVEN, "off_policy.column=none"], "none"),
        ([*GIVEN, "off_policy.column=answer"], "Row 0 of reasoning_gym/chain_sum has answer = "),
    ],
)  # fmt: skip
def test_a_teacher_that_does_not_fit_is_one_sentence(
    words: list[str], said: str, checked: Check
) -> None:
    with pytest.raises(ValueError, match="^[^\n]+$") as error:
        checked(*words)
    assert said in str(error.value)


def test_the_words_of_a_teacher_of_any_family_are_known(checked: Check, tmp_path: Path) -> None:
    model = make("Gemma 2", tmp_path / "teacher")
    loss = "algorithm.distillation.loss={kind: reverse_kl_topk, top_k: 256}"
    with pytest.raises(ValueError, match="top_k = 256, and the teacher t has 256 words"):
        checked(f"teachers.t.model={{kind: pretrained, path: {model}}}", loss)


def test_another_tokenizer_is_named_by_its_first_difference(checked: Check, tmp_path: Path) -> None:
    folder, other = materialize(RandomModel(), tmp_path / "models"), tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer.json":
            text = text.replace(b'"a":', b'"\xc3\xa4":')
        (other / file.name).write_bytes(text)
    with pytest.raises(ValueError, match="^[^\n]+$") as error:
        checked(
            f"model={{kind: pretrained, path: '{folder}'}}",
            f"teachers.t.model={{kind: pretrained, path: '{other}'}}",
        )
    assert "The teacher t has another tokenizer than the student" in str(error.value)
    assert "the token 'a' is none of the teacher's and has the id 14 of the student's" in str(
        error.value
    )


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], None),
        (["teachers.t.model.hidden_size=40"], "or set teachers.t.engine.kind = fsdp"),
        (["teachers.t.engine.kv_cache_gib=1e-5"], "Set teachers.t.engine.kv_cache_gib higher"),
        (["cluster.pools.teacher.gpus=2"], "teachers.t.engine.tensor_parallel_size = 1 is not the number"),
    ],
)  # fmt: skip
def test_a_teacher_in_vllm_is_checked_as_an_engine_that_samples(
    words: list[str], said: str | None, tmp_path: Path
) -> None:
    teacher = ["teachers.t.model.kind=random", "teachers.t.engine.kind=vllm"]
    config = load_recipe(DistillConfig, "tiny", [*teacher, f"store.uri={tmp_path}", *words])
    if said is None:
        found = {one.check: one.found for one in check(config) if one.check != "memory"}
        assert "vllm" in found["packages"] and "teacher t in vLLM in float32" in found["rollout"]
        return
    with pytest.raises(PreflightError, match="^[^\n]+$") as error:
        check(config)
    assert said in str(error.value)


def test_the_memory_plan_counts_a_teacher_in_vllm_by_its_own_settings() -> None:
    words = ["teachers.t.model.kind=random", "teachers.t.engine={kind: vllm, kv_cache_gib: 3}"]
    config = load_recipe(DistillConfig, "tiny", words)
    assert "teacher t, each engine: weights 0 MiB, keys and values 3.0 GiB" in plan(config)
    with pytest.raises(ValueError, match=r"Set teachers.t.engine.kv_cache_gib, on a GPU"):
        plan(load_recipe(DistillConfig, "tiny", [words[0], words[1].replace("3}", "9999}")]))
    gpu = [
        "cluster.pools.teacher={workers: 1, gpus: 1, gpu_memory_gib: 80}",
        "rollout.dtype=bfloat16",
    ]
    (line,) = [
        one
        for one in plan(load_recipe(DistillConfig, "tiny", [*words, *gpu]))
        if "GPU of pool teacher" in one
    ]
    assert line.startswith("a GPU of pool teacher: 68.0 GiB of 80.0 GiB")


def test_the_memory_plan_counts_each_teacher_on_its_pool() -> None:
    large = "{kind: random, layers: 8, hidden_size: 1024, heads: 16, max_positions: 512}"
    words = [f"teachers.one.model={large}", "teachers.two.model.kind=random", "teacher_column=who"]
    config = load_recipe(DistillConfig, "tiny", words)
    lines = {line.partition(",")[0]: line for line in plan(config)}
    assert {"actor", "teacher one", "teacher two"} <= set(lines)
    assert "optimizer" not in lines["teacher one"]
    slurm = ["cluster.kind=slurm", "cluster.host=lo", "store.uri=file:///shared"]
    small = [*words, *slurm, "cluster.pools.teacher={workers: 1, memory_gib: 0.1}"]
    with pytest.raises(ValueError, match="Set cluster.roles.teacher to a pool with more workers"):
        plan(load_recipe(DistillConfig, "tiny", small))


def test_a_teacher_in_vllm_needs_room_too(tmp_path: Path) -> None:
    policy_words(tmp_path, "7b")  # writes its config.json
    where = f"cluster.pools.teacher={{workers: 1, gpus: 1, gpu_memory_gib: {GPU}}}"

    def of(share: float) -> DistillConfig:
        engine = f"teachers.t.engine={{kind: vllm, gpu_memory_utilization: {share}}}"
        model = f"teachers.t.model={{kind: pretrained, path: '{tmp_path / '7b'}'}}"
        return load_recipe(DistillConfig, "tiny", [engine, model, where, "rollout.dtype=bfloat16"])

    with pytest.raises(ValueError, match=r"^By the memory plan teacher t's vLLM has") as caught:
        plan(of(0.1))
    assert str(caught.value).endswith(
        "Set teachers.t.engine.gpu_memory_utilization to 0.18 or more."
    )
    plan(of(0.18))


def test_teachers_share_the_task_runs_of_a_step() -> None:
    words = ["cluster.pools.cpu={workers: 64, slots: 4}", "teachers.t.model.kind=random"]
    config = load_recipe(DistillConfig, "tiny", words)
    assert config.sharded_stages == 3
    assert 3 * len(_shards_of(config).ranges(4096)) == 48
