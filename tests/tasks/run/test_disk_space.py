"""When a run warns that the disk of its store fills up."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.run.facts import FEWEST, GIB, DiskWarnings


class Disk:
    """What shutil would say of a disk that a test fills."""

    left = 0.0  # GiB

    def disk_usage(self, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=int(self.left * GIB))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    monkeypatch.setattr(shutil, "disk_usage", found.disk_usage)
    return found


def test_a_disk_that_fills_is_told_in_time_and_once(disk: Disk, tmp_path: Path) -> None:
    watch, said = DiskWarnings(tmp_path, steps=1000), {}
    for step in range(1, 100):
        disk.left = 100.0 - step
        if (sentence := watch.after(step, 0.1 * GIB)) is not None:
            said[step] = sentence
    assert sorted(said) == [50, 75, 88, 94, 97, 99], "50 steps before its end, then at each half"
    assert "has 50.0 GiB left: it lost 1 GiB a step, and is full in about 50 steps" in said[50]
    assert "store.keep_steps" in said[50]


def test_a_disk_with_room_for_the_whole_run_is_no_warning(disk: Disk, tmp_path: Path) -> None:
    watch = DiskWarnings(tmp_path, steps=60)
    for step in range(1, 61):
        disk.left = 100.0 - step
        assert watch.after(step, 0.1 * GIB) is None, step


def test_room_for_less_than_two_steps_is_told_at_once(disk: Disk, tmp_path: Path) -> None:
    watch = DiskWarnings(tmp_path, steps=10)
    disk.left = 3.0
    sentence = watch.after(1, 2.0 * GIB)
    assert sentence is not None and "a step of this run writes up to 2.0 GiB" in sentence
    assert watch.after(2, 2.0 * GIB) is None, "it has been told"
    disk.left = 1.4
    assert watch.after(3, 2.0 * GIB) is not None, "half of that is used up"


def test_who_makes_room_is_warned_again(disk: Disk, tmp_path: Path) -> None:
    watch = DiskWarnings(tmp_path, steps=10)
    disk.left = 3.0
    assert watch.after(1, 2.0 * GIB)
    disk.left = 300.0
    assert watch.after(2, 2.0 * GIB) is None
    disk.left = 3.0
    assert watch.after(3, 2.0 * GIB)


def test_a_store_elsewhere_has_no_disk_here() -> None:
    assert DiskWarnings(None, steps=10).after(FEWEST, 1.0) is None


def test_the_real_disk_of_a_folder_is_asked(tmp_path: Path) -> None:
    assert DiskWarnings(tmp_path, steps=9).after(1, 2.0 * shutil.disk_usage(tmp_path).free)
