"""The pages as axe-core sees them: no serious or critical barrier in any state, at two sizes, light and dark."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from nanochat.data.conversation import Part
from nanochat.report.samples import Sample, keep_samples
from nanochat.serve.hosted import Announced, Loadable
from nanochat.serve.server import create_runs_app
from tests.serve.test_web_runs import write
from tests.support.browsing import answers, finished, send, visit
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
SIZES = {"desk": {"width": 1280, "height": 800}, "phone": {"width": 375, "height": 740}}
looks = pytest.mark.parametrize("scheme", ["light", "dark"])
sizes = pytest.mark.parametrize("size", SIZES)


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


@looks
@sizes
def test_the_chat_page_has_no_barriers(browser, size, scheme):
    replies = {"rich": RICH, "silence": []}
    first, second = FakeEngine(replies), FakeEngine({"rich": ["Another answer."]})
    pip = Announced("pip", "published", "pip", 1, about=ABOUT)
    beside = [Loadable(second, second.tokenizer, pip)]  # type: ignore[arg-type]
    with (
        running(first, beside=beside) as url,
        visit(browser, url, viewport=SIZES[size], color_scheme=scheme) as page,
    ):

        def ask(text: str) -> None:
            send(page, text)
            finished(page)

        def press(where: str) -> Callable[[], None]:
            return lambda: page.locator(where).click()

        def unfold() -> None:
            page.locator(".tool summary").click()
            page.locator(".numbers summary").click()
            page.locator(".saw summary").click()
            expect(page.locator(".saw .prompt")).to_be_visible()

        def edit() -> None:
            page.locator(".turn.user").hover()
            page.get_by_role("button", name="Edit this message").click()

        def again() -> None:
            page.keyboard.press("Escape")
            page.get_by_role("button", name="Answer again").click()
            finished(page)

        def refused() -> None:
            first.fail = True
            ask("rich")
            expect(page.get_by_role("alert")).to_be_visible()

        def history() -> None:
            press("#model summary")()
            press("#history-toggle")()
            expect(page.locator("#history-list .chat")).to_have_count(1)

        def delete() -> None:
            page.locator("#history-list .chat").hover()
            page.get_by_role("button", name="Delete").click()
            expect(page.locator("#history-told button")).to_be_focused()

        def compare() -> None:
            press("#comparing-end")() if page.locator("#comparing").is_visible() else None
            press("#model summary")()
            press(".panel .compare button")()
            ask("rich")
            expect(page.locator(".pair .turn")).to_have_count(2)

        def tokens() -> None:
            page.get_by_label("Token probabilities").check()
            press("#settings-close")()
            press("#new-chat")()
            ask("rich")
            page.locator(".token").last.hover()
            expect(page.locator("#token-tip")).to_be_visible()

        found = through(page, {
            "empty": lambda: expect(page.locator("#welcome")).to_be_visible(),
            "writing": lambda: page.fill("#prompt", "rich"),
            "chat": lambda: ask("rich"),
            "unfolded": unfold,
            "editing": edit,
            "branches": again,
            "no answer": lambda: ask("silence"),
            "failed": refused,
            "models": press("#model summary"),
            "history": history,
            "history deleted": delete,
            "history closed": press("#history-close"),
            "settings": press("#settings-toggle"),
            "tokens": tokens,
            "comparison": compare,
        })  # fmt: skip
        expect(answers(page)).not_to_have_count(0)
        assert not found, found


@looks
@sizes
def test_the_page_of_runs_has_no_barriers(browser, base_folder: Path, size, scheme):
    write(base_folder, "d4", 40).close()
    write(base_folder, "d2", 20)
    folder = base_folder / "base_checkpoints" / "d4"
    keep_samples(folder, [Sample(40, "GSM8K", "2 + 2?", "4", 1.0), Sample(40, "GSM8K", "2 + 3?", "6", 0.0)])
    with (
        serving(create_runs_app(base_folder, (), "")) as url,
        visit(browser, f"{url}/runs", ready="#page", viewport=SIZES[size], color_scheme=scheme) as page,
    ):

        def draw() -> None:
            for box in page.get_by_role("checkbox").all():
                box.check()
            page.wait_for_function("() => document.querySelector('.chart .curve')")

        def unfold() -> None:
            for one in page.locator("details:not([open]) > summary").all():
                if one.is_visible():
                    one.click()

        found = through(page, {
            "list": lambda: expect(page.locator("#rows tr")).to_have_count(2),
            "charts": draw,
            "unfolded": unfold,
            "pointed at": lambda: page.locator(".chart svg").first.hover(),
        })  # fmt: skip
        assert not found, found


@looks
def test_the_page_of_runs_without_a_run_has_no_barriers(browser, base_folder: Path, scheme):
    with (
        serving(create_runs_app(base_folder, (), "")) as url,
        visit(browser, f"{url}/runs", ready="#page", color_scheme=scheme) as page,
    ):
        expect(page.get_by_role("heading", name="No run yet")).to_be_visible()
        assert barriers(page) == []
