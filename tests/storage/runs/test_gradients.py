"""Gradients go with the step that they were made for, tickets first; the audit waits for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.objects.store import Store
from storage.runs.gradients import (
    GradientsOf,
    GradientsRefused,
    check_open,
    discard_gradient,
    gradients_key,
    open_folder,
    read_gradient,
    remove_gradients,
)
from storage.runs.run_store import RunStore

OF = GradientsOf(run="run", step=2, optimizer_step=1, weights="xxh3:1", inputs="k")


@pytest.fixture
def files(tmp_path: Path) -> RunStore:
    return RunStore(Store(str(tmp_path)), "run")


def test_only_committed_steps_are_cleared_and_tickets_go_first(files: RunStore) -> None:
    for step in (1, 2, 3):
        folder = f"{gradients_key(files, step)}/{step:06d}.0-key"
        open_folder(files.store, folder, OF)
        files.store.write(f"{folder}/00000-token.safetensors", b"tensors")
        files.store.write(f"{gradients_key(files, step)}/weights-1/manifest.json", b"{}")
    removed = remove_gradients(files, 2)
    kinds = [key.endswith(".json") for key in removed]
    assert kinds == sorted(kinds, reverse=True)
    assert len(removed) == 6
    assert {key.split("/")[2] for key in files.store.list("run")} == {"000003"}
    assert remove_gradients(files, 2) == []


def test_folders_with_digits_of_other_scripts_are_no_steps(files: RunStore) -> None:
    for name in ("²", "٣", "000001"):
        files.store.write(f"run/gradients/{name}/x", b"1")
    assert remove_gradients(files, 5) == ["run/gradients/000001/x"]


def test_a_ticket_is_for_one_thing_alone(files: RunStore) -> None:
    open_folder(files.store, "run/gradients/000002/here", OF)
    check_open(files.store, "run/gradients/000002/here", OF)
    for field, value in (("step", 3), ("weights", "xxh3:2"), ("inputs", "other")):
        other = OF.model_copy(update={field: value})
        with pytest.raises(GradientsRefused, match=f"its {field} is {value}, not"):
            check_open(files.store, "run/gradients/000002/here", other)
    with pytest.raises(GradientsRefused, match="step 2, optimizer step 1 of run run .* too late"):
        check_open(files.store, "run/gradients/000002/gone", OF)


def test_discarding_a_unit_leaves_the_others(files: RunStore) -> None:
    folder = "run/gradients/000002/here"
    for unit in (1, 10, 11):
        files.store.write(f"{folder}/{unit:05d}-a.safetensors", b"tensors")
        files.finish(f"{folder}/{unit:05d}.safetensors", {"unit": unit})
    discard_gradient(files, folder, 1)
    assert read_gradient(files, folder, 1) is None
    assert len(files.store.list(folder)) == 4
