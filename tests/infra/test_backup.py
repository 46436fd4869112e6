"""The back-up job of infra/compose.yaml, run on a real Postgres: copies that restore, old ones gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.flows.test_servers import PASSWORD, postgres

pytestmark = pytest.mark.slow

COMPOSE = yaml.safe_load((Path(__file__).parents[2] / "infra" / "compose.yaml").read_text())


def test_databases_are_copied_each_round_and_copies_restore(tmp_path: Path) -> None:
    if shutil.which("pg_dump") is None:
        pytest.skip("pg_dump is not installed (apt install postgresql-client)")
    copies = tmp_path / "copies"
    copies.mkdir()
    (tmp_path / "pg").mkdir()
    script = COMPOSE["configs"]["backup"]["content"].replace("$$", "$")
    (tmp_path / "backup.sh").write_text(script.replace("/backups", str(copies)))
    old = copies / "prefect-20200101T000000Z.dump"
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    with postgres(tmp_path / "pg") as variables:
        place = urlsplit(variables["MLFLOW_BACKEND_STORE_URI"])
        where = {
            **os.environ,
            "PGHOST": "127.0.0.1",
            "PGPORT": str(place.port),
            "PGUSER": "refrain",
            "PGPASSWORD": PASSWORD,
        }

        def sql(database: str, text: str) -> str:
            words = ["psql", "-At", "-d", database, "-c", text]
            return subprocess.run(
                words, env=where, check=True, capture_output=True, text=True
            ).stdout.strip()

        sql("mlflow", "CREATE TABLE runs AS SELECT 7 AS n")
        job = subprocess.Popen(
            ["bash", str(tmp_path / "backup.sh")],
            env={**where, "BACKUP_DAYS": "14", "BACKUP_EVERY": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            end = time.monotonic() + 60
            while len(list(copies.glob("mlflow-*.dump"))) < 2:
                assert job.poll() is None and time.monotonic() < end
                time.sleep(0.1)
            sql("mlflow", "DROP TABLE runs")
            sql("postgres", "ALTER DATABASE prefect RENAME TO elsewhere")
            assert job.stderr is not None
            while "prefect was not copied" not in job.stderr.readline():  # and the job goes on
                assert job.poll() is None and time.monotonic() < end
        finally:
            job.kill()
            job.wait(10)
        assert not old.exists()
        assert len(list(copies.glob("prefect-*.dump"))) >= 2
        first = min(copies.glob("mlflow-*.dump"))
        restore = ["pg_restore", "-d", "mlflow", str(first)]
        subprocess.run(restore, env=where, check=True)
        assert sql("mlflow", "SELECT n FROM runs") == "7"
        assert first.stat().st_mode & 0o077 == 0
