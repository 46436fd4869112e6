"""A teacher's engine: its scores, and the updates that they make, against plain formulas."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from configs.algorithm.distillation import DistillAlgorithm
from configs.model import Model, PretrainedModel, RandomModel
from engines.models.checkpoints import materialize
from engines.train.contract import ColumnsResult, LogprobRequest, TeachRequest, UpdateRequest
from engines.train.fsdp_engine import FSDPEngine
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from tests.engines.train import naive_training as naive
from tests.engines.train.conftest import Join, Make
from tests.engines.train.train_ranks import (
    MODEL,
    TEMPERATURE,
    samples,
    spec,
    stored,
    update_of,
)

TEACHER = MODEL.model_copy(update={"seed": MODEL.seed + 1})
K = 5


def teacher(join: Join, tmp_path: Path, model: Model) -> FSDPEngine:
    facts = {"model": model, "student": MODEL, "name": "t"}
    return join(spec(tmp_path, role="teacher", micro_batch_tokens=64).model_copy(update=facts))


def taught(join: Join, tmp_path: Path, model: RandomModel, batch: BatchRef, top_k: int) -> BatchRef:
    """The batch with its teacher's columns."""
    engine = teacher(join, tmp_path, model)
    part = engine.teach(
        TeachRequest(
            batch=batch,
            out_key=f"run/t{model.seed}-{top_k}.safetensors",
            temperature=TEMPERATURE,
            top_k=top_k,
        )
    )
    made = ColumnsResult.together([part]).batch
    assert made is not None
    return batch.with_columns(made)


def tables(model: torch.nn.Module, rows: list[naive.Sample]) -> list[Tensor]:
    """Log-probs of every word at each response token of each row, [R, V]."""
    found = []
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt, row.response]))[None]
        logits = model(input_ids=ids).logits[0] / TEMPERATURE
        first = len(row.prompt) - 1
        found.append(logits[first : first + len(row.response)].log_softmax(-1))
    return found


def binned(table: Tensor, ids: Tensor) -> Tensor:
    rest = table.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([table.gather(1, ids), rest], dim=-1)


def test_scores_equal_the_naive_ones(join: Join, tmp_path: Path) -> None:
    rows, store = samples(), Store(str(tmp_path / "store"))
    batch = taught(join, tmp_path, TEACHER, stored(tmp_path, rows), K)
    with torch.no_grad():
        wanted = tables(naive.load(str(materialize(TEACHER, tmp_path / "models"))), rows)
    table = torch.cat(wanted)
    labels = torch.cat([torch.from_numpy(row.response) for row in rows])
    logprobs, offsets = batch.fetch_numpy(store, "teacher_logprobs")
    assert offsets is not None and np.diff(offsets).tolist() == [len(row.response) for row in rows]
    own = table.gather(1, labels[:, None])[:, 0].numpy()
    np.testing.assert_allclose(logprobs, own, atol=2e-5)
    ids, _ = batch.fetch_numpy(store, "teacher_topk_ids")
    assert (ids.dtype, ids.shape) == (np.int32, (len(labels), K))
    assert torch.from_numpy(ids.astype(np.int64)).equal(table.topk(K).indices)
    bins = binned(table, table.topk(K).indices).numpy()
    words, _ = batch.fetch_numpy(store, "teacher_topk_logprobs")
    tail, _ = batch.fetch_numpy(store, "teacher_tail_logprobs")
    np.testing.assert_allclose(words, bins[:, :-1], atol=2e-5)
    np.testing.assert_allclose(tail, bins[:, -1], atol=2e-5)


