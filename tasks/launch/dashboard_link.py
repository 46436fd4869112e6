"""How a browser gets the login of a run's own Prefect server: by a link that is opened once.

Prefect's dashboard keeps its password in the browser's local storage, or asks for it. The page of the
link puts it there. It takes the login from the link's fragment, which a browser sends to no server.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import HTMLResponse

PATH = "/open"
SCRIPT = """
const login = decodeURIComponent(location.hash.slice(1));
if (login) localStorage.setItem("prefect-password", btoa(login));
location.replace("/runs");
"""
_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; "
    f"script-src 'sha256-{_DIGEST}'",
    "Referrer-Policy": "no-referrer",
}


def link(address: str, login: str) -> str:
    """The link; whoever has it may do everything on the server."""
    return f"{address}{PATH}#{login}"


def page(request: Request) -> HTMLResponse:
    """The page of the link."""
    from starlette.responses import HTMLResponse

    return HTMLResponse(
        f"<!doctype html><title>Refrain</title><script>{SCRIPT}</script>", headers=HEADERS
    )
