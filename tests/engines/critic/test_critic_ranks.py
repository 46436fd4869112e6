"""Critics on several ranks: what they load, what of it they read, and sequences that they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.model import PretrainedModel
from engines.critic.engine import Critic, CriticRank
from engines.models.checkpoints import load_for_training
from engines.train.contract import ColumnsResult, TrainSpec
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from tests.engines.train.model.test_loading import (
    BYTES_MODEL,
    CASES,
    digest_of,
    directories,  # noqa: F401
    read_in_joining,
)
from tests.engines.train.model.test_sequence_parallel import check_columns, grouped_model
from tests.engines.train.train_ranks import Ranks, samples, spec, stored
from tests.ports import free_ports


def load_all(
    rank: int,
    world: int,
    _: list[int],
    ports: list[int],
    folder: Path,
    models: dict[str, Path],
) -> dict[str, str]:
    """Case -> digest of the weights."""
    digests = {}
    for case, port in zip(CASES, ports, strict=True):
        model = PretrainedModel(path=str(models[case]))
        engine = CriticRank(spec(folder, role="critic").model_copy(update={"model": model}))
        engine.join(rank, world, "127.0.0.1", port, 1, 60.0)
        digests[case] = engine.digest()
        engine.close()
    return digests


@pytest.mark.parametrize(
    "world", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 3))]
)
def test_weights_are_the_decoders_and_a_head_of_zeros(
    world: int,
    directories: dict[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    ports = free_ports(len(CASES))
    if world == 1:
        parts = [load_all(0, 1, [], ports, tmp_path, directories)]
    else:
        ranks = Ranks(world)
        try:
            parts = ranks.run(load_all, ports, tmp_path, directories)
        finally:
            ranks.close()
    wanted = {case: digest_of(Critic(load_for_training(directories[case]))) for case in CASES}
    assert all(part == wanted for part in parts)


def load_and_count(rank: int, world: int, ports: list[int], folder: Path) -> int:
    of = spec(folder, role="critic").model_copy(update={"model": BYTES_MODEL})
    return read_in_joining(CriticRank(of), rank, world, ports)


def test_a_rank_reads_its_share(tmp_path: Path) -> None:
    pair = Ranks(2)
    try:
        read = pair.run(load_and_count, tmp_path)
    finally:
        pair.close()
    (file,) = (tmp_path / "models").glob("*/model.safetensors")
    size, small = file.stat().st_size, 2**17  # small: headers and config.json
    assert all(size // 2 - small < joining < size // 2 + small for joining in read)


def values_of(
    rank: int, world: int, ports: list[int], base: TrainSpec, shared: int, batch: BatchRef
) -> ColumnsResult:
    train = base.train.model_copy(update={"sequence_parallel": shared})
    critic = CriticRank(base.model_copy(update={"train": train, "run": f"of-{world}-{shared}"}))
    critic.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    return critic.values(batch, f"values-{shared}.safetensors")


def test_ranks_that_share_sequences_write_values_once_and_in_order(tmp_path: Path) -> None:
    base = spec(tmp_path, role="critic", micro_batch_tokens=64, gradient_checkpointing=True)
    base = base.model_copy(update={"model": grouped_model(tmp_path)})
    batch, store = stored(tmp_path, samples(1, groups=5)), Store(str(tmp_path / "store"))
    alone = [values_of(0, 1, free_ports(1), base, 1, batch)]
    four = Ranks(4)
    try:
        for shared in (2, 4):
            found = four.run(values_of, base, shared, batch)
            check_columns(store, "values", alone, found)
    finally:
        four.close()