@pytest.mark.parametrize("kind", ["forward_kl_topk", "reverse_kl_topk", "jsd_topk"])
def test_an_update_by_words_equals_the_naive_one(
    kind: str, join: Join, make: Make, tmp_path: Path
) -> None:
    rows = [replace(row, advantages=np.zeros_like(row.advantages)) for row in samples()]
    batch = taught(join, tmp_path, TEACHER, stored(tmp_path, rows), K)
    student = naive.load(str(materialize(MODEL, tmp_path / "models")))
    with torch.no_grad():
        theirs = tables(naive.load(str(materialize(TEACHER, tmp_path / "models"))), rows)
    total, count = torch.zeros(()), 0
    for row, own, other in zip(rows, tables(student, rows), theirs, strict=True):
        ids, mask = other.topk(K).indices, torch.from_numpy(row.mask).bool()
        p, q = binned(own, ids), binned(other, ids)
        m = (p.exp() / 2 + q.exp() / 2).log()
        pairs = {"forward_kl_topk": [(q, p)], "reverse_kl_topk": [(p, q)]}
        for first, second in (found := pairs.get(kind, [(q, m), (p, m)])):
            kl = (first.exp() * (first - second)).sum(-1)[mask].sum()
            total = total + kl / len(found)
        count += int(mask.sum())
    (0.5 * total / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in student.parameters()])
    algorithm = DistillAlgorithm.model_validate(
        {"distillation": {"loss": {"kind": kind, "top_k": K}, "coefficient": 0.5}}
    )
    metrics = make(micro_batch_tokens=64).update(update_of(batch, algorithm, 1)).metrics  # fmt: skip
    assert metrics[f"distillation/{kind}"] == pytest.approx(float(total.detach()) / count, rel=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert 0 < metrics["distillation/teacher_mass"] < 1


def test_a_student_that_is_its_teacher_is_not_moved(join: Join, make: Make, tmp_path: Path) -> None:
    rows = [replace(row, advantages=np.zeros_like(row.advantages)) for row in samples()]
    store, plain = Store(str(tmp_path / "store")), stored(tmp_path, rows)
    engine = make(micro_batch_tokens=64)
    part = engine.logprobs(
        LogprobRequest(
            batch=plain,
            column="old_logprobs",
            out_key="run/old.safetensors",
            temperature=TEMPERATURE,
        )
    )
    assert part.batch is not None
    batch = taught(join, tmp_path, MODEL, plain, K)
    old, own = (
        ref.fetch_numpy(store, name)[0]
        for ref, name in ((part.batch, "old_logprobs"), (batch, "teacher_logprobs"))
    )
    np.testing.assert_allclose(own, old, atol=1e-6)
    algorithm = DistillAlgorithm.model_validate(
        {"distillation": {"loss": {"kind": "forward_kl_topk", "top_k": K}}}
    )
    moved = engine.update(update_of(batch, algorithm, 1)).metrics
    assert moved["train/grad_norm"] < 1e-5
    assert abs(moved["distillation/reverse_kl"]) < 1e-6


def test_a_teacher_of_other_tokens_is_refused_and_none_is_trained(
    join: Join, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    folder = materialize(MODEL, tmp_path / "models")
    other.mkdir()
    for file in folder.iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer_config.json":
            text = text.replace(b'"eos_token": "<eos>"', b'"eos_token": "<pad>"')
        (other / file.name).write_bytes(text)
    model = PretrainedModel(path=str(other))
    with pytest.raises(
        ValueError, match=r"'eos_token' has the id 0 of the teacher's and has the id 2"
    ):
        teacher(join, tmp_path, model)
    engine = teacher(join, tmp_path, TEACHER)
    with pytest.raises(ValueError, match="role teacher is frozen"):
        engine.update(
            UpdateRequest(
                step=1,
                batch=stored(tmp_path, samples()),
                algorithm=AlgorithmConfig(),
                temperature=1.0,
                max_new_tokens=8,
            )
        )


def test_rows_keep_their_words(join: Join, tmp_path: Path) -> None:
    """A batch in another order, and of some rows, has each row's own words."""
    store = Store(str(tmp_path / "store"))
    batch = taught(join, tmp_path, TEACHER, stored(tmp_path, samples()), K)
    order = [3, 0, 2]
    values, offsets = batch.fetch_numpy(store, "teacher_topk_ids")
    some, edges = batch.take(order).fetch_numpy(store, "teacher_topk_ids")
    assert offsets is not None and edges is not None
    for row, (start, stop) in zip(order, pairwise(edges), strict=True):
        assert some[start:stop].tolist() == values[offsets[row] : offsets[row + 1]].tolist()
