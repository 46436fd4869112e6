"""A teacher in vLLM: its scores against those of the train engine, and what it is not asked twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from configs.model import RandomModel
from configs.rollout import RolloutConfig
from configs.teachers import VllmTeaching
from engines.failures import WeightMismatch
from engines.rollout.contract import EngineDead, RolloutSpec
from engines.rollout.vllm_arguments import ScoredTokens
from engines.teachers.pool import SPARE_WORDS, VllmTeacherSpec
from engines.teachers.vllm_teacher import LEAST_TAIL, VllmTeacher, known_words, tails
from engines.train.contract import TeachRequest
from engines.train.fsdp_engine import FSDPEngine
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from tests.engines.train.train_ranks import MODEL, samples, spec, stored

TEACHER = MODEL.model_copy(update={"seed": MODEL.seed + 1})
K = 5
# Nats. Both compute in float32, and differ by the order of sums and by kernels.
TOLERANCE = 2e-4
COLUMNS = (
    "teacher_logprobs",
    "teacher_topk_ids",
    "teacher_topk_logprobs",
    "teacher_tail_logprobs",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("taught")


@pytest.fixture(scope="module")
def batch(folder: Path) -> BatchRef:
    return stored(folder, samples())


@pytest.fixture(scope="module")
def by_vllm(folder: Path) -> Iterator[VllmTeacher]:
    pytest.importorskip("vllm")
    engine = VllmTeacher(vllm_spec(folder, TEACHER))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def by_fsdp(folder: Path) -> Iterator[FSDPEngine]:
    facts = {"model": TEACHER, "student": MODEL, "name": "t"}
    engine = FSDPEngine(spec(folder, role="teacher").model_copy(update=facts))
    engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)
    yield engine
    engine.close()


def vllm_spec(folder: Path, model: RandomModel) -> VllmTeacherSpec:
    sampling = RolloutConfig(engine="transformers", dtype="float32")
    teaching = VllmTeaching(kv_cache_gib=0.1, max_sequences=8)
    return VllmTeacherSpec(
        engine=RolloutSpec(
            name="t",
            model=model,
            model_cache=str(folder / "models"),
            rollout=teaching.engine_of(sampling, K + SPARE_WORDS),
            store_uri=str(folder / "store"),
            max_model_len=64,
        ),
        student=MODEL,
        run="run",
    )


def columns(folder: Path, made: BatchRef) -> dict[str, NDArray[np.generic]]:
    store = Store(str(folder / "store"))
    return {name: made.fetch_numpy(store, name)[0] for name in COLUMNS}


@pytest.mark.vllm
@pytest.mark.slow
def test_scores_are_those_of_the_train_engine(
    by_vllm: VllmTeacher, by_fsdp: FSDPEngine, batch: BatchRef, folder: Path
) -> None:
    part = by_fsdp.teach(
        TeachRequest(batch=batch, out_key="run/fsdp.safetensors", temperature=1.0, top_k=K)
    )
    assert part.batch is not None
    digest = by_vllm.digest()
    assert digest == by_fsdp.digest("float32")  # so a run's records say the same of both
    made = by_vllm.teach(batch, "run/vllm.safetensors", K, digest)
    own, theirs = columns(folder, part.batch), columns(folder, made)
    assert [(theirs[name].dtype, theirs[name].shape) for name in COLUMNS] == [
        (own[name].dtype, own[name].shape) for name in COLUMNS
    ]
    # Two words of nearly equal probability may change places; no such are in these samples.
    assert theirs["teacher_topk_ids"].tolist() == own["teacher_topk_ids"].tolist()
    for name in COLUMNS:
        np.testing.assert_allclose(theirs[name], own[name], atol=TOLERANCE, err_msg=name)
    store = Store(str(folder / "store"))
    rows = [ref.fetch_numpy(store, "teacher_logprobs")[1] for ref in (made, part.batch)]
    assert rows[0] is not None and rows[1] is not None
    assert rows[0].tolist() == rows[1].tolist()
    assert 0 in [last - first for first, last in pairwise(rows[0].tolist())]  # an empty response


@pytest.mark.vllm
@pytest.mark.slow
def test_without_words_the_tokens_own_alone_are_written(
    by_vllm: VllmTeacher, batch: BatchRef, folder: Path
) -> None:
    alone = by_vllm.teach(batch, "run/alone.safetensors", 0, by_vllm.digest())
    assert alone.names == ("teacher_logprobs",) or list(alone.names) == ["teacher_logprobs"]
    with_words = by_vllm.teach(batch, "run/again.safetensors", K, by_vllm.digest())
    store = Store(str(folder / "store"))
    one, other = (ref.fetch_numpy(store, "teacher_logprobs")[0] for ref in (alone, with_words))
    np.testing.assert_allclose(one, other, atol=TOLERANCE)
    none = by_vllm.teach(batch.take([1]), "run/none.safetensors", K, by_vllm.digest())
    assert none.fetch_numpy(store, "teacher_topk_ids")[0].shape == (0, K)


@pytest.mark.vllm
@pytest.mark.slow
def test_scores_of_other_weights_are_refused(by_vllm: VllmTeacher, batch: BatchRef) -> None:
    with pytest.raises(WeightMismatch, match=r"The teacher t holds the weights \w+.*, not other"):
        by_vllm.teach(batch, "run/other.safetensors", K, "other")


@pytest.mark.vllm
@pytest.mark.slow
def test_one_whose_vllm_is_killed_says_so_and_another_scores_the_same(
    by_vllm: VllmTeacher, batch: BatchRef, folder: Path
) -> None:
    import psutil

    first = by_vllm.teach(batch, "run/first.safetensors", K, by_vllm.digest())
    dying = VllmTeacher(vllm_spec(folder, TEACHER))
    digest = dying.digest()
    for pid in dying.pids:
        psutil.Process(pid).kill()
    with pytest.raises(EngineDead):
        dying.teach(batch, "run/second.safetensors", K, digest)
    with pytest.raises(EngineDead):
        dying.digest()
    dying.close()
    again = VllmTeacher(vllm_spec(folder, TEACHER))
    second = again.teach(batch, "run/second.safetensors", K, again.digest())
    again.close()
    for name, values in columns(folder, first).items():
        np.testing.assert_allclose(values, columns(folder, second)[name], atol=1e-5)


def test_words_that_the_student_does_not_know_are_passed_over() -> None:
    scored = ScoredTokens(
        logprobs=np.array([-1.0, -2.0], np.float32),
        ids=np.array([[9, 3, 4, 1], [2, 0, 9, 1]], np.int32),
        words=np.log(np.array([[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]], np.float32)),
    )
    found = known_words(scored, 5, 2)
    assert found.ids.tolist() == [[3, 4], [2, 0]]
    np.testing.assert_allclose(np.exp(found.words), [[0.3, 0.2], [0.4, 0.3]], rtol=1e-6)
    assert found.logprobs.tolist() == [-1.0, -2.0]
    assert known_words(scored, None, 2).ids.tolist() == [[9, 3], [2, 0]]
    with pytest.raises(ValueError, match="Of 4 likeliest words of a teacher fewer than 3 are"):
        known_words(scored, 3, 3)


def test_a_tail_is_what_the_words_leave_and_never_less_than_float32_can_tell() -> None:
    words = np.log(np.array([[3 / 4, 1 / 8], [1.0, 1e-9], [1.0, 1e-4]], np.float32))
    np.testing.assert_allclose(np.exp(tails(words)), [1 / 8, LEAST_TAIL, LEAST_TAIL], rtol=1e-5)
    assert tails(np.zeros((0, 2), np.float32)).shape == (0,)
