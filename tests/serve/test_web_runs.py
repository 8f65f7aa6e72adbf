"""The page of training runs in a real browser: a training is seen while it goes on, by everyone, and harms nobody."""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from nanochat.runtime.samples import Sample, keep_samples
from nanochat.runtime.trackers.jsonl import Jsonl, describe_run
from nanochat.serve.app import create_runs_app
from nanochat.serve.runs import routes
from tests.support.browsing import visit
from tests.support.fake_engine import ABOUT, SETTINGS, FakeEngine, running, serving
from tests.test_run import begun, go

pytestmark = pytest.mark.browser
EVIL = '<img src=x onerror="alert(1)">'


def write(base: Path, tag: str, count: int, place: str = "base", steps: int = 100, **more: Any) -> Jsonl:
    """A run with so many lines, which is still open."""
    folder = base / f"{place}_checkpoints" / tag
    run = Jsonl(folder, 0)
    describe_run(folder, {"steps": steps, "device": "CPU", "ranks": 1, "parameters": 4_921_344})
    for step in range(1, count + 1):
        figures = {"loss": 2 + 6 / step, "smooth_loss": 2 + 5 / step, "tokens_per_second": 4000 + step, "mfu": 40.0}
        times = {"seconds": 0.5, "total_seconds": step / 2, "memory_gb": 1.5, "grad_norm": 0.3}
        run.log({"step": step, **figures, **times, **more})
    return run


@contextlib.contextmanager
def watching(browser: Browser, base: Path, **options: Any) -> Iterator[Page]:
    """The page of the runs under a base folder."""
    with serving(create_runs_app(base, (), "")) as url, visit(browser, f"{url}/runs", ready="#page", **options) as page:
        yield page


def chart(page: Page, title: str) -> Any:
    return page.locator(".chart", has=page.get_by_role("heading", name=title, exact=True))


def tick(page: Page, name: str) -> None:
    page.get_by_role("checkbox", name=re.compile(name)).check()


# --- live ----------------------------------------------------------------------------------------


