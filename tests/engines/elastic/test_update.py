"""An elastic update gives FSDP's gradient to the bit, whoever computed what, in whatever order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from engines.elastic import worker
from engines.train.contract import LogprobRequest
from engines.train.fsdp_engine import FSDPEngine
from storage.objects.store import Store
from storage.runs.gradients import GradientsRefused, read_gradient, remove_gradients
from storage.runs.run_store import RunStore
from tests.engines.elastic.conftest import PLAIN, Elastic
from tests.engines.train.batching.test_forest import batch_of, forests
from tests.engines.train.conftest import Make
from tests.engines.train.naive_training import Sample
from tests.engines.train.train_ranks import samples, spec, stored, update_of

MakeElastic = Callable[..., Elastic]


def shuffled(seed: int) -> Callable[[int], list[int]]:
    return lambda count: random.Random(seed).sample(range(count), count)


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {n: v for n, v in metrics.items() if "second" not in n}


def fsdp(
    engine: FSDPEngine, tmp_path: Path, rows: list[Sample], steps: int = 2
) -> tuple[str, dict[str, float]]:
    for step in range(1, steps + 1):
        result = engine.update(update_of(stored(tmp_path, rows), PLAIN, step))
    return engine.digest("float32"), dict(result.metrics)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"max_grad_norm": 1e9},
        {"mini_batches": 2, "epochs": 2},
        {"tree_training": True},
        {"optimizer_dtype": "bfloat16"},
        {"optimizer_dtype": "8bit"},
        {"compute_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_weights_are_fsdps_to_the_bit_where_units_are_its_micro_batches(
    changed: dict[str, object], elastic: MakeElastic, make: Make, tmp_path: Path
) -> None:
    rows = samples()
    if "epochs" in changed:
        for row in rows:
            object.__setattr__(row, "old", np.full(len(row.response), -4.0, np.float32))
    digest, metrics = fsdp(make(micro_batch_tokens=64, **changed), tmp_path, rows)
    with_workers = elastic(workers=2, run="other", **changed)
    batch = stored(tmp_path, rows)
    for step in (1, 2):
        result = with_workers.update(batch, step, shuffled(step))
    assert with_workers.aggregator.digest("float32") == digest
    assert timeless(dict(result.metrics)) == timeless(metrics)


def test_forests_are_learnt_as_fsdp_does_to_the_bit(
    elastic: MakeElastic, make: Make, tmp_path: Path
) -> None:
    batch = batch_of(tmp_path, forests(6, 12))
    alone = make(micro_batch_tokens=64)
    metrics = alone.update(update_of(batch, PLAIN, 1)).metrics
    with_workers = elastic(workers=2, run="other")
    result = with_workers.update(batch, 1, shuffled(1))
    assert with_workers.aggregator.digest("float32") == alone.digest("float32")
    assert timeless(dict(result.metrics)) == timeless(dict(metrics))


def test_any_number_of_workers_gives_the_same_weights(elastic: MakeElastic, tmp_path: Path) -> None:
    batch, found = stored(tmp_path, samples()), set()
    for workers in (1, 2, 3):
        one = elastic(workers=workers, run=f"with-{workers}")
        for step in (1, 2, 3):
            one.update(batch, step, shuffled(workers * 10 + step))
        found.add(one.aggregator.digest("float32"))
    assert len(found) == 1


def test_a_unit_of_several_micro_batches_is_their_sum(elastic: MakeElastic, tmp_path: Path) -> None:
    batch, found = stored(tmp_path, samples()), []
    for name, settings in (
        ("small", {"unit_tokens": 64, "micro_batch_tokens": 64}),
        ("large", {"unit_tokens": 4096, "micro_batch_tokens": 64}),
    ):
        one = elastic(run=name, max_grad_norm=1e9, **settings)
        one.open(batch)
        offered = one.aggregator.offer(1)
        assert (len(offered.units) == 1) == (name == "large")
        for unit in offered.units:
            one.compute(0, offered, unit.number, batch)
        assert one.aggregator.apply().refused == {}
        found.append(one.aggregator.close_update().metrics["train/grad_norm"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_worker_that_joins_late_computes_what_the_first_would_have(
    elastic: MakeElastic, tmp_path: Path
) -> None:
    batch = stored(tmp_path, samples())
    alone = elastic(workers=1, run="alone")
    alone.update(batch, 1)
    alone.update(batch, 2)
    changing = elastic(workers=1, run="changing")
    changing.update(batch, 1)
    changing.open(batch, 2)
    offered = changing.aggregator.offer(2)
    changing.compute(0, offered, 0, batch)
    left = changing.workers.pop()  # with the weights of the version
    changing.workers.append(elastic(workers=1, run="changing").workers[0])  # with the model's own
    for unit in range(1, len(offered.units)):
        changing.compute(0, offered, unit, batch)
    assert changing.aggregator.apply().refused == {}
    changing.aggregator.close_update()
    left.close()
    assert changing.aggregator.digest("float32") == alone.aggregator.digest("float32")


def test_the_first_of_two_gradients_stands_and_both_are_equal(
    elastic: MakeElastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, one = stored(tmp_path, samples()), elastic(workers=2)
    one.open(batch)
    offered = one.aggregator.offer(1)
    files = RunStore(Store(str(tmp_path / "store")), "run")
    first = one.compute(0, offered, 0, batch)
    standing = read_gradient(files, offered.folder, 0)
    again = one.compute(1, offered, 0, batch)
    assert first.computed and not again.computed  # it was there already
    # The second began before the first had ended, and found no marker then.
    monkeypatch.setattr(worker, "read_gradient", lambda *_: None)
    late = one.compute(1, offered, 0, batch)
    assert late.computed and late.equal
    assert read_gradient(files, offered.folder, 0) == standing
    names = [key for key in files.store.list(offered.folder) if "/00000-" in key]
    assert names == [f"{offered.folder}/{standing.file}"]  # the loser's file is gone


def test_a_gradient_with_other_bits_is_told(
    elastic: MakeElastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, one = stored(tmp_path, samples()), elastic(workers=2)
    one.open(batch)
    offered = one.aggregator.offer(1)
    one.compute(0, offered, 0, batch)
    monkeypatch.setattr(worker, "read_gradient", lambda *_: None)
    late = one.compute(1, offered, 0, batch, temperature=0.9)
    assert not late.equal


def test_gradients_of_another_step_or_other_weights_are_refused_by_name(
    elastic: MakeElastic, tmp_path: Path
) -> None:
    batch, one = stored(tmp_path, samples()), elastic()
    files = RunStore(Store(str(tmp_path / "store")), "run")
    one.update(batch, 1)
    one.open(batch, 2)
    offered = one.aggregator.offer(2)
    for field, value in (("weights", "xxh3:0"), ("optimizer_step", 1), ("step", 1)):
        other = replace(offered, of=offered.of.model_copy(update={field: value}))
        with pytest.raises(GradientsRefused, match=f"its {field.replace('_', ' ')} is"):
            one.compute(0, other, 0, batch)
    for unit in offered.units:
        one.compute(0, offered, unit.number, batch)
    # Put there past the ticket: the aggregator looks too.
    wrong = read_gradient(files, offered.folder, 1)
    files.store.delete([f"{offered.folder}/00001.json"])
    stale = wrong.model_copy(update={"of": wrong.of.model_copy(update={"step": 1})})
    files.finish(f"{offered.folder}/00001.safetensors", stale.model_dump(mode="json"))
    before = one.aggregator.digest("float32")
    refused = one.aggregator.apply().refused
    assert list(refused) == [1] and "its step is 1, not 2" in refused[1]
    assert one.aggregator.digest("float32") == before
    one.compute(0, offered, 1, batch)
    assert one.aggregator.apply().refused == {}


def test_torn_missing_and_damaged_objects_are_computed_again(
    elastic: MakeElastic, tmp_path: Path
) -> None:
    batch = stored(tmp_path, samples())
    whole, torn = elastic(run="whole"), elastic(run="torn")
    whole.update(batch, 1)
    torn.open(batch)
    offered = torn.aggregator.offer(1)
    assert len(offered.units) >= 4
    for unit in offered.units:
        torn.compute(0, offered, unit.number, batch)
    files = RunStore(Store(str(tmp_path / "store")), "torn")
    damages = {
        0: lambda path: path.unlink(),
        1: lambda path: path.write_bytes(path.read_bytes()[:-100]),
        2: lambda path: path.write_bytes(path.read_bytes()[:-100] + b"x" * 100),
    }
    for unit, damage in damages.items():
        damage(
            tmp_path / "store" / offered.folder / read_gradient(files, offered.folder, unit).file
        )
    files.store.delete([f"{offered.folder}/00003.json"])
    (tmp_path / "store" / offered.folder / "00003.json").write_text("{torn")
    before, asked = torn.aggregator.digest("float32"), []
    while refused := torn.aggregator.apply().refused:
        assert torn.aggregator.digest("float32") == before
        asked += refused
        for unit in refused:
            torn.compute(0, offered, unit, batch)
    assert sorted(asked) == [0, 1, 2, 3]
    torn.aggregator.close_update()
    assert torn.aggregator.digest("float32") == whole.aggregator.digest("float32")


def test_a_late_gradient_is_refused_and_leaves_nothing(
    elastic: MakeElastic, tmp_path: Path
) -> None:
    batch, one = stored(tmp_path, samples()), elastic()
    files = RunStore(Store(str(tmp_path / "store")), "run")
    one.open(batch)
    offered = one.aggregator.offer(1)
    for unit in offered.units:
        one.compute(0, offered, unit.number, batch)
    one.aggregator.apply()
    one.aggregator.close_update()
    assert files.store.list("run/gradients")
    assert remove_gradients(files, 0) == []
    assert remove_gradients(files, 1)
    with pytest.raises(GradientsRefused, match="too late"):
        one.compute(0, offered, 0, batch)
    assert files.store.list("run/gradients") == []


def test_bfloat16_gradients_are_near_and_half_as_large(
    elastic: MakeElastic, tmp_path: Path
) -> None:
    batch, norms, sizes = stored(tmp_path, samples()), [], []
    for dtype in ("float32", "bfloat16"):
        one = elastic(run=dtype, gradient_dtype=dtype)
        one.open(batch)
        offered = one.aggregator.offer(1)
        sizes.append(sum(one.compute(0, offered, u.number, batch).nbytes for u in offered.units))
        one.aggregator.apply()
        norms.append(one.aggregator.close_update().metrics["train/grad_norm"])
    assert norms[0] != norms[1] and norms[0] == pytest.approx(norms[1], rel=2e-3)
    assert 0.5 <= sizes[1] / sizes[0] < 0.53


def test_an_update_that_is_not_finite_is_skipped_as_fsdp_skips_it(
    elastic: MakeElastic, tmp_path: Path
) -> None:
    rows = samples()
    rows[0].advantages[:] = np.inf
    one = elastic()
    before = one.aggregator.digest("float32")
    result = one.update(stored(tmp_path, rows), 1)
    assert result.metrics["train/skipped_steps"] == 1
    assert one.aggregator.digest("float32") == before


def test_log_probs_are_those_of_the_weights_that_were_offered(
    elastic: MakeElastic, tmp_path: Path
) -> None:
    batch, one = stored(tmp_path, samples()), elastic()
    store = Store(str(tmp_path / "store"))
    one.update(batch, 1)
    weights = one.aggregator.offer_weights(under=2, version=1)
    request = LogprobRequest(
        batch=batch, column="old_logprobs", out_key="run/own.safetensors", temperature=0.7
    )
    own = one.aggregator.logprobs(request)
    far = one.workers[0].logprobs_under(weights, replace(request, out_key="run/far.safetensors"))
    values = [
        result.batch.fetch(store, ["old_logprobs"])["old_logprobs"].values()
        for result in (far, own)
    ]
    assert torch.equal(*values)


def test_a_published_version_is_not_written_twice(elastic: MakeElastic, tmp_path: Path) -> None:
    batch, one = stored(tmp_path, samples()), elastic()
    one.update(batch, 1)
    published = one.aggregator.export_weights(1, "float32")
    one.aggregator.settle_weights(1, "float32")
    assert one.aggregator.offer_weights(under=2, version=1).key == published.key
    assert spec(tmp_path).run == "run"


def test_an_empty_batch_changes_nothing(elastic: MakeElastic, tmp_path: Path) -> None:
    one, batch = elastic(), stored(tmp_path, samples())
    before = one.aggregator.digest("float32")
    assert one.open(batch.rows(0, 0)) == 0
    assert one.aggregator.close_update().metrics["train/optimizer_steps"] == 0
    assert one.aggregator.digest("float32") == before
    assert AlgorithmConfig() == PLAIN


def test_no_forward_pass_sees_weights_of_before(elastic: MakeElastic, tmp_path: Path) -> None:
    """FSDP may keep what it gathered for a forward pass; a step or a load makes it old."""
    batch, one = stored(tmp_path, samples()), elastic(workers=2)
    store = Store(str(tmp_path / "store"))

    def passed(engine: FSDPEngine, name: str, **more: object) -> torch.Tensor:
        method = engine.logprobs_under if more else engine.logprobs  # type: ignore[attr-defined]
        request = LogprobRequest(
            batch=batch,
            column="old_logprobs",
            out_key=f"run/{name}.safetensors",
            temperature=0.7,
        )
        result = method(request=request, **more)
        values: torch.Tensor = result.batch.fetch(store, ["old_logprobs"])["old_logprobs"].values()
        return values

    idle = one.workers.pop()  # computes log-probs only
    found = []
    for version in (0, 1, 2):
        if version:
            one.update(batch, version)
        weights = one.aggregator.offer_weights(under=version + 1, version=version)
        mine = passed(one.aggregator, f"own-{version}")
        its = passed(idle, f"idle-{version}", weights=weights)
        fresh = elastic(run=f"fresh-{version}").workers[0]
        assert torch.equal(mine, passed(fresh, f"fresh-{version}", weights=weights))
        assert torch.equal(mine, its)
        found.append(mine)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    idle.close()
