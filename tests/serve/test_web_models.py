"""Several models behind the page: the reader chooses one, and the chat continues with it."""

import contextlib
import re
from dataclasses import replace

import pytest
from playwright.sync_api import expect

from nanochat.serve.models import Announced, Loadable
from tests.serve.pages import ask
from tests.support.browsing import answers, finished, send, visit
from tests.support.fake_engine import SETTINGS, FakeEngine, running

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
        ask(page, "who")
        badge.click()
        choices = page.locator(".panel .served button")
        expect(choices).to_have_text([SETTINGS.model, "pip"])
        expect(choices.first).to_have_attribute("aria-pressed", "true")
        choices.last.click()
        expect(badge).to_be_focused()
        expect(page.locator("#model-name")).to_contain_text("mine")
        expect(page.locator(".panel")).not_to_be_visible()
        ask(page, "who")
        expect(answers(page)).to_have_text(["I am the first.", "I am Pip."])
        (asked,) = second.seen
        assert (asked.sampling.temperature, asked.sampling.max_tokens) == (0.0, 33)  # its own defaults
        page.locator(".saw summary").last.click()
        expect(page.locator(".saw .told").last).to_have_text(re.compile(r"\d+ tokens"))
        page.reload()  # the tab stays with its model
        ask(page, "again")
        expect(answers(page)).to_have_text(["I am the first.", "I am Pip.", "Pip still."])


def test_a_model_that_the_server_no_longer_has_gives_way_to_the_default_one(page):
    page.evaluate("sessionStorage.setItem('nanochat.model', 'gone')")
    page.reload()
    ask(page, "hello")
    expect(answers(page)).to_have_count(1)
    page.locator("#model summary").click()
    expect(page.locator(".panel .served")).to_have_count(0)  # nothing to choose from


# --- a server that is started again --------------------------------------------------------------


def test_a_page_that_is_open_goes_on_with_the_model_of_a_server_that_was_started_again(browser):
    first, second = contextlib.ExitStack(), FakeEngine()
    url = first.enter_context(running(FakeEngine()))
    with visit(browser, url, problems=["404"]) as page:
        ask(page, "one")
        first.close()
        settings = replace(SETTINGS, model="nanochat-rl-d4", stage="rl", tag="d5")
        with running(second, settings=settings, port=int(url.rsplit(":", 1)[1])):
            ask(page, "two")
            expect(answers(page)).to_have_text(["one", "two"])
            expect(page.locator(".error")).to_have_count(0)
            assert page.title() == "nanochat · d5"
            ask(page, "three")
            assert len(second.seen) == 2


def test_a_comparison_goes_on_when_the_server_is_back(browser):
    def engines(stack: contextlib.ExitStack, port: int = 0) -> str:
        pip = FakeEngine()
        return stack.enter_context(running(FakeEngine(), beside=[Loadable(pip, pip.tokenizer, OTHER)], port=port))  # type: ignore[arg-type]

    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    url = engines(first)
    with second, visit(browser, url, problems=["Failed to load resource"]) as page:
        page.locator("#model summary").click()
        page.locator(".panel .compare button").click()
        ask(page, "one")
        first.close()
        ask(page, "two")
        expect(page.locator(".error")).to_have_count(2)
        expect(page.locator("#comparing")).to_be_hidden()
        engines(second, int(url.rsplit(":", 1)[1]))
        send(page, "three")
        expect(page.locator(".pair .body")).to_have_text(["three", "three"])
        finished(page)
        expect(page.locator("#comparing")).to_be_visible()
        second.close()
        ask(page, "four")
        expect(page.locator("#model-name")).to_have_text("server not reachable")
        with contextlib.ExitStack() as third:
            engines(third, int(url.rsplit(":", 1)[1]))
            page.get_by_role("button", name="Try again").first.click()
            expect(page.locator("#comparing")).to_be_visible()
            expect(page.locator("#model-name")).not_to_have_text("server not reachable")
            finished(page)


def test_a_comparison_with_a_model_that_is_gone_gives_the_question_back(browser):
    pip, first = FakeEngine(), contextlib.ExitStack()
    url = first.enter_context(running(FakeEngine(), beside=[Loadable(pip, pip.tokenizer, OTHER)]))  # type: ignore[arg-type]
    with visit(browser, url, problems=["404"]) as page:
        page.locator("#model summary").click()
        page.locator(".panel .compare button").click()
        first.close()
        with running(FakeEngine(), settings=replace(SETTINGS, model="other"), port=int(url.rsplit(":", 1)[1])):
            send(page, "one")
            expect(page.locator(".error")).to_have_count(2)
            finished(page)
            expect(page.locator("#comparing")).to_be_hidden()
            expect(page.get_by_role("button", name="Try again")).to_have_count(0)
            expect(page.locator("#prompt")).to_have_value("one")
            page.press("#prompt", "Enter")
            finished(page)
            expect(answers(page).last).to_have_text("one")
