"""The pages as axe-core sees them: no serious or critical barrier in any state, on a phone by day and at a desk by night."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from nanochat.data.conversation import Part
from nanochat.runtime.samples import Sample, keep_samples
from nanochat.serve.app import create_runs_app
from nanochat.serve.models import Announced, Loadable
from nanochat.serve.runs import record
from nanochat.serve.runs.control import Control
from nanochat.serve.runs.script import fields_of
from scripts import finetune
from tests.serve.pages import ask
from tests.serve.test_web_runs import write
from tests.support.browsing import finished, visit
from tests.support.fake_engine import ABOUT, FakeEngine, running, serving

pytestmark = pytest.mark.browser

BARRIERS = ("serious", "critical")
LONG_LINE = "print('" + "x" * 300 + "')"
RICH = [
    "## Sum\n\nIt is ",
    Part("python", "37*48"),
    Part("python_output", "1776"),
    f" and *that* is **right**: [why](https://example.com).\n\n> quoted\n\n1. one\n2. two\n\n"
    f"| number | {'square ' * 12}|\n| --- | --- |\n| 2 | {'four ' * 30}|\n\n```python\n{LONG_LINE}\n```\n\nUse `sum`.",
]
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 740}
looks = pytest.mark.parametrize(
    ("scheme", "size"), [("light", PHONE), ("dark", DESK)], ids=["light phone", "dark desk"]
)


def barriers(page: Page) -> list[str]:
    """What axe finds on the page as it is, one line for each element; motion has come to rest."""
    page.wait_for_function("() => document.getAnimations().every(({ playState, effect }) => "
                           "playState !== 'running' || effect.getTiming().iterations === Infinity)")  # fmt: skip
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:160]}: {node['failureSummary']}"
        for rule in found
        if rule["impact"] in BARRIERS
        for node in rule["nodes"]
    ]


def through(page: Page, states: dict[str, Callable[[], Any]]) -> str:
    """Bring the page into each state in turn; what axe finds in each of them, as lines."""
    found = []
    for name, enter in states.items():
        enter()
        found += [f"{name}: {said}" for said in barriers(page)]
    return "\n".join(found)


@contextlib.contextmanager
def chatting(browser: Browser, scheme: Any, size: Any) -> Iterator[tuple[Page, FakeEngine]]:
    """The chat page of a server with two models, and the engine of the first."""
    first, second = FakeEngine({"rich": RICH, "silence": []}), FakeEngine({"rich": ["Another answer."]})
    pip = Announced("pip", "published", "pip", 1, about=ABOUT)
    beside = [Loadable(second, second.tokenizer, pip)]  # type: ignore[arg-type]
    with (
        running(first, beside=beside) as url,
        visit(browser, url, viewport=size, color_scheme=scheme) as page,
    ):
        yield page, first


def press(page: Page, *places: str) -> None:
    for place in places:
        page.locator(place).click()


@looks
def test_a_chat_has_no_barriers(browser, scheme, size):
    with chatting(browser, scheme, size) as (page, engine):

        def unfold() -> None:
            press(page, ".tool summary", ".numbers summary", ".saw summary")
            expect(page.locator(".saw .prompt")).to_be_visible()

        def edit() -> None:
            page.locator(".turn.user").hover()
            page.get_by_role("button", name="Edit this message").click()

        def again() -> None:
            page.keyboard.press("Escape")
            page.get_by_role("button", name="Answer again").click()
            finished(page)

        def refused() -> None:
            engine.fail = True
            ask(page, "rich")
            expect(page.get_by_role("alert")).to_be_visible()

        found = through(page, {
            "empty": lambda: expect(page.locator("#welcome")).to_be_visible(),
            "writing": lambda: page.fill("#prompt", "rich"),
            "chat": lambda: ask(page, "rich"),
            "unfolded": unfold,
            "editing": edit,
            "branches": again,
            "no answer": lambda: ask(page, "silence"),
            "failed": refused,
        })  # fmt: skip
        assert not found, found


@looks
def test_what_opens_beside_a_chat_has_no_barriers(browser, scheme, size):
    with chatting(browser, scheme, size) as (page, _):

        def history() -> None:
            press(page, "#model summary", "#history-toggle")
            expect(page.locator("#history-list .chat")).to_have_count(1)

        def delete() -> None:
            page.locator("#history-list .chat").hover()
            page.get_by_role("button", name="Delete").click()
            expect(page.locator("#history-told button")).to_be_focused()

        def tokens() -> None:
            page.get_by_label("Token probabilities").check()
            press(page, "#settings-close")
            ask(page, "rich")
            page.locator(".token").last.hover()
            expect(page.locator("#token-tip")).to_be_visible()

        def compare() -> None:
            press(page, "#model summary", ".panel .compare button")
            ask(page, "rich")
            expect(page.locator(".pair .turn")).to_have_count(2)

        ask(page, "rich")
        found = through(page, {
            "models": lambda: press(page, "#model summary"),
            "history": history,
            "deleted": delete,
            "settings": lambda: press(page, "#history-close", "#settings-toggle"),
            "tokens": tokens,
            "comparison": compare,
        })  # fmt: skip
        assert not found, found


@looks
def test_the_page_of_runs_has_no_barriers(browser, base_folder: Path, scheme, size):
    with (
        serving(create_runs_app(base_folder, (), "")) as url,
        visit(browser, f"{url}/runs", ready="#page", viewport=size, color_scheme=scheme) as page,
    ):

        def runs() -> None:
            write(base_folder, "d4", 40).close()
            write(base_folder, "d2", 20)
            folder = base_folder / "base_checkpoints" / "d4"
            keep_samples(folder, [Sample(40, "GSM8K", "2 + 2?", "4", 1.0), Sample(40, "GSM8K", "2 + 3?", "6", 0.0)])
            page.reload()
            expect(page.locator("#rows tr")).to_have_count(2)

        def draw() -> None:
            for box in page.get_by_role("checkbox").all():
                box.check()
            page.wait_for_function("() => document.querySelector('.chart .curve')")

        def unfold() -> None:
            for one in page.locator("details:not([open]) > summary").all():
                if one.is_visible():
                    one.click()

        found = through(page, {
            "no run": lambda: expect(page.get_by_role("heading", name="No run yet")).to_be_visible(),
            "list": runs,
            "charts": draw,
            "unfolded": unfold,
            "pointed at": lambda: page.locator(".chart svg").first.hover(),
        })  # fmt: skip
        assert not found, found


@looks
def test_the_form_that_starts_a_run_has_no_barriers(browser, base_folder: Path, monkeypatch, scheme, size):
    async def fields(*_: Any) -> list[Any]:
        return fields_of(finetune.Config)

    async def child(*_: Any) -> dict[str, Any]:
        return {"code": 1, "text": "time: about 3 s\nerror: no"}

    monkeypatch.setattr(Control, "_fields_of", fields)
    monkeypatch.setattr(Control, "_child", child)
    folder = base_folder / "tuned_checkpoints" / "made"
    write(base_folder, "made", 20, place="tuned").close()
    begun = record.Record(os.getpid(), "another boot", ("python", "-m", "scripts.finetune"), {}, 1, 0.0, code=1)
    record.write(folder, begun)
    (folder / record.LOG).write_text("step 1\n")
    (folder / record.LOG).chmod(0o600)
    with (
        serving(create_runs_app(base_folder, (), "", starts=True)) as url,
        visit(browser, f"{url}/runs", ready=".started", problems=["400"], viewport=size, color_scheme=scheme) as page,
    ):

        def unfold() -> None:
            press(page, ".started summary")
            expect(page.locator(".started .output")).to_have_text("step 1\n")

        def fill() -> None:
            page.get_by_label(re.compile("^--model")).fill("/m")
            page.get_by_label(re.compile("^--data")).fill("a.jsonl")
            press(page, "#rare summary")
            expect(page.locator("#command")).to_contain_text("--model=/m")

        def forecast() -> None:
            page.get_by_label("--lora_rank").fill("4")
            press(page, "#forecast")  # before the command is composed again
            expect(page.locator("#forecast-text")).to_contain_text("time: about 3 s")

        def refused() -> None:
            page.get_by_label(re.compile("^--data")).fill("-x")
            press(page, "#go")
            expect(page.get_by_role("alert")).to_contain_text("data has '-x'")
            expect(page.get_by_label(re.compile("^--data"))).to_have_attribute("aria-invalid", "true")

        def in_chinese() -> None:
            press(page, "#language")
            expect(page.locator("#start-title")).to_have_text("微调模型")
            expect(page.locator("#flag-model-help")).to_contain_text("模型目录")

        found = through(page, {
            "failed run": lambda: expect(page.locator(".started .state")).to_have_text("failed"),
            "log": unfold,
            "form": lambda: press(page, "#new-run"),
            "filled": fill,
            "forecast": forecast,
            "refused": refused,
            "in Chinese": in_chinese,
        })  # fmt: skip
        assert not found, found
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        page.locator("#cancel").click()
        expect(page.locator("#new-run")).to_be_focused()
        assert wide <= 0
