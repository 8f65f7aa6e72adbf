"""Thoughts on the page: folded above the answer, kept with the chat, and sent back for the template to drop."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.serve.pages import ask
from tests.serve.test_web_axe import DESK, PHONE, barriers
from tests.support.browsing import answers, finished, send, visit
from tests.support.fake_engine import ByteTokenizer, FakeEngine, running

pytestmark = pytest.mark.browser

THOUGHT = "First I add.\n\n37 * 48 = <b>1776</b>."
REPLIES = {"why": [f"<think>\n{THOUGHT}\n</think>\n\nSo it is **1776**."], "only": ["<think>\nIt goes on"]}
looks = pytest.mark.parametrize(
    ("size", "locale", "folded"),
    [(PHONE, "zh-CN", "思考过程"), (DESK, "en-US", "Thoughts")],
    ids=["phone", "desk"],
)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(REPLIES, tokenizer=ByteTokenizer(thought_marks=("<think>", "</think>")))


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with running(engine) as url:
        yield url


@looks
def test_a_thought_is_folded_above_the_answer(browser: Browser, url: str, size, locale: str, folded: str) -> None:
    with visit(browser, url, locale=locale, viewport=size) as page:
        ask(page, "why")
        summary, text = page.locator(".thought summary"), page.locator(".thought > div")
        expect(answers(page)).to_have_text("So it is 1776.")
        expect(summary).to_have_text(folded)
        expect(text).to_be_hidden()
        assert barriers(page) == []
        summary.focus()
        page.keyboard.press("Enter")
        expect(text).to_have_text(THOUGHT)
        expect(text).to_be_visible()
        assert barriers(page) == []
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= size["width"]


def test_the_fold_says_whether_the_model_still_thinks(engine: FakeEngine, browser: Browser, url: str) -> None:
    engine.gated = True
    with visit(browser, url) as page:
        send(page, "why")
        engine.allow(len("<think>\nFirst"))
        expect(page.locator(".thought summary")).to_have_text("Thinking…")
        expect(answers(page)).to_have_text("")
        engine.allow(1000)
        finished(page)
        expect(page.locator(".thought summary")).to_have_text("Thoughts")


def test_a_thought_is_kept_with_its_chat_and_sent_back(browser: Browser, url: str) -> None:
    with visit(browser, url) as page:
        ask(page, "why")
        page.reload()
        expect(page.locator(".thought > div")).to_have_text(THOUGHT)
        sent = messages_of_next(page)
        assert sent[1]["reasoning_content"] == THOUGHT
        assert "think" not in str(sent[1]["parts"])


def messages_of_next(page: Page) -> list[dict]:
    """The messages that the page sends with one more question."""
    with page.expect_request(re.compile("chat/completions")) as caught:
        ask(page, "next")
    return caught.value.post_data_json["messages"]


def test_a_thought_without_an_answer_says_so(browser: Browser, url: str) -> None:
    with visit(browser, url) as page:
        ask(page, "only")
        expect(page.locator(".thought > div")).to_have_text("It goes on")
        expect(page.locator(".meta .note")).to_have_count(1)
