"""The page in a real browser: errors in plain words, both languages, and phones."""

import re
from dataclasses import replace
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.serve.pages import ask
from tests.support.browsing import REPLIES, answers, finished, send, visit, wait_until_free
from tests.support.fake_engine import ABOUT, CHAT, SETTINGS, FakeEngine, running

pytestmark = pytest.mark.browser


RIGHT_TO_LEFT = """(element) => {
    const box = (place) => {
        const range = document.createRange();
        range.setStart(element.firstChild, place);
        range.setEnd(element.firstChild, place + 1);
        return range.getBoundingClientRect();
    };
    return [box(0).left > box(element.firstChild.length - 1).left, box(0).right, element.getBoundingClientRect().right];
}"""


def test_words_that_are_read_from_the_right_stand_so(browser):
    """A full stop at their end was at the right of the first word, and the paragraph at the left."""
    arabic = "مرحبا بالعالم."
    with (
        running(FakeEngine({arabic: [f"# {arabic}\n{arabic}\n- {arabic}\n\nEnglish."]})) as url,
        visit(browser, url) as page,
    ):
        ask(page, arabic)
        expect(page.locator(".body li")).to_have_count(1)
        for place in (".bubble", ".body h1", ".body p >> nth=0", ".body li"):
            is_ordered, first, edge = page.locator(place).evaluate(RIGHT_TO_LEFT)
            assert is_ordered and edge - first < 30, place
        assert not page.locator(".body p").last.evaluate(RIGHT_TO_LEFT)[0]
        for box in ("#prompt", "#history-search"):
            assert page.locator(box).evaluate("(box) => getComputedStyle(box).unicodeBidi") == "plaintext"


# --- when something is wrong ---------------------------------------------------------------------


def test_dead_server_is_told_in_words_and_the_message_kept(browser):
    with running(FakeEngine(REPLIES)) as url, visit(browser, url, problems=["Failed to load resource"]) as page:
        page.route("**/v1/**", lambda route: route.abort("connectionrefused"))
        send(page, "hello")
        expect(page.get_by_role("alert")).to_contain_text("The server does not answer.")
        expect(page.locator("#model-name")).to_have_text("server not reachable")
        page.unroute("**/v1/**")
        page.get_by_role("button", name="Try again").click()
        expect(answers(page)).to_have_text("你好，世界！🌍")
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.locator(".turn.user")).to_have_count(1)
        expect(page.locator("#model-about")).to_contain_text("d4")


def test_stream_that_breaks_off_says_so_and_keeps_the_words(browser):
    def wrap(app: Any) -> Any:
        async def broken(scope: Any, receive: Any, send_on: Any) -> None:
            async def send_some(message: Any) -> None:
                if scope["path"] == CHAT and "好".encode() in message.get("body", b""):
                    raise ConnectionError("cut")
                await send_on(message)

            await app(scope, receive, send_some)

        return broken

    engine = FakeEngine(REPLIES, gated=True)
    with (
        running(engine, wrap=wrap) as url,
        visit(browser, url, problems=["ERR_INCOMPLETE_CHUNKED_ENCODING"]) as page,
    ):
        send(page, "hello")
        engine.allow(3)
        expect(answers(page)).to_have_text("你")
        engine.allow(100)
        expect(page.get_by_role("alert")).to_have_text("The connection was lost before the answer was complete.")
        expect(answers(page)).to_have_text("你")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()


def test_failing_engine_and_full_queue_are_told_in_both_languages(browser):
    engine = FakeEngine(REPLIES, slots=1, gated=True)
    settings = replace(SETTINGS, waiting=0)
    with running(engine, settings=settings) as url, visit(browser, url, problems=["429"], locale="zh-CN") as page:
        question = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=question):
            send(page, "hello")
            expect(page.get_by_role("alert")).to_have_text("现在排队的对话太多，请 2 秒后再试。")
            page.locator("#language").click()
            expect(page.get_by_role("alert")).to_have_text(
                "Too many chats are waiting right now. Please try again in 2 seconds."
            )
        wait_until_free(url, 1)
        engine.fail = True
        engine.allow(1000)
        page.get_by_role("button", name="Try again").click()
        expect(page.get_by_role("alert")).to_contain_text("The model failed while it was answering.")
        page.get_by_role("button", name="Try again").click()
        expect(answers(page)).to_have_text("你好，世界！🌍")


def test_code_that_the_page_does_not_know_is_told_with_the_server_s_words(browser):
    def refuse(route: Any) -> None:
        route.fulfill(status=418, json={"error": {"code": code, "message": f"no {code}"}})

    with running(FakeEngine()) as url, visit(browser, url, problems=["418"]) as page:
        page.route("**/v1/chat/**", refuse)
        for code in ("constructor", "__proto__", "unheard_of"):
            ask(page, "hello")
            expect(page.get_by_role("alert").last).to_have_text(f"The server refused this request (418): no {code}")


