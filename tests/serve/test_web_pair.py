"""Two models behind one question: their answers next to each other, and the chat that continues from one of them."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from nanochat.serve.models import Announced, Loadable
from tests.serve.pages import ask, check, heard
from tests.support.browsing import answers, finished, send, visit
from tests.support.fake_engine import ABOUT, SETTINGS, FakeEngine, eventually, running

pytestmark = pytest.mark.browser

DESK, PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 740}
FIRST = {"who": ["I am the first."], "more": ["First again."]}
SECOND = {"who": ["I am Pip."], "more": ["Pip again."]}


@contextlib.contextmanager
def comparing(
    browser: Browser, *engines: FakeEngine, size: Any = DESK, names: bool = True, **options: Any
) -> Iterator[Page]:
    """A page that compares a server's two models; `names` says whether the comparison has begun."""
    first, second = engines
    pip = Announced("pip", "sft", "d4", 1, about=ABOUT)
    beside = [Loadable(second, second.tokenizer, pip)]  # type: ignore[arg-type]
    with running(first, beside=beside) as url, visit(browser, url, viewport=size, **options) as page:
        if names:
            compare(page)
        yield page


@contextlib.contextmanager
def half_answered(browser: Browser, size: Any = DESK) -> Iterator[tuple[Page, FakeEngine, FakeEngine]]:
    """A page on which two models have begun their answers, and their engines, which wait for the test."""
    first, second = FakeEngine(FIRST, gated=True), FakeEngine(SECOND, gated=True)
    with comparing(browser, first, second, size=size) as page:
        send(page, "who")
        first.allow(4)
        second.allow(4)
        expect(answers(page)).to_have_text(["I am", "I am"])
        yield page, first, second


def compare(page: Page) -> None:
    page.locator("#model summary").click()
    page.locator(".panel .compare button").click()
    expect(page.locator("#comparing")).to_be_visible()


def pair(page: Page) -> Locator:
    return page.locator(".pair .turn")


def take(page: Page, place: int) -> None:
    pair(page).nth(place).get_by_role("button", name="Continue with this one").click()


def stored(page: Page) -> dict[str, Any]:
    """The open chat as the tab keeps it."""
    return json.loads(page.evaluate("sessionStorage.getItem('nanochat.chat')"))["chat"]


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_both_answers_stream_next_to_each_other_or_on_a_phone_below(browser, size):
    with half_answered(browser, size) as (page, first, second):
        second.allow(4)
        expect(answers(page)).to_have_text(["I am", "I am Pip"])
        expect(page.locator(".pair .body.streaming")).to_have_count(2)
        expect(page.locator(".pair .by")).to_have_text([SETTINGS.model, "pip"])
        expect(page.get_by_role("button", name="Continue with this one")).to_have_count(0)
        left, right = (pair(page).nth(place).bounding_box() for place in (0, 1))
        assert left and right
        if size == DESK:
            assert left["y"] == right["y"] and left["x"] + left["width"] < right["x"]
            assert right["x"] + right["width"] > 1000  # wider than the column of a single answer
        else:
            assert left["x"] == right["x"] and left["y"] + left["height"] < right["y"]
        assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"]
        first.allow(1000)
        second.allow(1000)
        finished(page)
        expect(answers(page)).to_have_text(["I am the first.", "I am Pip."])
        expect(page.get_by_role("button", name="Continue with this one")).to_have_count(2)
        expect(page.locator(".pair .numbers")).to_have_count(2)


def test_one_answer_is_stopped_while_the_other_goes_on(browser):
    with half_answered(browser) as (page, first, second):
        page.get_by_role("button", name="Stop pip").press("Enter")
        expect(pair(page).last.locator(".meta")).to_contain_text("stopped")
        expect(page.locator("#prompt")).to_be_focused()
        expect(page.get_by_role("button", name="Stop answering")).to_be_visible()
        first.allow(1000)
        finished(page)
        expect(answers(page)).to_have_text(["I am the first.", "I am"])
        eventually(lambda: second.seen[0].cancelled)  # the page says so before the server has noticed
        assert not first.seen[0].cancelled


