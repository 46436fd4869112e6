"""What processes set right in their environment: proxies, certificates, temporary files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from configs import process
from configs.process import begin_process, past_proxies, shorten_temporary_folder

ROOT = Path(__file__).parents[2]
NAMES = [f"{name}_proxy" for name in ("http", "https", "all", "no")]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that this machine sets; what a test sets goes with it."""
    for name in [*NAMES, *(name.upper() for name in NAMES), "SSL_CERT_FILE"]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """The port of a server that answers any request so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served.server_port
        served.shutdown()


GETS = {
    "httpx": "import httpx; say = lambda url: httpx.get(url).text",
    "urllib": "import urllib.request as u; say = lambda url: u.urlopen(url).read().decode()",
    "requests": "import requests; say = lambda url: requests.get(url).text",
    "aiohttp": """
import aiohttp, asyncio
async def get(url):
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as answer:
        return await answer.text()
say = lambda url: asyncio.run(get(url))
""",
    "botocore": """
import botocore.httpsession, botocore.awsrequest
from botocore.utils import get_environ_proxies
def say(url):
    session = botocore.httpsession.URLLib3Session(proxies=get_environ_proxies(url))
    return session.send(botocore.awsrequest.AWSPreparedRequest("GET", url, {}, b"", False)).text
""",
}


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy"])
@pytest.mark.parametrize("library", GETS)
def test_this_machine_is_reached_by_no_proxy_and_others_by_theirs(
    library: str, variable: str
) -> None:
    with server(b"own") as own, server(b"proxy") as proxy:
        urls = [f"http://127.0.0.1:{own}/", f"http://localhost:{own}/", "http://judge.example/v1"]
        code = f"{GETS[library]}\nprint(*[say(url) for url in {urls}])"
        begin = "from configs.process import begin_process; begin_process()\n"
        done = subprocess.run(
            [sys.executable, "-c", begin + code],
            env={**os.environ, "PYTHONPATH": str(ROOT), variable: f"http://127.0.0.1:{proxy}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.stdout.split() == ["own", "own", "proxy"], done.stderr


def test_a_socks_proxy_breaks_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    past_proxies()
    with server(b"own") as own:
        assert httpx.get(f"http://127.0.0.1:{own}/").text == "own"
    with pytest.raises(httpx.ConnectError):  # it is asked: nobody listens there
        httpx.get("http://judge.example/v1")


@pytest.mark.parametrize(
    ("upper", "lower", "expected"),
    [
        (None, None, ("", "")),
        ("corp.example", None, ("corp.example", "corp.example")),
        (None, "corp.example, ::1", ("corp.example,::1", "corp.example,::1")),
        ("a", "b", ("a", "b")),
        ("*", None, None),
    ],
)
def test_what_is_listed_stays(
    upper: str | None,
    lower: str | None,
    expected: tuple[str, str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    for name, value in (("NO_PROXY", upper), ("no_proxy", lower)):
        if value is not None:
            monkeypatch.setenv(name, value)
    past_proxies()
    past_proxies()  # nothing twice
    if expected is None:
        assert os.environ["NO_PROXY"] == "*"
        return
    for name, first in zip(("NO_PROXY", "no_proxy"), expected, strict=True):
        hosts = os.environ[name].split(",")
        assert set(hosts) == {*first.split(","), *process.LOOPBACK, "node7"} - {""}
        assert len(hosts) == len(set(hosts))
        assert os.environ[name].startswith(first)


@pytest.mark.parametrize("made", [None, "no certificate"])
def test_certificates_that_cannot_be_read_are_left_out_and_told(
    made: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "bundle.pem"
    if made is not None:
        file.write_text(made)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    begin_process()
    begin_process()
    assert "SSL_CERT_FILE" not in os.environ
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"SSL_CERT_FILE = {file} is no file of certificates (")


def test_good_certificates_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    import certifi

    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    begin_process()
    assert os.environ["SSL_CERT_FILE"] == certifi.where()


def test_a_short_folder_of_temporary_files_stays() -> None:
    before = tempfile.gettempdir()
    shorten_temporary_folder()
    assert tempfile.gettempdir() == before == os.environ["TMPDIR"]


@pytest.mark.parametrize("name", ["j" * 77, "j" * 200, "ü" * 40])
def test_sockets_fit_below_a_long_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder, short = tmp_path / name, Path(tempfile.mkdtemp(dir="/tmp"))
    folder.mkdir()
    request.addfinalizer(lambda: shutil.rmtree(short))
    own = short / f"refrain-{os.getuid()}"
    own.mkdir(mode=0o700)
    (own / "old").symlink_to(tmp_path / "gone")
    monkeypatch.setattr(process, "SHORT_FOLDERS", (str(tmp_path / "missing"), str(short)))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    shorten_temporary_folder()
    shorten_temporary_folder()
    (link,) = own.iterdir()  # and not that of the job that is over
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(link)
    Path(tempfile.gettempdir(), "file").touch()
    assert (folder / "file").exists(), "what is made lies where TMPDIR said"


def test_a_link_of_another_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("j" * 77)
    folder.mkdir()
    for short in ("a", "b"):
        (tmp_path / short).mkdir()
    monkeypatch.setattr(process, "SHORT_FOLDERS", (str(tmp_path / "a"),))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    shorten_temporary_folder()
    (link,) = (tmp_path / "a").glob("*/*")
    link.unlink()
    link.symlink_to(tmp_path)  # somebody's trap
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(
        ValueError, match=r"TMPDIR = .* is \d+ bytes long, .* Set TMPDIR to a folder"
    ):
        shorten_temporary_folder()
