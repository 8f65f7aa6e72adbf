"""Thoughts on the page: folded above the answer, kept with the chat, and sent back for the template to drop."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from nanochat.serve.models import Loadable
from tests.serve.pages import ask, check
from tests.serve.test_web_axe import DESK, PHONE, barriers
from tests.support.browsing import answers, finished, send, visit
from tests.support.fake_engine import SETTINGS, ByteTokenizer, FakeEngine, running

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
    return FakeEngine(REPLIES, tokenizer=thinker())


def thinker(thinks_by_default: bool | None = None) -> ByteTokenizer:
    """A tokenizer whose template has a switch for thoughts unless `thinks_by_default` is None."""
    return ByteTokenizer(takes_options=True, thought_marks=("<think>", "</think>"), thinks_by_default=thinks_by_default)


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


@pytest.mark.parametrize("gated", [False, True], ids=["at once", "token by token"])
def test_the_tokens_of_a_thought_are_no_tokens_of_the_answer(
    engine: FakeEngine, browser: Browser, url: str, gated: bool
) -> None:
    """They stood in front of the answer, with the marks of the thought."""
    with visit(browser, url) as page:
        check(page, "Token probabilities")
        engine.gated = gated
        send(page, "why")
        for place in range(len(REPLIES["why"][0]) if gated else 0):
            engine.allow(1)
            if place == 60:
                expect(page.locator(".thought summary")).to_have_text("Thoughts")
        engine.allow(1000)
        finished(page)
        expect(page.locator(".body .token")).to_have_text([*"So it is **1776**."])
        expect(page.locator(".thought > div")).to_have_text(THOUGHT)
        ask(page, "only")
        expect(answers(page).last.locator(".token")).to_have_count(0)


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
        sent = body_of_next(page)["messages"]
        assert sent[1]["reasoning_content"] == THOUGHT
        assert "think" not in str(sent[1]["parts"])


def body_of_next(page: Page) -> Any:
    """What the page sends with one more question."""
    with page.expect_request(re.compile("chat/completions")) as caught:
        ask(page, "next")
    return caught.value.post_data_json


def test_a_thought_without_an_answer_says_so(browser: Browser, url: str) -> None:
    with visit(browser, url) as page:
        ask(page, "only")
        expect(page.locator(".thought > div")).to_have_text("It goes on")
        expect(page.locator(".meta .note")).to_have_count(1)


def test_an_answer_that_was_stopped_in_its_thought_is_kept(engine: FakeEngine, browser: Browser, url: str) -> None:
    """It was dropped, and its question stood in the input box after a reload."""
    engine.gated = True
    with visit(browser, url) as page:
        send(page, "why")
        engine.allow(len("<think>\nFirst I"))
        expect(page.locator(".thought > div")).to_have_text("First I")
        page.get_by_role("button", name="Stop").click()
        finished(page)
        page.reload()
        expect(page.locator(".thought > div")).to_have_text("First I")
        expect(page.locator(".meta .note")).to_have_text("stopped")
        expect(page.locator("#prompt")).to_have_value("")
        engine.gated = False
        engine.allow(1000)
        sent = body_of_next(page)["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "user"]
        page.get_by_role("button", name="Answer again").click()
        finished(page)
        expect(page.locator(".error")).to_have_count(0)


# --- the switch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "locale", "settings", "label"),
    [(PHONE, "zh-CN", "设置", "思考"), (DESK, "en-US", "Settings", "Think")],
    ids=["phone", "desk"],
)
@pytest.mark.parametrize("default", [True, False])
def test_the_switch_shows_the_default_and_is_sent_once_it_is_set(
    browser: Browser, size, locale: str, settings: str, label: str, default: bool
) -> None:
    with (
        running(FakeEngine(REPLIES, tokenizer=thinker(default))) as url,
        visit(browser, url, locale=locale, viewport=size) as page,
    ):
        assert "chat_template_kwargs" not in body_of_next(page)
        page.get_by_role("button", name=settings).click()
        switch = page.get_by_role("checkbox", name=label, exact=True)
        expect(switch).to_be_checked(checked=default)
        assert barriers(page) == []
        switch.set_checked(not default)
        page.keyboard.press("Escape")
        assert body_of_next(page)["chat_template_kwargs"] == {"enable_thinking": not default}
        page.reload()
        page.get_by_role("button", name=settings).click()
        expect(switch).to_be_checked(checked=not default)


def test_the_prompt_that_is_shown_is_the_one_that_the_switch_made(browser: Browser) -> None:
    with running(FakeEngine(REPLIES, tokenizer=thinker(True))) as url, visit(browser, url) as page:
        check(page, "Think", on=False)
        ask(page, "why")
        with page.expect_request(re.compile("/tokenize$")) as caught:
            page.locator(".saw summary").click()
        body: Any = caught.value.post_data_json
        assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_only_a_model_with_a_switch_is_sent_it(browser: Browser) -> None:
    plain = Loadable(FakeEngine(), ByteTokenizer(), replace(SETTINGS, model="plain"))  # type: ignore[arg-type]
    with (
        running(FakeEngine(REPLIES, tokenizer=thinker(True)), beside=[plain]) as url,
        visit(browser, url) as page,
    ):
        check(page, "Think", on=False)
        page.locator("#model summary").click()
        page.locator(".served").get_by_role("button", name="plain").click()
        assert "chat_template_kwargs" not in body_of_next(page)
        page.get_by_role("button", name="Settings").click()
        expect(page.locator("#setting-temperature")).to_be_visible()
        expect(page.locator("#setting-think")).to_have_count(0)
