"""A browser for tests of the page. Every visit checks that no request goes elsewhere and the console is clean."""

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from nanochat.data.conversation import Part
from tests.support.fake_engine import eventually

expect.set_options(timeout=30_000)  # long enough for a busy machine

REPLIES: dict[str, Sequence[Part | str]] = {
    "hello": ["你好，世界！🌍"],
    "sum": ["37 * 48 = ", Part("python", "37*48"), Part("python_output", "1776"), "1776."],
    "bad sum": [Part("python", "1/0"), Part("python_output", "error"), "I cannot."],
    "silence": [],
}


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium without a window. Without Chromium, the test is skipped."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed: apt-get install --no-install-recommends chromium fonts-wqy-zenhei")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def visit(
    browser: Browser,
    url: str,
    problems: Sequence[str] = (),
    locale: str = "en-US",
    ready: str = "#model",
    **options: Any,
) -> Iterator[Page]:
    """Open a page in a fresh profile. On exit, check that requests only went to its server.

    The console may only have messages that contain one of `problems`. `ready` shows when the page has
    been drawn.
    """
    context = browser.new_context(locale=locale, **options)
    page = context.new_page()
    requests: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    try:
        page.goto(url)
        expect(page.locator(ready)).to_be_visible()
        yield page
    finally:
        context.close()
    server = "/".join(url.split("/")[:3])
    assert [address for address in requests if not address.startswith((f"{server}/", "data:"))] == []
    assert [text for text in said if not any(problem in text for problem in problems)] == []


def send(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answers(page: Page) -> Locator:
    """The answers that are shown. One that is given again stays hidden until the new one ends."""
    return page.locator(".turn.model:not([hidden]) .body")


def finished(page: Page) -> None:
    expect(page.locator("#send")).to_have_attribute("aria-label", re.compile("^(Send|发送)$"))


def wait_until_free(url: str, slots: int) -> None:
    eventually(lambda: httpx.get(f"{url}/health").json()["free_slots"] == slots)


def say_hello(page: Page, times: int) -> None:
    """Send hello so many times in a new chat, and wait for each answer to end."""
    for number in range(1, times + 1):
        send(page, "hello")
        expect(answers(page)).to_have_count(number)
        finished(page)
