"""The board in a real browser: curves, a sample, its colours, a search, and text that is no script."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from storage.runs.run_store import RunStore
from tasks.board.run_view import RunView
from tasks.board.server import application
from tests.browser import Browser, browser
from tests.ports import free_port
from tests.tasks.board.conftest import HOSTILE

__all__ = ["browser"]

pytestmark = pytest.mark.slow

KEY = "k" * 32


@pytest.fixture
def address(hostile: RunStore) -> Iterator[str]:
    port = free_port()
    app = application(RunView(hostile), KEY)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until = time.monotonic() + 30
    while not server.started and time.monotonic() < until:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)


def background(browser: Browser, token: int) -> str:
    found: str = browser.page.locator(f".token[data-at='{token}']").evaluate(
        "one => one.style.background"
    )
    return found


def test_a_run_is_read_in_the_browser(browser: Browser, address: str, hostile: RunStore) -> None:
    page = browser.page
    page.goto(f"{address}/#key={KEY}&order=stored")
    page.locator(".card").first.wait_for()
    assert page.inner_text("#run") == hostile.run
    assert "key" not in page.url, "the address can be shown to others"
    curve = page.locator("figure[data-metric='reward/mean'] polyline")
    curve.wait_for(state="attached")
    assert len(curve.get_attribute("points").split()) == 4
    assert "4 of 6 steps" in page.inner_text("#state")
    assert "step 4: 16 samples" in page.inner_text("#facts")
    assert HOSTILE[:60] in page.locator(".card").first.inner_text()

    page.locator(".card").first.click()
    page.locator(".token").first.wait_for()
    assert page.locator(".turn.policy .token").all_inner_texts() == list(HOSTILE)
    assert page.locator("script").count() == 1
    assert page.title() == hostile.run, "the model's script did not run"
    by_advantage = [background(browser, at) for at in (0, len(HOSTILE) - 1)]
    assert "hsl" in by_advantage[0] or "rgb" in by_advantage[0]
    assert by_advantage[0] != by_advantage[1], "-1 and 1"
    page.select_option("#colour", "log-prob ratio trainer / engine")
    assert background(browser, 0) == background(browser, 50) != by_advantage[0]
    assert "0.5" in page.inner_text(".legend")
    page.select_option("#colour", "policy version")
    assert background(browser, 3) != background(browser, 4), "drawn by versions 2 and 3"
    page.select_option("#colour", "author")
    assert page.inner_text(".legend") == "policy"
    page.locator(".token[data-at='4']").hover()
    title = page.locator(".token[data-at='4']").get_attribute("title")
    assert title.startswith("token 4, policy, version 3\n") and "log-prob, engine: -2" in title

    picture = page.locator("article img")  # of the environment; the model's is text
    assert picture.count() == 1
    page.wait_for_function("document.querySelector('article img').naturalWidth == 4")

    page.locator(".card").nth(1).click()
    page.locator(".turn.environment").wait_for()
    turns = page.locator(".turn .who").all_inner_texts()
    assert turns == ["prompt", "policy", "environment", "policy"]
    assert page.locator(".turn.environment .token").count() == 3
    assert page.inner_text(".legend").split() == ["policy", "environment"]

    page.fill("#search", "<script")
    page.get_by_role("button", name="Find").click()
    page.get_by_text("found 1 times in answers and 0 in prompts").wait_for()
    assert page.locator(".card").count() == 1
    page.fill("#search", "[")
    page.get_by_role("button", name="Find").click()
    page.get_by_text("is no regular expression").wait_for()
    assert [one for one in browser.errors if "404" not in one and "/api/samples" not in one] == []
    browser.errors.clear()
    page.fill("#search", "")
    page.select_option("#view", "groups")
    page.locator("#list .chips button").first.wait_for()
    assert page.locator("#list .chips").count() == 4
    page.locator("#list .chips button").nth(5).click()
    page.get_by_text("Where it came from").wait_for()

    page.fill("#metric", "train/loss")
    page.get_by_role("button", name="Show", exact=True).click()
    page.locator("figure[data-metric='train/loss'] polyline").wait_for(state="attached")
    page.click("#back")
    page.get_by_text("step 3: 16 samples").wait_for()
    page.reload()
    page.get_by_text("step 3: 16 samples").wait_for()
    assert browser.errors == []


def test_without_the_key_the_page_says_what_to_open(browser: Browser, address: str) -> None:
    browser.page.goto(address)
    browser.page.get_by_text("Open the link that refrain board printed.").wait_for()
    assert browser.page.locator(".card").count() == 0
