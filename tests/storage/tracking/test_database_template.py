"""New databases are copied from one that was migrated before, and are the same as without that."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from configs.storage import TrackingConfig
from storage.tracking.connection import new_database
from storage.tracking.tracker import Tracker
from tests.storage.tracking.test_tracker import page

PACKAGE = "mlflow-skinny"


class Migration:
    """Makes a database of one table, and counts how often it does."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, database: Path) -> None:
        self.made += 1
        with sqlite3.connect(database) as connection:
            connection.execute("create table things (name text)")
        connection.close()


def tables(database: Path) -> set[tuple[str, str, tuple[str, ...]]]:
    """What is in a database; words in no order, since MLflow's migrations list sets of Python's."""
    connection = sqlite3.connect(database)
    found = connection.execute("select type, name, coalesce(sql, '') from sqlite_master").fetchall()
    connection.close()
    return {(kind, name, tuple(sorted(re.findall(r"\w+", sql)))) for kind, name, sql in found}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "refrain"


def test_the_second_database_is_a_copy(tmp_path: Path, cache: Path) -> None:
    migrate = Migration()
    for name in ("one.db", "two.db"):
        new_database(tmp_path / name, PACKAGE, migrate)
    assert migrate.made == 1
    assert tables(tmp_path / "one.db") == tables(tmp_path / "two.db") != set()
    assert {path.name for path in tmp_path.iterdir()} == {"one.db", "two.db", "cache"}
    assert len(list(cache.iterdir())) == 1


def test_a_database_that_is_there_is_left_alone(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "one.db").write_bytes(b"mine")
    new_database(tmp_path / "one.db", PACKAGE, Migration())
    assert (tmp_path / "one.db").read_bytes() == b"mine"


def test_without_a_cache_folder_it_is_migrated(tmp_path: Path, cache: Path) -> None:
    cache.parent.write_text("a file where the folder would be")
    migrate = Migration()
    new_database(tmp_path / "one.db", PACKAGE, migrate)
    assert migrate.made == 1
    assert tables(tmp_path / "one.db")


def test_without_a_home_it_is_migrated(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("storage.tracking.connection.cache_folder", homeless)
    migrate = Migration()
    new_database(tmp_path / "one.db", PACKAGE, migrate)
    assert migrate.made == 1


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    def fail(database: Path) -> None:
        database.write_text("half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        new_database(tmp_path / "one.db", PACKAGE, fail)
    assert not (tmp_path / "one.db").exists()
    assert not list(cache.iterdir())


def test_mlflow_gets_the_tables_that_it_would_make(tmp_path: Path, cache: Path) -> None:
    from mlflow import MlflowClient

    for name in ("one.db", "two.db"):
        tracker = Tracker(TrackingConfig(uri=f"sqlite:///{tmp_path / name}"))
        tracker.start(page())
        tracker.finish("FINISHED")
    MlflowClient(f"sqlite:///{tmp_path}/own.db").search_experiments()
    assert tables(tmp_path / "one.db") == tables(tmp_path / "two.db") == tables(tmp_path / "own.db")
    connection = sqlite3.connect(tmp_path / "two.db")
    places = connection.execute("select artifact_location from experiments").fetchall()
    connection.close()
    assert not any(str(cache) in place for (place,) in places)
