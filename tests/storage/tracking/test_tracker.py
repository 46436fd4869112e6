"""The tracker against MLflow on SQLite, and the picture of a run's progress."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from configs.storage import TrackingConfig
from storage.objects.documents import JsonValue
from storage.tracking.connection import TrackingAddress, TrackingError
from storage.tracking.plots import progress_png
from storage.tracking.registry import (
    DAY,
    GOING_TAG,
    REMOVED_TAG,
    Registry,
    that_stay,
    unsaid,
)
from storage.tracking.tracker import TrackedData, TrackedRun, Tracker, flatten

SETTINGS: dict[str, JsonValue] = {
    "seed": 3,
    "data": {"source": {"kind": "file", "path": "rows.jsonl"}, "system_prompt": "x" * 2000},
    "rewards": {"functions": [{"kind": "math"}]},
    "empty": {},
}


def page(run: str = "tiny-1") -> TrackedRun:
    return TrackedRun(
        run=run,
        store_uri="file:///store",
        settings=SETTINGS,
        data=TrackedData(
            name="rows.jsonl", digest="sha256:" + "ab" * 32, source={"kind": "file"}, rows=25
        ),
        model_name="tiny",
        flow_run_id="flow-1",
        flow_run_url="http://prefect/runs/flow-run/flow-1",
        git_commit="c0ffee",
    )


@pytest.fixture
def tracker(config: TrackingConfig, request: pytest.FixtureRequest) -> Iterator[Tracker]:
    tracker = Tracker(config)
    tracker.start(page(request.node.name))
    yield tracker
    tracker.finish()


def client(config: TrackingConfig):  # type: ignore[no-untyped-def]
    from mlflow import MlflowClient

    return MlflowClient(config.uri)


def test_a_run_has_a_page(tracker: Tracker, config: TrackingConfig, folder: Path) -> None:
    run = client(config).get_run(tracker.run_id)
    assert run.info.run_name == "test_a_run_has_a_page"
    assert run.info.status == "RUNNING"
    assert run.data.tags["prefect.flow_run_id"] == "flow-1"
    assert "](http://prefect/runs/flow-run/flow-1)" in run.data.tags["mlflow.note.content"]
    assert run.data.params["data.source.path"] == "rows.jsonl"
    assert run.data.params["rewards.functions"] == '[{"kind": "math"}]'
    assert len(run.data.params["data.system_prompt"]) == 500
    [data] = run.inputs.dataset_inputs
    assert data.dataset.name == "rows.jsonl"
    assert data.dataset.digest == ("ab" * 32)[:36]
    artifacts = folder / "deep" / "mlartifacts" / "refrain" / tracker.run_id / "artifacts"
    assert yaml.safe_load((artifacts / "config.yaml").read_text()) == SETTINGS
    assert str(folder / "deep" / "mlflow.db") in tracker.link
    page = f"/runs/{tracker.run_id}/model-metrics?workflowType=machine_learning"
    assert tracker.link.endswith(page), "opened as model training, at the curves"


def test_metrics_and_files(tracker: Tracker, config: TrackingConfig) -> None:
    assert tracker.last_step is None
    for step in (1, 2):
        tracker.log_step(step, {"reward/mean": 0.1 * step, "time/rollout": 3.0}, at=1e9 + step)
    tracker.log_file("plots/progress.png", b"one")
    tracker.log_file("plots/progress.png", b"two")
    tracker.log_file("note.md", "text")
    assert tracker.last_step == 2
    mlflow = client(config)
    history = mlflow.get_metric_history(tracker.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.1), (2, 0.2)]
    place = Path(mlflow.download_artifacts(tracker.run_id, "plots/progress.png"))
    assert place.read_bytes() == b"two"


def test_a_metric_may_have_any_name(tracker: Tracker, config: TrackingConfig) -> None:
    """Users' reward functions name them."""
    names = ["pass@1 (%)", "../up", "a//b", "größe/x", "x" * 300, "."]
    tracker.log_step(1, {name: float(n) for n, name in enumerate(names)}, at=1e9)
    shown = client(config).get_run(tracker.run_id).data.metrics
    assert shown == {"pass_1 ___": 0, "___up": 1, "a__b": 2, "größe/x": 3, "x" * 250: 4, "_": 5}


