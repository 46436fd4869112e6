"""The login of a run's own Prefect server: who started the run has it, and nobody else.

It is NAME:PASSWORD, Prefect's auth string, made anew for each server. The server and the flow have
it in memory; people and other commands on the machine read it in a file of the server's folder.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

HOST = "127.0.0.1"
LOGIN = re.compile(r"refrain:[\w-]{32}")  # so that no other file is taken for one and sent


def new_login() -> str:
    """A login of 192 random bits."""
    return f"refrain:{secrets.token_urlsafe(24)}"


def login_file(home: Path, port: int) -> Path:
    """Where the login of the server with that folder and port is."""
    return home / f"login-{port}"


def write_login(file: Path, login: str) -> None:
    """Write a login that only this user can read, whoever could read what was there before."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(login)


def headers_for(api: str, logs: str | None) -> dict[str, str]:
    """HTTP headers by which this user may ask a run's Prefect server; none where no login is known.

    The record of a run says where its server is, and who can write to the store can change that. So a
    team's login goes to PREFECT_API_URL alone, and a run's own to its port of this machine.

    Args:
        api: the server's API, of the run's record.
        logs: folder of the flow's log; the folder of its server is beside that of all logs.
    """
    if api == PREFECT_API_URL.value():
        login = PREFECT_API_AUTH_STRING.value()
    else:
        login = _own_login(api, logs)
    if login is None:
        return {}
    return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


def _own_login(api: str, logs: str | None) -> str | None:
    place = urlsplit(api)
    if logs is None or place.hostname != HOST or place.port is None:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        login = login_file(Path(logs).parents[1] / "prefect", place.port).read_text()
        if LOGIN.fullmatch(login):
            return login
    return None