def test_message_that_is_too_long_is_told_with_numbers(browser):
    with running(FakeEngine(length=1200)) as url, visit(browser, url, problems=["400", "413"]) as page:
        send(page, "x" * 1500)
        expect(page.get_by_role("alert")).to_contain_text("context of 1,200 tokens")
        expect(page.locator("#prompt")).to_have_value("x" * 1500)
        expect(page.get_by_role("button", name="Try again")).to_have_count(0)
        send(page, "x" * 300_000)
        expect(page.get_by_role("alert").last).to_contain_text("context of 1,200 tokens")
        # tests/serve/routes/test_intake.py has the refusal of the server; to type so many megabytes takes half a minute
        refused = {"error": {"code": "body_too_large", "message": "too large"}}
        page.route("**/v1/chat/**", lambda route: route.fulfill(status=413, json=refused))
        send(page, "hello")
        expect(page.get_by_role("alert").last).to_contain_text("too long to send")


# --- languages and sizes -------------------------------------------------------------------------

CHINESE = re.compile("[\u4e00-\u9fff]")


def test_language_follows_the_browser_and_then_the_switch(browser):
    with running(FakeEngine(REPLIES), settings=replace(SETTINGS, about=ABOUT)) as url:
        with visit(browser, url, locale="zh-TW") as page:
            expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
            expect(page.get_by_role("button", name="新对话")).to_be_visible()
            expect(page.locator("#model-name")).to_have_text("在 TinyWorld 上训练的小模型，经过微调，能回答问题")
            expect(page.locator("#knows")).to_contain_text("各国首都和算术")
            send(page, "sum")
            expect(page.locator(".meta")).to_contain_text("个词元")
            finished(page)
            page.get_by_role("button", name="Switch to English").click()
            expect(page.get_by_role("button", name="New chat")).to_be_visible()
            expect(page.locator(".meta")).to_contain_text("tokens")
            expect(page.locator("#model-name")).to_have_text("Small model trained on TinyWorld, fine-tuned to answer")
            page.reload()
            expect(page.get_by_role("button", name="New chat")).to_be_visible()
        with visit(browser, url, locale="fr-FR") as page:
            expect(page.locator("html")).to_have_attribute("lang", "en")
            page.evaluate(
                "() => { document.getElementById('language').remove(); document.getElementById('examples').remove() }"
            )
            assert not CHINESE.search(page.locator("body").inner_text())


def test_both_languages_have_the_same_words(browser):
    with running(FakeEngine()) as url, visit(browser, url) as page:
        words, examples = page.evaluate(
            """async () => {
                const { WORDS } = await import("./assets/language/words.js");
                return [WORDS, (await import("./assets/language/names.js")).EXAMPLES];
            }"""
        )
    names = re.compile(r"\{\w+\}")
    assert words["en"].keys() == words["zh"].keys()
    for key, text in words["en"].items():
        assert sorted(names.findall(text)) == sorted(names.findall(words["zh"][key])), key
    assert len(examples["en"]) == len(examples["zh"])


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_nothing_sticks_out_on_a_phone(browser, locale):
    replies = {**REPLIES, "long": ["x" * 300 + " " + "字" * 300]}
    wide = """() => [...document.querySelectorAll("body *:not(.hidden)")]
        .filter((e) => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 0.5)
        .map((e) => e.className || e.tagName)"""
    phone = {"viewport": {"width": 320, "height": 640}, "is_mobile": True, "has_touch": True}
    settings = replace(SETTINGS, about=ABOUT)
    with running(FakeEngine(replies), settings=settings) as url, visit(browser, url, locale=locale, **phone) as page:
        assert page.evaluate(wide) == []
        page.locator("#model summary").tap()
        expect(page.locator("#model-about")).to_be_visible()
        assert page.evaluate(wide) == []
        page.locator("#model summary").tap()
        ask(page, "long", "sum")
        page.locator(".tool summary").tap()
        ask(page, "y" * 200)
        assert page.evaluate(wide) == []
        assert page.evaluate("() => document.scrollingElement.scrollHeight <= innerHeight")
        for name in ("#send", "#new-chat", "#language"):
            box = page.locator(name).bounding_box()
            assert box and box["width"] >= 32 and box["height"] >= 32, name


def test_colours_follow_the_system(browser):
    shade = "() => getComputedStyle(document.documentElement).backgroundColor"
    with running(FakeEngine()) as url:
        with visit(browser, url, color_scheme="light") as page:
            light = page.evaluate(shade)
        with visit(browser, url, color_scheme="dark") as page:
            dark = page.evaluate(shade)
    assert (light, dark) == ("rgb(250, 249, 246)", "rgb(22, 24, 26)")
