"""The logs of a run as an answer on the command line."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import TextIO

from configs.terminal_text import print_text, without_colours
from storage.runs.live import read_live
from storage.runs.run_store import RunStore
from tasks.commands.command import Answer, Request, text
from tasks.run.run_log import FLOW, WORKERS, folder_of


def answer(request: Request) -> Answer:
    """Show the end of the log that was asked for; go on with what is added, if that is asked."""
    arguments, files = request.arguments, request.files
    if arguments.lines < 0:
        raise ValueError(
            f"--lines {arguments.lines} shows nothing. Give it a number from 1, or 0: all."
        )
    path = log_of(files, arguments.workers, arguments.worker)
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = list(deque(file, arguments.lines or None))
        if arguments.follow:
            print_text(without_colours("".join(lines)), end="", flush=True)
            _follow(file)
            return Answer(record={}, shown=[])
    record = {"path": str(path), "lines": [line.rstrip("\n") for line in lines]}
    return Answer(record=record, shown=[text(without_colours("".join(lines)).rstrip("\n"))])


def _follow(file: TextIO) -> None:
    """Print what is added to a file, until Ctrl-C."""
    try:
        while True:
            print_text(without_colours(file.read()), end="", flush=True)
            time.sleep(1.0)
    except KeyboardInterrupt:
        return


def log_of(files: RunStore, workers: bool, worker: str | None) -> Path:
    """The file that was asked for. Raises ValueError, which says where it is or why there is none."""
    live = read_live(files)
    here = os.uname().nodename
    if live is not None and live.host not in (None, here):
        raise ValueError(
            f"The flow of {files.run} ran on {live.host}, and its logs are there in {live.logs}; "
            f"this is {here}. Ask there."
        )
    folder = folder_of(files.run)
    if live is not None and live.logs is not None:
        folder = Path(live.logs)
    name = WORKERS if workers else FLOW
    if worker is not None or (workers and live is not None and live.worker_logs is not None):
        if live is None or live.worker_logs is None:
            raise ValueError(
                f"The workers of {files.run} have no files of their own. Ask for --workers: those of "
                "the flow's machine print into one; others to where they were started."
            )
        folder = Path(live.worker_logs)
        names = sorted(path.stem for path in folder.glob("*.log"))
        if worker not in names:
            raise ValueError(
                f"Name one with --worker: {', '.join(names) or 'there are none yet'} (in {folder})."
            )
        name = f"{worker}.log"
    path = folder / name
    if not path.is_file():
        raise ValueError(
            f"There is no {path}: the run said nothing yet, was made by an older Refrain, or worked "
            "in another folder, in whose .refrain/logs it is."
        )
    return path
