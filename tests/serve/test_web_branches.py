"""Branches of a chat in a real browser: answers given again, questions edited, answers continued, and settings."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.serve.pages import ask, check, heard
from tests.support.browsing import REPLIES, answers, finished, say_hello, send, visit
from tests.support.fake_engine import SETTINGS, ByteTokenizer, FakeEngine, running

pytestmark = pytest.mark.browser

PUBLISHED = replace(SETTINGS, stage="published", tag="qwen")


def edit(page: Page, place: int, text: str) -> None:
    turn = page.locator(".turn.user").nth(place)
    turn.hover()
    turn.get_by_role("button", name="Edit this message").click()
    box = page.get_by_role("textbox", name="Your message")
    expect(box).to_be_focused()
    box.fill(text)
    box.press("Enter")
    finished(page)


# --- branches ------------------------------------------------------------------------------------


def test_earlier_answers_stay_behind_arrows_over_a_reload(engine, page):
    engine.replies = {"who": ["first"]}
    ask(page, "who")
    for words in ("second", "third"):
        engine.replies = {"who": [words]}
        page.get_by_role("button", name="Answer again").click()
        finished(page)
        expect(answers(page)).to_have_text(words)
    expect(page.locator(".branches")).to_have_text("3 / 3")
    expect(page.get_by_role("button", name="Later version")).to_be_disabled()
    earlier, later = (page.get_by_role("button", name=f"{name} version") for name in ("Earlier", "Later"))
    earlier.press("Enter")
    expect(answers(page)).to_have_text("second")
    expect(page.locator(".branches")).to_have_text("2 / 3")
    expect(earlier).to_be_focused()
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("first")
    expect(later).to_be_focused()  # there is no earlier one
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("second")
    expect(later).to_be_focused()
    ask(page, "next")  # the chat goes on from the answer that is shown
    assert heard(engine) == "whosecondnext"
    page.reload()
    expect(answers(page)).to_have_text(["second", "next"])
    expect(page.locator(".branches")).to_have_text("2 / 3")
    page.get_by_role("button", name="Later version").click()
    expect(answers(page)).to_have_text(["third"])
    page.get_by_role("button", name="Earlier version").click()
    expect(answers(page)).to_have_text(["second", "next"])


def test_an_edited_message_starts_a_branch_and_the_old_one_stays_reachable(engine, page):
    ask(page, "one", "two", "three")
    edit(page, 1, "zwei")
    expect(page.locator(".turn.user .bubble")).to_have_text(["one", "zwei"])
    assert heard(engine) == "oneonezwei"
    arrows = page.locator(".turn.user .branches")
    expect(arrows).to_have_text("2 / 2")
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".turn.user .bubble")).to_have_text(["one", "two", "three"])
    edit(page, 0, "eins")
    expect(page.locator(".turn.user .bubble")).to_have_text(["eins"])
    assert heard(engine) == "eins"
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".turn.user .bubble").first).to_have_text("one")


def test_editing_is_left_with_escape_and_an_unchanged_text_asks_nothing(engine, page):
    ask(page, "hello")
    page.get_by_role("button", name="Edit this message").press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user .bubble")).to_be_visible()
    expect(page.get_by_role("button", name="Edit this message")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("more")
    page.keyboard.press("Escape")
    expect(page.locator(".turn.user .bubble")).to_have_text("hello")
    assert len(engine.seen) == 1


def test_an_edited_question_that_leaves_room_for_all_takes_the_line_about_the_context_away(browser):
    engine = FakeEngine({"x" * 120: ["y"]}, length=200)
    with running(engine, settings=replace(SETTINGS, max_tokens=20)) as url, visit(browser, url) as page:
        ask(page, "one " * 5, "two " * 5, "x" * 120)
        expect(page.locator(".forgotten")).to_have_count(1)
        edit(page, 2, "three")
        finished(page)
        assert heard(engine).startswith("one")
        expect(page.locator(".forgotten")).to_have_count(0)
        page.get_by_role("button", name="Earlier version").click()
        expect(page.locator(".forgotten")).to_have_count(1)


def test_an_edited_question_waits_for_the_answer_in_progress(engine, page):
    ask(page, "one")
    engine.gated = True
    send(page, "two")
    expect(page.locator(".turn.user")).to_have_count(2)
    page.get_by_role("button", name="Edit this message").first.press("Enter")
    page.keyboard.type(" and more")
    page.keyboard.press("Enter")
    box = page.get_by_role("textbox", name="Your message")
    expect(box).to_have_value("one and more")
    engine.allow(1000)
    finished(page)
    box.press("Enter")
    finished(page)
    expect(page.locator(".turn.user .bubble")).to_have_text("one and more")
    assert heard(engine) == "one and more"


def test_an_edited_question_that_had_no_answer_replaces_what_came_after_it(engine, page):
    engine.fail = True
    ask(page, "failed", "one", "two")
    edit(page, 0, "edited")
    expect(page.locator(".turn.user .bubble")).to_have_text("edited")
    assert heard(engine) == "edited"
    ask(page, "next")
    assert heard(engine) == "editededitednext"
    page.reload()
    expect(page.locator(".turn.user .bubble")).to_have_text(["edited", "next"])


def test_an_edited_question_that_fails_is_tried_again(engine, page):
    ask(page, "one")
    engine.fail = True
    edit(page, 0, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The model failed")
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_have_text("你好，世界！🌍")
    expect(page.locator(".turn.user .branches")).to_have_text("2 / 2")
    assert heard(engine) == "hello"


def test_an_answer_cut_by_its_length_is_continued(browser):
    engine = FakeEngine({"long": ["0123456789"]})
    with running(engine, settings=replace(SETTINGS, max_tokens=4)) as url, visit(browser, url) as page:
        ask(page, "long")
        expect(page.locator(".meta")).to_contain_text("cut off at the length limit")
        engine.replies = {"long": ["4567"]}
        page.get_by_role("button", name="Continue").click()
        finished(page)
        expect(answers(page)).to_have_text("01234567")
        assert heard(engine) == "long0123"
        assert engine.seen[-1].prompt[-5] == engine.tokenizer.special("assistant_start")
        page.get_by_label("Length and speed of this answer").click()
        expect(page.locator(".numbers > span")).to_contain_text("8 tokens")
        page.reload()
        expect(answers(page)).to_have_text("01234567")
        expect(page.locator(".branches")).to_have_count(0)
        engine.replies = {"long": ["89"]}
        page.get_by_role("button", name="Continue").click()
        finished(page)
        expect(answers(page)).to_have_text("0123456789")
        expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def test_an_answer_that_fills_the_context_cannot_go_on_and_can_be_given_again(browser):
    engine = FakeEngine({"long": ["0123456789" * 9]}, length=32)
    with running(engine) as url, visit(browser, url, ["400"]) as page:
        ask(page, "long")
        for _ in range(2):
            page.get_by_role("button", name="Continue").click()
            finished(page)
        expect(page.get_by_role("alert")).to_contain_text("fills the model's context of 32 tokens")
        expect(page.locator("#prompt")).to_have_value("")
        engine.replies = {"long": ["short"]}
        page.get_by_role("button", name="Try again").click()
        expect(answers(page)).to_have_text("short")
        expect(page.locator(".turn.model .branches")).to_have_text("2 / 2")


# --- settings ------------------------------------------------------------------------------------


def test_settings_go_with_every_request_are_kept_and_can_be_reset(browser):
    engine = FakeEngine(REPLIES, tokenizer=ByteTokenizer(takes_system=True))
    with running(engine) as url, visit(browser, url) as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System message").fill("Be brief.")
        values = {"Temperature": "1.3", "Top-k": "7", "Top-p": "0.9", "Min-p": "0.05", "Longest reply": "3"}
        values |= {"Seed": "11"}
        for name, value in values.items():
            page.get_by_label(name, exact=True).fill(value)
        page.keyboard.press("Escape")
        expect(page.locator("#settings")).to_be_hidden()
        page.reload()
        with page.expect_request("**/v1/chat/completions") as request:
            ask(page, "hello")
        body = json.loads(request.value.post_data or "")
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        sampling = engine.seen[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.3, 7, 0.9, 0.05)
        assert (sampling.max_tokens, sampling.seed) == (3, 11)
        page.get_by_role("button", name="Answer again").click()
        finished(page)
        assert engine.seen[-1].sampling.seed == 12  # the same seed would give the same answer
        page.get_by_role("button", name="Settings").click()
        box = page.get_by_label("Temperature", exact=True)
        box.fill("3")
        expect(page.get_by_text("Give a number from 0 to 2;")).to_be_visible()
        page.get_by_role("button", name="Back to the defaults").click()
        expect(box).to_have_value("")
        expect(box).to_have_attribute("placeholder", "0.6")
        page.get_by_role("button", name="Close").click()
        page.locator("#new-chat").click()
        ask(page, "hello")
        sampling = engine.seen[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.6, 50, 512)


def test_the_longest_answer_leaves_room_for_the_chat_before_it(engine, page):
    """A length beyond the context, which means no limit, made the model forget the chat at every question."""
    page.evaluate("localStorage.setItem('nanochat.settings', JSON.stringify({max_tokens: 1000000}))")
    page.reload()
    ask(page, "hello", "hello")
    assert heard(engine).count("hello") == 2
    expect(page.locator(".forgotten")).to_have_count(0)


def test_kept_settings_that_a_model_cannot_take_are_not_sent(engine, page):
    keep = "(kept) => localStorage.setItem('nanochat.settings', JSON.stringify(kept))"
    page.evaluate(keep, {"system": "x", "seed": "y", "top_k": 0.5})
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature", exact=True)).to_be_visible()
    expect(page.get_by_label("System message")).to_have_count(0)
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "hello")
    body = json.loads(request.value.post_data or "")
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert not {"seed", "top_k", "logprobs"} & body.keys()
    page.evaluate(keep, {"top_k": 100_000})
    page.reload()
    ask(page, "hello")
    assert engine.seen[-1].sampling.top_k == engine.tokenizer.vocab_size


# --- what the model saw --------------------------------------------------------------------------


def test_the_prompt_of_an_answer_is_shown_with_its_special_tokens(browser):
    engine = FakeEngine(REPLIES)
    spelled = "你好 user_end <b>🌍</b>"
    with running(engine, settings=PUBLISHED) as url, visit(browser, url) as page:
        say_hello(page, 1)
        ask(page, spelled)
        page.get_by_label("What the model saw").locator("visible=true").last.click()
        prompt = page.locator(".saw[open] .prompt")
        expect(prompt).to_have_text(engine.tokenizer.decode(engine.seen[-1].prompt))
        expect(prompt).to_contain_text(f"user_start{spelled}user_end")
        framed = [engine.tokenizer.decode([token]) for token in engine.seen[-1].prompt if token >= 256]
        expect(prompt.locator("mark")).to_have_text(framed)  # the text that spells one is none
        expect(page.locator(".saw[open] .told")).to_contain_text(f"these {len(engine.seen[-1].prompt)} tokens")
        page.reload()
        expect(answers(page)).to_have_count(2)
        expect(page.locator(".saw")).to_have_count(0)  # the settings of then are not known any more


def test_a_prompt_that_cannot_be_loaded_is_told_and_loaded_later(browser):
    with (
        running(FakeEngine(REPLIES)) as url,
        visit(browser, url, problems=["Failed to load resource"]) as page,
    ):
        say_hello(page, 1)
        page.route("**/tokenizer_info*", lambda route: route.abort("connectionrefused"))
        summary = page.locator(".saw summary")
        summary.click()
        expect(page.locator(".saw .told")).to_contain_text("The server does not answer.")
        page.unroute("**/tokenizer_info*")
        summary.click()
        summary.click()
        expect(page.locator(".saw .prompt mark").first).to_be_visible()


# --- probabilities and the context ---------------------------------------------------------------


def scored(*tokens: tuple[str, float]) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": math.log(p), "bytes": [*text.encode()],
         "top_logprobs": [{"token": text, "logprob": math.log(p), "bytes": None},
                          {"token": "other", "logprob": math.log(0.01), "bytes": None}]}
        for text, p in tokens
    ]  # fmt: skip


def test_tokens_show_their_probability_and_alternatives(engine, page):
    engine.replies = {"hello": ["Hi 你"]}
    check(page, "Token probabilities")
    ask(page, "hello")
    assert engine.seen[-1].sampling.logprobs == 5
    tokens = page.locator(".token")
    expect(tokens).to_have_text(["H", "i", " ", "你"])  # three tokens of one byte each are one character
    tip = page.get_by_role("tooltip")
    tokens.first.focus()
    expect(tip.locator("tr")).to_have_text(["H100%"])
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(tip.locator("table")).to_have_count(3)
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    tokens.nth(1).hover()
    expect(tip).to_contain_text("i100%")
    page.evaluate(
        """async (scores) => {
            const { TokenView } = await import("./assets/reply/tokens.js");
            const body = document.querySelector(".body");
            body.replaceChildren();
            new TokenView().add(scores, body);
        }""",
        scored(("sure", 0.95), ("so", 0.7), ("hm", 0.3), ("<b>", 0.05)),
    )
    for place, name in enumerate(["token", "token likely", "token open", "token unlikely"]):
        expect(tokens.nth(place)).to_have_attribute("class", name)
    tokens.last.click()
    expect(tip.locator("tr")).to_have_text(["<b>5%", "other1%"])
    expect(tip.locator(".chosen")).to_have_text("<b>5%")


def test_an_answer_continues_as_text_after_probabilities_were_switched_off(browser):
    engine = FakeEngine({"long": ["**0123456789**"]})
    with running(engine, settings=replace(SETTINGS, max_tokens=4)) as url, visit(browser, url) as page:
        check(page, "Token probabilities")
        ask(page, "long")
        expect(page.locator(".token")).to_have_text(["*", "*", "0", "1"])
        check(page, "Token probabilities", on=False)
        engine.replies = {"long": ["23**"]}
        page.get_by_role("button", name="Continue").click()
        finished(page)
        expect(answers(page).locator("strong")).to_have_text("0123")
        expect(answers(page)).not_to_have_class("body tokens")
