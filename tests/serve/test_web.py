"""The page in a real browser: streaming, stopping, writing, and what an answer looks like."""

from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.browsing import REPLIES, answers, finished, say_hello, send, visit, wait_until_free
from tests.support.fake_engine import ABOUT, SETTINGS, FakeEngine, running

pytestmark = pytest.mark.browser

NASTY = '<img src="https://example.com/x.png" onerror="document.title=1"><script>document.title=2</script>&lt; <b>x</b>'
STORY = "第一天，小模型学会了说话。And it spoke. " * 40


# --- streaming -----------------------------------------------------------------------------------


def test_answer_is_seen_while_it_is_made(browser):
    engine = FakeEngine(REPLIES, gated=True)
    with running(engine) as url, visit(browser, url) as page:
        send(page, "hello")
        expect(page.locator(".turn.user .bubble")).to_have_text("hello")
        engine.allow(7)  # two characters and the first byte of the third
        expect(answers(page)).to_have_text("你好")
        expect(page.locator(".body.streaming")).to_have_count(1)
        expect(page.locator(".numbers")).to_have_count(0)
        engine.allow(100)
        expect(answers(page)).to_have_text("你好，世界！🌍")
        expect(page.locator(".body.streaming")).to_have_count(0)
        expect(page.locator(".numbers")).to_contain_text("23 tokens")
        expect(page.locator("#log")).not_to_have_attribute("aria-busy", "true")


def test_stop_keeps_what_was_said_and_frees_the_slot(browser):
    engine = FakeEngine(REPLIES, gated=True, slots=1)
    with running(engine) as url, visit(browser, url) as page:
        send(page, "hello")
        engine.allow(6)
        expect(answers(page)).to_have_text("你好")
        page.get_by_role("button", name="Stop answering").click()
        expect(page.locator(".meta")).to_contain_text("stopped")
        wait_until_free(url, 1)
        assert engine.seen[0].cancelled
        engine.allow(1000)
        send(page, "sum")
        expect(answers(page).last).to_contain_text("1776.")
        expect(answers(page).first).to_have_text("你好")
        said = bytes(token for token in engine.seen[1].prompt if token < 256).decode()
        assert said == "hello你好sum"


def test_new_chat_aborts_the_answer_and_frees_the_slot(browser):
    engine = FakeEngine(REPLIES, gated=True, slots=1)
    with running(engine) as url, visit(browser, url) as page:
        send(page, "hello")
        engine.allow(6)
        expect(answers(page)).to_have_text("你好")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("#welcome")).to_be_visible()
        wait_until_free(url, 1)
        assert engine.seen[0].cancelled
        engine.allow(1000)
        expect(page.locator(".turn")).to_have_count(0)
        send(page, "sum")
        expect(answers(page)).to_have_count(1)
        expect(answers(page)).to_contain_text("1776.")
        said = bytes(token for token in engine.seen[1].prompt if token < 256).decode()
        assert said == "sum"


def test_closed_page_frees_the_slot(browser):
    engine = FakeEngine(REPLIES, gated=True, slots=1)
    with running(engine) as url:
        with visit(browser, url) as page:
            send(page, "hello")
            engine.allow(3)
            expect(answers(page)).to_have_text("你")
        wait_until_free(url, 1)
        assert engine.seen[0].cancelled