def look(page: Page) -> None:
    """Let the page look at once, as after a change of tabs."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_a_training_is_seen_from_its_first_step_to_its_end(browser, base_folder):
    with watching(browser, base_folder) as page:
        expect(page.get_by_role("heading", name="No run yet")).to_be_visible()
        stage = begun(12, save_seconds=0)
        row = page.locator("#rows tr")
        look(page)
        expect(row.locator(".state")).to_have_text("running")
        expect(row.locator(".far")).to_have_text("getting ready")
        go(stage, 3, every=5)
        look(page)
        expect(row.locator(".far")).to_contain_text("step 3 of 12 · ")
        expect(row.get_by_role("progressbar")).to_have_js_property("value", 3)
        expect(chart(page, "Loss").locator(".curve")).to_have_count(2)  # as measured, and smooth
        expect(page).to_have_title(re.compile("^25 % Training runs"))
        before = chart(page, "Loss").locator(".curve").last.get_attribute("d")
        go(stage, 4, every=5)
        look(page)
        expect(row.locator(".far")).to_contain_text("step 7 of 12 · ")
        assert chart(page, "Loss").locator(".curve").last.get_attribute("d") != before
        for title in ("Tokens per second", "MFU in percent", "Peak memory in GB", "Accuracy on held-out problems"):
            expect(chart(page, title).locator(".value")).to_have_text(re.compile(r"\d"))
        go(stage, every=5)
        look(page)
        expect(row.locator(".state")).to_have_text("finished")
        expect(row.locator(".far")).to_have_text("step 12 of 12")
        expect(page.locator("#told")).to_have_text("d2 · pretraining has finished.")


def test_only_new_lines_travel(browser, base_folder):
    run = write(base_folder, "d4", 50)
    with watching(browser, base_folder) as page:
        expect(page.locator(".far")).to_contain_text("step 50 of 100")
        page.wait_for_function("() => document.querySelector('.chart .curve')")
        with page.expect_response(re.compile(r"runs/data\?shown=\w+\.\w+\.50$")) as told:
            run.log({"step": 51, "loss": 1.0})
        news = told.value.json()["shown"]
        assert [len(one["steps"]) <= 2 for one in news.values()] == [True]
        expect(page.locator(".far")).to_contain_text("step 51 of 100")
    run.close()


def test_what_is_measured_before_training_is_seen_by_time_too(browser, base_folder):
    run = Jsonl(base_folder / "tuned_checkpoints" / "pip", 0)
    run.log({"step": 0, "general_perplexity": 348.0})
    for step in (1, 2):
        run.log({"step": step, "loss": 3.0, "general_perplexity": 330.0 + step, "total_seconds": 30.0 * step})
    run.close()
    with watching(browser, base_folder) as page:
        page.get_by_text("More figures").click()
        page.get_by_role("radio", name="by time").check()
        page.get_by_role("slider", name=re.compile("Perplexity of general text")).press("Home")
        readout = chart(page, "Perplexity of general text").locator(".readout")
        expect(readout).to_have_text("0 s348")


# --- several runs --------------------------------------------------------------------------------


def test_runs_are_laid_over_each_other_and_the_choice_is_kept(browser, base_folder):
    write(base_folder, "d4", 60).close()
    write(base_folder, "d8", 30, "chatrl", reward=0.5).close()
    with watching(browser, base_folder) as page:
        expect(page.get_by_role("checkbox", checked=True)).to_have_count(1)  # the newest
        expect(chart(page, "Reward").locator(".value")).to_have_text("0.5")
        expect(chart(page, "Replies per second").locator(".value")).to_have_text("4,030")  # what this stage counts
        expect(chart(page, "MFU in percent")).to_have_count(0)
        tick(page, "d4")
        expect(chart(page, "Loss").locator(".value")).to_have_text(["2.2", "2.1"])
        colours = (
            chart(page, "Loss")
            .locator(".curve:not(.faint)")
            .evaluate_all("all => all.map((one) => getComputedStyle(one).stroke)")
        )
        assert len(set(colours)) == 2
        page.get_by_role("radio", name="by time").check()
        expect(chart(page, "Loss").locator("svg text").last).to_have_text("30 s")  # a round time
        page.reload()
        expect(page.get_by_role("checkbox", checked=True)).to_have_count(2)
        for box in page.get_by_role("checkbox").all():
            box.uncheck()
        expect(page.locator("#notes")).to_have_text("Tick a run above to see its curves.")
        expect(page.locator(".chart")).to_have_count(0)


def test_at_most_as_many_runs_as_there_are_colours(browser, base_folder):
    for number in range(15):
        write(base_folder, f"d{number}", 2).close()
    with watching(browser, base_folder) as page:
        expect(page.locator("#rows tr")).to_have_count(12)
        page.get_by_role("button", name="Show 3 more runs").click()
        expect(page.locator("#rows tr")).to_have_count(15)
        for box in page.get_by_role("checkbox").all()[: routes.MOST_SHOWN]:
            box.check()
        expect(page.locator("#rows input:disabled")).to_have_count(15 - routes.MOST_SHOWN)
        expect(chart(page, "Loss").locator(".value")).to_have_count(routes.MOST_SHOWN)


# --- everyone ------------------------------------------------------------------------------------


def test_keyboard_and_screen_reader_get_every_figure(browser, base_folder):
    write(base_folder, "d4", 60).close()
    with watching(browser, base_folder) as page:
        curve = page.get_by_role("slider", name="Loss: move along the curve with the arrow keys")
        expect(curve).to_have_attribute("aria-valuetext", "latest: d4 · pretraining 2.1")
        curve.focus()
        page.keyboard.press("Home")
        expect(curve).to_have_attribute("aria-valuetext", "step 1: d4 · pretraining 8")
        page.keyboard.press("ArrowRight")
        expect(chart(page, "Loss").locator(".readout")).to_have_text("step 25")
        page.keyboard.press("End")
        expect(curve).to_have_attribute("aria-valuenow", "59")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # the table behind the curve
        table = chart(page, "Loss").get_by_role("table")
        expect(table.get_by_role("columnheader")).to_have_text(["Step", "d4 · pretraining"])
        expect(table.get_by_role("row").nth(1)).to_have_text("34")
        expect(table.get_by_role("row").last).to_have_text("602.1")
        page.get_by_text("More figures").click()
        expect(chart(page, "Gradient norm").locator(".curve")).to_have_count(1)
        chart(page, "Loss").locator(".plot").hover()  # in the middle
        expect(chart(page, "Loss").locator(".at")).to_have_text(re.compile("^step (2|3)[0-9]$"))


def test_both_languages_and_a_link_from_the_chat(browser, base_folder):
    write(base_folder, "d4", 3).close()
    settings = replace(SETTINGS, about=ABOUT, runs=base_folder)
    with running(FakeEngine(), settings=settings) as url, visit(browser, url, locale="zh-CN") as page:
        page.get_by_role("link", name="查看训练过程").click()
        expect(page.get_by_role("heading", name="训练过程")).to_be_visible()
        expect(page.locator(".far")).to_have_text("第 3 步，共 100 步")
        page.get_by_role("button", name="Switch to English").click()
        expect(page.locator(".far")).to_have_text("step 3 of 100")
        expect(page.locator(".state")).to_have_text("stopped")
        page.get_by_role("link", name="Chat", exact=True).click()
        expect(page.get_by_role("textbox", name="Ask something")).to_be_visible()
    with running(FakeEngine()) as url, visit(browser, url) as page:
        expect(page.locator("#model-name")).to_have_text(re.compile("."))
        expect(page.locator("#runs-link")).to_be_hidden()


def test_nothing_sticks_out_on_a_phone(browser, base_folder):
    write(base_folder, "x" * 200, 60).close()
    keep_samples(base_folder / "base_checkpoints" / ("x" * 200), [Sample(60, "base_loss", "y" * 300, "字" * 300)])
    wide = """() => [...document.querySelectorAll("body *:not(.hidden)")]
        .filter((e) => e.checkVisibility() && !e.closest("svg, thead, .scroll table")
            && e.getBoundingClientRect().right > innerWidth + 0.5)
        .map((e) => e.className || e.tagName)"""
    phone = {"viewport": {"width": 320, "height": 640}, "is_mobile": True, "has_touch": True}
    with watching(browser, base_folder, locale="zh-CN", **phone) as page:
        expect(page.locator(".chart").first).to_be_visible()
        for summary in page.locator("summary:not([data-i18n=rareFlags])").all():
            summary.tap()
        expect(page.locator(".said")).to_be_visible()
        assert page.evaluate(wide) == []


def test_all_figures_of_a_run_are_in_view_on_a_narrow_desk(browser, base_folder):
    tag = "a-long-tag-of-a-long-experiment-on-many-cards"
    run = write(base_folder, tag, 60, val_bpb=0.29, loss=0.007473)
    folder = base_folder / "base_checkpoints" / tag
    describe_run(folder, {"steps": 100, "device": "AMD EPYC, 2 thread(s)", "parameters": 4_921_344, "ranks": 8})
    with watching(browser, base_folder, viewport={"width": 1000, "height": 700}) as page:
        expect(page.locator("#rows .number").last).to_have_text("1.5")
        scroll = "() => { const at = document.querySelector('.scroll'); return at.scrollWidth - at.clientWidth }"
        assert page.evaluate(scroll) == 0
    run.close()


def test_names_figures_and_samples_of_others_are_only_text(browser, base_folder):
    tag = EVIL.replace("/", "")
    write(base_folder, tag, 3, **{EVIL: 1.0, "__proto__": 2.0, "constructor": 3.0}, device=EVIL).close()
    folder = base_folder / "base_checkpoints" / tag
    keep_samples(folder, [Sample(3, EVIL, EVIL, f"<script>alert(1)</script>{EVIL}", 0.0)])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 1e300, "toString": 5}\n' + "[" * 50_000 + '\n{"step": 5, "loss": -1e300}\n{"st')
    with watching(browser, base_folder) as page:
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        expect(page.locator(".tag")).to_have_text(tag)
        expect(page.locator("#notes")).to_contain_text("1 lines of metrics.jsonl could not be read")
        page.get_by_text("More figures").click()
        for name in (EVIL, "__proto__", "constructor", "toString"):
            expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        page.get_by_text("What the checkpoints of").click()
        expect(page.locator(".said")).to_have_text(f"<script>alert(1)</script>{EVIL}")
        expect(page.locator(".sample .note")).to_have_text(f"{EVIL} · wrong")
        assert page.locator("main img, main script").count() == 0


def test_a_server_that_ends_is_told_and_found_again(browser, base_folder):
    write(base_folder, "d4", 3).close()
    with watching(browser, base_folder, problems=["Failed to load resource"]) as page:
        expect(page.locator(".far")).to_be_visible()
        page.route("**/runs/data**", lambda route: route.abort("connectionrefused"))
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.get_by_role("alert")).to_contain_text("The server does not answer; this page keeps trying.")
        expect(page.locator(".far")).to_be_visible()
        page.unroute("**/runs/data**")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.get_by_role("alert")).to_have_count(0)


# --- the arithmetic of a chart -------------------------------------------------------------------


def test_axes_have_round_numbers_and_one_spike_hides_no_curve(browser, base_folder):
    with watching(browser, base_folder) as page:
        call = "async ([name, given]) => (await import('./assets/runs/chart.js'))[name](...given)"
        for low, high, wanted in (
            (0, 10, [0, 5, 10]),
            (1.9, 2.3, [1.9, 2, 2.1, 2.2, 2.3]),
            (-1, 1, [-1, 0, 1]),
        ):
            found = page.evaluate(call, ["ticks", [low, high, 4 if high != 1 else 2]])
            assert found == pytest.approx(wanted)
        for low, high in ((0, 1e-12), (1e15, 1.1e15), (-1e300, 1e300)):
            assert 2 <= len(page.evaluate(call, ["ticks", [low, high, 4]])) <= 12
        values = [2 + math.sin(step) for step in range(200)]
        low, high = page.evaluate(call, ["limits", [[*values, 1e9], False]])
        assert 0.8 < low < 1.1 and 2.9 < high < 3.3
        assert page.evaluate(call, ["limits", [[5, 5], True]]) == [0, pytest.approx(5.3)]
        assert page.evaluate(call, ["limits", [[], False]]) == [0, 1]
