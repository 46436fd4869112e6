"""Commands whose output goes to a program that ends before them, as `refrain grpo --help | head`."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")
READER_LEFT = 141  # exit code: as of a program that SIGPIPE ended


def until_nobody_reads(main: Callable[P, int]) -> Callable[P, int]:
    """A command that ends without a traceback once nobody reads what it prints."""

    @wraps(main)
    def ended(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()  # also where argparse ends the program after --help
        except BrokenPipeError:
            if not nobody_reads():  # it is another pipe's
                raise
            drop_output()
            return READER_LEFT

    return ended


def drop_output() -> None:
    """Let what is printed from now on go nowhere, and what is not flushed yet."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def nobody_reads() -> bool:
    """Whether standard output is a pipe that is closed at its other end."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
