"""The database of the run's own Prefect server: writers wait for each other, none is turned away."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import text

from tasks.launch.prefect_app import writes_in_turn


def test_a_reader_may_go_on_to_write_while_others_write(tmp_path: Path) -> None:
    """Prefect's own way fails here with "database is locked", and the client waits two seconds."""
    from prefect.server.database import provide_database_interface

    order = []

    async def both() -> None:
        tables = provide_database_interface()
        async with tables.session_context(begin_transaction=True) as session:
            await session.execute(text("CREATE TABLE counts (who TEXT)"))
        has_read, begun = asyncio.Event(), asyncio.Event()

        async def reads_then_writes() -> None:
            async with tables.session_context(begin_transaction=True) as session:
                await session.execute(text("SELECT * FROM counts"))
                has_read.set()
                await begun.wait()
                await asyncio.sleep(0.2)  # in which the other would have written
                await session.execute(text("INSERT INTO counts VALUES ('first')"))
                order.append("first")

        async def writes() -> None:
            await has_read.wait()
            begun.set()
            async with tables.session_context(begin_transaction=True) as session:
                await session.execute(text("INSERT INTO counts VALUES ('second')"))
                order.append("second")

        await asyncio.gather(reads_then_writes(), writes())
        await (await tables.engine()).dispose()

    with writes_in_turn(f"sqlite+aiosqlite:///{tmp_path / 'prefect.db'}"):
        asyncio.run(both())
    assert order == ["first", "second"]