def test_a_step_recorded_again_is_one_point(
    tracker: Tracker, config: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer died between MLflow's write of the metrics and that of the tags."""
    figures = {"reward/mean": 0.1, "time/rollout": 3.7}

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore._set_tags", dies)
        with pytest.raises(KeyboardInterrupt):
            tracker.log_step(1, figures, at=1234567890.123)
    assert tracker.last_step is None
    tracker.log_step(1, figures, at=1234567890.123)
    tracker.log_step(2, figures, at=1234567891.5)
    for name in figures:
        history = client(config).get_metric_history(tracker.run_id, name)
        assert [(m.step, m.timestamp) for m in history] == [(1, 1234567890123), (2, 1234567891500)]


def test_the_page_is_one_of_model_training_and_its_reward_is_first(
    tracker: Tracker, config: TrackingConfig
) -> None:
    mlflow = client(config)
    experiment = mlflow.get_experiment_by_name("refrain")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    tracker.log_step(1, {"advantage/max": 2.0, "reward/mean": 0.5, "KL": 0.1}, at=1e9)
    shown = mlflow.get_run(tracker.run_id).data.metrics
    sections = sorted(name.partition("/")[0] for name in shown if "/" in name)
    assert sections[0] == "Overview", "the page sorts them so"
    assert shown["Overview/reward"] == shown["reward/mean"] == 0.5
    assert mlflow.get_run(tracker.run_id).data.tags["mlflow.source.git.commit"] == "c0ffee"


def test_an_experiment_of_an_older_refrain_gets_its_kind(
    config: TrackingConfig, tmp_path: Path
) -> None:
    old = config.model_copy(update={"experiment": "old"})
    mlflow = TrackingAddress.of(old.uri).connect()
    mlflow.create_experiment("old", artifact_location=(tmp_path / "artifacts").as_uri())
    Tracker(old).start(page("kind"))
    kind = mlflow.get_experiment_by_name("old").tags["mlflow.experimentKind"]
    assert kind == "custom_model_development"


def test_resuming_goes_on_with_the_page(config: TrackingConfig) -> None:
    first = Tracker(config)
    first.start(page("resumed"))
    first.log_step(7, {"kl": 0.5}, at=1e9)
    first.finish("KILLED")
    again = Tracker(config)
    changed: dict[str, JsonValue] = {**SETTINGS, "seed": 4, "new": True}
    again.start(replace(page("resumed"), flow_run_id="flow-2", settings=changed))
    assert again.run_id == first.run_id
    assert again.last_step == 7
    run = client(config).get_run(again.run_id)
    assert run.info.status == "RUNNING"
    assert run.data.tags["prefect.flow_run_id"] == "flow-2"
    assert (run.data.params["seed"], run.data.params["new"]) == ("3", "true")
    other_store = Tracker(config)
    other_store.start(replace(page("resumed"), store_uri="file:///other"))
    assert other_store.run_id != first.run_id


@pytest.mark.parametrize(
    "elsewhere", ["http://127.0.0.1:9", "databricks-uc", "sqlite:////no/such/folder/mlflow.db"]
)
def test_versions_are_registered_where_the_page_is(
    elsewhere: str, config: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", elsewhere)
    tracker = Tracker(config)
    tracker.start(page("registered"))
    tracker.register_version(1, uri="file:///w", digest="sha256:d", step=1, store_uri="file:///s")
    assert set(tracker.registered()) == {1}
    tracker.finish()
    Registry(config).give(tracker.model_name, "best", tracker.registered()[1])
    monkeypatch.delenv("MLFLOW_REGISTRY_URI")
    found = client(config).get_model_version_by_alias(tracker.model_name, "best")
    assert found.tags["refrain.digest"] == "sha256:d"


def test_a_fork_is_a_child_of_its_parent(config: TrackingConfig) -> None:
    parent, child = Tracker(config), Tracker(config)
    parent.start(page("parent"))
    child.start(replace(page("child"), forked_from="parent"))
    tags = client(config).get_run(child.run_id).data.tags
    assert tags["mlflow.parentRunId"] == parent.run_id
    assert tags["refrain.forked_from"] == "parent"


def test_versions_are_registered_once(tracker: Tracker, config: TrackingConfig) -> None:
    def register(version: int) -> str:
        return tracker.register_version(
            version,
            uri=f"file:///store/run/weights/v{version:06d}",
            digest=f"xxh3:{version}",
            step=version,
            store_uri="file:///store",
        )

    numbers = [register(version) for version in (0, 5, 0, 5)]
    assert numbers == [numbers[0], numbers[1]] * 2
    mlflow = client(config)
    latest = mlflow.get_model_version_by_alias("tiny", "latest")
    assert str(latest.version) == numbers[1]
    assert latest.source == "file:///store/run/weights/v000005"
    assert latest.run_id == tracker.run_id
    assert latest.tags["refrain.digest"] == "xxh3:5"
    assert latest.tags["refrain.step"] == latest.tags["refrain.version"] == "5"
    assert tracker.registered() == {0: numbers[0], 5: numbers[1]}
    experiment = mlflow.get_experiment_by_name("refrain")
    found = mlflow.search_logged_models(
        [experiment.experiment_id], f"source_run_id = '{tracker.run_id}'"
    )
    models = {one.tags["refrain.version"]: one for one in found}
    assert sorted(models) == ["0", "5"] and len(found) == 2, "each version is a model once"
    assert models["5"].status == "READY" and models["5"].model_type == "policy"
    outputs = mlflow.get_run(tracker.run_id).outputs.model_outputs
    assert {(one.model_id, one.step) for one in outputs} == {
        (models["0"].model_id, 0), (models["5"].model_id, 5),
    }  # fmt: skip


def test_failures_of_mlflow_are_tracking_errors(tracker: Tracker, config: TrackingConfig) -> None:
    with pytest.raises(TrackingError, match=r"MLflow at sqlite:///.* failed: "):
        tracker.log_step(1, {"kl": 1.0}, at=1e9, lineage={"a tag with *": "1"})
    deleted = config.model_copy(update={"experiment": "gone"})
    Tracker(deleted).start(page())
    experiment = client(config).get_experiment_by_name("gone").experiment_id
    client(config).delete_experiment(experiment)
    with pytest.raises(TrackingError, match="The MLflow experiment gone has been deleted"):
        Tracker(deleted).start(page())


def test_addresses() -> None:
    with pytest.raises(ValueError, match=r"tracking.uri is ./mlruns. Set it to sqlite:///"):
        Tracker(TrackingConfig(uri="./mlruns"))
    server = Tracker(TrackingConfig(uri="http://127.0.0.1:9"))
    with pytest.raises(
        TrackingError, match=r"server at http://127.0.0.1:9 does not answer .*Start"
    ):
        server.start(page())


def test_flattened_settings() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, {"e": None}], "f": None, "g": "x"}) == {
        "a.b": "1",
        "a.c": "{}",
        "d": '[1, {"e": null}]',
        "f": "null",
        "g": "x",
    }


