"""Two ranks, apart or sharing sequences, score and learn words as one rank does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from configs.algorithm.distillation import DistillAlgorithm
from engines.train.contract import ColumnsResult, TeachRequest, TrainSpec, UpdateResult
from engines.train.fsdp_engine import FSDPEngine
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from tests.engines.train.train_ranks import (
    MODEL,
    TEMPERATURE,
    Ranks,
    samples,
    spec,
    stored,
    update_of,
)
from tests.ports import free_ports

K = 4
WORDS = DistillAlgorithm.model_validate(
    {"distillation": {"loss": {"kind": "reverse_kl_topk", "top_k": K}}}
)
COLUMNS = ("logprobs", "topk_ids", "topk_logprobs", "tail_logprobs")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank did."""

    taught: ColumnsResult
    update: UpdateResult | None


def scenario(
    rank: int, world: int, ports: list[int], base: TrainSpec, shared: int, batch: BatchRef
) -> Seen:
    """A teacher's pass; and an update, where the batch has been taught."""
    train = base.train.model_copy(update={"sequence_parallel": shared})
    student = base.model_copy(update={"train": train, "run": f"of-{world}-{shared}"})
    seven = MODEL.model_copy(update={"seed": 7})
    facts = {"role": "teacher", "model": seven, "student": MODEL, "name": "t"}
    teacher = FSDPEngine(student.model_copy(update=facts))
    teacher.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    taught = teacher.teach(
        TeachRequest(
            batch=batch, out_key=f"t-{world}-{shared}.safetensors", temperature=TEMPERATURE, top_k=K
        )
    )
    if "teacher_topk_ids" not in batch.names:
        return Seen(taught=taught, update=None)
    engine = FSDPEngine(student)
    engine.join(rank, world, "127.0.0.1", ports[1], 1, 60.0)
    update = engine.update(update_of(batch, WORDS, 1))
    return Seen(taught=taught, update=update)


@pytest.mark.slow  # processes that import torch
def test_ranks_score_and_learn_words_as_one_does(tmp_path: Path) -> None:
    base, store = spec(tmp_path, micro_batch_tokens=64), Store(str(tmp_path / "store"))
    plain = stored(tmp_path, samples(1, groups=5))
    alone = scenario(0, 1, free_ports(4), base, 1, plain).taught.batch
    assert alone is not None
    batch = plain.with_columns(alone)
    one = scenario(0, 1, free_ports(4), base, 1, batch).update
    assert one is not None
    two = Ranks(2)
    try:
        for shared in (1, 2):
            seen = two.run(scenario, base, shared, batch)
            found = ColumnsResult.together([rank.taught for rank in seen]).batch
            assert found is not None
            for name in COLUMNS:
                ours, theirs = (r.fetch_numpy(store, f"teacher_{name}")[0] for r in (found, alone))
                np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)
            for rank in seen:
                assert rank.update is not None
                for name in ("train/grad_norm", "train/loss", "distillation/teacher_mass"):
                    assert rank.update.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4)
    finally:
        two.close()
