"""The password of a run's own Prefect server: new for each, in a file of this user alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.launch.server import PASSWORD_FILE, EmbeddedServer, new_password


def test_a_password_is_new_and_in_a_file_of_this_user(tmp_path: Path) -> None:
    home = tmp_path / "prefect"
    first = new_password(home)
    assert (home / PASSWORD_FILE).read_text().strip() == first
    assert (home / PASSWORD_FILE).stat().st_mode & 0o777 == 0o600
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (home / PASSWORD_FILE).unlink()
    (home / PASSWORD_FILE).symlink_to(victim)
    assert new_password(home) != first
    assert victim.read_text() == "mine" and not (home / PASSWORD_FILE).is_symlink()


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777])
def test_an_older_folder_is_closed_first(tmp_path: Path, mode: int) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect").chmod(mode)
    new_password(tmp_path / "prefect")
    assert (tmp_path / "prefect").stat().st_mode & 0o777 == 0o700


def test_a_folder_behind_a_link_gets_none(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "prefect").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        new_password(tmp_path / "prefect")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_server_gets_it_by_its_environment_and_only_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    for password in (None, "refrain:x"):
        server = EmbeddedServer(tmp_path, password)
        try:
            environment, command = server._environment(), server._command()
        finally:
            server._reserved.close()
        assert environment.get("PREFECT_SERVER_API_AUTH_STRING") == password
        assert not any("refrain:x" in word for word in command)
