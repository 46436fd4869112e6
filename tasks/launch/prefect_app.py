"""The process of a run's own Prefect server, which tasks/launch/server.py starts.

It is what `prefect server start` runs, without that command's own imports and services: Prefect's
ASGI app with the dashboard, in uvicorn, on a database that lies under PREFECT_HOME.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn

from engines.processes.process_setup import imports_uncollected
from storage.tracking.database_template import new_database


def main() -> None:
    """Serve until SIGTERM. The arguments are the host and the port."""
    host, port = sys.argv[1:]
    with imports_uncollected():
        from prefect.server.api.server import create_app
        from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_HOME

        database = PREFECT_HOME.value() / "prefect.db"
        if PREFECT_API_DATABASE_CONNECTION_URL.value() == _address(database):
            new_database(database, "prefect", _make_tables)
        app = create_app()
    uvicorn.run(
        app,
        host=host,
        port=int(port),
        log_level="error",
        lifespan="on",
        timeout_graceful_shutdown=1,
    )


def _address(database: Path) -> str:
    return f"sqlite+aiosqlite:///{database}"


def _make_tables(database: Path) -> None:
    """Prefect's tables in a new database."""
    from prefect.server.database import provide_database_interface
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.database.dependencies import temporary_database_config

    async def make() -> None:
        tables = provide_database_interface()
        await tables.create_db()
        await (await tables.engine()).dispose()

    with temporary_database_config(AioSqliteConfiguration(_address(database))):
        asyncio.run(make())


if __name__ == "__main__":
    main()
