"""Prompts from a user's function, which is named by an import path.

Every process that needs rows calls the function once: the flow, and each worker of the data engine.
So it has to return the same rows in the same order each time; their digest says whether it did.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future

from configs.data import FunctionSource
from configs.imports import described, imported
from storage.objects.documents import Row
from storage.prompts.source import RowsInMemory, plain_row, row_name

MOST_ROWS = 2**22  # that are kept in memory; a function that gives more is taken for endless
_SECOND = 1.0  # beyond the deadline, for one that looks at it between two rows


class _Endless(Exception):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


class FunctionRows(RowsInMemory):
    """The rows that a user's function returned, in memory.

    Raises ValueError where the function cannot be called, or where its rows are no data.
    """

    def __init__(self, config: FunctionSource) -> None:
        rows = [_row(i, row, config.path) for i, row in enumerate(self._returned(config))]
        if not rows:
            raise ValueError(f"data.source.path is {config.path}: it returned no rows.")
        super().__init__(config.path, rows)

    def _returned(self, config: FunctionSource) -> list[object]:
        """What the function returns, or yields, with an error of its own in one sentence."""
        try:
            function = imported(config.path)
        except ValueError as error:
            raise ValueError(f"data.source.path: {error}.") from error
        outcome: Future[list[object]] = Future()
        give_up = time.monotonic() + config.timeout

        def call() -> None:
            rows: list[object] = []
            try:
                for row in function(**config.params):
                    rows.append(row)
                    if len(rows) > MOST_ROWS or time.monotonic() > give_up:
                        return
                outcome.set_result(rows)
            except BaseException as error:  # raised in the caller's thread
                outcome.set_exception(error)
            finally:
                if not outcome.done():
                    outcome.set_exception(_Endless(len(rows)))

        threading.Thread(target=call, name="rows", daemon=True).start()
        try:
            return outcome.result(config.timeout + _SECOND)
        except (_Endless, TimeoutError) as error:
            if isinstance(error, TimeoutError) and outcome.done():
                raise self._gave_none(config, error) from error  # its own
            rows = f" {error.rows} rows and" if isinstance(error, _Endless) else ""
            raise ValueError(
                f"data.source.path is {config.path}, which gave{rows} no end of them within "
                f"{config.timeout:g} s and {MOST_ROWS} rows. Let it end, or set data.source.timeout "
                "higher."
            ) from None
        except Exception as error:  # the user's own lines ran: any error may come out
            raise self._gave_none(config, error) from error

    @staticmethod
    def _gave_none(config: FunctionSource, error: Exception) -> ValueError:
        return ValueError(
            f"data.source.path is {config.path}, which gave no rows: {described(error)}"
        )


def _row(index: int, row: object, source: str) -> Row:
    if not isinstance(row, Mapping):
        raise ValueError(
            f"{row_name(index)} of {source} is a {type(row).__name__}, not a dict of columns."
        )
    return plain_row(dict(row), f"{row_name(index)} of {source}")
