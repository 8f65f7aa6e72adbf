"""The page's history in a real browser: the list of chats, search, rename, delete and undo, and the file of chats."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.serve.pages import ask
from tests.support.browsing import REPLIES, answers, finished, send, visit, wait_until_free
from tests.support.fake_engine import FakeEngine, running

pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def chats(page: Page) -> Any:
    return page.locator("#history-list .open")


def ask_in_new_chats(page: Page, *questions: str) -> None:
    for question in questions:
        if page.locator(".turn").count():
            page.locator("#new-chat").click()
        ask(page, question)


def show(page: Page) -> None:
    page.locator("#history-toggle").click()
    expect(page.locator("#history")).to_be_visible()


def test_chats_are_listed_by_day_and_opened_again(page):
    show(page)
    expect(page.locator("#history-list")).to_have_text(
        "Chats appear here. They stay in this browser; the server stores nothing."
    )
    ask_in_new_chats(page, "hello", "sum")
    expect(chats(page)).to_have_text(["sum", "hello"])
    expect(page.locator("#history-list h3")).to_have_text(["Today"])
    chats(page).last.click()
    expect(answers(page)).to_have_text("你好，世界！🌍")
    expect(chats(page).last).to_have_attribute("aria-current", "true")
    page.locator("#language").click()
    expect(page.locator("#history-list h3")).to_have_text(["今天"])
    page.reload()
    expect(chats(page)).to_have_text(["sum", "hello"])  # the panel is open again
    expect(page.locator(".turn.user .bubble")).to_have_text("hello")
    page.evaluate(
        """async () => {
            const { allChats, keepChats } = await import("./assets/chats/store.js");
            const [first, second] = await allChats();
            const noon = new Date().setHours(12);
            const old = Date.UTC(2024, 4, 5, 12);
            await keepChats([{ ...first, updated: noon - 864e5 }, { ...second, updated: old }]);
        }"""
    )
    page.fill("#history-search", " ")
    expect(page.locator("#history-list h3")).to_have_text(["昨天", "2024年5月5日"])


def test_the_day_before_today_is_yesterday_where_the_clocks_have_changed(browser):
    """On 29 March 2026 a day had 23 hours in Berlin: 24 hours before half past midnight it was the 28th."""
    with running(FakeEngine(REPLIES)) as url, visit(browser, url, timezone_id="Europe/Berlin") as page:
        page.clock.set_fixed_time("2026-03-29T12:00:00+02:00")
        ask_in_new_chats(page, "hello")
        page.clock.set_fixed_time("2026-03-30T00:30:00+02:00")
        show(page)
        expect(page.locator("#history-list h3")).to_have_text(["Yesterday"])


def test_a_title_ends_with_a_whole_character(page):
    ask_in_new_chats(page, "x" * 79 + "🌍")
    show(page)
    expect(chats(page)).to_have_text(["x" * 79])


def test_search_looks_in_titles_and_texts(page):
    ask_in_new_chats(page, "hello", "sum", "Pinguine")
    show(page)
    expect(page.locator("#history-search")).to_be_focused()
    for wanted, found in [("世界", ["hello"]), ("SUM", ["sum"]), ("1776 37", ["sum"]), ("in", ["Pinguine"])]:
        page.fill("#history-search", wanted)
        expect(chats(page)).to_have_text(found)
    page.fill("#history-search", "nowhere")
    expect(page.locator("#history-list")).to_have_text("No chat holds these words.")


def test_a_chat_is_renamed_deleted_and_brought_back_with_the_keyboard(page):
    ask_in_new_chats(page, "hello")
    show(page)
    page.get_by_role("button", name="Rename “hello”").press("Enter")
    box = page.get_by_role("textbox", name="New title")
    expect(box).to_be_focused()
    box.fill("<b>Greeting</b>")
    box.press("Enter")
    expect(chats(page)).to_have_text(["<b>Greeting</b>"])
    expect(chats(page)).to_be_focused()
    ask(page, "sum")  # the title stays when the chat goes on
    expect(chats(page)).to_have_text(["<b>Greeting</b>"])
    delete = page.get_by_role("button", name="Delete “<b>Greeting</b>”")
    delete.focus()
    page.locator("#history-search").dispatch_event("input")  # draws the list anew, as a reply does that is saved
    page.wait_for_timeout(300)
    expect(delete).to_be_focused()
    delete.press("Enter")
    expect(chats(page)).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="Deleted")).to_contain_text("Deleted “<b>Greeting</b>”.")
    expect(page.get_by_role("button", name="Undo")).to_be_focused()
    page.keyboard.press("Enter")
    expect(chats(page)).to_have_text(["<b>Greeting</b>"])
    expect(page.locator(".turn.user .bubble")).to_have_text(["hello", "sum"])
    page.get_by_role("button", name="Delete “<b>Greeting</b>”").press("Enter")
    expect(chats(page)).to_have_count(0)
    page.reload()
    expect(page.locator("#history-list")).to_contain_text("Chats appear here.")
    expect(page.locator(".turn")).to_have_count(0)


def test_an_answer_that_is_left_in_the_middle_is_in_the_list(engine, page):
    engine.gated = True
    send(page, "hello")
    engine.allow(6)
    expect(answers(page)).to_have_text("你好")
    page.locator("#new-chat").click()
    show(page)
    chats(page).click()
    expect(answers(page)).to_have_text("你好")
    expect(page.locator(".meta")).to_contain_text("stopped")


def test_a_chat_that_is_deleted_while_it_is_answered_does_not_come_back(browser):
    engine = FakeEngine(REPLIES, gated=True, slots=1)
    with running(engine) as url, visit(browser, url) as page:
        send(page, "hello")
        engine.allow(len("".join(map(str, REPLIES["hello"])).encode()) + 1)  # and no step of the next answer
        finished(page)
        show(page)
        send(page, "sum")
        engine.allow(2)
        expect(answers(page).last).to_have_text("37")
        page.get_by_role("button", name="Delete “hello”").press("Enter")
        expect(page.locator("#welcome")).to_be_visible()
        wait_until_free(url, 1)
        engine.allow(1000)
        ask(page, "other")
        expect(chats(page)).to_have_text(["other"])
        page.reload()
        expect(chats(page)).to_have_text(["other"])


def test_an_answer_that_ends_leaves_a_title_that_is_being_typed(engine, page):
    ask_in_new_chats(page, "hello")
    show(page)
    engine.gated = True
    send(page, "sum")
    expect(page.locator(".turn.user")).to_have_count(2)
    page.get_by_role("button", name="Rename “hello”").press("Enter")
    page.keyboard.type("My new na")
    engine.allow(1000)
    finished(page)
    page.wait_for_timeout(300)  # the list would be drawn again by now
    page.keyboard.type("me")
    page.keyboard.press("Enter")
    expect(chats(page)).to_have_text(["My new name"])
    expect(chats(page)).to_be_focused()


def test_on_a_phone_the_list_is_a_drawer_over_the_chat(browser):
    with running(FakeEngine(REPLIES)) as url, visit(browser, url, locale="zh-CN", **PHONE) as page:
        ask_in_new_chats(page, "hello", "x" * 300)
        page.locator("#history-toggle").tap()
        expect(chats(page)).to_have_count(2)
        box = page.locator("#history").bounding_box()
        assert box and box["x"] == 0 and box["width"] < 360 and box["height"] == 844
        assert (
            page.evaluate("""() => [...document.querySelectorAll("#history *")]
            .filter((e) => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth).length""")
            == 0
        )
        page.keyboard.press("Escape")
        expect(page.locator("#history")).to_be_hidden()
        page.locator("#history-toggle").tap()
        chats(page).last.tap()
        expect(page.locator("#history")).to_be_hidden()
        expect(page.locator(".turn.user .bubble")).to_have_text("hello")
        page.locator("#history-toggle").tap()
        page.touchscreen.tap(380, 400)  # beside the drawer
        expect(page.locator("#history")).to_be_hidden()


# --- the file ------------------------------------------------------------------------------------


def chosen(page: Page, text: str | bytes) -> None:
    content = text.encode() if isinstance(text, str) else text
    file = {"name": "chats.json", "mimeType": "application/json", "buffer": content}
    page.locator("#history-file").set_input_files(file)  # type: ignore[arg-type]


def exported(page: Page) -> dict[str, Any]:
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    return json.loads(download.value.path().read_text(encoding="utf-8"))


def a_chat(name: str, **fields: Any) -> dict[str, Any]:
    answer = {"parent": 0, "role": "assistant", "parts": [{"type": "text", "text": f"re {name}"}], "note": None}
    answer |= {"numbers": [3, 0.5], "used": 9, "forgotten": 0, "context": 4096}
    messages = [{"parent": -1, "role": "user", "text": name}, answer]
    return {"id": name, "title": "", "created": 1e12, "updated": 1e12, "messages": messages, "at": 1, **fields}


def a_file(*chats: Any, **fields: Any) -> str:
    return json.dumps({"format": "nanochat-chats", "version": 1, "chats": chats, **fields})


def test_exported_chats_come_back_on_another_device(browser):
    with running(FakeEngine(REPLIES)) as url:
        with visit(browser, url) as page:
            ask_in_new_chats(page, "hello", "sum")
            show(page)
            file = exported(page)
        with visit(browser, url) as page:
            ask_in_new_chats(page, "own")
            show(page)
            chosen(page, json.dumps(file))
            told = page.locator("#history-told")
            expect(told).to_have_text("2 chats were imported, 0 were here already.")
            expect(chats(page)).to_have_text(["own", "sum", "hello"])
            chats(page).nth(1).click()
            expect(page.locator(".tool summary")).to_have_text("37*48 = 1776")
            chosen(page, json.dumps(file))
            expect(told).to_have_text("0 chats were imported, 2 were here already.")
            assert [chat["messages"] for chat in exported(page)["chats"][1:]] == [c["messages"] for c in file["chats"]]


LOOP = [{"parent": 1, "role": "user", "text": "a"}, {"parent": 0, "role": "assistant", "parts": []}]
WRONG = {
    "not JSON": ("{", "is not JSON"),
    "bytes": (b"\xff\x00\xfe", "is not JSON"),
    "deep": ("[" * 100_000, "is not JSON"),
    "a list": ("[]", "holds no chats"),
    "null": ("null", "holds no chats"),
    "another": ('{"messages": []}', "holds no chats"),
    "newer": (a_file(version=2), "another version"),
    "no list": (json.dumps({"format": "nanochat-chats", "version": 1, "chats": "all"}), "holds no chats"),
    "a chat that is null": (a_file(a_chat("good"), None), "chat 2 of 2 in the file is damaged"),
    "a number for a text": (a_file(a_chat("bad", messages=[{"parent": -1, "role": "user", "text": 7}])), "damaged"),
    "a circle": (a_file(a_chat("good"), a_chat("bad", messages=LOOP)), "chat 2 of 2 in the file is damaged"),
    "a strange role": (a_file(a_chat("bad", messages=[{"parent": -1, "role": "root", "text": ""}], at=-1)), "damaged"),
    "a strange note": (a_file(a_chat("bad", messages=[*a_chat("x")["messages"][:1],
                                                      {**a_chat("x")["messages"][1], "note": "askKey"}])), "damaged"),
    "an id with markup": (a_file(a_chat("<img>")), "damaged"),
    "a time beyond all days": (a_file(a_chat("bad", updated=1e300)), "damaged"),
    "nowhere": (a_file(a_chat("bad", at=2)), "damaged"),
    "twice": (a_file(a_chat("same"), a_chat("same")), "two chats in the file have the same id"),
}  # fmt: skip


def test_a_hostile_file_gets_one_line_and_nothing_is_imported(page):
    ask_in_new_chats(page, "hello")
    show(page)
    before = exported(page)
    for name, (text, reason) in WRONG.items():
        chosen(page, text)
        told = page.locator("#history-told")
        expect(told).to_contain_text(reason)
        assert told.inner_text().startswith("Nothing was imported: "), name
        page.evaluate("() => document.getElementById('history-told').replaceChildren()")
    assert exported(page) == before
    huge = page.evaluate(
        """async () => {
            const { importChats } = await import("./assets/chats/files.js");
            return importChats(new File([new Uint8Array(51 * 2 ** 20)], "huge.json"));
        }"""
    )
    assert huge == {"key": "importHuge", "values": {"most": 50}}


def test_markup_in_an_imported_chat_is_text_and_strange_fields_are_left_out(page):
    nasty = '<img src=x onerror="document.title=1">'
    chat = a_chat("one", title=nasty, strange={"__proto__": {"polluted": 1}})
    chat["messages"][0]["text"] = nasty
    chat["messages"][1]["parts"].append({"type": "tool", "expression": nasty, "result": nasty})
    show(page)
    chosen(page, a_file(chat))
    expect(chats(page)).to_have_text([nasty])
    chats(page).click()
    expect(page.locator(".turn.user .bubble")).to_have_text(nasty)
    assert page.locator("#log img, #history img").count() == 0
    assert page.title() == "nanochat · d4"
    assert "strange" not in exported(page)["chats"][0]
    assert page.evaluate("() => ({}).polluted === undefined")


def test_without_storage_the_page_still_chats(page):
    page.add_init_script(
        """for (const name of ["indexedDB", "localStorage", "sessionStorage"]) {
            Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError") } });
        }"""
    )
    page.reload()
    ask_in_new_chats(page, "hello")
    expect(answers(page)).to_have_text("你好，世界！🌍")
    expect(page.get_by_text("lasts only until you leave the page")).to_be_visible()
    show(page)
    expect(chats(page)).to_have_text(["hello"])
