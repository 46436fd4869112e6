"""A version that a run has registered, loaded by MLflow alone: log-probs are those of its export."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.environment import installed
from configs.storage import TrackingConfig
from storage.runs.commit_log import read_commit
from storage.runs.run_store import RunStore
from storage.tracking.tracker import TrackedData, TrackedRun
from tasks.reporting.mlflow_page import record_of
from tasks.reporting.registered_files import Page
from tests.flows.conftest import ROOT, starting
from tests.mlflow_servers import mlflow_server, with_refrain, without_refrain

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LOGPROBS = """
import json, os, torch
def of(model):
    ids = torch.arange(1, 40).view(1, -1) % model.config.vocab_size
    with torch.no_grad():
        logits = model.float()(input_ids=ids).logits.log_softmax(-1)
    return logits[0, :-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
"""
LOADED = f"""{LOGPROBS}
import mlflow
mlflow.set_tracking_uri(os.environ["PLACE"])
uri = os.environ["MODEL"]
folder = mlflow.artifacts.download_artifacts(uri)
parts = mlflow.transformers.load_model(uri, return_type="components")
pipeline = mlflow.transformers.load_model(uri)
said = pipeline("1 + 1 =", max_new_tokens=4)[0]["generated_text"]
print(json.dumps([sorted(os.listdir(folder)), of(parts["model"]), said.startswith("1 + 1 =")]))
"""
EXPORTED = f"""{LOGPROBS}
from transformers import AutoModelForCausalLM
print(json.dumps(of(AutoModelForCausalLM.from_pretrained(os.environ["EXPORT"]))))
"""


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if installed("mlflow") is None:
        pytest.skip("the whole mlflow is not installed (the extra ui)")
    with mlflow_server(tmp_path_factory.mktemp("proxied"), proxied=True) as address:
        yield address


@pytest.fixture(scope="module")
def run(
    proxied: str, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunStore]:
    folder = tmp_path_factory.mktemp("run")
    with starting(folder, prefect_api) as launch:
        yield launch("tiny", "steps=2", f"tracking.uri={proxied}").whole().files


@pytest.fixture(scope="module")
def exported(run: RunStore, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Log-probs of version 2, as `refrain export` writes it."""
    folder = tmp_path_factory.mktemp("export") / "model"
    words = [run.run, "--to", str(folder), f"store.uri={run.store.uri}"]
    command = [sys.executable, "-m", "flows.export", *words]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found: list[float] = json.loads(
        with_refrain(folder.parent / "meta", EXPORTED, EXPORT=str(folder))
    )
    return found


def registered(run: RunStore, uri: str, copied: bool) -> str:
    """The address of version 2 at another place, where the run is put on record once more."""
    page = Page(TrackingConfig(uri=uri, system_metrics=0, copy_models=copied))
    page.start(
        TrackedRun(
            run=run.run, store_uri=run.store.uri, settings={}, model_name="tiny",
            data=TrackedData(name="d", digest="sha256:ab", source={}, rows=1),
            record=f"{record_of(run)} {copied}",
        )
    )  # fmt: skip
    weights = read_commit(run, 2).version_out
    number = page.register_version(
        2, uri=run.store.url(weights.key), digest=weights.digest, step=2, store_uri=run.store.uri
    )
    page.finish()
    return f"models:/tiny/{number}"


def same(printed: str, exported: list[float]) -> None:
    files, found, speaks = json.loads(printed.splitlines()[-1])
    assert {"MLmodel", "config.json", "components"} <= set(files)
    assert found == exported, "the same weights, so the same numbers to the bit"
    assert speaks


def test_from_a_proxied_server_with_refrain_installed(
    proxied: str, run: RunStore, exported: list[float], tmp_path: Path
) -> None:
    same(with_refrain(tmp_path, LOADED, PLACE=proxied, MODEL="models:/tiny/1"), exported)


def test_from_a_proxied_server_without_refrain(
    proxied: str, run: RunStore, exported: list[float]
) -> None:
    uri = registered(run, proxied, copied=True)
    same(without_refrain(LOADED, PLACE=proxied, MODEL=uri), exported)


def test_from_a_server_with_a_folder_of_this_machine_without_refrain(
    run: RunStore, exported: list[float], tmp_path: Path
) -> None:
    with mlflow_server(tmp_path, proxied=False) as address:
        uri = registered(run, address, copied=False)
        same(without_refrain(LOADED, PLACE=address, MODEL=uri), exported)
    assert not list((tmp_path / "artifacts").rglob("*.safetensors")) or all(
        one.is_symlink() for one in (tmp_path / "artifacts").rglob("*.safetensors")
    )


def test_from_a_database_without_a_server_and_without_refrain(
    run: RunStore, exported: list[float], tmp_path: Path
) -> None:
    place = f"sqlite:///{tmp_path}/mlflow.db"
    same(without_refrain(LOADED, PLACE=place, MODEL=registered(run, place, False)), exported)
