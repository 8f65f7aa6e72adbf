"""What several tests of the page do."""

from playwright.sync_api import Page

from tests.support.browsing import finished, send
from tests.support.fake_engine import FakeEngine


def ask(page: Page, *questions: str) -> None:
    """Send questions, and wait for each answer to end."""
    for question in questions:
        send(page, question)
        finished(page)


def heard(engine: FakeEngine) -> str:
    """The text of the last prompt."""
    return bytes(token for token in engine.seen[-1].prompt if token < 256).decode()


def check(page: Page, setting: str, on: bool = True) -> None:
    """Switch a setting on or off in the drawer."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label(setting).set_checked(on)
    page.keyboard.press("Escape")
