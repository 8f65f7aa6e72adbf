"""Two tabs of one browser, and a browser that stores nothing: no chat is lost, and no deleted chat comes back."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.serve.pages import ask

pytestmark = pytest.mark.browser

QUESTIONS = """async () => (await (await import("./assets/chats/store.js")).allChats())
    .map(({ messages }) => messages.filter(({ role }) => role === "user").map(({ text }) => text))"""


@pytest.fixture
def tabs(page: Page) -> tuple[Page, Page]:
    """Two tabs with the list of chats; both show the chat whose only question is "one"."""
    ask(page, "one")
    page.locator("#history-toggle").click()
    second = page.context.new_page()
    second.goto(page.url)
    second.locator("#history-list .open").click()  # the panel is open as in the first tab
    expect(second.locator(".bubble")).to_have_text("one")
    return page, second


def chats(page: Page) -> Any:
    return page.locator("#history-list .open")


def stored(page: Page) -> list[list[str]]:
    """The questions of each chat, the chat that was used last first."""
    return page.evaluate(QUESTIONS)


def close(page: Page, other: Page) -> None:
    """Leave a page, and wait until what it writes on leaving is written."""
    page.close(run_before_unload=True)
    other.wait_for_timeout(500)


def test_a_tab_that_is_closed_leaves_what_another_tab_has_added(tabs):
    first, second = tabs
    ask(second, "two", "three")
    close(first, second)
    assert stored(second) == [["one", "two", "three"]]


def test_a_chat_that_another_tab_deleted_does_not_come_back(tabs):
    first, second = tabs
    second.get_by_role("button", name="Delete “one”").press("Enter")
    expect(chats(second)).to_have_count(0)
    expect(chats(first)).to_have_count(0)  # the other tab's list is drawn again
    close(first, second)
    assert stored(second) == []


def test_two_tabs_that_both_ask_on_keep_both_copies(tabs):
    first, second = tabs
    ask(second, "two")
    ask(first, "zwei", "drei")
    expect(chats(first)).to_have_count(2)
    assert stored(first) == [["one", "zwei", "drei"], ["one", "two"]]
    first.reload()  # the tab stays with its copy
    ask(first, "vier")
    ask(second, "three")
    assert stored(first) == [["one", "two", "three"], ["one", "zwei", "drei", "vier"]]
    second.get_by_role("button", name="Delete “one”").first.press("Enter")
    expect(chats(first)).to_have_count(1)
    ask(first, "fünf")
    assert stored(first) == [["one", "zwei", "drei", "vier", "fünf"]]


def test_two_tabs_keep_the_settings_of_both(page):
    second = page.context.new_page()
    second.goto(page.url)
    for tab, name in ((page, "Temperature"), (second, "Seed")):
        tab.get_by_role("button", name="Settings").click()
        tab.get_by_label(name, exact=True).fill("1")
    kept = "() => JSON.parse(localStorage.getItem('nanochat.settings'))"
    assert page.evaluate(kept) == {"temperature": 1, "seed": 1}
    page.get_by_role("button", name="Back to the defaults").click()
    assert page.evaluate(kept) == {}


def test_a_list_that_is_out_of_date_opens_and_renames_what_is_stored(tabs):
    first, second = tabs
    first.locator("#new-chat").click()
    ask(second, "two")
    first.get_by_role("button", name="Rename “one”").press("Enter")
    first.get_by_role("textbox", name="New title").fill("Title")
    ask(second, "three")
    first.get_by_role("textbox", name="New title").press("Enter")
    expect(chats(first)).to_have_text("Title")
    assert stored(first) == [["one", "two", "three"]]
    ask(second, "four")
    expect(chats(second)).to_have_text("Title")
    chats(first).click()
    expect(first.locator(".bubble")).to_have_text(["one", "two", "three", "four"])
    ask(second, "five")
    chats(first).click()  # it is open already, but out of date
    expect(first.locator(".bubble")).to_have_text(["one", "two", "three", "four", "five"])


FULL = """() => {
    const put = IDBObjectStore.prototype.put;
    IDBObjectStore.prototype.put = function (...values) {
        const request = put.apply(this, values);
        this.transaction.abort(); // as browsers do when the disk is full
        return request;
    };
    window.roomAgain = () => (IDBObjectStore.prototype.put = put);
}"""


def test_a_browser_without_room_says_so_and_keeps_the_chat_until_the_page_is_left(page):
    page.locator("#history-toggle").click()
    ask(page, "one")
    expect(chats(page)).to_have_count(1)
    page.evaluate(FULL)
    page.get_by_role("button", name="Delete “one”").press("Enter")
    page.get_by_role("button", name="Undo").press("Enter")
    expect(page.locator("#history-told")).to_contain_text("“one” is not back: the browser has no room for it.")
    ask(page, "two")
    expect(page.locator("#not-kept")).to_contain_text("The browser cannot save this chat")
    page.locator("#new-chat").click()
    expect(chats(page)).to_have_text(["two"])
    chats(page).click()
    expect(page.locator(".bubble")).to_have_text("two")
    page.evaluate("() => void roomAgain()")
    ask(page, "three")
    expect(page.locator("#not-kept")).to_be_hidden()
    page.get_by_role("button", name="Undo").press("Enter")
    expect(page.locator("#history-told")).to_have_text("“one” is back.")
    page.reload()
    expect(chats(page)).to_have_text(["two", "one"])
    assert stored(page) == [["two", "three"], ["one"]]


def test_a_tab_that_has_no_room_for_its_chat_does_not_go_back_to_an_earlier_state_of_it(page):
    ask(page, "one")
    page.evaluate("""() => {
        Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError") };
    }""")
    ask(page, "two", "three")
    assert stored(page) == [["one", "two", "three"]]
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()
    assert stored(page) == [["one", "two", "three"]]


def test_a_database_that_the_browser_has_closed_is_opened_again(page):
    remember = """const open = IDBFactory.prototype.open;
        IDBFactory.prototype.open = function (...names) {
            const request = open.apply(this, names);
            request.addEventListener("success", () => (window.base = request.result));
            return request;
        };"""
    page.add_init_script(remember)
    page.reload()
    ask(page, "one")
    page.wait_for_function("() => window.base")  # the page opens it when it keeps the answer
    page.evaluate("base.close()")
    ask(page, "two")
    page.locator("#new-chat").click()
    page.reload()
    assert stored(page) == [["one", "two"]]
