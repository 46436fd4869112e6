"""A registered version as MLflow loads it: where its files are, and what MLflow is told of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from configs.storage import TrackingConfig
from engines.models.adapters import stream_whole
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, of_registration, open_manifest_at
from storage.tracking.connection import TrackingError
from storage.tracking.tracker import TrackedEvaluation
from tasks.reporting.registered_files import MLMODEL, TOKENIZER, Page, version_at
from tests.contract.conftest import s3, s3_server, s3_store  # noqa: F401
from tests.storage.tracking.test_tracker import client, page
from tests.tasks.reporting.versions import RUN, adapted, published

Versions = tuple[Store, WeightsRef, WeightsRef]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    store, whole = published(tmp_path_factory.mktemp("versions"))
    return store, whole, adapted(store, whole)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('tracking')}/mlflow.db"


@pytest.fixture
def opened(
    database: str, versions: Versions, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def of(**settings: Any) -> Page:
        one = Page(TrackingConfig(uri=database, system_metrics=0, **settings))
        run = replace(page(RUN), store_uri=versions[0].uri, model_name=request.node.name)
        one.start(replace(run, record=request.node.name))
        pages.append(one)
        return one

    yield of
    for one in pages:
        one.finish()


def register(one: Page, store: Store, ref: WeightsRef, **given: Any) -> str:
    return one.register_version(
        ref.version,
        uri=store.url(ref.key),
        digest=ref.digest,
        step=ref.version,
        store_uri=store.uri,
        **given,
    )


@pytest.fixture
def mlflow(database: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow as a user has it, with the entry points that pyproject.toml names."""
    import mlflow
    from mlflow.store.artifact import artifact_repository_registry as known

    from tasks.reporting.artifact_repository import RefrainArtifactRepository

    for scheme in ("refrain-file", "refrain-s3"):
        monkeypatch.setitem(
            known._artifact_repository_registry._registry, scheme, RefrainArtifactRepository
        )
    mlflow.set_tracking_uri(database)
    return mlflow


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_is(folder: Path, store: Store, ref: WeightsRef) -> None:
    found, wanted = tensors_in(folder), dict(stream_whole(store, ref))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (folder / MLMODEL).is_file()
    assert {"config.json", "tokenizer.json"} <= {one.name for one in (folder / TOKENIZER).iterdir()}


@pytest.mark.parametrize("copied", [False, True])
def test_a_version_on_this_disk_is_a_model_folder(
    copied: bool, opened: Callable[..., Page], versions: Versions, mlflow: Any, request: Any
) -> None:
    store, whole, _ = versions
    number = register(opened(copy_models=copied), store, whole)
    folder = Path(mlflow.artifacts.download_artifacts(f"models:/{request.node.name}/{number}"))
    assert_is(folder, store, whole)
    links = [one for one in folder.glob("*.safetensors") if one.is_symlink()]
    assert bool(links) != copied, "the weights are in the store alone, unless they are copied"
    assert not list(Path(store.url(whole.key).removeprefix("file://")).glob("*meta*"))
    model = yaml.safe_load((folder / MLMODEL).read_text())
    assert json.loads(model["signature"]["inputs"])[0]["type"] == "string"
    assert set(model["flavors"]) == {"transformers", "python_function"}
    (made,) = client_of(mlflow).search_logged_models(
        ["1"], f"attributes.model_id = '{model['model_id']}'"
    )
    assert (made.source_run_id, made.name) == (model["run_id"], f"{RUN}-v0")


@pytest.mark.parametrize("copied", [False, True])
def test_an_adapter_is_merged(
    copied: bool, opened: Callable[..., Page], versions: Versions, mlflow: Any, request: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    store, _, lora = versions
    number = register(opened(copy_models=copied), store, lora)
    uri = f"models:/{request.node.name}/{number}"
    source = client_of(mlflow).get_model_version(request.node.name, number).source
    assert source.startswith("refrain-file:") != copied
    assert_is(Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(tmp_path))), store, lora)
    one = mlflow.artifacts.download_artifacts(f"{uri}/config.json")
    assert json.loads(Path(one).read_text())["architectures"] == ["LlamaForCausalLM"]


def client_of(mlflow: Any) -> Any:
    return mlflow.MlflowClient()


def test_a_version_in_a_bucket_is_read_from_there(
    versions: Versions, opened: Callable[..., Page], mlflow: Any, request: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    here, whole, lora = versions
    bucket: Store = request.getfixturevalue("s3_store")
    for key in here.list(RUN):
        bucket.write(key, here.read(key))
    one = opened()
    one.start(replace(one.tracked, store_uri=bucket.uri, store_options=bucket.options))
    numbers = [register(one, bucket, ref) for ref in (whole, lora)]
    sources = [client_of(mlflow).get_model_version(request.node.name, n).source for n in numbers]
    assert sources == [bucket.url(whole.key), f"refrain-{bucket.url(lora.key)}"]
    beside = {*bucket.list(whole.key)} - {*here.list(whole.key)}
    assert beside and all(of_registration(key.removeprefix(f"{whole.key}/")) for key in beside)
    for name in ("MLFLOW_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, str(bucket.options["endpoint_url"]))
    for number, ref in zip(numbers, (whole, lora), strict=True):
        uri, target = f"models:/{request.node.name}/{number}", tmp_path / number
        target.mkdir()
        folder = Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(target)))
        assert_is(folder, here, ref)


