"""Say whether what runs in this container is well: the health check of the image.

    refrain health [URL …]

Well is what answers at each URL with a success; without URLs, those of REFRAIN_HEALTH_URL. Where
neither names one, the container's processes are looked at: they are well if any of their threads ran
since the last look. That finds programs which are stopped or wait for one another for ever, as a
flow, a worker and a server of ours never do: each does something every few seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from configs.environment import health_pages
from configs.terminal_text import print_text

TIMEOUT = 10.0  # seconds for a page to answer
UNWELL = 1  # exit code


def main(words: Sequence[str] = ()) -> int:
    """Look once; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="refrain health",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("urls", nargs="*", metavar="URL")
    parser.add_argument(
        "--last",
        type=Path,
        default=Path(tempfile.gettempdir(), f"refrain-health-{os.getuid()}"),
        metavar="FILE",
        help="where the last look is kept [%(default)s]",
    )
    arguments = parser.parse_args(list(words) or sys.argv[1:])
    pages = arguments.urls or health_pages()
    wrong = no_answer(pages) if pages else at_rest(arguments.last)
    print_text(wrong or "well", error=bool(wrong))
    return UNWELL if wrong else 0


def no_answer(pages: Sequence[str]) -> str:
    """What is wrong with the pages; empty if nothing is."""
    import urllib.error
    import urllib.request

    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this very container
    for page in pages:
        try:
            direct.open(page, timeout=TIMEOUT).close()
        except (OSError, ValueError) as error:  # HTTPError and URLError are OSErrors
            return f"{page}: {error}"
    return ""


def at_rest(last: Path, proc: Path = Path("/proc")) -> str:
    """What is wrong with the processes; empty if any ran since the time that `last` was written."""
    now = str(cpu_time(proc))
    before = last.read_text() if last.is_file() else None
    last.write_text(now)
    return "No process here ran since the last look." if now == before else ""


def cpu_time(proc: Path) -> int:
    """Nanoseconds that the threads of all processes here have run, those of this health check not."""
    own, total = {os.getpid(), os.getppid()}, 0
    for folder in proc.glob("[0-9]*"):
        if int(folder.name) in own - {1}:
            continue
        for file in folder.glob("task/*/schedstat"):
            try:
                total += int(file.read_text().split()[0])
            except (OSError, IndexError):
                continue  # it has ended meanwhile
    return total


if __name__ == "__main__":
    sys.exit(main())
