"""Recipes pass --check on the machine that they name: with config.json alone, and rows of a file."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from configs.recipe import load_recipe
from configs.recipe_files import FOLDER, remarks
from engines.workers import placement
from flows.recipe import settings_of
from tasks.memory import holders
from tasks.run.preflight import check
from tests.recipes.stand_ins import empty_model, flow, of_hub, recipe, rows

GPU = 79.6  # GiB that nvidia-smi says of an H100 with 80 GB
GIB = 2**30
HOST = {1: 200, 2: 400, 8: 1800}  # GiB of a machine with so many GPUs, as clouds rent them
NUMBERS = {"one": 1, "two": 2, "8": 8}
QUICK = ("gsm8k-qwen2.5", "search", "distill-7b-1.5b")  # an answer, an environment, a teacher


def gpus_of(name: str) -> int:
    """How many GPUs of 80 GB a recipe's first words name."""
    found = re.search(r"(one|two|8) GPUs? of 80 GB", " ".join(remarks(FOLDER / f"{name}.yaml")))
    assert found is not None, "the first words say for what hardware it is"
    return NUMBERS[found[1]]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=() if one in QUICK else pytest.mark.slow)
        for one in of_hub()
        if one != "gsm8k-multinode"
    ],
)
def test_it_fits_the_hardware_that_it_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, gpus = recipe(name), gpus_of(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    node = replace(placement.this_node(), cores=8 * gpus)
    monkeypatch.setattr(placement, "this_node", lambda: node)
    monkeypatch.setattr(holders, "host_memory", lambda: (HOST[gpus] * GIB, "as stated"))
    words = [f"store.uri={tmp_path}/store", *rows(name, tmp_path)]
    words.append(f"model.path={empty_model(settings['model']['path'], tmp_path)}")
    for teacher, one in settings.get("teachers", {}).items():
        path = empty_model(one["model"]["path"], tmp_path)
        words.append(f"teachers.{teacher}.model.path={path}")
    pools = settings["cluster"]["pools"]
    on_gpus = [pool for pool, one in pools.items() if one.get("gpus")]
    assert sum(pools[pool]["workers"] for pool in on_gpus) == gpus
    words += [f"cluster.pools.{pool}.gpu_memory_gib={GPU}" for pool in on_gpus]
    config = load_recipe(settings_of(flow(name)), name, words)
    found = [finding.found for finding in check(config) if finding.check == "memory"]
    print("\n".join(found))
    assert any(line.startswith("a GPU of pool gpu: ") for line in found)