def test_the_button_of_the_input_box_stops_both(browser):
    engines = FakeEngine(FIRST, gated=True), FakeEngine(SECOND, gated=True)
    with comparing(browser, *engines) as page:
        send(page, "who")
        engines[0].allow(4)
        expect(answers(page).first).to_have_text("I am")
        page.locator("#send").click()
        finished(page)
        expect(page.locator(".pair .note")).to_have_text(["stopped", "stopped"])
        expect(page.get_by_role("button", name="Continue with this one")).to_have_count(1)  # the other one is empty


def test_one_answer_fails_and_the_other_stays(browser):
    engines = FakeEngine(FIRST), FakeEngine(SECOND)
    engines[0].fail = True
    with comparing(browser, *engines) as page:
        ask(page, "who")
        expect(pair(page).first.get_by_role("alert")).to_contain_text("The model failed")
        expect(pair(page).last.locator(".body")).to_have_text("I am Pip.")
        pair(page).first.get_by_role("button", name="Try again").click()
        finished(page)
        expect(answers(page)).to_have_text(["I am the first.", "I am Pip."])
        assert len(engines[1].seen) == 1  # only the one that failed was asked again
        page.reload()  # the sides stay, although the left answer came last
        expect(page.locator(".pair .by")).to_have_text([SETTINGS.model, "pip"])
        expect(answers(page)).to_have_text(["I am the first.", "I am Pip."])


def test_both_fail_and_the_question_is_not_lost(browser):
    engines = FakeEngine(FIRST, fail=True), FakeEngine(SECOND, fail=True)
    with comparing(browser, *engines) as page:
        ask(page, "who")
        expect(page.get_by_role("button", name="Try again")).to_have_count(2)
        page.reload()
        expect(page.locator("#prompt")).to_have_value("who")
        page.press("#prompt", "Enter")
        finished(page)
        expect(answers(page)).to_have_text(["I am the first.", "I am Pip."])


def test_on_a_phone_the_page_follows_both_answers_and_says_nothing_of_keys(browser):
    engines = [FakeEngine({"who": ["line\n\n" * 40], "more": ["line\n\n" * 40]}, gated=True) for _ in range(2)]
    with comparing(browser, *engines, size=PHONE, has_touch=True, is_mobile=True) as page:
        for question in ("who", "more"):
            send(page, question)
            expect(page.get_by_role("button", name="Stop pip")).to_be_visible()
            page.wait_for_timeout(200)  # a scroll event comes after the next frame
            for engine in engines:
                engine.allow(6 * 40 + 1)
            finished(page)
        expect(page.locator("#to-end")).to_be_hidden()
        place = "(s) => [s.scrollTop, s.scrollHeight - s.clientHeight]"
        top, most = page.locator("#scroller").evaluate(place)
        assert top > 1000 and most - top < 48
        expect(page.locator(".hint .keys")).to_be_hidden()


def test_the_chat_continues_from_the_answer_that_was_taken(browser):
    engines = FakeEngine(FIRST), FakeEngine(SECOND)
    with comparing(browser, *engines) as page:
        ask(page, "who")
        page.reload()  # keeps both answers and the comparison
        expect(answers(page)).to_have_text(["I am the first.", "I am Pip."])
        take(page, 1)
        page.reload()
        expect(answers(page)).to_have_text(["I am Pip."])
        expect(page.locator(".by")).to_have_text(["pip"])
        expect(page.locator(".pair")).to_have_count(0)
        expect(page.locator(".turn.model .branches")).to_have_text("2 / 2")
        expect(page.locator("#comparing-text")).to_have_text(f"{SETTINGS.model} answers beside pip")
        ask(page, "more")
        expect(page.locator(".pair .by")).to_have_text(
            ["pip", SETTINGS.model]
        )  # the model that was taken is the first now
        assert heard(engines[0]) == heard(engines[1]) == "whoI am Pip.more"
        page.locator("#comparing-end").click()
        expect(page.locator("#comparing")).to_be_hidden()
        ask(page, "who")
        assert heard(engines[1]) == "whoI am Pip.morePip again.who"  # nothing was taken: it is the left one
        assert len(engines[0].seen) == 2
        expect(answers(page)).to_have_text(["I am Pip.", "Pip again.", "I am Pip."])
        page.reload()
        expect(answers(page)).to_have_text(["I am Pip.", "Pip again.", "I am Pip."])
        page.get_by_role("button", name="Earlier version").first.click()
        expect(answers(page)).to_have_text(["I am the first."])
        assert not any("beside" in message for message in stored(page)["messages"])


