"""The page in a real browser: streaming, stopping, writing, and what an answer looks like."""

import re

import pytest
from playwright.sync_api import expect

from tests.serve.pages import ask, heard
from tests.support.browsing import REPLIES, answers, finished, say_hello, send, visit, wait_until_free
from tests.support.fake_engine import FakeEngine, running

pytestmark = pytest.mark.browser

NASTY = '<img src="https://example.com/x.png" onerror="document.title=1"><script>document.title=2</script>&lt; <b>x</b>'
STORY = "第一天，小模型学会了说话。And it spoke. " * 40


# --- streaming -----------------------------------------------------------------------------------


def test_answer_is_seen_while_it_is_made(engine, page):
    engine.gated = True
    send(page, "hello")
    expect(page.locator(".turn.user .bubble")).to_have_text("hello")
    engine.allow(7)  # two characters and the first byte of the third
    expect(answers(page)).to_have_text("你好")
    expect(page.locator(".body.streaming")).to_have_count(1)
    expect(page.locator(".numbers")).to_have_count(0)
    expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-live", "polite")
    engine.allow(100)
    expect(answers(page)).to_have_text("你好，世界！🌍")
    expect(page.locator(".body.streaming")).to_have_count(0)
    expect(page.locator("#log")).not_to_have_attribute("aria-busy", "true")
    numbers = page.locator(".numbers > span")
    expect(numbers).to_be_hidden()
    page.get_by_label("Length and speed of this answer").click()
    expect(numbers).to_have_text(re.compile(r"^23 tokens · [\d,.]+ tokens/s$"))


def test_stop_and_new_chat_end_an_answer_and_free_its_slot(browser):
    engine = FakeEngine(REPLIES, gated=True, slots=1)
    with running(engine) as url, visit(browser, url) as page:
        send(page, "hello")
        engine.allow(6)
        expect(answers(page)).to_have_text("你好")
        page.get_by_role("button", name="Stop answering").click()
        expect(page.locator(".meta")).to_contain_text("stopped")
        wait_until_free(url, 1)
        send(page, "sum")
        engine.allow(2)
        expect(answers(page)).to_have_text(["你好", "37"])
        assert heard(engine) == "hello你好sum"
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("#welcome")).to_be_visible()
        expect(page.locator(".turn")).to_have_count(0)
        wait_until_free(url, 1)
        assert all(seen.cancelled for seen in engine.seen)
        engine.allow(1000)
        ask(page, "sum")
        expect(answers(page)).to_have_text(re.compile("1776.$"))
        assert heard(engine) == "sum"


def test_events_are_read_the_same_however_the_bytes_are_cut(page):
    """With every pair of cuts; a real network makes such cuts only by chance."""
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


def test_the_box_takes_several_lines_and_sends_nothing_empty_or_during_an_answer(engine, page):
    box = page.locator("#prompt")
    expect(box).to_be_focused()
    expect(page.locator("#send")).to_be_disabled()
    send(page, " \n ")
    expect(page.locator(".turn")).to_have_count(0)
    page.fill("#prompt", "")
    heights = [box.bounding_box()["height"]]
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    heights.append(box.bounding_box()["height"])
    page.fill("#prompt", "line\n" * 100)
    heights.append(box.bounding_box()["height"])
    assert heights[0] + 10 < heights[1] < heights[2] < 260
    engine.gated = True
    send(page, "one\ntwo")
    expect(page.locator(".turn.user .bubble")).to_have_text("one\ntwo")
    expect(box).to_have_value("")
    expect(box).to_be_focused()
    send(page, "sum")
    expect(box).to_have_value("sum")
    engine.allow(1000)
    finished(page)
    assert len(engine.seen) == 1
    page.press("#prompt", "Enter")
    expect(answers(page).last).to_contain_text("1776.")


# --- what is shown -------------------------------------------------------------------------------


def test_markup_calculator_calls_and_silence_are_shown_in_words(page):
    ask(page, NASTY)  # the fake engine echoes it
    expect(answers(page)).to_have_text(NASTY)
    expect(page.locator(".turn.user .bubble")).to_have_text(NASTY)
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.title() == "nanochat · d4"
    ask(page, "sum")
    expect(page.locator(".tool summary")).to_have_text("37*48 = 1776")
    expect(page.locator(".tool p")).to_be_hidden()
    page.locator(".tool summary").click()
    expect(page.locator(".tool p")).to_have_text("The model asked the calculator for “37*48” and got “1776”.")
    ask(page, "bad sum")
    expect(page.locator(".tool summary").last).to_have_text("1/0 = ?")
    ask(page, "silence")
    expect(page.locator(".meta").last).to_contain_text("The model had nothing to say.")
    ask(page, "hello")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").last.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("() => navigator.clipboard.readText()") == "你好，世界！🌍"


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


def test_a_full_context_is_told_where_messages_are_dropped_over_a_reload(browser):
    engine = FakeEngine(REPLIES, length=120)
    with running(engine) as url, visit(browser, url) as page:
        bar, line = page.locator("#context-text"), page.locator(".forgotten")
        expect(page.locator("#context")).to_be_hidden()
        say_hello(page, 1)
        expect(bar).to_have_text(f"{len(engine.seen[-1].prompt) + 23} of 120 tokens of context")
        expect(page.locator("#context-bar")).to_have_attribute("max", "120")
        ask(page, "hello", "hello", "hello")
        page.locator(".saw summary").last.click()
        expect(page.locator(".saw[open] .prompt")).to_have_text(engine.tokenizer.decode(engine.seen[-1].prompt))
        page.reload()
        expect(bar).to_contain_text("the oldest messages were dropped")
        expect(line).to_have_text("The model no longer sees the messages above: its context holds only 120 tokens.")
        expect(answers(page)).to_have_count(4)
        assert "cut off" not in page.locator("#log").inner_text()
        seen = heard(engine)
        ask(page, "hello")
        assert len(heard(engine)) <= len(seen) + 20
        page.locator("#language").click()
        expect(line).to_contain_text("上下文")
        page.locator("#new-chat").click()
        expect(page.locator("#context")).to_be_hidden()
