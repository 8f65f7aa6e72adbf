"""The browser that the tests of the page share, and the page of a chat."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browsing import REPLIES, chromium, visit
from tests.support.fake_engine import FakeEngine, running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(REPLIES)


@pytest.fixture
def page(browser: Browser, engine: FakeEngine) -> Iterator[Page]:
    """The page of a server whose engine is `engine`."""
    with running(engine) as url, visit(browser, url) as page:
        yield page
