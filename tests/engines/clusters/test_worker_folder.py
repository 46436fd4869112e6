"""The folder of a worker in a Slurm job or a pod: its user's alone, whoever was in /tmp before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from distributed.diskutils import WorkSpace

from engines.clusters import worker

SCHEDULER = "tcp://127.0.0.1:1"


def started(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    """The words with which `dask worker` would be started."""
    found: list[str] = []
    for name in ("begin_process", "close_to_others", "import_from_working_folder"):
        monkeypatch.setattr(worker, name, lambda: None)
    monkeypatch.setattr(worker, "start_fork_server", lambda: None)
    monkeypatch.setattr(worker, "dask_worker", found.extend)
    monkeypatch.setattr("sys.argv", ["worker", SCHEDULER, *options])
    worker.main()
    return found


def folder_of(words: list[str]) -> Path:
    """The one that Dask takes, which is the last."""
    last = len(words) - 1 - words[::-1].index(worker.FOLDER)
    return Path(words[last + 1])


def closed(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_IMODE(status.st_mode) == 0o700 and status.st_uid == os.getuid()


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_others_cannot_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    tmp_path.chmod(0o1777)
    before = os.umask(umask)
    try:
        folder = folder_of(started(monkeypatch, worker.FOLDER, str(tmp_path)))
        assert closed(folder)
        assert tmp_path in folder.parents
        assert closed(folder.parent)
        inner = Path(WorkSpace(str(folder)).new_work_dir(name="one").dir_path)
        assert folder in inner.parents
    finally:
        os.umask(before)
    assert not list(tmp_path.glob("dask-*"))
    again = folder_of(started(monkeypatch, worker.FOLDER, str(tmp_path)))
    assert again == folder, "so that what dead workers left is cleared by the next"


@pytest.mark.parametrize("made", ["link", "open folder"])
def test_a_folder_that_somebody_made_before_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    tmp_path.chmod(0o1777)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    squatted = tmp_path / f"refrain-{os.getuid()}"
    if made == "link":
        squatted.symlink_to(theirs)
    else:
        squatted.mkdir()
        squatted.chmod(0o777)
    folder = folder_of(started(monkeypatch, worker.FOLDER, str(tmp_path)))
    assert closed(folder)
    assert not {squatted, theirs} & {folder, *folder.parents}
    assert not list(theirs.iterdir())


def test_without_an_option_it_is_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert tmp_path in folder_of(started(monkeypatch)).parents
