"""Progress rewards before a run: the checks, and the memory plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.recipe import load_recipe
from configs.srpo import SRPOConfig
from engines.encoders.memory_plan import encoder_bytes
from engines.models.facts import model_facts
from tasks.memory.holders import MemoryDemand, places
from tasks.progress_rewards import checks
from tasks.progress_rewards.feature import FEATURE
from tasks.run.features import PreflightError
from tasks.run.preflight import check
from tests.engines.encoders.test_encoders import drawn
from tests.tasks.memory.settings import plan


def test_the_encoder_of_what_episodes_see_is_in_the_plan(tmp_path: Path) -> None:
    def found(*words: str) -> SRPOConfig:
        own = ("cluster.roles.encoder=eyes", "cluster.pools.eyes={workers: 2, threads: 1}")
        return load_recipe(SRPOConfig, "tiny-srpo", [*own, *words])

    assert not [line for line in plan(found()) if line.startswith("encoder")]
    eyes = f"encoder={{kind: transformers, model: '{drawn('vit', tmp_path)}'}}"
    planned = encoder_bytes(found(eyes).encoder)
    assert min(planned.values()) > 0
    lines = plan(found(eyes))
    assert [line for line in lines if line.startswith("encoder, each worker: encoder's weights")]
    config = found(eyes)
    seeing = (FEATURE.holders,)
    (machine,) = places(
        MemoryDemand(config=config, shape=model_facts(config.model).shape, of_features=seeing)
    )
    assert {what: machine.taken[what] for what in planned} == {
        what: 2 * size for what, size in planned.items()
    }

    far = ("cluster.kind=address", "cluster.address=tcp://s:8786", "store.uri=file:///shared")
    gpu = "cluster.pools.eyes={workers: 1, threads: 1, gpus: 1, gpu_memory_gib: 0.00001}"
    for more, says in (
        ("", "Set cluster.roles.encoder to a larger pool, or take a smaller encoder."),
        (", frames: 64", "Set encoder.frames lower."),
    ):
        small = eyes.removesuffix("}") + f"{more}}}"
        with pytest.raises(ValueError, match="a GPU of pool eyes has to hold") as caught:
            plan(found(gpu, small, *far))
        assert says in str(caught.value)


def test_what_measures_progress_is_looked_at_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*words: str) -> str:
        config = load_recipe(SRPOConfig, "tiny-srpo", [f"store.uri={tmp_path}/store", *words])
        with pytest.raises(PreflightError) as caught:
            check(config)
        return str(caught.value)

    good = check(load_recipe(SRPOConfig, "tiny-srpo", [f"store.uri={tmp_path}/store"]))
    found = {one.check: one.found for one in good}
    assert found["encoder"] == "a fixed projection"
    assert "environment: loads; takes text; frames of 4 x 4 x 3, uint8" in found["data"]
    assert "no column 'level'" in said("progress.task_column=level")
    (tmp_path / "flat.py").write_text(
        "class Flat:\n"
        "    def reset(self): return 'go'\n"
        "    def step(self, text): return 'on'\n"
        "    def frame(self): return [[0.0]]\n"
    )
    flat = f"episodes.environment={{kind: class, path: '{tmp_path}/flat.py:Flat'}}"
    model = "encoder={kind: transformers, model: some/model}"
    assert "frames are float32 [1, 1]. Make it with" in said(flat, model)
    assert f"encoder.model = {tmp_path}/none/at/all: no such" in said(
        f"encoder={{kind: transformers, model: {tmp_path}/none/at/all}}"
    )
    monkeypatch.setattr(checks, "find_spec", lambda package: None)
    assert "pip install 'scikit-learn>=1.5'" in said()
