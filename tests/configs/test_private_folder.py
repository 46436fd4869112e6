"""A folder whose name others can guess: theirs is refused, ours is ours alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from configs import process
from configs.process import keep_compiled_code, machine_folder, private_folder
from storage.objects.node_cache import NodeCache
from storage.objects.store import Store

root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
OTHER = 12345


def test_what_is_made_is_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder(folder) == folder
    folder.chmod(0o755)  # as an older Refrain made it
    assert private_folder(folder).stat().st_mode & 0o777 == 0o700


@root
def test_a_group_that_is_not_the_users_own_is_not_trusted(tmp_path: Path) -> None:
    for group, trusted in ((OTHER, False), (os.getuid(), True)):
        folder = tmp_path / str(group)
        folder.mkdir()
        os.chown(folder, -1, group)
        folder.chmod(0o775)
        if trusted:
            assert private_folder(folder).stat().st_mode & 0o777 == 0o700
            continue
        with pytest.raises(PermissionError, match="can be written by others"):
            private_folder(folder)


@pytest.mark.parametrize("mode", [0o702, 0o777, 0o1777])
def test_where_others_could_write_nothing_is_trusted(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="can be written by others"):
        private_folder(folder)


def test_links_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "file").touch()
    for name in ("link", "nowhere", "file"):
        with pytest.raises(OSError):
            private_folder(tmp_path / name)
    assert not (tmp_path / "gone").exists()


def test_a_folder_above_in_which_everyone_renames_is_refused(tmp_path: Path) -> None:
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by everyone"):
        private_folder(tmp_path / "above" / "mine")
    (tmp_path / "above").chmod(0o1777)  # as /tmp
    assert private_folder(tmp_path / "above" / "mine")


@root
def test_another_users_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trap = tmp_path / f"refrain-{os.getuid()}"
    trap.mkdir(mode=0o700)
    os.chown(trap, OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"number {OTHER}"):
        private_folder(trap)
    folder = machine_folder("weights")
    assert trap not in folder.parents and tmp_path in folder.parents
    assert folder.stat().st_uid == os.getuid()
    assert not list(trap.iterdir())


def test_all_processes_have_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = machine_folder("weights")
    assert folder == machine_folder("weights") == tmp_path / f"refrain-{os.getuid()}" / "weights"


def test_kept_weights_follow_no_link(tmp_path: Path) -> None:
    store = Store(f"memory://{tmp_path.name}")
    store.write("a", b"weights")
    cache = NodeCache(store, tmp_path / "kept", 10_000)
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    cache._path("a").symlink_to(victim)
    with pytest.raises(OSError):
        cache.read_ranges([("a", 0, 7)])
    with pytest.raises(OSError):
        cache.has("a")
    assert victim.read_bytes() == b"mine"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError):
        NodeCache(store, tmp_path / "open", 10_000)


@pytest.mark.parametrize("home", ["cache", "cache-of-others", ""])
def test_compiled_code_is_looked_for_in_a_folder_of_ones_own(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / (home or "a-file" / Path("x"))))
    (tmp_path / "a-file").touch()
    (tmp_path / "cache-of-others" / "refrain").mkdir(parents=True)
    (tmp_path / "cache-of-others" / "refrain").chmod(0o777)
    keep_compiled_code()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache-of-others") not in folder.parents
    assert (home == "cache") == ((tmp_path / "cache") in folder.parents)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_torch_compiles_there(tmp_path: Path) -> None:
    code = "from configs.process import begin_process; begin_process()\n"
    code += "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(Path(process.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / "refrain" / "torchinductor")