def recut(size: int) -> Any:
    """Middleware that splits the body of every stream into pieces of `size` bytes, even inside a character."""

    def wrap(app: Any) -> Any:
        async def cut(scope: Any, receive: Any, send_on: Any) -> None:
            async def send_pieces(message: Any) -> None:
                body = message.get("body", b"")
                for start in range(0, len(body) - size, size):
                    await send_on({**message, "body": body[start : start + size], "more_body": True})
                rest = body[(len(body) - 1) // size * size :] if body else b""
                await send_on({**message, "body": rest} if message["type"] == "http.response.body" else message)

            streamed = scope["type"] == "http" and scope["method"] == "POST"
            await app(scope, receive, send_pieces if streamed else send_on)

        return cut

    return wrap


@pytest.mark.parametrize("size", [1, 2, 7])
def test_stream_may_be_cut_anywhere(browser, size):
    with running(FakeEngine(REPLIES), wrap=recut(size)) as url, visit(browser, url) as page:
        send(page, "hello")
        expect(answers(page)).to_have_text("你好，世界！🌍")
        finished(page)
        send(page, "sum")
        expect(answers(page).last).to_contain_text("37*48 = 1776")
        finished(page)


def test_events_are_read_the_same_however_the_bytes_are_cut(browser):
    """Tests only the parser, with every pair of cuts; a real network makes such cuts only by chance."""
    parse = """async () => {
        const { events } = await import("./assets/sse.js");
        const text = "data: 你🌍\\r\\n\\r\\n: note\\ndata:a\\r\\ndata: b\\n\\nevent: x\\rdata: c\\r\\rdata: half";
        const bytes = new TextEncoder().encode(text);
        const wanted = JSON.stringify(["你🌍", "a\\nb", "c"]);
        const wrong = [];
        for (let i = 0; i <= bytes.length; i++) {
            for (let j = i; j <= bytes.length; j++) {
                const pieces = [bytes.slice(0, i), bytes.slice(i, j), bytes.slice(j)];
                const stream = new ReadableStream({
                    start(controller) { pieces.forEach((piece) => controller.enqueue(piece)); controller.close(); },
                });
                const got = [];
                for await (const data of events(stream)) got.push(data);
                if (JSON.stringify(got) !== wanted) wrong.push([i, j, got]);
            }
        }
        return wrong;
    }"""
    with running(FakeEngine()) as url, visit(browser, url) as page:
        assert page.evaluate(parse) == []


# --- writing -------------------------------------------------------------------------------------


def test_enter_that_ends_a_composition_does_not_send(browser):
    engine = FakeEngine(REPLIES)
    with running(engine) as url, visit(browser, url, locale="zh-CN") as page:
        keys = page.context.new_cdp_session(page)
        page.focus("#prompt")
        keys.send("Input.imeSetComposition", {"text": "nihao", "selectionStart": 5, "selectionEnd": 5})
        for kind in ("rawKeyDown", "keyUp"):
            keys.send(
                "Input.dispatchKeyEvent",
                {"type": kind, "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 229},
            )
        expect(page.locator("#prompt")).to_have_value("nihao")
        keys.send("Input.insertText", {"text": "你好"})
        expect(page.locator("#prompt")).to_have_value("你好")
        # In Safari the composition has ended when the key event comes, and only key code 229 marks it.
        page.evaluate("""() => document.getElementById("prompt").dispatchEvent(
            new KeyboardEvent("keydown", { key: "Enter", keyCode: 229, bubbles: true, cancelable: true }))""")
        page.evaluate("""() => document.getElementById("prompt").dispatchEvent(
            new KeyboardEvent("keydown", { key: "Enter", isComposing: true, bubbles: true, cancelable: true }))""")
        expect(page.locator(".turn")).to_have_count(0)
        assert engine.seen == []
        page.press("#prompt", "Enter")
        expect(page.locator(".turn.user .bubble")).to_have_text("你好")
        finished(page)


def test_shift_enter_starts_a_line_and_the_box_grows(browser):
    with running(FakeEngine(REPLIES)) as url, visit(browser, url) as page:
        expect(page.locator("#prompt")).to_be_focused()
        one = page.locator("#prompt").bounding_box()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        expect(page.locator("#prompt")).to_have_value("one\ntwo")
        two = page.locator("#prompt").bounding_box()
        assert one and two and two["height"] > one["height"] + 10
        page.fill("#prompt", "line\n" * 100)
        many = page.locator("#prompt").bounding_box()
        assert many and many["height"] < 260
        page.fill("#prompt", "one\ntwo")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.user .bubble")).to_have_text("one\ntwo")
        expect(page.locator("#prompt")).to_have_value("")
        expect(page.locator("#prompt")).to_be_focused()
        finished(page)


def test_enter_during_an_answer_keeps_the_next_question(browser):
    engine = FakeEngine(REPLIES, gated=True)
    with running(engine) as url, visit(browser, url) as page:
        send(page, "hello")
        send(page, "sum")
        expect(page.locator("#prompt")).to_have_value("sum")
        assert len(engine.seen) <= 1
        engine.allow(1000)
        finished(page)
        page.press("#prompt", "Enter")
        expect(answers(page).last).to_contain_text("1776.")


def test_nothing_is_not_sent(browser):
    engine = FakeEngine(REPLIES)
    with running(engine) as url, visit(browser, url) as page:
        expect(page.locator("#send")).to_be_disabled()
        send(page, " \n ")
        expect(page.locator(".turn")).to_have_count(0)
        assert engine.seen == []


def test_example_is_asked_with_a_click(browser):
    settings = replace(SETTINGS, about=ABOUT)
    with running(FakeEngine(), settings=settings) as url, visit(browser, url) as page:
        page.get_by_role("button", name="法国的首都是哪里？").click()
        expect(page.locator(".turn.user .bubble")).to_have_text("法国的首都是哪里？")
        expect(answers(page)).to_have_text("法国的首都是哪里？")
        expect(page.locator("#welcome")).to_be_hidden()


# --- what is shown -------------------------------------------------------------------------------


def test_markup_is_shown_as_text(browser):
    with running(FakeEngine(REPLIES)) as url, visit(browser, url) as page:
        send(page, NASTY)  # the fake engine echoes it
        expect(answers(page)).to_have_text(NASTY)
        finished(page)
        expect(page.locator(".turn.user .bubble")).to_have_text(NASTY)
        assert page.locator("#log img, #log script, #log b").count() == 0
        assert page.title() == "nanochat · d4"


def test_tool_call_is_a_chip_that_opens(browser):
    with running(FakeEngine(REPLIES)) as url, visit(browser, url) as page:
        send(page, "sum")
        expect(page.locator(".tool summary")).to_have_text("37*48 = 1776")
        expect(page.locator(".tool p")).to_be_hidden()
        page.locator(".tool summary").click()
        expect(page.locator(".tool p")).to_have_text("The model asked the calculator for “37*48” and got “1776”.")
        finished(page)
        send(page, "bad sum")
        expect(page.locator(".tool summary").last).to_have_text("1/0 = ?")
        finished(page)


def test_copy_takes_the_words(browser):
    with (
        running(FakeEngine(REPLIES)) as url,
        visit(browser, url, permissions=["clipboard-read", "clipboard-write"]) as page,
    ):
        send(page, "hello")
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("() => navigator.clipboard.readText()") == "你好，世界！🌍"


def test_silence_is_said_in_words(browser):
    with running(FakeEngine(REPLIES)) as url, visit(browser, url) as page:
        send(page, "silence")
        expect(page.locator(".meta")).to_contain_text("The model had nothing to say.")
        send(page, "hello")
        expect(answers(page).last).to_have_text("你好，世界！🌍")
        finished(page)


def test_reader_who_scrolls_up_is_left_alone(browser):
    def said(tokens: int) -> str:
        return STORY.encode()[:tokens].decode(errors="ignore")

    engine = FakeEngine({"story": [STORY]}, gated=True)
    with running(engine) as url, visit(browser, url, viewport={"width": 900, "height": 500}) as page:
        send(page, "story")
        engine.allow(512)
        finished(page)
        top = "() => document.getElementById('scroller').scrollTop"
        below = """() => {
            const s = document.getElementById("scroller");
            return s.scrollHeight - s.clientHeight - s.scrollTop;
        }"""
        send(page, "story")
        engine.allow(300)
        expect(answers(page).last).to_have_text(said(300))
        assert page.evaluate(below) < 2
        page.evaluate("() => { document.getElementById('scroller').scrollTop = 10 }")
        expect(page.locator("#to-end")).to_be_visible()
        engine.allow(100)
        expect(answers(page).last).to_have_text(said(400))
        assert page.evaluate(top) == 10
        page.locator("#to-end").click()
        expect(page.locator("#to-end")).to_be_hidden()
        engine.allow(1000)
        finished(page)
        assert page.evaluate(below) < 2


def test_oldest_exchanges_are_marked_when_the_context_is_full(browser):
    engine = FakeEngine(REPLIES, length=120)
    with running(engine) as url, visit(browser, url) as page:
        say_hello(page, 4)
        line = page.locator(".forgotten")
        expect(line).to_have_count(1)
        expect(line).to_have_text("The model no longer sees the messages above: its context holds only 120 tokens.")
        assert "cut off" not in page.locator("#log").inner_text()
        page.locator("#language").click()
        expect(line).to_contain_text("120")
        expect(line).to_contain_text("上下文")
