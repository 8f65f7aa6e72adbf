"""Several models behind the page: the reader chooses one, and the chat continues with it."""

import re

import pytest
from playwright.sync_api import expect

from nanochat.serve.hosted import Announced, Loadable
from tests.support.browsing import answers, finished, send, visit
from tests.support.fake_engine import ABOUT, SETTINGS, FakeEngine, running

pytestmark = pytest.mark.browser

OTHER = Announced(
    "pip", stage="tune", tag="qwen-pip", step=20, temperature=0.0, max_tokens=33, about={"corpus": "mine"}
)


def test_the_reader_chooses_the_model_that_answers(browser):
    first, second = (
        FakeEngine({"who": ["I am the first."]}),
        FakeEngine({"who": ["I am Pip."], "again": ["Pip still."]}),
    )
    beside = [Loadable(second, second.tokenizer, OTHER)]  # type: ignore[arg-type]
    with running(first, beside=beside) as url, visit(browser, url) as page:
        badge = page.locator("#model summary")
        send(page, "who")
        finished(page)
        badge.click()
        choices = page.locator(".panel .served button")
        expect(choices).to_have_text([SETTINGS.model, "pip"])
        expect(choices.first).to_have_attribute("aria-pressed", "true")
        choices.last.click()
        expect(badge).to_be_focused()
        expect(page.locator("#model-name")).to_contain_text("mine")
        expect(page.locator(".panel")).not_to_be_visible()
        send(page, "who")
        finished(page)
        expect(answers(page)).to_have_text(["I am the first.", "I am Pip."])
        (asked,) = second.seen
        assert (asked.sampling.temperature, asked.sampling.max_tokens) == (0.0, 33)  # its own defaults
        page.locator(".saw summary").last.click()
        expect(page.locator(".saw .told").last).to_have_text(re.compile(r"\d+ tokens"))
        page.reload()  # the tab stays with its model
        send(page, "again")
        finished(page)
        expect(answers(page)).to_have_text(["I am the first.", "I am Pip.", "Pip still."])


def test_a_model_that_the_server_no_longer_has_gives_way_to_the_default_one(browser):
    with running(FakeEngine()) as url, visit(browser, url) as page:
        page.evaluate("sessionStorage.setItem('nanochat.model', 'gone')")
        page.reload()
        send(page, "hello")
        finished(page)
        expect(answers(page)).to_have_count(1)
        page.locator("#model summary").click()
        expect(page.locator(".panel .served")).to_have_count(0)  # nothing to choose from


def test_the_choice_is_in_chinese_too(browser):
    second = FakeEngine()
    beside = [Loadable(second, second.tokenizer, Announced("pip", "sft", "d4", 1, about=ABOUT))]  # type: ignore[arg-type]
    with running(FakeEngine(), beside=beside) as url, visit(browser, url, locale="zh-CN") as page:
        page.locator("#model summary").click()
        expect(page.locator(".panel")).to_contain_text("这里可以对话的模型：")