def test_two_processes_can_make_the_database_at_once_and_quietly(tmp_path: Path) -> None:
    """Relative to the working directory, which gets nothing but the folder that was asked for."""
    program = textwrap.dedent(
        """
        import logging, sys, threading
        logging.basicConfig(level=logging.INFO)
        from tests_page import page
        from configs.storage import TrackingConfig
        from storage.tracking.tracker import Tracker
        tracker = Tracker(TrackingConfig(uri="sqlite:///.refrain/mlflow.db"))
        tracker.start(page(sys.argv[1]))
        tracker.log_step(1, {"kl": 0.0}, at=1e9)
        tracker.register_version(
            0, uri="file:///store/" + sys.argv[1], digest="x", step=0, store_uri="file:///store"
        )
        tracker.finish()
        logging.getLogger("later").info("heard")
        print([thread.name for thread in threading.enumerate()])
        """
    )
    (tmp_path / "tests_page.py").write_text(Path(__file__).read_text())
    work = tmp_path / "work"
    work.mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, name],
            cwd=work,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for process in processes:
        out, err = process.communicate(timeout=150)
        assert process.returncode == 0, err
        assert out == "['MainThread']\n"
        assert err == "INFO:later:heard\n"
    assert [path.name for path in work.iterdir()] == [".refrain"]


def test_logging_of_others_is_left_alone(tracker: Tracker) -> None:
    assert logging.getLogger("somebody.else").isEnabledFor(logging.WARNING)
    assert not logging.getLogger("alembic.runtime.migration").isEnabledFor(logging.INFO)


