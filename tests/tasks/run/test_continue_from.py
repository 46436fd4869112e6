"""Where a run begins by its settings: in a real store, with real registered versions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from configs.recipe import load_recipe
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.prompts.cursor import Cursor, draw
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource
from storage.runs.commit_log import Commit, commit
from storage.runs.run_store import ORIGIN_FIELD, RunStore, origin_of
from storage.runs.seen_rows import seen_before, write_rows, write_seen
from storage.runs.snapshots import mark
from storage.runs.weights_writing import publish
from storage.tracking.registry import Registry
from storage.tracking.tracker import TrackedData, TrackedRun, Tracker
from tasks.run.beginning import NothingNew, beginning, check_state_fits, first_cursor, fresh_rows
from tasks.run.opening import differing, may_change, open_run


def write(folder: Path, numbers: range) -> PromptSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": str(n)}) + "\n" for n in numbers))
    return open_source(settings(folder).data.source)


def settings(folder: Path, *words: str) -> GRPOConfig:
    own = [
        f"store.uri=file://{folder}/store",
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
        "data.source.kind=file",
        f"data.source.path={folder}/rows.jsonl",
    ]
    return load_recipe(GRPOConfig, "tiny", [*own, *words])


@pytest.fixture
def parent(tmp_path: Path) -> RunStore:
    """A finished run of two steps over four of six rows, with a snapshot after the second."""
    source = write(tmp_path, range(6))
    run = RunStore(Store(f"file://{tmp_path}/store"), "parent")
    config = settings(tmp_path)
    run.write_run({"config": config.model_dump(mode="json"), "flow": "flows.grpo:grpo"})
    cursor = Cursor.start(config.data, source)
    versions = [
        publish(run.store, run.run, v, [("w", torch.full((2,), float(v)))], {}) for v in range(3)
    ]
    for step in (1, 2):
        _, cursor = draw(source, cursor, 2)
        record = Commit(
            step=step,
            parent=step - 1,
            refs={"batch": write_batch(run.store, run.stage_key(step, "b", 1, "k"), {"x": [1.0]})},
            version_in=versions[step - 1],
            version_out=versions[step],
            cursor=cursor.to_json(),
        )
        commit(run, record)
    run.store.write(f"{run.state_key(2)}/0.distcp", b"state")
    mark(run, 2)
    write_rows(run, source.row_digests())
    return run


def begun(parent: RunStore, name: str, config: GRPOConfig) -> tuple[RunStore, Cursor]:
    """A run that begins as a flow would begin it."""
    origin, seen = beginning(config)
    run = RunStore(parent.store, name)
    write_seen(run, seen)
    run.write_run({"config": {}, ORIGIN_FIELD: origin.model_dump(mode="json")})
    source = open_source(config.data.source)
    return run, first_cursor(parent.store, config, source, origin, seen)


def test_only_unseen_rows_make_the_first_epoch(parent: RunStore, tmp_path: Path) -> None:
    source = write(tmp_path, range(9))
    run, cursor = begun(parent, "child", settings(tmp_path, "continue_from=parent"))
    assert cursor.fresh == 5
    assert str(origin_of(run)) == "parent@2"
    fresh = fresh_rows(cursor, source, seen_before(run))
    assert {6, 7, 8} < set(fresh)
    assert len(seen_before(run)) == 4
    first, _ = draw(source, cursor, 5, fresh=fresh)
    assert sorted(first) == fresh


def test_a_fork_of_a_run_that_began_with_unseen_rows_draws_those_first(
    parent: RunStore, tmp_path: Path
) -> None:
    source = write(tmp_path, range(9))
    config = settings(tmp_path, "continue_from=parent")
    run, cursor = begun(parent, "child", config)
    record = {"config": config.model_dump(mode="json"), "flow": "flows.grpo:grpo"}
    origin = origin_of(run)
    assert origin is not None
    run.write_run({**record, ORIGIN_FIELD: origin.model_dump(mode="json")})
    version = publish(parent.store, "child", 1, [("w", torch.ones(2))], {})
    _, cursor = draw(source, cursor, 2, fresh=fresh_rows(cursor, source, seen_before(run)))
    batch = write_batch(run.store, run.stage_key(1, "b", 1, "k"), {"x": [1.0]})
    commit(
        run,
        Commit(
            step=1,
            parent=0,
            refs={"batch": batch},
            version_in=version,
            version_out=version,
            cursor=cursor.to_json(),
        ),
    )
    before = run.store.list("")
    opened = open_run("flows.grpo:grpo", settings(tmp_path), fork="child@1")
    assert (opened.start, opened.first, opened.resumed) == (1, cursor, False)
    rest, _ = draw(source, opened.first, 3, fresh=fresh_rows(opened.first, source, opened.seen))
    assert len(rest) == 3 and {6, 7, 8} & set(rest)
    assert run.store.list("") == before  # opening only reads


@pytest.mark.parametrize(
    ("words", "left"), [(["continue_data=unseen"], 5), (["continue_data=restart"], 9)]
)
def test_new_rows_that_make_no_step_are_too_little(
    parent: RunStore, tmp_path: Path, words: list[str], left: int
) -> None:
    write(tmp_path, range(9))
    short = ["data.epochs=1", "prompts_per_step=10"]
    with pytest.raises(NothingNew, match=f"data.epochs = 1 leaves {left} prompts .* takes 10"):
        open_run("flows.grpo:grpo", settings(tmp_path, "continue_from=parent", *short, *words))
    with pytest.raises(ConfigError, match="leaves 9 prompts .* or data.last_step = partial"):
        open_run("flows.grpo:grpo", settings(tmp_path, *short))
    partial = settings(tmp_path, *short, "data.last_step=partial")
    assert open_run("flows.grpo:grpo", partial).first.position == 0


def test_with_nothing_new_there_is_nothing_to_do(parent: RunStore, tmp_path: Path) -> None:
    source = open_source(settings(tmp_path).data.source)
    run, cursor = begun(parent, "child", settings(tmp_path, "continue_from=parent@2"))
    version = publish(parent.store, "child", 1, [("w", torch.ones(2))], {})
    _, cursor = draw(source, cursor, 2, fresh=fresh_rows(cursor, source, seen_before(run)))
    record = Commit(
        step=1, parent=0, version_in=version, version_out=version, cursor=cursor.to_json()
    )
    commit(run, record)
    write_rows(run, source.row_digests())
    with pytest.raises(
        NothingNew, match="all 6 rows of .* were seen by child@1 or the runs before"
    ):
        beginning(settings(tmp_path, "continue_from=child"))
    again, _ = beginning(settings(tmp_path, "continue_from=child", "continue_data=restart"))
    assert str(again) == "child@1"


def test_trainer_state_and_cursor_if_asked(parent: RunStore, tmp_path: Path) -> None:
    words = ("continue_from=parent", "continue_state=trainer", "continue_data=cursor")
    run, cursor = begun(parent, "child", settings(tmp_path, *words))
    origin = origin_of(run)
    assert origin is not None and origin.trainer_state and origin.cursor
    assert cursor.position == 4
    with pytest.raises(ConfigError, match="parent@1 is not stored as a snapshot"):
        beginning(settings(tmp_path, "continue_from=parent@1", words[1]))
    write(tmp_path, range(9))
    with pytest.raises(ConfigError, match="no longer those of parent@2: 6 rows then, 9 rows"):
        beginning(settings(tmp_path, *words))


def test_the_champion_is_found_by_its_alias(parent: RunStore, tmp_path: Path) -> None:
    config = settings(tmp_path, "continue_from=models:/m@champion")
    with pytest.raises(ConfigError, match="no version of model m has the alias champion"):
        beginning(config)
    data = TrackedData(name="rows", digest="sha256:00", source={}, rows=6)
    tracked = TrackedRun(
        run="parent", store_uri=parent.store.uri, settings={}, data=data, model_name="m"
    )
    tracker = Tracker(config.tracking)
    tracker.start(tracked)
    number = tracker.register_version(
        1, uri="file:///w", digest="d", step=1, store_uri=parent.store.uri
    )
    Registry(config.tracking).give("m", "champion", number)
    run, cursor = begun(parent, "child", config)
    assert str(origin_of(run)) == "parent@1"
    assert cursor.fresh == 4
    elsewhere = settings(
        tmp_path, "continue_from=models:/m@champion", f"store.uri=file://{tmp_path}/other"
    )
    with pytest.raises(ConfigError, match="Set store.uri to the former"):
        beginning(elsewhere)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nobody", "continue_from = nobody: Run nobody has no committed step"),
        ("parent@7", "Run parent has no committed step 7: its last is 2"),
    ],
)
def test_a_place_that_is_not_there_is_refused(
    parent: RunStore, tmp_path: Path, place: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        beginning(settings(tmp_path, f"continue_from={place}"))


def test_a_finished_schedule_is_not_taken_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.schedule = cosine that has come to its end"):
        settings(tmp_path, "continue_from=a", "continue_state=trainer", "train.schedule=cosine")


def test_an_order_without_data_is_empty() -> None:
    assert seen_before(RunStore(Store("memory://none"), "run")).dtype == np.uint64


def test_a_run_with_steps_left_wants_the_data_that_it_drew(
    parent: RunStore, tmp_path: Path
) -> None:
    more, done = settings(tmp_path, "steps=3"), settings(tmp_path, "steps=2")
    assert open_run("flows.grpo:grpo", more, resume=parent.run).resumed
    write(tmp_path, range(9))
    with pytest.raises(ConfigError, match="data has changed since .* 6 rows .* 9 rows .* Restore"):
        open_run("flows.grpo:grpo", more, resume=parent.run)
    assert open_run("flows.grpo:grpo", done, resume=parent.run).resumed  # it draws nothing


@pytest.mark.parametrize(("was", "now"), [("8bit", "float32"), ("bfloat16", "8bit")])
def test_moments_of_another_kind_are_refused_by_name(tmp_path: Path, was: str, now: str) -> None:
    before, config = (settings(tmp_path, f"train.optimizer_dtype={dtype}") for dtype in (was, now))
    said = f"of train.optimizer_dtype = {was}, and train.optimizer_dtype = {now} has other moments"
    with pytest.raises(ConfigError, match=f"{said}.*continue_state = weights"):
        check_state_fits(config, before, "parent@2")
    check_state_fits(before, before, "parent@2")


def test_an_adapter_that_is_served_otherwise_is_the_same_state(tmp_path: Path) -> None:
    merged = settings(tmp_path, "lora.rank=4", "rollout.engine=vllm")
    beside = settings(tmp_path, "lora.rank=4", "rollout.engine=vllm", "lora.serving=adapter")
    check_state_fits(beside, merged, "parent@2")
    other = settings(tmp_path, "lora.rank=8", "rollout.engine=vllm", "lora.serving=adapter")
    with pytest.raises(ConfigError, match="Set lora to the former"):
        check_state_fits(other, merged, "parent@2")


def test_masters_in_another_form_are_the_same_state(tmp_path: Path) -> None:
    words = ("train.compute_dtype=bfloat16", "train.weights_dtype=bfloat16")
    before = settings(tmp_path, *words)
    remainders = settings(tmp_path, *words, "train.master_weights=remainder")
    check_state_fits(remainders, before, "parent@2")
    changed = differing(before.model_dump(mode="json"), remainders.model_dump(mode="json"))
    assert changed == ["train.master_weights"]
    assert all(map(may_change, changed))
