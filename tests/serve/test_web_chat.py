"""The page in a real browser: the chat survives a reload, questions are answered again, the model is described."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from nanochat.data.conversation import Part
from nanochat.data.traits import TINYWORLD
from tests.serve.pages import ask, heard
from tests.support.browsing import REPLIES, answers, finished, send, visit
from tests.support.fake_engine import ABOUT, SETTINGS, FakeEngine, running

pytestmark = pytest.mark.browser

KNOWN = replace(SETTINGS, about=ABOUT)
KEEP = "kept => { window.onpagehide = () => sessionStorage.setItem('nanochat.chat', kept) }"


# --- a reload ------------------------------------------------------------------------------------


def test_a_reload_keeps_the_chat_and_new_chat_clears_the_tab(engine, page):
    ask(page, "hello", "sum")
    page.fill("#prompt", "not sent yet")
    page.reload()
    expect(page.locator(".turn.user")).to_have_text(["You saidhello", "You saidsum"])
    expect(answers(page).first).to_have_text("你好，世界！🌍")
    expect(page.locator(".tool summary")).to_have_text("37*48 = 1776")
    expect(page.locator("#welcome")).to_be_hidden()
    expect(page.locator("#prompt")).to_have_value("not sent yet")
    ask(page, "next")
    assert heard(engine).startswith("hello你好，世界！🌍sum37 * 48 = ") and heard(engine).endswith("next")
    page.get_by_role("button", name="New chat").click()
    assert page.evaluate("() => sessionStorage.getItem('nanochat.chat')").count("hello") == 0
    page.evaluate(KEEP, "nonsense")  # what is no chat is ignored
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)


def test_an_answer_that_a_reload_cut_short_is_marked_and_a_question_without_one_is_not_lost(engine, page):
    engine.gated = True
    send(page, "hello")
    engine.allow(6)
    expect(answers(page)).to_have_text("你好")
    page.reload()
    expect(answers(page)).to_have_text("你好")
    expect(page.locator(".meta")).to_contain_text("stopped")
    send(page, "sum")
    expect(page.locator(".turn.user")).to_have_count(2)
    page.fill("#prompt", "a draft")
    page.reload()
    expect(page.locator(".turn.user")).to_have_count(1)
    expect(page.locator("#prompt")).to_have_value("sum\n\na draft")


@pytest.mark.parametrize("exchanges, text", [(510, "x"), (8, "€" * 15_000)], ids=["messages", "bytes"])
def test_a_chat_that_is_larger_than_a_request_goes_on_without_its_oldest_messages(browser, exchanges, text):
    answer = {"role": "assistant", "parts": [{"type": "text", "text": text}], "note": None, "numbers": None}
    answer |= {"used": 0, "forgotten": 0, "context": 0}
    messages = []
    for place in range(0, 2 * exchanges, 2):
        messages.append({"parent": place - 1, "role": "user", "text": "q"})
        messages.append({**answer, "parent": place})
    chat = {"id": "x", "title": "", "created": 1, "updated": 1, "messages": messages, "at": len(messages) - 1}
    engine = FakeEngine(REPLIES, length=10**6)
    with running(engine) as url, visit(browser, url) as page:
        page.evaluate(KEEP, json.dumps({"chat": chat}))
        page.reload()
        expect(page.locator(".turn.user")).to_have_count(exchanges)
        with page.expect_request("**/v1/chat/completions") as request:
            send(page, "hello")
        finished(page)
        expect(answers(page).last).to_have_text("你好，世界！🌍")
        expect(page.locator(".forgotten")).to_have_count(1)
        asked = json.loads(request.value.post_data or "")["messages"]
        assert len(asked) == (999 if exchanges > 500 else 11)
        assert asked[0]["role"] == "user" and asked[-1] == {"role": "user", "content": "hello"}


def test_a_question_without_an_answer_goes_to_the_input_box_when_another_chat_is_opened(engine, page):
    engine.fail = True
    send(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The model failed")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#prompt")).to_have_value("hello")
    expect(page.locator("#send")).to_be_enabled()
    engine.gated = True
    page.press("#prompt", "Enter")
    expect(page.locator(".turn.user")).to_have_count(1)
    page.fill("#prompt", "a draft")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#prompt")).to_have_value("hello\n\na draft")


def test_an_example_leaves_what_stands_in_the_input_box(page):
    page.fill("#prompt", "a draft")
    page.locator("#examples button").first.click()
    expect(page.locator(".turn.model")).to_have_count(1)
    finished(page)
    expect(page.locator("#prompt")).to_have_value("a draft")


# --- again ---------------------------------------------------------------------------------------


def test_the_last_answer_can_be_given_again_and_draws_its_words(browser):
    engine = FakeEngine(REPLIES)
    settings = replace(SETTINGS, temperature=0.0)
    with running(engine, settings=settings) as url, visit(browser, url) as page:
        ask(page, "sum", "hello")
        expect(page.get_by_role("button", name="Answer again")).to_have_count(1)
        assert engine.seen[-1].sampling.temperature == 0
        prompt = heard(engine)
        page.get_by_role("button", name="Answer again").press(" ")
        finished(page)
        expect(page.locator("#prompt")).to_be_focused()
        expect(page.locator(".turn.user")).to_have_count(2)
        expect(page.locator(".turn.model")).to_have_count(2)
        assert heard(engine) == prompt and len(engine.seen) == 3
        assert engine.seen[-1].sampling.temperature == 0.6


def test_an_answer_stays_if_another_one_fails(engine, page):
    ask(page, "hello")
    engine.fail = True
    page.get_by_role("button", name="Answer again").click()
    expect(page.get_by_role("alert")).to_contain_text("The model failed")
    expect(answers(page)).to_have_text("你好，世界！🌍")
    page.get_by_role("button", name="Try again").press("Enter")
    finished(page)
    expect(page.locator("#prompt")).to_be_focused()
    expect(answers(page)).to_have_text("你好，世界！🌍")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert heard(engine) == "hello"


# --- what is said of the model and its answers ---------------------------------------------------


def test_the_panel_describes_the_model_and_the_others_and_closes_like_a_menu(browser):
    with running(FakeEngine(), settings=KNOWN) as url, visit(browser, url) as page:
        panel, name = page.locator("#model-about"), page.locator("#model summary")
        expect(panel).to_be_hidden()
        name.press("Enter")
        expect(panel).to_contain_text("4.9 million parameters")
        expect(panel).to_contain_text("fine-tuned on good answers")
        expect(panel).to_contain_text("Stage sft, tag d4, step 300")
        expect(panel.locator("li")).to_have_text(["-i rl -g old", "-i base -g d4"])
        page.locator("#language").click()
        expect(panel).to_be_hidden()
        name.click()
        expect(panel).to_contain_text("490万个参数")
        name.press("Escape")
        expect(panel).to_be_hidden()
        expect(name).to_be_focused()
        page.get_by_role("button", name="法国的首都是哪里？").click()  # an example is asked
        expect(answers(page)).to_have_text("法国的首都是哪里？")
        expect(page.locator("#welcome")).to_be_hidden()


def test_the_page_promises_what_the_model_can(browser):
    with running(FakeEngine(), settings=KNOWN) as url, visit(browser, url) as page:
        (entry,) = httpx.get(f"{url}/v1/models").json()["data"]
        knows = page.locator("#knows")
        expect(knows).to_contain_text("simple facts: capitals and sums. It knows nothing else.")

        def described(**changes: Any) -> None:
            page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{**entry, **changes}]}))
            page.reload()

        described(corpus="mytexts", knows=None, others=[])
        expect(knows).to_contain_text("trained from scratch on mytexts")
        expect(page.locator("#examples button")).to_have_count(3)
        described(tag="smoke")
        expect(knows).to_contain_text("it can answer nothing")
        expect(knows).not_to_contain_text("capitals")
        described(stage="tune", corpus="chats.jsonl", knows=None)
        expect(knows).to_have_text("It is a published model that was fine-tuned on chats.jsonl.")
        expect(page.locator("#model-name")).to_have_text("Published model, fine-tuned on chats.jsonl")
        page.locator("#model summary").click()
        expect(page.locator("#model-about")).to_contain_text("It was published by others")


# --- lines of Chinese ----------------------------------------------------------------------------

SENTENCES = (
    "企鹅不会飞，但是很会游泳。它们生活在寒冷的南极，靠捕鱼为生，走起路来摇摇摆摆。"
    "程序运行在这台机器上，所以不需要网络。"
)
# The words that stand on two lines, each with the text around it.
BROKEN = """(words) => {
    const broken = [];
    for (const element of document.querySelectorAll("[data-i18n], .bubble, .body, .examples button")) {
        if (!element.checkVisibility()) continue;
        const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
        const letters = [];
        for (let node; (node = walker.nextNode()); ) {
            for (let at = 0; at < node.data.length; at++) letters.push([node, at]);
        }
        const text = letters.map(([node, at]) => node.data[at]).join("");
        for (const word of words) {
            for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + 1)) {
                const range = document.createRange();
                range.setStart(...letters[at]);
                const [last, place] = letters[at + word.length - 1];
                range.setEnd(last, place + 1);
                const tops = [...range.getClientRects()].map((box) => Math.round(box.top));
                if (new Set(tops).size > 1) broken.push([word, text]);
            }
        }
    }
    return broken;
}"""
WORDS = (
    "企鹅 但是 游泳 它们 生活 寒冷 南极 程序 运行 机器 所以 需要 网络 训练 常识 首都 名胜 动物 植物 颜色 形状 "
    "日期 节日 行星 职业 日常 用品 单词 等于 多少 哪里 模型 语言 参数 对话 词元 服务器 浏览器 微调 强化 学习 刷新 标签"
).split()


def test_lines_of_chinese_break_between_words_only(browser):
    """The last assertion shows that the browser by itself breaks inside words."""
    replies = {"企鹅": [SENTENCES, Part("python", "1+1"), Part("python_output", "2"), SENTENCES]}
    settings = replace(SETTINGS, about={**ABOUT, "knows": TINYWORLD.knows})
    with running(FakeEngine(replies), settings=settings) as url, visit(browser, url, locale="zh-CN") as page:
        broken, loose = [], []
        for width in range(320, 420, 10):
            page.set_viewport_size({"width": width, "height": 700})
            page.locator("#model summary").click()
            broken += page.evaluate(BROKEN, WORDS)
            page.locator("#model summary").click()
        send(page, SENTENCES)
        finished(page)
        send(page, "企鹅")
        finished(page)
        expect(answers(page).last).to_contain_text(SENTENCES)
        for width in range(320, 420, 10):
            page.set_viewport_size({"width": width, "height": 700})
            broken += page.evaluate(BROKEN, WORDS)
        page.evaluate("() => document.documentElement.classList.remove('phrases')")
        for width in range(320, 420, 10):
            page.set_viewport_size({"width": width, "height": 700})
            loose += page.evaluate(BROKEN, WORDS)
        assert broken == []
        assert loose != []


# --- a key ---------------------------------------------------------------------------------------


def test_a_key_in_the_address_opens_the_page_and_leaves_the_address(browser):
    settings = replace(SETTINGS, api_key="once-1_a-B")
    with running(FakeEngine(REPLIES), settings=settings) as url, browser.new_page(locale="en") as page:
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        page.goto(f"{url}/#key=once-1_a-B")
        ask(page, "hello")
        expect(answers(page)).to_have_text("你好，世界！🌍")
        assert page.url == f"{url}/"


def test_a_key_in_an_address_that_is_entered_where_the_page_is_open_is_taken_too(browser):
    settings = replace(SETTINGS, api_key="second")
    with running(FakeEngine(REPLIES), settings=settings) as url, browser.new_page(locale="en") as page:
        page.on("dialog", lambda dialog: dialog.dismiss())
        page.goto(f"{url}/#key=first")
        expect(page.locator("#model-name")).to_have_text("server not reachable")
        page.fill("#prompt", "hello")
        page.goto(f"{url}/#key=second")
        expect(page.locator("#model-name")).to_have_text("Small model")
        assert page.url == f"{url}/"
        page.press("#prompt", "Enter")
        expect(answers(page)).to_have_text("你好，世界！🌍")


def test_requests_that_are_refused_at_the_same_time_ask_for_the_key_once(browser):
    asked: list[str] = []
    settings = replace(SETTINGS, api_key="secret")
    with running(FakeEngine(REPLIES), settings=settings) as url, browser.new_page(locale="en") as page:

        def answer(dialog):
            asked.append(dialog.message)
            dialog.accept("secret" if len(asked) > 1 else "")

        page.on("dialog", answer)
        page.goto(url)
        expect(page.locator("#model-name")).to_have_text("server not reachable")
        page.evaluate(
            """async () => {
                const { servedModels } = await import("./assets/client.js");
                return Promise.all([servedModels(), servedModels(), servedModels()]);
            }"""
        )
        assert len(asked) == 2


def test_the_page_asks_for_the_servers_key_until_it_is_right_and_keeps_it_for_the_tab(browser):
    typed = ["密钥", "two words", "wrong"]  # no header can carry the first two
    asked: list[str] = []
    settings = replace(SETTINGS, api_key="secret")
    with running(FakeEngine(REPLIES), settings=settings) as url, browser.new_page(locale="en") as page:

        def answer(dialog):
            asked.append(dialog.message)
            dialog.accept(typed.pop(0) if typed else "secret")

        page.on("dialog", answer)
        page.goto(url)
        ask(page, "hello")
        expect(answers(page)).to_have_text("你好，世界！🌍")
        assert len(asked) == 4 and set(asked) == {"This server asks for its key:"}
        count = len(asked)
        page.reload()
        ask(page, "sum")
        assert len(asked) == count
