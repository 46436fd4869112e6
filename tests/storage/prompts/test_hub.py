"""Suites by the ids of their data on a hub: the datasets library asks one on loopback for them."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.data import HubSource
from configs.evaluation import EvaluationConfig, suite_names
from tests.hub import Hub, serving
from tests.storage.prompts.test_chosen import HUB

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="needs the extra hub"
)
# HF_ENDPOINT is read when the library is imported, so in a process of its own.
PROGRAM = """
import json, sys
from configs.evaluation import EvaluationConfig
from storage.prompts.datasets import open_source
suites = EvaluationConfig.model_validate({"suites": sys.argv[1:]}).suites
for name, suite in suites.items():
    try:
        found = open_source(suite.source)
        found.check_columns([suite.prompt.prompt_column])
        print(json.dumps([name, found.rows(range(len(found)))]))
    except ValueError as error:
        print(json.dumps([name, str(error)]))
"""


def source_of(name: str) -> HubSource:
    source = EvaluationConfig.model_validate({"suites": [name]}).suites[name].source
    assert isinstance(source, HubSource)
    return source


def repository(name: str) -> dict[str, bytes]:
    """A repository as the suite's data set has one: a row, in Parquet, by subset and split."""
    subset, split = source_of(name).subset or "default", source_of(name).split
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([HUB[name]]), file)
    card = (
        f"---\nconfigs:\n- config_name: {subset}\n  data_files:\n"
        f"  - split: {split}\n    path: {subset}/{split}-*\n---\n"
    )
    return {
        "README.md": card.encode(),
        f"{subset}/{split}-00000-of-00001.parquet": file.getvalue(),
        f"{subset}/other-00000-of-00001.parquet": b"another split's",
    }


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """Has the data of every suite; those of gpqa for whoever has a token."""
    datasets = {source_of(name).name: repository(name) for name in suite_names()}
    with serving(datasets, gated=frozenset({source_of("gpqa").name})) as hub:
        yield hub


def opened(hub: Hub, folder: Path, *names: str, **variables: str) -> dict[str, object]:
    """What a process finds that knows the hub by its address alone."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder), **variables}
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_suites_load_their_data_by_id(hub: Hub, tmp_path: Path) -> None:
    found = opened(hub, tmp_path, *suite_names(), HF_TOKEN="hf_test")
    assert sorted(found) == suite_names()
    for name, rows in found.items():
        assert isinstance(rows, list), rows
        (row,) = rows
        if name == "gpqa":  # whose answers become letters
            assert row["Question"].startswith("1 + 1?\n\nA. ") and row["answer"] in "ABCD"
        else:
            assert row.items() <= HUB[name].items(), "hle takes some columns alone"
    files = [one for one in hub.asked if one.startswith("GET") and one.endswith(".parquet")]
    assert len(files) == len(suite_names()), "each its one split, by a request to this hub"


def test_what_the_hub_does_not_give_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    (said,) = opened(hub, tmp_path, "gpqa").values()
    assert "hub dataset Idavidrein/gpqa (subset gpqa_diamond, split train)" in str(said)
    assert "cannot be loaded" in str(said) and "gated" in str(said)
    with serving({}) as empty:
        (said,) = opened(empty, tmp_path, "gsm8k").values()
    assert "cannot be loaded: Dataset 'openai/gsm8k' doesn't exist on the Hub" in str(said)
