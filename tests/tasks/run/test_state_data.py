"""Forged results at Prefect's API are not loaded by a flow's process."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from tasks.run.flow_options import without_state_data
from tests.flows.conftest import ROOT, prefect_api, settings_for
from tests.tasks.run.forged_results import Forgery, forge, pickled

__all__ = ["prefect_api"]  # a fixture

FORGERIES = {
    "local pickle": Forgery("local-file-system", {"type": "pickle"}),
    "remote pickle": Forgery("remote-file-system", {"type": "pickle"}),
    "compressed pickle": Forgery(
        "local-file-system", {"type": "compressed/pickle", "compressionlib": "zlib"}
    ),
    "name of a library": Forgery(
        "local-file-system", {"type": "pickle", "picklelib": "runs_when_imported"}
    ),
    "name of a decoder": Forgery(
        "local-file-system", {"type": "json", "object_decoder": "runs_when_called.loads"}
    ),
}


@dataclass(frozen=True)
class Attacked:
    """What came of the forgeries in a flow's process."""

    ran: dict[str, bool]  # whether the attacker's code did, by forgery
    outcomes: dict[str, str]  # of the flow runs


def result_for(what: str, marker: Path) -> bytes:
    """The bytes that are served for a forged result."""
    if what == "compressed pickle":
        return base64.encodebytes(zlib.compress(pickled(marker)))
    return b'{"a": {}}' if what == "name of a decoder" else pickled(marker)


def attacked(guarded: bool, api: str, folder: Path) -> Attacked:
    """A process with flow runs that have not begun; all are forged by another, then it begins them."""
    storage, home = folder / "storage", folder / "home"
    for made in (storage, home):
        made.mkdir()
    markers = {what: folder / what for what in FORGERIES}
    (home / "runs_when_imported.py").write_text(
        f"from pathlib import Path\nfrom pickle import dumps, loads\n"
        f"Path({str(markers['name of a library'])!r}).touch()\n"
    )
    (home / "runs_when_called.py").write_text(
        f"from pathlib import Path\n"
        f"def loads(record): Path({str(markers['name of a decoder'])!r}).touch()\n"
    )
    kind = "guarded" if guarded else "unguarded"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tasks.run.forged_results", kind, str(len(FORGERIES))],
        cwd=home,
        env={
            **os.environ,
            **settings_for(api),
            "PYTHONPATH": f"{ROOT}:{home}",
            "PREFECT_HOME": str(home),
            "PREFECT_LOGGING_TO_API_ENABLED": "false",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        runs = json.loads(process.stdout.readline())
        with serving(storage) as url, httpx.Client(base_url=api, timeout=30) as attacker:
            for (what, forgery), run in zip(FORGERIES.items(), runs, strict=True):
                place = url if what == "remote pickle" else str(storage)
                key = what.replace(" ", "-")
                result = result_for(what, markers[what])
                (storage / key).write_text(forge(attacker, forgery, run, place, key, result))
            out, _ = process.communicate("go\n", timeout=120)
    finally:
        process.kill()
        process.wait()
    outcomes = dict(zip(FORGERIES, json.loads(out.splitlines()[-1]), strict=True))
    return Attacked({what: marker.exists() for what, marker in markers.items()}, outcomes)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """An HTTP server of the attacker's with the files of a folder; yields its URL."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_prefect_alone_loads_every_forged_result(prefect_api: str, tmp_path: Path) -> None:
    """So they are good forgeries; else the next test would hold whatever we do."""
    seen = attacked(False, prefect_api, tmp_path)
    assert all(seen.ran.values()), seen


def test_a_flow_of_ours_loads_none(prefect_api: str, tmp_path: Path) -> None:
    seen = attacked(True, prefect_api, tmp_path)
    assert not any(seen.ran.values()), seen
    assert all(one.startswith("raised MissingResult") for one in seen.outcomes.values()), seen


def test_only_states_lose_their_data() -> None:
    """Blocks, artifacts and logs have a field of that name too."""
    state = {"type": "COMPLETED", "data": {"storage_key": "k"}, "state_details": {}}
    answer = {
        "state": state,
        "bare": {"type": "COMPLETED", "data": {"storage_key": "k"}},
        "value": {**state, "data": 7},
        "artifact": {"type": "markdown", "data": "text"},
        "block": {"data": {"basepath": "/tmp"}},
    }
    read = json.loads(json.dumps(answer), object_hook=without_state_data)
    assert [read[name]["data"] for name in ("state", "bare", "value")] == [None] * 3
    assert read["state"]["type"] == "COMPLETED"
    assert read["artifact"] == answer["artifact"]
    assert read["block"] == answer["block"]
