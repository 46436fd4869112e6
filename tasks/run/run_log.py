"""What a run's flow and its workers say, in files that stay when the run has ended.

Of the flow: the logs of its tasks, the lines of its terminal, and a failure's traceback. Workers on
this machine print to the flow's standard error, and to a file beside; those of Slurm have files of
their own, in the folder of its jobs.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary, TracebackException
from types import TracebackType

from configs.terminal_text import terminal_text

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
FOLDER = Path(".refrain", "logs")  # of the working folder, as the run's Prefect database
FLOW, WORKERS = "flow.log", "workers.log"
CALLERS = (
    "/prefect/",
    "/concurrent/futures/",
    "contextlib.py",
    "<frozen ",
    "/tasks/run/run_log.py",
)
LINES = logging.getLogger("refrain.terminal")  # what the terminal was told
TOLD = ("prefect.flow_runs", "prefect.task_runs", LINES.name)  # loggers


class _Lines(logging.Formatter):
    """Time, level and the task or flow run, then the message; tracebacks without Prefect's frames."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(of)s%(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)  # other handlers take over what is noted there
        record.exc_text = None
        fields = record.__dict__
        name = fields.get("task_run_name") or fields.get("flow_run_name")
        fields["of"] = f"{name}: " if name else ""
        return terminal_text(super().format(record))

    def formatException(self, ei: ExcInfo) -> str:
        cause: TracebackException | None = TracebackException(*ei)
        first = cause
        while cause is not None:
            cause.stack = StackSummary.from_list(
                [f for f in cause.stack if not _left_out(f.filename)]
            )
            cause = cause.__cause__ or cause.__context__
        return "" if first is None else "".join(first.format()).rstrip()


def _left_out(file: str) -> bool:
    """Whether a frame says nothing of the work: Prefect's own, and what only calls."""
    return any(part in file for part in CALLERS)


def folder_of(run: str) -> Path:
    """Where the logs of a run that works here go, as an absolute path."""
    return (FOLDER / run).absolute()


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    """During the body, write what is said to the flow's file, after what was there before.

    An error that ends the body is written with its traceback, and raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / FLOW, encoding="utf-8")
    handler.setFormatter(_Lines())
    LINES.setLevel(logging.INFO)
    LINES.propagate = False
    loggers = [logging.getLogger(name) for name in TOLD]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    except BaseException as error:
        record = LINES.makeRecord(
            LINES.name, logging.ERROR, __file__, 0, "The run ends by an error.", (),
            (type(error), error, error.__traceback__),
        )  # fmt: skip
        handler.handle(record)
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