def test_what_is_listed_is_what_is_downloaded(versions: Versions, tmp_path: Path) -> None:
    from tasks.reporting.artifact_repository import RefrainArtifactRepository

    store, whole, _ = versions
    files = RefrainArtifactRepository(f"refrain-{store.url(whole.key)}")
    folder = Path(files.download_artifacts("", str(tmp_path)))
    assert not any(one.is_symlink() for one in folder.rglob("*")), "a caller's folder has files"
    for place in ("", "components", TOKENIZER):
        listed = {one.path: (one.is_dir, one.file_size) for one in files.list_artifacts(place)}
        assert listed
        for path, (is_dir, size) in listed.items():
            if path.endswith((".safetensors", "index.json")) or path == "manifest.json":
                continue  # written anew, under names of their own
            assert (folder / path).is_dir() == is_dir
            assert is_dir or path == MLMODEL or (folder / path).stat().st_size == size
    gone = RefrainArtifactRepository(f"refrain-{store.url('tiny-1/weights/v000009')}")
    with pytest.raises(Exception, match=r"no policy version at file:.*v000009: retention"):
        gone.download_artifacts("")
    with pytest.raises(Exception, match="nothing is added"):
        files.log_artifacts(str(tmp_path))


def test_a_version_whose_files_are_gone_is_not_registered(
    opened: Callable[..., Page], versions: Versions
) -> None:
    store, whole, _ = versions
    gone = whole.model_copy(update={"version": 7, "key": f"{RUN}/weights/v000007"})
    with pytest.raises(TrackingError, match=r"v000007 is not registered: its files are no longer"):
        register(one := opened(), store, gone)
    assert one.registered() == {}


def test_a_model_has_parameters_metrics_and_evaluations_once(
    opened: Callable[..., Page], versions: Versions
) -> None:
    store, whole, _ = versions
    one = opened()

    def evaluated(suite: str, at: float) -> TrackedEvaluation:
        return TrackedEvaluation(
            version=0, weights_digest=whole.digest, suite=suite, rows_digest="xxh3:ab" * 9,
            metrics={f"eval/{suite}/reward": 0.25}, at=at,
        )  # fmt: skip

    for _ in range(2):  # a retry, or a run that is resumed
        one.log_step(0, {"reward/mean": 0.5}, at=1e9)
        register(one, store, whole, metrics={"reward/mean": 0.5}, at=1e9,
                 evaluations=[evaluated("before", 1e9)])  # fmt: skip
        one.log_evaluation(evaluated("after", 2e9))
    mlflow = client(one.config)
    (model,) = [m for m in mlflow.search_logged_models(["1"]) if m.source_run_id == one.run_id]
    assert model.params["seed"] == "3"
    assert str(model.status) == "READY"
    found = {m.key: (m.value, m.step, m.dataset_name) for m in model.metrics}
    assert found == {
        "reward/mean": (0.5, 0, None),
        "Overview/reward": (0.5, 0, None),
        "eval/before/reward": (0.25, 0, "before"),
        "eval/after/reward": (0.25, 0, "after"),
    }
    run = mlflow.get_run(one.run_id)
    assert [out.model_id for out in run.outputs.model_outputs] == [model.model_id]
    for name in found:
        assert len(mlflow.get_metric_history(one.run_id, name)) == 1
    assert len(one.registered()) == 1


def test_a_run_whose_store_was_moved_goes_on_with_its_page(
    opened: Callable[..., Page], versions: Versions, mlflow: Any, request: Any, tmp_path: Path
) -> None:
    store, whole, _ = versions
    before = opened()
    number = register(before, store, whole)
    shutil.copytree(store.uri.removeprefix("file://"), tmp_path / "moved")
    moved = Store(f"file://{tmp_path}/moved")
    after = Page(before.config)
    after.start(replace(before.tracked, store_uri=moved.uri))
    assert after.run_id == before.run_id
    assert register(after, moved, whole) == number, "it is registered already"
    version = client(before.config).get_model_version(request.node.name, number)
    assert version.tags["refrain.uri"] == moved.url(whole.key)
    assert version.tags["refrain.store"] == moved.uri
    folder = Path(mlflow.artifacts.download_artifacts(f"models:/{request.node.name}/{number}"))
    (link, *_) = folder.glob("*.safetensors")
    assert link.resolve().is_relative_to(tmp_path)
    assert_is(folder, moved, whole)
    shutil.copytree(tmp_path / "moved", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / whole.key)
    Page(before.config).start(replace(before.tracked, store_uri=f"file://{tmp_path}/again"))
    version = client(before.config).get_model_version(request.node.name, number)
    assert version.tags["refrain.store"].endswith("again"), "a version that is gone stops nothing"
    other = Page(before.config)
    other.start(replace(before.tracked, store_uri=moved.uri, record="another run of that name"))
    assert other.run_id != before.run_id


def test_a_version_is_found_by_its_address(versions: Versions) -> None:
    store, whole, lora = versions
    for ref in (whole, lora):
        found, again = version_at(store.url(ref.key))
        assert (found.uri, again.key, again.digest) == (store.uri, ref.key, ref.digest)
        assert open_manifest_at(found, again.key).base == ref.base
