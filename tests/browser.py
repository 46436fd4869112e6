"""The system's chromium without a screen, driven by playwright, for tests of pages.

With REFRAIN_SCREENSHOTS=FOLDER the pictures of the documents are written there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Browser:
    """A page, and what its console complained of."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("console", lambda said: self._say(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self._say(str(error)))
        page.on("response", lambda got: self._say(got.url) if got.status >= 400 else None)

    def _say(self, text: str) -> None:
        self.errors.append(text)

    def open(self, address: str, *texts: str) -> str:
        """Open a page and wait until it shows the texts; returns all that it shows."""
        self.page.goto(address)
        for text in texts:
            self.page.get_by_text(text).first.wait_for(timeout=30_000)
        self.page.wait_for_timeout(2500)  # the graph is drawn after its data have come
        shown: str = self.page.inner_text("body")
        return shown

    def picture(self, name: str, height: int = 900) -> None:
        folder = os.environ.get("REFRAIN_SCREENSHOTS")
        if folder is not None:
            self.page.set_viewport_size({"width": 1300, "height": height})
            self.page.wait_for_timeout(1000)
            self.page.screenshot(path=str(Path(folder, f"{name}.png")))


@pytest.fixture
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no browser is installed (apt install chromium)")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield Browser(started.new_page(viewport={"width": 1300, "height": 900}))
        with suppress(playwright.Error):
            started.close()
