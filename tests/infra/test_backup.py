"""Copies of databases by infra/backup.sh: whole while they are written to, and never fewer by a failure."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.flows.test_servers import PASSWORD, postgres

SCRIPT = Path(__file__).parents[2] / "infra" / "backup.sh"


def backup(to: Path, *databases: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, databases)],
        env={**os.environ, "BACKUP_TO": str(to), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def old_copy(to: Path, name: str, day: int, ending: str = "db") -> Path:
    to.mkdir(exist_ok=True)
    copy = to / f"{name}-202601{day:02d}T000000Z.{ending}"
    copy.write_bytes(b"good")
    return copy


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_copy_of_sqlite_is_whole_while_it_is_written_to(tmp_path: Path, journal: str) -> None:
    file, to, over = tmp_path / "mlflow.db", tmp_path / "copies", threading.Event()
    with sqlite3.connect(file) as database:
        database.execute(f"PRAGMA journal_mode={journal}")
        database.execute("CREATE TABLE pairs (n INTEGER, half TEXT, filler BLOB)")

    def write() -> None:
        own = sqlite3.connect(file, timeout=60)
        number = 0
        while not over.is_set():
            with own:  # both halves or none
                for half in "ab":
                    own.execute("INSERT INTO pairs VALUES (?, ?, zeroblob(4000))", (number, half))
            number += 1
        own.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        done = backup(to, file)
    finally:
        over.set()
        writer.join()
    assert (done.returncode, done.stderr) == (0, "")
    (copy,) = to.glob("mlflow-*.db")
    assert done.stdout == f"{copy}\n"
    assert copy.stat().st_mode & 0o077 == 0
    rows = sqlite3.connect(copy).execute("SELECT count(*), count(DISTINCT n) FROM pairs").fetchone()
    assert rows[0] == 2 * rows[1] > 0


def test_a_failure_leaves_the_copies_of_before(tmp_path: Path) -> None:
    to, file, broken = tmp_path / "copies", tmp_path / "good.db", tmp_path / "prefect.db"
    before = [old_copy(to, "prefect", day) for day in range(1, 5)]
    sqlite3.connect(file).execute("CREATE TABLE a (b)").connection.close()
    broken.write_bytes(b"no database" * 1000)
    done = backup(to, broken, file, BACKUP_KEEP="2")
    assert done.returncode == 1
    assert done.stderr.endswith(f"{broken} was not copied\n")
    assert all(copy.read_bytes() == b"good" for copy in before)
    assert len(list(to.glob("good-*.db"))) == 1  # the others are copied all the same
    assert list(to.glob("*.part")) == []
    missing = backup(to, tmp_path / "none.db")
    assert missing.returncode == 1 and not (tmp_path / "none.db").exists()


def test_the_number_of_copies_is_bounded(tmp_path: Path) -> None:
    to, file = tmp_path / "copies", tmp_path / "mlflow.db"
    sqlite3.connect(file).execute("CREATE TABLE a (b)").connection.close()
    copies = [old_copy(to, "mlflow", day) for day in range(1, 6)]
    others = [old_copy(to, "mlflow-2", 1), old_copy(to, "mlflow", 1, "dump")]
    (to / "mlflow-20260101T000000Z.db.part").touch()  # of one that was killed
    assert backup(to, file, BACKUP_KEEP="3").returncode == 0
    assert [copy.exists() for copy in copies] == [False, False, False, True, True]
    assert len(list(to.glob("mlflow-2026*.db"))) == 3
    assert all(other.exists() for other in others)
    assert list(to.glob("*.part")) == []


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [([], {}, "Name a database"), (["a"], {"BACKUP_KEEP": "0"}, "BACKUP_KEEP = 0 is no number")],
)
def test_what_cannot_be_is_said(
    tmp_path: Path, words: list[str], variables: dict[str, str], said: str
) -> None:
    done = backup(tmp_path, *words, **variables)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.slow
def test_databases_of_postgres_are_copied_each_round_and_copies_restore(tmp_path: Path) -> None:
    if shutil.which("pg_dump") is None:
        pytest.skip("pg_dump is not installed (apt install postgresql-client)")
    copies = tmp_path / "copies"
    (tmp_path / "pg").mkdir()
    old = [old_copy(copies, "prefect", day, "dump") for day in range(1, 4)]
    with postgres(tmp_path / "pg") as variables:
        place = urlsplit(variables["MLFLOW_BACKEND_STORE_URI"])
        where = {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(place.port),
            "PGUSER": "refrain",
            "PGPASSWORD": PASSWORD,
        }

        def sql(database: str, text: str) -> str:
            words = ["psql", "-At", "-d", database, "-c", text]
            return subprocess.run(
                words, env={**os.environ, **where}, check=True, capture_output=True, text=True
            ).stdout.strip()

        sql("mlflow", "CREATE TABLE runs AS SELECT 7 AS n")
        job = subprocess.Popen(
            ["bash", str(SCRIPT), "prefect", "mlflow"],
            env={
                **os.environ,
                **where,
                "BACKUP_TO": str(copies),
                "BACKUP_KEEP": "2",
                "BACKUP_EVERY": "2",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            end = time.monotonic() + 60
            while len(list(copies.glob("mlflow-*.dump"))) < 2:
                assert job.poll() is None and time.monotonic() < end
                time.sleep(0.1)
            sql("postgres", "ALTER DATABASE prefect RENAME TO elsewhere")
            assert job.stderr is not None
            while "prefect was not copied" not in job.stderr.readline():  # and the job goes on
                assert job.poll() is None and time.monotonic() < end
        finally:
            job.terminate()
            assert job.wait(10) == 143
        assert not any(copy.exists() for copy in old)
        assert len(list(copies.glob("prefect-*.dump"))) == 2
        first = min(copies.glob("mlflow-*.dump"))
        sql("mlflow", "DROP TABLE runs")
        restore = ["pg_restore", "--clean", "--if-exists", "-d", "mlflow", str(first)]
        subprocess.run(restore, env={**os.environ, **where}, check=True)
        assert sql("mlflow", "SELECT n FROM runs") == "7"
        assert first.stat().st_mode & 0o077 == 0
        assert backup(copies, "prefect", "mlflow", **where).returncode == 1
        assert backup(copies, "mlflow", **where).returncode == 0