# Plots


def record(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.1 + step / 50,
        "reward/std": 0.2,
        "kl": 0.001 * step,
        "time/rollout": 3.0,
        "time/update": 5.0,
    }


def pixels(png: bytes):  # type: ignore[no-untyped-def]
    from matplotlib import image

    return image.imread(io.BytesIO(png))


@pytest.mark.parametrize("count", [0, 1, 12, 400])
def test_progress_is_drawn_for_any_number_of_steps(count: int) -> None:
    steps = range(1, count + 1)
    picture = pixels(progress_png(steps, [record(step) for step in steps], "tiny-1"))
    assert picture.shape[:2] == (825, 990)
    assert (picture[..., :3] != 1).any()


def test_gaps_in_the_records_are_no_error() -> None:
    progress_png([1, 2, 3], [{}, {"reward/mean": 0.5}, {"time/eval": 2.0, "reward/std": 1.0}])


def test_a_drawing_changes_with_its_numbers() -> None:
    steps = [1, 2]
    once = progress_png(steps, [record(1), record(2)])
    assert once == progress_png(steps, [record(1), record(2)])
    assert once != progress_png(steps, [record(1), record(9)])


def test_retention_goes_by_alias_number_and_age(tracker: Tracker, config: TrackingConfig) -> None:
    for version in range(1, 7):
        tracker.register_version(
            version, uri=f"file:///v{version}", digest=f"d{version}", step=version, store_uri="s"
        )
    numbers = tracker.registered()
    Registry(config).give(tracker.model_name, "champion", numbers[2])
    known = tracker.registered_versions()
    assert [(one.version, one.number) for one in known] == sorted(numbers.items())
    assert {one.version: one.aliases for one in known if one.aliases} == {2: ("champion",)}
    now = known[-1].at + 10 * DAY
    assert that_stay(known, 2, 0.0, now) == {2, 5, 6}
    assert that_stay(known, 0, 0.0, now) == {2}, "an alias keeps a version, whatever the number"
    assert that_stay(known, 2, 11.0, now) == {1, 2, 3, 4, 5, 6}, "all are younger"
    assert that_stay(known, None, 0.0, now) == {1, 2, 3, 4, 5, 6}
    assert that_stay([], 2, 0.0, now) == set()
    tracker.tag_removed([1, 3])
    assert [one.version for one in tracker.registered_versions() if one.removed] == [1, 3]
    tags = client(config).get_model_version(tracker.model_name, numbers[3]).tags
    assert tags["refrain.removed"].endswith("by store.keep_registered of its run")


def test_an_alias_that_is_given_before_the_removal_keeps_a_version(
    tracker: Tracker, config: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(1, 4):
        tracker.register_version(
            version, uri=f"file:///v{version}", digest=f"d{version}", step=version, store_uri="s"
        )
    numbers, registry = tracker.registered(), Registry(config)
    assert that_stay(tracker.registered_versions(), 1, 0.0, time.time()) == {3}
    registry.give(tracker.model_name, "champion", numbers[2])  # by somebody else, since then
    assert tracker.let_go([1, 2, 99]) == {1, 99}

    def tags(version: int) -> set[str]:
        found = registry.tags(tracker.model_name, numbers[version])
        return {GOING_TAG, REMOVED_TAG} & set(found)

    assert [tags(version) for version in (1, 2, 3)] == [{GOING_TAG}, set(), set()]
    # Its process dies here; then somebody gives the version an alias, and another process asks.
    registry.give(tracker.model_name, "challenger", numbers[1])
    assert tracker.let_go([1]) == set() and tags(1) == set()
    client(config).delete_registered_model_alias(tracker.model_name, "challenger")
    # Or by other settings the version stays.
    assert tracker.let_go([1]) == {1} and tags(1) == {GOING_TAG}
    tracker.take_back([1, 3])
    assert tags(1) == tags(3) == set()
    # Or the process dies behind the removal: whoever comes next says so.
    assert tracker.let_go([1]) == {1}
    assert unsaid(tracker.registered_versions(), lambda version: version != 1) == [1]
    assert unsaid(tracker.registered_versions(), lambda version: True) == []
    tracker.tag_removed([1])
    assert tags(1) == {REMOVED_TAG}
