"""A trainer that begins at a step of another run: with its whole state, or with its weights alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from configs.algorithm.algorithm import AlgorithmConfig
from configs.model import RandomModel
from engines.failures import WeightMismatch
from engines.train.contract import TrainEngine, TrainSpec
from engines.train.fsdp_engine import FSDPEngine
from engines.train.trainer import Trainer, TrainerSettings
from engines.workers.engine import EngineSpec, join_of
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.commit_log import Commit, commit, read_commit
from storage.runs.forks import begin_at
from storage.runs.run_store import ORIGIN_FIELD, RunStore
from storage.runs.snapshots import has_base, snapshots
from storage.runs.weights import WeightsRef
from tests.engines.train.train_ranks import MAX_NEW_TOKENS, TEMPERATURE, samples, spec, stored

PLAIN = AlgorithmConfig()


class OneRank:
    """A gang of one rank, in this process."""

    def __init__(self, payload: TrainSpec) -> None:
        self.spec = EngineSpec.of("engines.train.fsdp_engine:FSDPEngine", payload, TrainEngine)
        self.generation = 0
        self.engine: FSDPEngine | None = None

    @property
    def formed(self) -> bool:
        return self.engine is not None

    def form(self, cancel: object) -> None:
        self.close()
        self.generation += 1
        self.engine = FSDPEngine(self.spec.payload)
        self.engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)

    def call(self, method: Any, call_id: object, cancel: object, **arguments: Any) -> Any:
        return join_of(method)([methodcaller(method.__name__, **arguments)(self.engine)])

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def trainer_of(tmp_path: Path) -> Iterator[MakeTrainer]:
    gangs = []

    def make(run: str, **train: Any) -> Trainer:
        gangs.append(OneRank(spec(tmp_path, run, **train)))
        return Trainer(
            gangs[-1],  # type: ignore[arg-type]
            RunStore(Store(str(tmp_path / "store")), run),
            TrainerSettings(epoch=1, temperature=TEMPERATURE, max_new_tokens=MAX_NEW_TOKENS),
        )

    yield make
    for gang in gangs:
        gang.close()


@pytest.fixture
def batch(tmp_path: Path) -> BatchRef:
    return stored(tmp_path, samples())


@pytest.fixture
def parent(tmp_path: Path, trainer_of: MakeTrainer, batch: BatchRef) -> RunStore:
    """Two committed updates without a snapshot."""
    run = RunStore(Store(str(tmp_path / "store")), "run")
    run.write_run({})
    trainer = trainer_of("run")
    before = trainer.settle(0, "float32")
    for step in (1, 2):
        trainer.update(step, batch, PLAIN)
        after = trainer.settle(step, "float32")
        record = Commit(
            step=step,
            parent=step - 1,
            refs={"batch": batch},
            version_in=before,
            version_out=after,
            algorithm=PLAIN.model_dump(mode="json"),
        )
        before = commit(run, record).version_out
    return run


def version(run: RunStore, number: int) -> WeightsRef:
    return read_commit(run, number).version_out


def child_of(parent: RunStore, name: str, step: int, **options: bool) -> RunStore:
    child = RunStore(parent.store, name)
    child.write_run({ORIGIN_FIELD: begin_at(parent, step, **options).model_dump(mode="json")})
    return child


def test_weights_alone_with_a_fresh_optimizer(
    parent: RunStore, trainer_of: MakeTrainer, batch: BatchRef
) -> None:
    child_of(parent, "next", 2, fork=False, trainer_state=False)
    trainer = trainer_of("next")
    trainer.update(1, batch, PLAIN)
    first = trainer.digest(1, "float32")
    trainer.at(0)  # back to the start, with the optimizer fresh again
    assert trainer.digest(0, "float32") == version(parent, 2).digest
    assert trainer.settle(0, "float32").digest == version(parent, 2).digest
    trainer.update(1, batch, PLAIN)
    assert trainer.digest(1, "float32") == first


def test_a_fork_between_snapshots_replays_under_its_parents_settings(
    parent: RunStore, trainer_of: MakeTrainer, batch: BatchRef
) -> None:
    child = child_of(parent, "fork", 1, fork=True)
    assert not has_base(child, 1)
    trainer_of("run").snapshot(1, child.run, 1)
    assert snapshots(child) == [1]
    trainer = trainer_of("fork", learning_rate=1e-3)
    trainer.at(1)
    assert trainer.digest(1, "float32") == version(parent, 1).digest
    trainer.update(2, batch, PLAIN)
    assert trainer.digest(2, "float32") != version(parent, 2).digest  # another learning rate
    same = trainer_of("fork")
    same.update(2, batch, PLAIN)
    assert same.digest(2, "float32") == version(parent, 2).digest


def test_the_state_goes_on_in_a_new_run(
    parent: RunStore, trainer_of: MakeTrainer, batch: BatchRef
) -> None:
    trainer_of("run").snapshot(1)
    child_of(parent, "next", 1, fork=False)
    trainer = trainer_of("next")
    trainer.at(0)
    assert trainer.base == 0
    assert trainer.digest(0, "float32") == version(parent, 1).digest
    trainer.update(1, batch, PLAIN)
    assert trainer.digest(1, "float32") == version(parent, 2).digest


def test_what_differs_is_named(parent: RunStore, trainer_of: MakeTrainer) -> None:
    trainer = trainer_of("run")
    equal = trainer.compare(2, version(parent, 2), "float32")
    assert (equal.digest, equal.differing) == (version(parent, 2).digest, ())
    found = trainer.compare(2, version(parent, 1), "float32")
    assert found.digest == version(parent, 2).digest
    assert found.differing[0].name == "model.embed_tokens.weight"
    assert len(found.differing) <= found.tensors
    assert 0 < found.differing[0].largest < 0.1
    rounded = trainer.compare(2, version(parent, 2), "bfloat16")
    assert rounded.digest == trainer.digest(2, "bfloat16")
    assert len(rounded.differing) == rounded.tensors


def test_weights_of_another_model_are_refused(
    tmp_path: Path, parent: RunStore, trainer_of: MakeTrainer
) -> None:
    child_of(parent, "wide", 2, fork=False, trainer_state=False)
    trainer = trainer_of("wide")
    payload = spec(tmp_path, "wide").model_copy(
        update={"model": RandomModel(layers=3, hidden_size=64, heads=2, seed=5)}
    )
    trainer._spec = EngineSpec.of("engines.train.fsdp_engine:FSDPEngine", payload, TrainEngine)
    with pytest.raises(WeightMismatch, match=r"has no tensor model\.layers\.2"):
        trainer.at(0)
