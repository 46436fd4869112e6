"""Say whether what runs in this container is well: the health check of the image.

    refrain health [URL …]

Well is what answers at each URL with a success, by itself and within ten seconds; each other URL has
a line that says why it is not. Without URLs, those of REFRAIN_HEALTH_URL are asked. Where
neither names one, the container's processes are looked at: they are well if any of their threads ran
since the last look. That finds programs which are stopped or wait for one another for ever, as a
flow, a worker and a server of ours never do: each does something every few seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from configs.environment import health_pages
from configs.terminal_text import print_text

if TYPE_CHECKING:
    import urllib.error
    import urllib.request

TIMEOUT = 10.0  # seconds for all pages to answer
UNWELL = 1  # exit code; Docker has no other
NO_PAGE = "is no address of a page. Give one as http://HOST:PORT/PATH, without a login."


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
    """A line for each page that is not well; empty if all are. They are asked at once."""
    faults = {page: f"{shown(page)} did not answer in {TIMEOUT:g} s." for page in pages}

    def ask(page: str) -> None:
        faults[page] = wrong_with(page)

    threads = [threading.Thread(target=ask, args=(page,), daemon=True) for page in faults]
    for thread in threads:
        thread.start()
    end = time.monotonic() + TIMEOUT
    for thread in threads:  # a page may send a byte now and then, which no socket's timeout ends
        thread.join(max(0.0, end - time.monotonic()))
    return "\n".join(filter(None, list(faults.values())))


def wrong_with(page: str) -> str:
    """What is wrong with one page, in a line; empty if it answers with a success."""
    import http.client
    import urllib.error

    try:
        parts = urlsplit(page)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError(page)
        _ = parts.port  # ValueError for none that there is
        _opener().open(page, timeout=TIMEOUT).close()
    except urllib.error.HTTPError as error:
        return f"{shown(page)} {_answer(error)}"
    except TimeoutError:
        return f"{shown(page)} did not answer in {TIMEOUT:g} s."
    except http.client.InvalidURL:
        return f"{shown(page)} {NO_PAGE}"
    except http.client.BadStatusLine:
        return f"{shown(page)} answers, and not by HTTP."
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return f"{shown(page)} did not answer in {TIMEOUT:g} s."
        return f"{shown(page)} cannot be reached: {_reason(error.reason)}."
    except (OSError, http.client.HTTPException) as error:
        return f"{shown(page)} cannot be reached: {_reason(error)}."
    except ValueError:
        return f"{shown(page)} {NO_PAGE}"
    return ""


def _opener() -> urllib.request.OpenerDirector:
    """Asks this very container, by no proxy, and goes nowhere else."""
    import urllib.request

    class Stays(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *arguments: object) -> None:
            return None  # the redirect itself is the answer

    return urllib.request.build_opener(urllib.request.ProxyHandler({}), Stays)


def _answer(error: urllib.error.HTTPError) -> str:
    if error.code in (301, 302, 303, 307, 308):
        return (
            f"sends on to {shown(error.headers.get('Location', ''))}, as to a login. Name the page "
            "itself."
        )
    login = ": it asks for a login. Name a page that needs none" if error.code in (401, 407) else ""
    return f"answers {error.code} {error.reason}{login}."


def _reason(error: str | BaseException) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)


def shown(page: str) -> str:
    """An address without the login that may be in it."""
    return re.sub(r"//[^/@]*@", "//…@", page)


def at_rest(last: Path, proc: Path = Path("/proc")) -> str:
    """What is wrong with the processes; empty if any ran since the time that `last` was written."""
    now = str(cpu_time(proc))
    try:
        before = last.read_text() if last.exists() else None
        last.write_text(now)
    except OSError as error:
        return f"The last look cannot be kept in {last}: {error.strerror}. Set --last to a file."
    return "No process here ran since the last look." if now == before else ""


def cpu_time(proc: Path) -> int:
    """Nanoseconds that the threads of all processes here have run, those of this health check not."""
    ours, total = {os.getpid(), os.getppid()}, 0
    for folder in proc.glob("[0-9]*"):
        if int(folder.name) in ours - {1}:
            continue
        for file in folder.glob("task/*/schedstat"):
            try:
                total += int(file.read_text().split()[0])
            except (OSError, IndexError):
                continue  # it has ended meanwhile
    return total


if __name__ == "__main__":
    sys.exit(main())
