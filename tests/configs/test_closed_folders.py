"""What a run makes is its user's alone; a store that a group shares stays the group's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.process import close_folder, close_to_others
from storage.objects.store import Store


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> set[int]:
    """Of all that is below a folder."""
    return {path.lstat().st_mode & 0o7777 for path in folder.rglob("*")}


def test_what_is_made_can_be_opened_by_one_user(tmp_path: Path) -> None:
    close_to_others()
    store = Store(f"file://{tmp_path}/store")
    store.write("run/a", b"1")
    store.create("run/deep/b", b"2")
    store.replace("run/a", b"3", b"1")
    (tmp_path / "prefect.db").touch()
    assert modes(tmp_path) == {0o700, 0o600}
    os.umask(0o027)
    close_to_others()
    assert os.umask(0) == 0o077


def test_a_store_is_shared_by_a_setting(tmp_path: Path) -> None:
    close_to_others()
    store = Store(f"file://{tmp_path}/store", {"shared_by_group": True})
    store.write("run/a", b"1")
    store.create("run/deep/b", b"2")
    store.replace("run/a", b"3", b"1")
    with store.write_stream("run/c") as file:
        file.write(b"4")
    assert {mode & 0o777 for mode in modes(tmp_path)} == {0o770, 0o660}
    assert store.read("run/a") == b"3"
    before = (tmp_path / "store").stat().st_mode
    (tmp_path / "store").chmod(0o750)  # what is there stays as it is
    store.write("run/d", b"5")
    assert (tmp_path / "store").stat().st_mode != before


@pytest.mark.parametrize("value", [False, "true", 1])
def test_nothing_else_shares_it(tmp_path: Path, value: object) -> None:
    close_to_others()
    Store(f"file://{tmp_path}/store", {"shared_by_group": value}).write("a", b"1")
    assert modes(tmp_path) == {0o700, 0o600}


def test_an_older_folder_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / ".refrain"
    close_folder(folder)
    assert not folder.exists()
    for mode, after in ((0o755, 0o700), (0o777, 0o700), (0o700, 0o700), (0o2775, 0o2775)):
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
        close_folder(folder)
        assert folder.stat().st_mode & 0o7777 == after
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    close_folder(tmp_path / "link")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_a_colleague_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / ".refrain"
    folder.mkdir()
    folder.chmod(0o755)
    os.chown(folder, 12345, 12345)
    close_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_model_that_is_kept_is_no_exception(tmp_path: Path) -> None:
    from engines.models.checkpoints import _made_once

    def make(folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    close_to_others()
    made = _made_once(tmp_path / "models" / "random", make)
    assert modes(tmp_path) == {0o700, 0o600}
    assert sorted(path.name for path in made.parent.iterdir()) == ["random", "random.lock"]
