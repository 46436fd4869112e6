"""The process of a run's own Prefect server, which tasks/launch/server.py starts.

It is what `prefect server start` runs, without that command's own imports and services: Prefect's
ASGI app with the dashboard, in uvicorn, on a database that lies under PREFECT_HOME.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Route

from engines.processes.process_setup import imports_uncollected
from storage.tracking.connection import new_database
from tasks.launch import dashboard_link

if TYPE_CHECKING:
    from fastapi import FastAPI
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


def main() -> None:
    """Serve until SIGTERM. The arguments are the host and the port."""
    host, port = sys.argv[1:]
    with imports_uncollected():
        from prefect.server.api.server import create_app
        from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, PREFECT_HOME

        database = PREFECT_HOME.value() / "prefect.db"
        tables: AbstractContextManager[None] = contextlib.nullcontext()
        if PREFECT_API_DATABASE_CONNECTION_URL.value() == _address(database):
            new_database(database, "prefect", _make_tables)
            tables = writes_in_turn(_address(database))
        app = create_app()
        guard(app, host)
    with tables:
        uvicorn.run(
            app,
            host=host,
            port=int(port),
            log_level="error",
            lifespan="on",
            timeout_graceful_shutdown=1,
            ws_per_message_deflate=False,  # a flow and its server are on one machine
        )


def guard(app: FastAPI, host: str) -> None:
    """Have the server answer requests to this machine alone, and give its dashboard a link.

    A web page whose own name leads here (DNS rebinding) asks for that name. `localhost` is the
    browser's word where the port is forwarded, by SSH say.
    """
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[host, "localhost"])
    app.router.routes.insert(0, Route(dashboard_link.PATH, dashboard_link.page))


def writes_in_turn(address: str) -> AbstractContextManager[None]:
    """Prefect's database, where a transaction that writes waits for the lock before it reads.

    As Prefect begins them, one that has read before another wrote fails at its own first write, and
    the client asks again after two seconds or more: each of several steps that overlap would begin
    that late. Work-around for https://github.com/PrefectHQ/prefect/issues/18934.
    """
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.database.dependencies import temporary_database_config

    class Immediate(AioSqliteConfiguration):
        @asynccontextmanager
        async def begin_transaction(
            self, session: AsyncSession, with_for_update: bool = False
        ) -> AsyncGenerator[AsyncSessionTransaction, None]:
            async with super().begin_transaction(session, with_for_update=True) as transaction:
                yield transaction

    return temporary_database_config(Immediate(address))


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
