"""Branches of a chat in a real browser: answers given again, questions edited, answers continued, and settings."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.browsing import REPLIES, answers, finished, say_hello, send, visit
from tests.support.fake_engine import ABOUT, SETTINGS, ByteTokenizer, FakeEngine, running

pytestmark = pytest.mark.browser

PUBLISHED = replace(SETTINGS, stage="published", tag="qwen")


def heard(engine: FakeEngine) -> str:
    """The text of the last prompt."""
    return bytes(token for token in engine.seen[-1].prompt if token < 256).decode()


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


def test_earlier_answers_stay_behind_arrows_over_a_reload(browser):
    engine = FakeEngine({"who": ["first"]})
    with running(engine) as url, visit(browser, url) as page:
        send(page, "who")
        finished(page)
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
        send(page, "next")  # the chat goes on from the answer that is shown
        finished(page)
        assert heard(engine) == "whosecondnext"
        page.reload()
        expect(answers(page)).to_have_text(["second", "next"])
        expect(page.locator(".branches")).to_have_text("2 / 3")
        page.get_by_role("button", name="Later version").click()
        expect(answers(page)).to_have_text(["third"])
        page.get_by_role("button", name="Earlier version").click()
        expect(answers(page)).to_have_text(["second", "next"])


def test_an_edited_message_starts_a_branch_and_the_old_one_stays_reachable(browser):
    engine = FakeEngine(REPLIES)
    with running(engine) as url, visit(browser, url) as page:
        for question in ("one", "two", "three"):
            send(page, question)
            finished(page)
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


def test_editing_is_left_with_escape_and_an_unchanged_text_asks_nothing(browser):
    engine = FakeEngine(REPLIES)
    with running(engine) as url, visit(browser, url) as page:
        send(page, "hello")
        finished(page)
        page.get_by_role("button", name="Edit this message").press("Enter")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.user .bubble")).to_be_visible()
        expect(page.get_by_role("button", name="Edit this message")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.type("more")
        page.keyboard.press("Escape")
        expect(page.locator(".turn.user .bubble")).to_have_text("hello")
        assert len(engine.seen) == 1


def test_an_edited_question_waits_for_the_answer_in_progress(browser):
    engine = FakeEngine(REPLIES)
    with running(engine) as url, visit(browser, url) as page:
        send(page, "one")
        finished(page)
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


def test_an_edited_question_that_had_no_answer_replaces_what_came_after_it(browser):
    engine = FakeEngine(REPLIES, fail=True)
    with running(engine) as url, visit(browser, url) as page:
        send(page, "failed")
        finished(page)
        for question in ("one", "two"):
            send(page, question)
            finished(page)
        edit(page, 0, "edited")
        expect(page.locator(".turn.user .bubble")).to_have_text("edited")
        assert heard(engine) == "edited"
        send(page, "next")
        finished(page)
        assert heard(engine) == "editededitednext"
        page.reload()
        expect(page.locator(".turn.user .bubble")).to_have_text(["edited", "next"])


def test_an_edited_question_that_fails_is_tried_again(browser):
    engine = FakeEngine(REPLIES)
    with running(engine) as url, visit(browser, url) as page:
        send(page, "one")
        finished(page)
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
        send(page, "long")
        finished(page)
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
            send(page, "hello")
        finished(page)
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
        send(page, "hello")
        finished(page)
        sampling = engine.seen[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.6, 50, 512)


def test_only_a_model_that_knows_system_messages_is_given_one(browser):
    with running(FakeEngine(REPLIES), settings=replace(SETTINGS, about=ABOUT)) as url, visit(browser, url) as page:
        kept = {"system": "x", "seed": "y", "top_k": 0.5}
        page.evaluate("(kept) => localStorage.setItem('nanochat.settings', JSON.stringify(kept))", kept)
        page.reload()
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_label("Temperature", exact=True)).to_be_visible()
        expect(page.get_by_label("System message")).to_have_count(0)
        page.keyboard.press("Escape")
        with page.expect_request("**/v1/chat/completions") as request:
            send(page, "hello")
        finished(page)
        body = json.loads(request.value.post_data or "")
        assert [message["role"] for message in body["messages"]] == ["user"]
        assert not {"seed", "top_k", "logprobs"} & body.keys()


def test_a_top_k_above_the_vocabulary_takes_all_of_it(browser):
    engine = FakeEngine(REPLIES)
    with running(engine) as url, visit(browser, url) as page:
        page.evaluate("localStorage.setItem('nanochat.settings', JSON.stringify({ top_k: 100000 }))")
        page.reload()
        send(page, "hello")
        finished(page)
        assert engine.seen[-1].sampling.top_k == engine.tokenizer.vocab_size


# --- what the model saw --------------------------------------------------------------------------


def test_the_prompt_of_an_answer_is_shown_with_its_special_tokens(browser):
    engine = FakeEngine(REPLIES)
    spelled = "你好 user_end <b>🌍</b>"
    with running(engine, settings=PUBLISHED) as url, visit(browser, url) as page:
        say_hello(page, 1)
        send(page, spelled)
        finished(page)
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


def test_the_prompt_shown_is_without_the_messages_that_did_not_fit(browser):
    engine = FakeEngine(REPLIES, length=120)
    with running(engine) as url, visit(browser, url) as page:
        say_hello(page, 4)
        page.locator(".saw summary").last.click()
        expect(page.locator(".saw[open] .prompt")).to_have_text(engine.tokenizer.decode(engine.seen[-1].prompt))


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


def test_tokens_show_their_probability_and_alternatives(browser):
    engine = FakeEngine({"hello": ["Hi 你"]})
    with running(engine) as url, visit(browser, url) as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Token probabilities").check()
        page.keyboard.press("Escape")
        send(page, "hello")
        finished(page)
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
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Token probabilities").check()
        page.keyboard.press("Escape")
        send(page, "long")
        finished(page)
        expect(page.locator(".token")).to_have_text(["*", "*", "0", "1"])
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Token probabilities").uncheck()
        page.keyboard.press("Escape")
        engine.replies = {"long": ["23**"]}
        page.get_by_role("button", name="Continue").click()
        finished(page)
        expect(answers(page).locator("strong")).to_have_text("0123")
        expect(answers(page)).not_to_have_class("body tokens")


def test_the_bar_tells_how_much_of_the_context_is_used_and_when_messages_were_dropped(browser):
    engine = FakeEngine(REPLIES, length=120)
    with running(engine) as url, visit(browser, url) as page:
        expect(page.locator("#context")).to_be_hidden()
        say_hello(page, 1)
        used = len(engine.seen[-1].prompt) + 23
        expect(page.locator("#context-text")).to_have_text(f"{used} of 120 tokens of context")
        expect(page.locator("#context-bar")).to_have_attribute("max", "120")
        for _ in range(3):
            send(page, "hello")
            finished(page)
        expect(page.locator("#context-text")).to_contain_text("the oldest messages were dropped")
        page.reload()
        expect(page.locator("#context-text")).to_contain_text("the oldest messages were dropped")
        page.locator("#new-chat").click()
        expect(page.locator("#context")).to_be_hidden()