def test_a_reload_in_the_middle_keeps_what_both_have_said(browser):
    with half_answered(browser) as (page, _, second):
        second.allow(100)
        expect(answers(page)).to_have_text(["I am", "I am Pip."])
        expect(pair(page).last.locator(".numbers")).to_have_count(1)  # it has ended
        page.reload()
        expect(answers(page)).to_have_text(["I am", "I am Pip."])
        expect(page.locator(".pair .note")).to_have_text(["stopped"])
        take(page, 0)
        expect(page.get_by_role("button", name="Continue", exact=True)).to_be_visible()


def test_another_chat_ends_both_answers_and_keeps_them(browser):
    with half_answered(browser) as (page, *_):
        page.locator("#new-chat").click()
        expect(page.locator(".turn")).to_have_count(0)
        page.locator("#history-toggle").click()
        page.locator("#history-list .open").click()
        expect(page.locator(".pair .note")).to_have_text(["stopped", "stopped"])
        expect(answers(page)).to_have_text(["I am", "I am"])


def test_an_edited_question_goes_to_both(browser):
    engines = FakeEngine(FIRST), FakeEngine(SECOND)
    with comparing(browser, *engines) as page:
        ask(page, "who")
        page.locator(".turn.user").hover()
        page.get_by_role("button", name="Edit this message").click()
        page.get_by_role("textbox", name="Your message").fill("more")
        page.keyboard.press("Enter")
        finished(page)
        expect(answers(page)).to_have_text(["First again.", "Pip again."])
        page.get_by_role("button", name="Earlier version").click()
        expect(answers(page)).to_have_text(["I am the first.", "I am Pip."])  # still next to each other


def test_settings_hold_for_both_and_each_shows_what_it_saw(browser):
    engines = FakeEngine(FIRST), FakeEngine(SECOND)
    with comparing(browser, *engines) as page:
        check(page, "Token probabilities")
        ask(page, "who")
        for place in (0, 1):
            assert pair(page).nth(place).locator(".token").count() > 5
            pair(page).nth(place).locator(".saw summary").click()
            expect(pair(page).nth(place).locator(".saw .prompt")).to_contain_text("who")
        assert [engine.seen[0].sampling.logprobs for engine in engines] == [5, 5]


def test_the_panel_begins_and_ends_a_comparison(browser):
    with comparing(browser, FakeEngine(FIRST), FakeEngine(SECOND), names=False) as page:
        page.locator("#model summary").click()
        choice = page.get_by_role("group", name="Compare its answers with those of:").get_by_role("button", name="pip")
        expect(choice).to_have_attribute("aria-pressed", "false")
        choice.press("Enter")
        expect(page.locator("#comparing")).to_be_visible()
        page.locator("#model summary").click()
        expect(choice).to_have_attribute("aria-pressed", "true")
        choice.click()
        expect(page.locator("#comparing")).to_be_hidden()
        compare(page)
        ask(page, "who")
        expect(page.get_by_role("group", name="The answers of two models")).to_be_visible()
        page.get_by_role("button", name="End the comparison").press("Enter")
        expect(page.locator("#prompt")).to_be_focused()


def test_a_chat_whose_answers_lie_about_their_neighbour_is_not_shown(browser):
    chat = {"id": "x", "title": "", "created": 1, "updated": 1, "at": 1}
    answer = {"role": "assistant", "parts": [{"type": "text", "text": "a"}], "note": None, "numbers": None}
    answer |= {"parent": 0, "used": 0, "forgotten": 0, "context": 0}
    read = """async (chat) => { try { return (await import("./assets/chats/check.js")).readChat(chat).messages.at(-1) }
                              catch { return null } }"""
    with comparing(browser, FakeEngine(), FakeEngine(), names=False) as page:

        def second(**fields: Any) -> Any:
            question = {"parent": -1, "role": "user", "text": "q"}
            return page.evaluate(read, {**chat, "messages": [question, answer, {**answer, **fields}]})

        assert second(beside=1, model="pip") == {**answer, "beside": 1, "model": "pip"}
        assert second() == answer
        for wrong in ({"beside": 0}, {"beside": 2}, {"beside": 3}, {"beside": "1"}, {"model": 3}):
            assert second(**wrong) is None
